"""Reads a run's directory: run.json (options, and the commands of the run's parts), metrics.jsonl (a line for each step,
validation or test) and samples.jsonl (a line for each sample). Each may also be packed, with .gz after its name.

llmc/run/metrics.c writes the fields of metrics.jsonl. An unknown number is null in the file and NaN here. An infinite
bound is 1e308 in the file and inf here. The reader checks every file once. A wrong type, a number out of range or half a
line raises a Fault with the file's name and exit code 65. This module also holds how scripts fail and follow a run, and
loss curves.
"""

import argparse
import contextlib
import gzip
import json
import math
import os
import shlex
import sys
import time
import zlib

EXIT_USAGE, EXIT_INPUT, EXIT_WRITE = 64, 65, 74
UNBOUNDED, LARGEST = 1e308, 1e100


class Fault(Exception):
    """Ends a script with one line for the user and an exit code."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class Parser(argparse.ArgumentParser):
    """An argparse parser that prints the script's docstring as it is."""

    def __init__(self, **more):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    def error(self, message):
        raise Fault(EXIT_USAGE, f"{message} (--help shows the use)")


def finite_number(text):
    """Reads a finite number, as an argparse type."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def run_main(main, packages=""):
    """Runs a script's main; a Fault becomes one line on stderr and its exit code. packages: what main imports."""
    sys.stdout = sys.stdout or open("/dev/full", "w", encoding="utf-8")  # if closed, writing fails
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")
    sys.stdout.reconfigure(errors="backslashreplace")  # file names may be any bytes
    try:
        try:
            main()
        finally:
            sys.stdout.flush()
    except (Fault, ImportError) as error:
        fault = error if isinstance(error, Fault) else missing_packages(packages, error)
        sys.exit(print(f"error: {fault}", file=sys.stderr) or fault.code)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # quiet if the reader has ended
            print(f"error: {error.filename or 'standard output'}: {error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the rest at exit
        sys.exit(EXIT_WRITE)
    except KeyboardInterrupt:
        sys.exit(130)


def missing_packages(packages, error):
    """Runs the whole script again with build/venv's Python, if there is one. Else returns the Fault to report."""
    venv = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "build", "venv")
    python = os.path.join(venv, "bin", "python")
    if os.access(python, os.X_OK) and "GNS_IN_VENV" not in os.environ:
        os.environ["GNS_IN_VENV"] = "1"  # try once only
        os.execv(python, [python] + sys.argv)
    return Fault(EXIT_INPUT, f"the Python package {packages} does not load ({error}): "
                 f"python3 -m venv {shlex.quote(venv)} && {shlex.quote(python)} -m pip install {packages}")


def write_whole(path, text):
    """Writes the whole file, or none of it. text: a string, or a function, called after the file has been opened."""
    partial = f"{path}.{os.getpid()}.tmp"
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path)):
        raise Fault(EXIT_WRITE, f"{path}: not written: not a regular file; move it away, or choose another place")
    try:
        with open(partial, "x", encoding="utf-8", errors="replace") as file:
            try:
                file.write(text() if callable(text) else text)
                file.flush()
                os.replace(partial, path)
            except BaseException:
                os.remove(partial)
                raise
    except OSError as error:
        raise Fault(EXIT_WRITE, f"{path}: cannot write: {error.strerror}") from None


# ---- Reading and checking -------------------------------------------------------------------------------------------

def has_log(path):
    return os.path.exists(path) or os.path.exists(path + ".gz")


def read_bytes(path, begin=0):
    """Returns a file from byte `begin` on. Unpacks PATH.gz if only that exists."""
    packed = not os.path.exists(path) and os.path.exists(path + ".gz")
    path += ".gz" if packed else ""
    if os.path.exists(path) and not os.path.isfile(path):  # reading a FIFO would wait for its writer
        raise Fault(EXIT_INPUT, f"{path}: not a regular file; name another")
    try:
        with (gzip.open if packed else open)(path, "rb") as file:
            file.seek(begin)
            return file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise Fault(EXIT_INPUT, f"{path}: damaged, or cut short; copy it again") from None
    except OSError as error:
        raise Fault(EXIT_INPUT, f"{path}: {error.strerror}; name a run's directory") from None


