"""A run's directory as the scripts read it: run.json (the options, and the commands of the run's parts), metrics.jsonl
(a line a step or validation) and samples.jsonl (a line a sample), each of them also packed, with .gz behind the name.

The fields of metrics.jsonl are those that llmc/run/metrics.c writes; what was not known is null there, NaN here; a bound
that is infinite is 1e308 there, inf here.
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

EXIT_USAGE, EXIT_INPUT, EXIT_WRITE = 64, 65, 74
UNBOUNDED = 1e308
MANIFEST = "MANIFEST.json"  # of a checkpoint: the names of its files (llmc/manifest.h)


class Fault(Exception):
    """What ends a script: one line for the user, and the exit code."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


def missing_package(package, error):
    """The Fault to raise; where there is a build/venv, its Python first runs the script from the start, and may have it."""
    venv = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "build", "venv")
    python = os.path.join(venv, "bin", "python")
    there = os.access(python, os.X_OK)
    if there and os.path.isfile(sys.argv[0]) and "GNS_IN_VENV" not in os.environ:
        os.environ["GNS_IN_VENV"] = "1"  # once
        sys.stdout.flush()
        os.execv(python, [python] + sys.argv)
    venv = venv if os.path.relpath(venv).startswith(os.pardir) else os.path.relpath(venv)
    create = "" if there else f"python3 -m venv {shlex.quote(venv)} && "
    install = f"{create}{shlex.quote(os.path.join(venv, 'bin', 'pip'))} install {package}"
    return Fault(EXIT_INPUT, f"the Python package {package} does not load ({error}): {install}")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Fault(EXIT_USAGE, f"{message} (--help shows the use)")


def run_main(main):
    """Runs a script's main; a Fault becomes one line on stderr and its exit code."""
    try:
        main()
    except Fault as fault:
        print(f"error: {fault}", file=sys.stderr)
        sys.exit(fault.code)
    except KeyboardInterrupt:
        sys.exit(130)


def open_output(path, mode):
    """A file to write, as open() gives it. A link, a device or a FIFO that has its name is a Fault."""

    def opener(name, flags):
        fault = Fault(EXIT_WRITE, f"{name}: not written: not a regular file; move it away, or choose another place")
        if os.path.islink(name) or (os.path.exists(name) and not os.path.isfile(name)):
            raise fault
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise fault
        return fd

    return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=opener)


def write_whole(path, text):
    """The file is there whole or not at all."""
    partial = path + ".tmp"
    try:
        if os.path.lexists(path):
            open_output(path, "ab").close()  # it may be replaced
        with open_output(partial, "w") as file:
            file.write(text)
        os.replace(partial, path)
    except OSError as error:
        if os.path.isfile(partial):
            os.remove(partial)
        raise Fault(EXIT_WRITE, f"{path}: cannot write: {error.strerror}") from None


def remove_checkpoint(path):
    """Removes a checkpoint's files, by the names in its manifest, and its directory where nothing else is in it. A link
    is unlinked, never entered."""
    if os.path.islink(path):
        os.remove(path)
        return
    if not os.path.isfile(os.path.join(path, MANIFEST)):
        return  # not a checkpoint
    names = [entry["name"] for entry in read_json(os.path.join(path, MANIFEST))["files"]]
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        for name in names + [MANIFEST]:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(os.path.basename(name), dir_fd=directory)
    finally:
        os.close(directory)
    with contextlib.suppress(OSError):  # something else is in it
        os.rmdir(path)


class Run:
    """Lists with one entry a step (`rows`), a validation (`val_rows`) or a test (`test_rows`), each a line's fields."""

    def __init__(self, path, begin=0):
        """begin: tokens done before the first line, where an earlier part is told elsewhere."""
        self.path = path
        self.name = os.path.basename(os.path.abspath(path))
        self.info = read_json(os.path.join(path, "run.json"))
        self.rows, self.val_rows, self.test_rows = read_metrics(os.path.join(path, "metrics.jsonl"))
        self.samples = read_samples(os.path.join(path, "samples.jsonl"))
        add_seconds(self.rows, self.val_rows + self.test_rows, begin)

    def column(self, name):
        """A field over the steps, NaN where a step has none."""
        return [number(row.get(name)) for row in self.rows]

    def val_column(self, name):
        return [number(row.get(name)) for row in self.val_rows]

    def parts(self):
        """One dictionary a part of the run: first_step, ranks, started, host, directory, command."""
        parts = self.info.get("parts", [])
        good = isinstance(parts, list) and all(isinstance(part, dict) and isinstance(part.get("command"), list)
                                               for part in parts)
        if not good:
            raise Fault(EXIT_INPUT, f"{os.path.join(self.path, 'run.json')}: \"parts\" is no list of commands")
        return parts

    def has(self, name):
        return any(math.isfinite(x) for x in self.column(name))


def number(x):
    return math.nan if x is None else float(x)


