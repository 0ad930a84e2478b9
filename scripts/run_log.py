"""The one reader of a run's directory: run.json (options, and the commands of the run's parts), metrics.jsonl (a line for
each step, validation or test) and samples.jsonl (a line for each sample), each also packed, with .gz after its name.

llmc/run/metrics.c writes the fields of metrics.jsonl. An unknown number is null there and NaN here; an infinite bound is
1e308 there and inf here. Also here: how scripts fail, and the curves that several of them compute from a run.
"""

import argparse
import contextlib
import gzip
import json
import math
import os
import shlex
import stat
import sys
import zlib

EXIT_USAGE, EXIT_INPUT, EXIT_MEMORY, EXIT_WRITE = 64, 65, 71, 74
UNBOUNDED = 1e308
MANIFEST = "MANIFEST.json"  # of a checkpoint: the names of its files (llmc/base/manifest.h)

# ----------------------------------------------------------------------------------------------------------------------
# Scripts


class Fault(Exception):
    """Ends a script: one line for the user, and the exit code."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class Parser(argparse.ArgumentParser):
    """The description is the script's docstring as it is."""

    def __init__(self, **more):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    def _print_message(self, message, file=None):  # argparse's own ignores a full disk
        (file or sys.stderr).write(message or "")

    def error(self, message):
        raise Fault(EXIT_USAGE, f"{message} (--help shows the use)")


def run_main(main, packages=""):
    """Runs a script's main; a Fault becomes one line on stderr and its exit code. packages: what main imports."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: what is written fails, as on a full disk
            setattr(sys, name, open("/dev/full" if name == "stdout" else os.devnull, "w", encoding="utf-8"))
    sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be any bytes
    try:
        try:
            main()
        finally:
            sys.stdout.flush()
    except (Fault, ImportError) as error:
        fault = error if isinstance(error, Fault) else missing_packages(packages, error)
        print(f"error: {fault}", file=sys.stderr)
        sys.exit(fault.code)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # its reader has ended
            print(f"error: {error.filename or 'standard output'}: {error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest once more
        sys.exit(EXIT_WRITE)
    except MemoryError:
        print("error: out of memory: is a file of the run far too large?", file=sys.stderr)
        sys.exit(EXIT_MEMORY)
    except KeyboardInterrupt:
        sys.exit(130)


def missing_packages(packages, error):
    """The Fault to report. If build/venv has a Python, first runs the whole script with that."""
    venv = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "build", "venv")
    python = os.path.join(venv, "bin", "python")
    there = os.access(python, os.X_OK)
    if there and "GNS_IN_VENV" not in os.environ:
        os.environ["GNS_IN_VENV"] = "1"  # once
        sys.stdout.flush()
        os.execv(python, [python] + sys.argv)
    venv = venv if os.path.relpath(venv).startswith(os.pardir) else os.path.relpath(venv)
    create = f"python3 -m venv {shlex.quote(venv)} && "
    install = f"{'' if os.path.exists(os.path.join(venv, 'bin', 'pip')) else create}{shlex.quote(os.path.join(venv, 'bin', 'pip'))} install {packages}"
    return Fault(EXIT_INPUT, f"the Python package {packages} does not load ({error}): {install}")


def printable(path):
    """The name of a file, which may be any bytes, as text."""
    return os.fsencode(path).decode(errors="replace")


def refuse_special(path):
    """A Fault if the file to write exists and is a link, a device or a FIFO."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise Fault(EXIT_WRITE, f"{path}: not written: not a regular file; move it away, or choose another place")


def open_own(path, mode):
    """Opens a regular file, never through a symbolic or hard link. mode: "x" (a new file) or "ab"."""
    refuse_special(path)
    file = open(path, mode, encoding=None if "b" in mode else "utf-8", errors=None if "b" in mode else "replace",
                opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666))
    state = os.fstat(file.fileno())
    if stat.S_ISREG(state.st_mode) and state.st_nlink <= 1:
        return file
    file.close()
    raise Fault(EXIT_WRITE, f"{path}: not written: it has another name (a hard link); move it away, or choose another place")