def parse(where, data):
    """Parses bytes of a file as JSON. where: names them in the error."""
    try:
        return json.loads(data.decode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise Fault(EXIT_INPUT, f"{where}: not JSON: {error}") from None


NUMBER, COUNT, TEXT, UNKNOWN = (int, float), int, str, (int, float, type(None))
NAMES = {NUMBER: "a number", COUNT: "a whole number", TEXT: "text", UNKNOWN: "a number", list: "a list", dict: "an object"}
RUN = {"options": dict, "model": {"parameters": NUMBER, "layers": NUMBER, "channels": NUMBER}, "train_data": {"tokens": NUMBER},
       "engine": TEXT, "program": TEXT,
       "parts": [{"command!": [TEXT], "directory": TEXT, "host": TEXT, "started": TEXT, "program_xxh3_128": TEXT,
                  "first_step": COUNT, "ranks": COUNT, "options": dict}]}
SAMPLE = {"step!": COUNT, "text!": TEXT, "tokens": COUNT, "prompt": (str, type(None))}
ROW = {"step!": COUNT, "tokens!": NUMBER, "gns_layer": [UNKNOWN]}  # every other field is a number, a flag or null


def check(where, value, shape, name=""):
    """Returns the value; raises a Fault if it does not have the shape: a type, [shape of the elements] or {field: shape}.
    A required field's name ends with an exclamation mark."""
    kind = type(shape) if isinstance(shape, (list, dict)) else shape
    if not isinstance(value, kind) or kind in (NUMBER, COUNT) and (isinstance(value, bool) or not abs(value) <= LARGEST) or (
            kind == COUNT and value < 0):
        what = NAMES.get(kind, "text or null")
        raise Fault(EXIT_INPUT, f'{where}: "{name}" is not {what}' if name else f"{where}: not {what}")
    for element in value if isinstance(shape, list) else ():
        check(where, element, shape[0], name)
    for field, of in shape.items() if isinstance(shape, dict) else ():
        if field.rstrip("!") in value or field.endswith("!"):
            check(where, value.get(field.rstrip("!")), of, field.rstrip("!"))
    return value


def read_json(path, shape=None):
    return check(path, parse(path, read_bytes(path)), shape or {})


class Cut(Exception):
    """A log has lost lines that were read: a resume has cut it back, or another run has begun."""


class Tail:
    """A log that a run may still be writing."""

    def __init__(self, path):
        self.path, self.end, self.lines, self.last = path, 0, 0, b""  # bytes read, lines read, the last line

    def new_lines(self, shape, whole=False):
        """Yields (where, object) of every line written since the last call. Leaves a line without its end to the next call.
        whole: yields such a line if it is JSON (its run is writing it, or waits for space on the disk)."""
        data = read_bytes(self.path, self.end - len(self.last))
        if not data.startswith(self.last):
            raise Cut
        lines = data[len(self.last):].splitlines(keepends=True)
        for line in lines:
            where = f"{self.path} line {self.lines + 1}"
            if not line.endswith(b"\n"):
                with contextlib.suppress(Fault):
                    if whole:
                        yield where, check(where, parse(where, line), shape)
                return
            self.end, self.lines, self.last = self.end + len(line), self.lines + 1, line
            if line.strip():
                yield where, check(where, parse(where, line), shape)


# ---- Runs -----------------------------------------------------------------------------------------------------------

def command_text(part, between="\n"):
    """Returns a part's command as a shell reads it."""
    return f"cd {shlex.quote(part.get('directory', '.'))}{between}{shlex.join(part['command'])}"


class Live:
    """A run that may still be training: new() returns what it has written since the last call.

    Time is training time: each step's tokens over its tok_per_s. Validation, samples and checkpoints do not count.
    begin: tokens done before the first line, if an earlier part has its own log."""

    def __init__(self, path, begin=0):
        self.path, self.begin = path, begin
        parent, base = os.path.split(os.path.abspath(path))
        name = base if base != "run" else os.path.basename(parent) or base
        self.name = os.fsencode(name).decode(errors="replace")
        self.info_path, self.metrics_path, self.samples_path = (os.path.join(path, name) for name in
                                                                ("run.json", "metrics.jsonl", "samples.jsonl"))
        self.rewind()

    def rewind(self):
        self.info, self.parts, self.seconds = {}, [], {}
        self.time, self.tokens, self.rate = 0.0, self.begin, math.nan
        self.tails = Tail(self.metrics_path), Tail(self.samples_path)

    def new(self, whole=False):
        """Returns new (parts, rows, samples). A row's `seconds` is the training time up to it. Raises Cut if lines that
        were returned are gone: after rewind() all lines are new."""
        self.info = read_json(self.info_path, RUN)
        parts, told = self.info.get("parts", []), len(self.parts)
        if parts[:told] != self.parts:
            raise Cut
        self.parts = parts
        rows = [self.timed(where, row) for where, row in self.tails[0].new_lines(ROW, whole)]
        samples = [line for _, line in self.tails[1].new_lines(SAMPLE, whole)] if has_log(self.samples_path) else []
        return parts[told:], rows, samples

    def timed(self, where, row):
        for name, value in row.items():
            check(where, value, [UNKNOWN] if name == "gns_layer" else UNKNOWN, name)
            for x in value if isinstance(value, list) else [value]:
                if x == UNBOUNDED and name.endswith(("_lower", "ramp_aim")):
                    row[name] = math.inf
                elif x is not None and not abs(x) <= LARGEST:
                    raise Fault(EXIT_INPUT, f'{where}: "{name}" is no number that a run writes')
        if row["tokens"] < self.tokens:
            raise Fault(EXIT_INPUT, f"{where}: the tokens go backwards")
        if "loss" in row:
            self.rate = max(row.get("tok_per_s") or 0, 0) or self.rate
            self.time += (row["tokens"] - self.tokens) / self.rate
            self.seconds[row["step"]] = self.time
            self.tokens = row["tokens"]
        row["seconds"] = self.seconds_at(row["step"])
        return row

    def seconds_at(self, step):
        return self.seconds.get(step, self.time)


def numbers_of(row):
    """Returns a row as {name: number} for a viewer, without the step and unknown numbers. Splits lists into elements."""
    out = {name: x for name, x in row.items() if not isinstance(x, list)}
    out |= {f"{name}/{i:02d}": x for name, values in row.items() if isinstance(values, list) for i, x in enumerate(values)}
    return {name: x for name, x in out.items() if x is not None and x == x and name != "step"}


def add_follow_options(parser):
    parser.add_argument("--follow", action="store_true", help="wait for the run, and add what it writes until Ctrl-C")
    parser.add_argument("--every", type=finite_number, default=10, metavar="SECONDS",
                        help="between two reads with --follow (default: %(default)s)")


def follow(sinks, args):
    """Gives each sink what its run (`live`) has written: once, or with --follow until Ctrl-C. Calls add(parts, rows,
    samples); went_back() before all lines come again, as a resume has cut the logs back; finish() at the end."""
    try:
        while True:
            for sink in sinks:
                if args.follow and not (has_log(sink.live.info_path) and has_log(sink.live.metrics_path)):
                    continue
                try:
                    sink.add(*sink.live.new())
                except Cut:
                    sink.live.rewind()
                    sink.went_back()
                    sink.add(*sink.live.new())
            if not args.follow:
                break
            time.sleep(max(args.every, 0.01))
    finally:
        for sink in sinks:
            sink.finish()


def column(rows, name):
    """Returns a field of every row; NaN for a row without it."""
    return [math.nan if row.get(name) is None else float(row[name]) for row in rows]


def finite(values):
    return [x for x in values if math.isfinite(x)]


class Run(Live):
    """A whole run: rows of steps (`rows`), of validations (`val_rows`) and of tests (`test_rows`); samples."""

    def __init__(self, path, begin=0):
        super().__init__(path, begin)
        _, rows, self.samples = self.new(whole=True)
        self.rows, self.val_rows, self.test_rows = [], [], []
        for row in rows:
            (self.val_rows if "val_loss" in row else self.test_rows if "hellaswag" in row else self.rows).append(row)
        if not self.rows:
            raise Fault(EXIT_INPUT, f"{self.metrics_path}: no step in it; let the run make some")

    def column(self, name):
        """Returns a field of every step. loss is without label smoothing, as in validation."""
        return column(self.rows, "loss_nll" if name == "loss" and "loss_nll" in self.rows[0] else name)

    def val_column(self, name):
        return column(self.val_rows, name)


# ---- Curves ---------------------------------------------------------------------------------------------------------

def smooth_column(run, name):
    """Returns the exponential average of a field, bias-corrected, with a half-life of 1% of the run's tokens."""
    span = max(1.0, 0.01 * run.rows[-1]["tokens"])
    out, total, weight, before = [], 0.0, 0.0, 0
    for at, value in zip(run.column("tokens"), run.column(name)):
        decay = 2.0 ** (-(at - before) / span)
        if math.isfinite(value) and decay < 1:
            total = decay * total + (1 - decay) * value
            weight = decay * weight + (1 - decay)
            before = at
        out.append(total / weight if weight > 0 else math.nan)
    return out


def time_unit(seconds):
    """Returns (name, seconds) of the largest unit that fits into the time at least twice."""
    for name, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return name, length
    return "seconds", 1


def loss_curve(run, kind):
    """Returns (rows, losses): the validation losses or the smoothed training losses, and their lines."""
    return (run.val_rows, run.val_column("val_loss")) if kind == "val" else (run.rows, smooth_column(run, "loss"))


def common_target(runs, kind):
    """Returns the lowest loss that every run reaches."""
    best = [min(finite(loss_curve(run, kind)[1]), default=math.nan) for run in runs]
    for run, loss in zip(runs, best):
        if math.isnan(loss):
            raise Fault(EXIT_INPUT, f"{run.path}: no {kind} loss that is a number")
    return max(best)


def common_kind(runs):
    """Returns "val" if every run's validation losses cross their common target between two of them, else "train"."""
    if all(finite(run.val_column("val_loss")) for run in runs):
        target = common_target(runs, "val")
        if all(reach(loss_curve(run, "val"), target) for run in runs):
            return "val"
    return "train"


def reach(curve, target):
    """Returns {step, tokens, seconds} where a loss_curve first falls to `target`, interpolated between two lines. None if
    it never does, or if its first line is already there: the crossing is then unknown."""
    last = None
    for row, loss in zip(*curve):
        if not math.isfinite(loss):
            continue
        here = {name: row[name] for name in ("step", "tokens", "seconds")}
        if loss <= target:
            if last is None:
                return None
            part = (last[1] - target) / (last[1] - loss)
            return {name: last[0][name] + part * (here[name] - last[0][name]) for name in here}
        last = here, loss
    return None