def read_text(path):
    """A file's text; gzip's, where there is only a file with .gz behind the name."""
    packed = not os.path.exists(path) and os.path.exists(path + ".gz")
    path += ".gz" if packed else ""
    try:
        with (gzip.open if packed else open)(path, "rt", encoding="utf-8") as file:
            return file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise Fault(EXIT_INPUT, f"{path}: damaged, or cut short") from None
    except OSError as error:
        raise Fault(EXIT_INPUT, f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Fault(EXIT_INPUT, f"{path}: not UTF-8 text") from None


def read_json(path):
    try:
        info = json.loads(read_text(path))
    except ValueError as error:
        raise Fault(EXIT_INPUT, f"{path}: not JSON: {error}") from None
    if not isinstance(info, dict) or not isinstance(info.get("options", {}), dict):
        raise Fault(EXIT_INPUT, f"{path}: not a run's description")
    return info


def is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def check_row(row, where):
    """Every line names its step and tokens; every other field is a number, a flag, null or a list of numbers."""
    if not isinstance(row, dict):
        raise Fault(EXIT_INPUT, f"{where}: not a JSON object")
    for name in ("step", "tokens"):
        if not is_number(row.get(name)) or not math.isfinite(row[name]):
            raise Fault(EXIT_INPUT, f"{where}: no number \"{name}\"")
    for name, value in row.items():
        items = value if isinstance(value, list) else [value]
        if not all(item is None or isinstance(item, bool) or is_number(item) for item in items):
            raise Fault(EXIT_INPUT, f"{where}: \"{name}\" is not a number")
        if isinstance(value, list) != (name == "gns_layer"):
            raise Fault(EXIT_INPUT, f"{where}: \"{name}\" is {'a list' if isinstance(value, list) else 'no list'}")


def read_lines(path):
    """(where, object) of every line of JSON."""
    for i, line in enumerate(read_text(path).split("\n"), 1):
        where = f"{path} line {i}"
        try:
            if line:
                yield where, json.loads(line)
        except ValueError:
            raise Fault(EXIT_INPUT, f"{where}: not JSON") from None


def read_samples(path):
    samples = []
    for where, sample in read_lines(path) if os.path.exists(path) or os.path.exists(path + ".gz") else ():
        if not isinstance(sample, dict) or not is_number(sample.get("step")) or not isinstance(sample.get("text"), str):
            raise Fault(EXIT_INPUT, f"{where}: no sample with its step and text")
        samples.append(sample)
    return samples


def read_metrics(path):
    rows, val_rows, test_rows = [], [], []
    for where, row in read_lines(path):
        check_row(row, where)
        row.update((name, math.inf) for name, x in row.items() if name.endswith("_lower") and x == UNBOUNDED)
        kind = val_rows if "val_loss" in row else test_rows if "hellaswag" in row else rows
        if kind and row["tokens"] < kind[-1]["tokens"]:
            raise Fault(EXIT_INPUT, f"{where}: the tokens go backwards")
        kind.append(row)
    if not rows:
        raise Fault(EXIT_INPUT, f"{path}: no step in it")
    return rows, val_rows, test_rows


def add_seconds(rows, other_rows, begin):
    """Training time: each step's tokens over its tok_per_s; validation, samples and checkpoints do not count."""
    seconds, tokens = 0.0, begin
    at = {}
    known = [row["tok_per_s"] for row in rows if row.get("tok_per_s")]
    rate = known[0] if known else math.nan
    for row in rows:
        rate = row.get("tok_per_s") or rate
        seconds += (row["tokens"] - tokens) / rate
        tokens = row["tokens"]
        row["seconds"] = at[row["step"]] = seconds
    for row in other_rows:
        row["seconds"] = at.get(row["step"], math.nan)


def smooth(tokens, values, span):
    """Exponential average whose weight halves every `span` tokens, corrected for its start; NaN is passed by."""
    out, total, weight, before = [], 0.0, 0.0, 0
    for at, value in zip(tokens, values):
        decay = 2.0 ** (-(at - before) / span)
        if math.isfinite(value) and decay < 1:
            total = decay * total + (1 - decay) * value
            weight = decay * weight + (1 - decay)
            before = at
        out.append(total / weight if weight > 0 else math.nan)
    return out


SMOOTH_FRACTION = 0.01  # of the run's tokens


def span_of(run):
    """The half-life in tokens of a run's smoothed curves."""
    return max(1.0, SMOOTH_FRACTION * run.rows[-1]["tokens"])


def time_unit(seconds):
    """(name, seconds in it) of the largest unit that the time has two of."""
    for name, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return name, length
    return "seconds", 1


def loss_curve(run, kind):
    """(rows, losses): the validation losses or the smoothed training losses, and the lines that they stand at."""
    if kind == "val":
        return run.val_rows, run.val_column("val_loss")
    tokens = run.column("tokens")
    return run.rows, smooth(tokens, run.column("loss"), span_of(run))


def common_kind(runs):
    """Validation losses where every run has two or more, else the smoothed training losses."""
    return "val" if all(len(run.val_rows) > 1 for run in runs) else "train"


def common_target(runs, kind):
    """The lowest loss that every run reaches."""
    best = []
    for run in runs:
        losses = [x for x in loss_curve(run, kind)[1] if math.isfinite(x)]
        if not losses:
            raise Fault(EXIT_INPUT, f"{run.path}: no {kind} loss that is a number")
        best.append(min(losses))
    return max(best)


def reach(run, kind, target, curve=None):
    """{step, tokens, seconds} where the loss first is `target` or less, straight between lines; or None.
    curve: loss_curve(run, kind), where it is at hand."""
    last = None
    for row, loss in zip(*(curve or loss_curve(run, kind))):
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