def write_whole(path, text):
    """Writes the whole file, or none of it. text: a string, or a function, called once the file can be written."""
    partial, opened = path + ".tmp", False
    try:
        refuse_special(path)
        refuse_special(partial)
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial)  # of a script that was killed
        with open_own(partial, "x") as file:
            opened = True
            file.write(text() if callable(text) else text)
        os.replace(partial, path)
    except BaseException as error:
        if opened:
            os.remove(partial)
        if isinstance(error, OSError):
            raise Fault(EXIT_WRITE, f"{path}: cannot write: {error.strerror}") from None
        raise


def remove_checkpoint(path):
    """Removes the files that a checkpoint's manifest names, and its directory if that is then empty. A link is removed,
    never entered."""
    if os.path.islink(path):
        os.remove(path)
        return
    manifest = os.path.join(path, MANIFEST)
    if not os.path.isfile(manifest):
        return  # not a checkpoint
    names = [entry["name"] for entry in read_json(manifest)["files"]] + [MANIFEST]
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    for name in names:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(os.path.basename(name), dir_fd=directory)
    os.close(directory)
    with contextlib.suppress(OSError):  # not empty
        os.rmdir(path)


# ----------------------------------------------------------------------------------------------------------------------
# Files


def has_log(path):
    return os.path.exists(path) or os.path.exists(path + ".gz")


def read_bytes(path, begin=0):
    """A file from byte `begin` on; unpacked, where there is only a file with .gz after the name."""
    packed = not os.path.exists(path) and os.path.exists(path + ".gz")
    path += ".gz" if packed else ""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # reading a FIFO would wait for its writer
            raise Fault(EXIT_INPUT, f"{path}: not a regular file")
        with (gzip.open if packed else open)(path, "rb") as file:
            file.seek(begin)
            return file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise Fault(EXIT_INPUT, f"{path}: damaged, or cut short") from None
    except OSError as error:
        raise Fault(EXIT_INPUT, f"{path}: {error.strerror}") from None


def parse(where, data):
    """The JSON in some bytes of a file. where: names them in the error. Half a surrogate pair, which no text may hold,
    becomes U+FFFD."""
    try:
        value = json.loads(data)
        if b"\xed" in data or b"\\ud" in data.lower():
            text = json.dumps(value, ensure_ascii=False)
            value = json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        return value
    except UnicodeDecodeError:
        raise Fault(EXIT_INPUT, f"{where}: not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise Fault(EXIT_INPUT, f"{where}: not JSON: {error}") from None


def read_json(path):
    info = parse(path, read_bytes(path))
    objects = ("options", "model", "train_data") if os.path.basename(path) == "run.json" else ()
    if not isinstance(info, dict) or not all(isinstance(info.get(key, {}), dict) for key in objects):
        raise Fault(EXIT_INPUT, f"{path}: not a run's description")
    return info


def parse_lines(path, data, first=1):
    """(where, object) of every line of JSON. The last one may have no end: a run is writing it, or waits for space on the
    disk in the middle of it; it counts if it is JSON. first: the number of the data's first line."""
    *lines, last = data.split(b"\n")
    for i, line in enumerate(lines, first):
        if line:
            yield f"{path} line {i}", parse(f"{path} line {i}", line)
    with contextlib.suppress(Fault):
        if last:
            where = f"{path} line {first + len(lines)}"
            yield where, parse(where, last)


class Cut(Exception):
    """Lines that were read of a log are no longer in it: a resume has cut it back, or another run has begun."""


class Tail:
    """A log that a run may still be writing."""

    def __init__(self, path):
        self.path, self.end, self.lines, self.last = path, 0, 0, b""  # bytes and lines read, and the last of these

    def new_lines(self):
        """(where, object) of every line written since the last call; a line without its end is left for the next."""
        data = read_bytes(self.path, self.end - len(self.last))
        if not data.startswith(self.last):
            raise Cut
        data, first = data[len(self.last):data.rfind(b"\n") + 1], self.lines + 1
        self.end += len(data)
        self.lines += data.count(b"\n")
        self.last = ([self.last] + data.splitlines(keepends=True))[-1]
        return parse_lines(self.path, data, first)


# ----------------------------------------------------------------------------------------------------------------------
# What the files hold


def parts_of(path, info):
    """The parts of the run in run.json, one dictionary each: first_step, ranks, started, host, directory, command."""
    parts = info.get("parts", [])
    if not isinstance(parts, list) or not all(isinstance(part, dict) and isinstance(part.get("command"), list)
                                              for part in parts):
        raise Fault(EXIT_INPUT, f"{path}: \"parts\" is no list of commands")
    return parts


def command_text(part, between="\n"):
    """A part's command as a shell reads it."""
    return f"cd {shlex.quote(part.get('directory', '.'))}{between}{shlex.join(part['command'])}"


def is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def checked_rows(lines):
    """Rows of metrics.jsonl: each has its step, and tokens that never go backwards; every other field is a number, a flag
    or null, or gns_layer, a list of them."""
    tokens = 0
    for where, row in lines:
        for name in ("step", "tokens"):
            if not isinstance(row, dict) or not is_number(row.get(name)) or not math.isfinite(row[name]):
                raise Fault(EXIT_INPUT, f"{where}: no number \"{name}\"")
        for name, value in row.items():
            values = value if name == "gns_layer" and isinstance(value, list) else [value]
            if not all(x is None or isinstance(x, (int, float)) for x in values):
                raise Fault(EXIT_INPUT, f"{where}: \"{name}\" is not a number")
        if not isinstance(row.get("gns_layer", []), list):
            raise Fault(EXIT_INPUT, f"{where}: \"gns_layer\" is not a list")
        if row["tokens"] < tokens:
            raise Fault(EXIT_INPUT, f"{where}: the tokens go backwards")
        tokens = row["tokens"]
        row.update((name, math.inf) for name, x in row.items() if name.endswith(("_lower", "ramp_aim")) and x == UNBOUNDED)
        yield row


def checked_samples(lines):
    for where, sample in lines:
        if not isinstance(sample, dict) or not is_number(sample.get("step")) or not isinstance(sample.get("text"), str):
            raise Fault(EXIT_INPUT, f"{where}: no sample with its step and text")
        yield sample


class Clock:
    """Training time: each step's tokens over its tok_per_s; validation, samples and checkpoints do not count."""

    def __init__(self, tokens=0):
        self.seconds, self.tokens, self.rate = 0.0, tokens, math.nan

    def advance(self, row):
        """Seconds at the end of the row's step."""
        self.rate = row.get("tok_per_s") or self.rate
        self.seconds += (row["tokens"] - self.tokens) / self.rate
        self.tokens = row["tokens"]
        return self.seconds


class Live:
    """A run that may still be training: new() returns what it has written since the last call."""

    def __init__(self, path):
        self.path = path
        self.name = os.path.basename(os.path.abspath(path))
        self.info_path, self.metrics_path, self.samples_path = (os.path.join(path, name) for name in
                                                                ("run.json", "metrics.jsonl", "samples.jsonl"))
        self.rewind()

    def rewind(self):
        self.info, self.parts, self.clock, self.seconds = {}, [], Clock(), {}
        self.metrics, self.samples = Tail(self.metrics_path), Tail(self.samples_path)

    def has_begun(self):
        return has_log(self.info_path) and has_log(self.metrics_path)

    def new(self):
        """(parts, rows, samples). Each row has the `seconds` of training until there. Raises Cut if lines that were
        returned are gone: after rewind() all of them are new."""
        self.info = read_json(self.info_path)
        parts, told = parts_of(self.info_path, self.info), len(self.parts)
        if parts[:told] != self.parts:
            raise Cut
        self.parts = parts
        rows = list(checked_rows(self.metrics.new_lines()))
        for row in rows:
            if "loss" in row:
                self.seconds[row["step"]] = self.clock.advance(row)
            row["seconds"] = self.seconds_at(row["step"])
        samples = list(checked_samples(self.samples.new_lines())) if has_log(self.samples_path) else []
        return parts[told:], rows, samples

    def seconds_at(self, step):
        return self.seconds.get(step, self.clock.seconds)


def column(rows, name):
    """A field of every row, NaN where a row has none."""
    return [math.nan if row.get(name) is None else float(row[name]) for row in rows]


def finite(values):
    return [x for x in values if math.isfinite(x)]


class Run:
    """Rows of steps (`rows`), validations (`val_rows`) and tests (`test_rows`), each a line's fields with the `seconds`
    of training until there; samples, and run.json as `info`."""

    def __init__(self, path, begin=0):
        """begin: tokens done before the first line, where an earlier part has a log of its own."""
        self.path = path
        self.name = printable(os.path.basename(os.path.abspath(path)))
        self.info = read_json(os.path.join(path, "run.json"))
        metrics, samples = os.path.join(path, "metrics.jsonl"), os.path.join(path, "samples.jsonl")
        self.rows, self.val_rows, self.test_rows = [], [], []
        clock, seconds = Clock(begin), {}
        for row in checked_rows(parse_lines(metrics, read_bytes(metrics))):
            if "val_loss" in row or "hellaswag" in row:
                row["seconds"] = seconds.get(row["step"], math.nan)
                (self.val_rows if "val_loss" in row else self.test_rows).append(row)
            else:
                row["seconds"] = seconds[row["step"]] = clock.advance(row)
                self.rows.append(row)
        if not self.rows:
            raise Fault(EXIT_INPUT, f"{metrics}: no step in it")
        self.samples = list(checked_samples(parse_lines(samples, read_bytes(samples)))) if has_log(samples) else []

    def column(self, name):
        """loss: without label smoothing, as validation is."""
        if name == "loss" and self.rows and "loss_nll" in self.rows[0]:
            name = "loss_nll"
        return column(self.rows, name)

    def val_column(self, name):
        return column(self.val_rows, name)

    def parts(self):
        return parts_of(os.path.join(self.path, "run.json"), self.info)


# ----------------------------------------------------------------------------------------------------------------------
# Curves


def smooth(tokens, values, span):
    """Exponential average whose weights halve every `span` tokens, bias-corrected; NaN is left out."""
    out, total, weight, before = [], 0.0, 0.0, 0
    for at, value in zip(tokens, values):
        decay = 2.0 ** (-(at - before) / span)
        if math.isfinite(value) and decay < 1:
            total = decay * total + (1 - decay) * value
            weight = decay * weight + (1 - decay)
            before = at
        out.append(total / weight if weight > 0 else math.nan)
    return out


def smooth_column(run, name):
    """A field over the steps, smoothed with a half-life of 1% of the run's tokens."""
    return smooth(run.column("tokens"), run.column(name), max(1.0, 0.01 * run.rows[-1]["tokens"]))


def time_unit(seconds):
    """(name, seconds in it) of the largest unit of which the time has at least two."""
    for name, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return name, length
    return "seconds", 1


def loss_curve(run, kind):
    """(rows, losses): the validation losses, or the smoothed training losses, and their lines."""
    return (run.val_rows, run.val_column("val_loss")) if kind == "val" else (run.rows, smooth_column(run, "loss"))


def common_kind(runs):
    """Validation losses where every run has two or more, else the smoothed training losses."""
    return "val" if all(len(run.val_rows) > 1 for run in runs) else "train"


def common_target(runs, kind):
    """The lowest loss that every run reaches."""
    best = []
    for run in runs:
        losses = finite(loss_curve(run, kind)[1])
        if not losses:
            raise Fault(EXIT_INPUT, f"{run.path}: no {kind} loss that is a number")
        best.append(min(losses))
    return max(best)


def reach(curve, target):
    """{step, tokens, seconds} where a loss_curve first is `target` or less, linear between lines; or None."""
    last = None
    for row, loss in zip(*curve):
        if not math.isfinite(loss):
            continue
        here = {name: row[name] for name in ("step", "tokens", "seconds")}
        if loss <= target:
            if last is None:
                return here
            part = (last[1] - target) / (last[1] - loss)
            return {name: last[0][name] + part * (here[name] - last[0][name]) for name in here}
        last = here, loss
    return None
