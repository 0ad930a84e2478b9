"""Reads a run's directory: run.json (options, and the commands of the run's parts), metrics.jsonl (a line for each step,
validation or test), samples.jsonl (a line for each sample) and outliers.jsonl (a line for each row of --outliers).

llmc/run/metrics.c writes the fields of metrics.jsonl. An unknown number is null in the file, None in a line and NaN in a
column. An infinite bound is 1e308 in the file and inf here. A line that is no JSON object with its fields raises a Fault
with the file's name and exit code 65. This module also defines the scripts' errors, follows runs, and computes loss curves.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import sys
import time

EXIT_USAGE, EXIT_INPUT, EXIT_WRITE = 64, 65, 74
UNBOUNDED = 1e308


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
    """Returns a text's number, for argparse. ValueError if it is not finite."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


finite_number.__name__ = "number"  # argparse's message says "invalid number value"


def run_main(main, packages=""):
    """Runs a script's main; a Fault becomes one line on stderr and its exit code. packages: packages that main imports.
    Where they are missing the whole script runs again with build/venv's Python, if there is one."""
    if sys.getfilesystemencoding() != "utf-8":  # tensorboard and tokenizers open files by names in UTF-8
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONUTF8": "1"})
    sys.stdout.reconfigure(errors="backslashreplace")  # file names may be any bytes
    try:
        main()
        sys.stdout.flush()
    except Fault as fault:
        print(f"error: {fault}", file=sys.stderr)
        sys.exit(fault.code)
    except ImportError as error:
        venv = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "build", "venv")
        python = os.path.join(venv, "bin", "python")
        if os.access(python, os.X_OK) and "GNS_IN_VENV" not in os.environ:
            os.environ["GNS_IN_VENV"] = "1"  # prevents a second restart
            os.execv(python, [python] + sys.argv)
        print(f"error: the Python package {packages} does not load ({error}): "
              f"python3 -m venv {shlex.quote(venv)} && {shlex.quote(python)} -m pip install {packages}", file=sys.stderr)
        sys.exit(EXIT_INPUT)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # quiet if the reader has ended
            print(f"error: {error.filename or 'standard output'}: {error.strerror or error}; choose another place", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # at exit Python flushes stdout again
        sys.exit(EXIT_WRITE)
    except KeyboardInterrupt:
        sys.exit(130)


def write_whole(path, text, begin=""):
    """Writes the whole file, or none of it. Replaces a file that begins with `begin` or is empty; no link, and no device."""
    partial = f"{path}.{os.getpid()}.tmp"
    ours = os.path.isfile(path) and read_bytes(path)[:len(begin)] in (b"", begin.encode())
    if os.path.lexists(path) and (os.path.islink(path) or not ours):
        raise Fault(EXIT_WRITE, f"{path}: not written: not a file of this script; move it away, or choose another place")
    try:
        with open(partial, "x", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(partial)
        raise Fault(EXIT_WRITE, f"{path}: cannot write: {error.strerror}; choose another place") from None


# ---- Reading and checking -------------------------------------------------------------------------------------------

def read_bytes(path, remedy="name a run's directory"):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise Fault(EXIT_INPUT, f"{path}: {error.strerror}; {remedy}") from None


# Fields that each line of metrics.jsonl, samples.jsonl and outliers.jsonl must have.
ROW, SAMPLE, OUTLIER = ("step", "tokens"), ("step", "text"), ("kind", "step", "shard", "offset", "norm", "loss", "score")


def read_float(text):
    """Reads a float of JSON. 1e308 and 1e999 stand for infinity."""
    value = float(text)
    return value if abs(value) < UNBOUNDED else math.copysign(math.inf, value)


def parse(where, data, fields=()):
    """Returns bytes as a JSON object that has these fields. where: names the bytes in a Fault."""
    try:
        value = json.loads(data.decode(errors="replace"), parse_float=read_float)
    except ValueError as error:
        raise Fault(EXIT_INPUT, f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict) or not value.keys() >= set(fields):
        raise Fault(EXIT_INPUT, f"{where}: not an object with {', '.join(fields) or 'names'}")
    return value


def read_lines(path, fields, known):
    """Yields (where, object) of every line, except a last line without its end: its run is writing the line, or waits for
    space on the disk. known: {line: object} of earlier calls, to which new lines are added."""
    for number, line in enumerate(read_bytes(path).split(b"\n")[:-1], 1):
        where = f"{path} line {number}"
        if line.strip():
            known[line] = known.get(line) or parse(where, line, fields)
            yield where, known[line]


# ---- Runs -----------------------------------------------------------------------------------------------------------

def command_text(part, between="\n"):
    """Returns a part's command as a shell reads it."""
    return f"cd {shlex.quote(part.get('directory', '.'))}{between}{shlex.join(part['command'])}"


def column(rows, name):
    """Returns a field of every row; NaN for a row without it."""
    return [math.nan if row.get(name) is None else float(row[name]) for row in rows]


def finite(values):
    return [x for x in values if math.isfinite(x)]


class Run:
    """A run, from its present logs: parts (its commands), lines (of metrics.jsonl), samples, outliers. `rows` has lines of
    steps, `val_rows` lines of validations, `test_rows` lines of tests. live: accepts a run that has no step yet.

    A line's `seconds` is the training time up to this line: the sum of tokens / tok_per_s over the steps. Validation,
    samples and checkpoints do not count."""

    def __init__(self, path, live=False, known=None):
        self.path = path
        parent, base = os.path.split(os.path.abspath(path))
        name = base if base != "run" else os.path.basename(parent) or base
        self.name = os.fsencode(name).decode(errors="replace")
        self.info_path, self.metrics_path, *others = (os.path.join(path, name) for name in (
            "run.json", "metrics.jsonl", "samples.jsonl", "outliers.jsonl"))
        self.info = parse(self.info_path, read_bytes(self.info_path))
        self.parts = self.info.get("parts", [])
        known = {} if known is None else known
        self.lines, before, now, rate = [], 0, 0.0, math.nan
        for where, line in read_lines(self.metrics_path, ROW, known):
            if line["tokens"] < before:
                raise Fault(EXIT_INPUT, f"{where}: the tokens go backwards")
            if "loss" in line:
                rate = max(line.get("tok_per_s") or 0, 0) or rate
                now += (line["tokens"] - before) / rate
                before = line["tokens"]
            line["seconds"] = now
            self.lines.append(line)
        self.samples, self.outliers = ([line for _, line in read_lines(other, fields, known)] if os.path.exists(other) else []
                                       for other, fields in zip(others, (SAMPLE, OUTLIER)))
        self.rows = [line for line in self.lines if "loss" in line]
        self.val_rows = [line for line in self.lines if "val_loss" in line]
        self.test_rows = [line for line in self.lines if "hellaswag" in line]
        if not self.rows and not live:
            raise Fault(EXIT_INPUT, f"{self.metrics_path}: no step in it; let the run make some")

    def column(self, name):
        """Returns a field of every step. The field loss is without label smoothing, as in validation."""
        return column(self.rows, "loss_nll" if name == "loss" and "loss_nll" in self.rows[0] else name)


# ---- Viewers --------------------------------------------------------------------------------------------------------

def numbers_of(line):
    """Returns a line as {name: number} for a viewer, without the step and unknown numbers. Splits lists into elements."""
    out = {name: x for name, x in line.items() if not isinstance(x, list)}
    out |= {f"{name}/{i:02d}": x for name, values in line.items() if isinstance(values, list) for i, x in enumerate(values)}
    return {name: x for name, x in out.items() if isinstance(x, (int, float)) and x == x and name != "step"}


def add_follow_options(parser):
    parser.add_argument("--follow", action="store_true", help="wait for the run, and add what it writes until Ctrl-C")
    parser.add_argument("--every", type=finite_number, default=10, metavar="SECONDS",
                        help="seconds between two reads with --follow (default: %(default)s)")


def read_new(paths, args):
    """Yields (run, begins, parts, lines, samples) for each run: what is new in it. Reads the runs once, or with --follow
    until Ctrl-C. begins: all is new, as on the first read, after a resume that cut the logs, or in another run."""
    seen, known = {}, {path: {} for path in paths}
    while True:
        for path in paths:
            if args.follow and not all(os.path.exists(f"{path}/{name}") for name in ("run.json", "metrics.jsonl")):
                continue
            run = Run(path, live=args.follow, known=known[path])  # a line that has not changed is the same object
            there, before = (run.parts, run.lines, run.samples), seen.get(path)
            begins = not before or any(now[:len(old)] != old for now, old in zip(there, before))
            seen[path] = there
            yield run, begins, *(now if begins else now[len(old):] for now, old in zip(there, before or there))
        if not args.follow:
            return
        time.sleep(max(args.every, 0.01))


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
    units = (("days", 86400), ("hours", 3600), ("minutes", 60))
    return next((unit for unit in units if seconds >= 2 * unit[1]), ("seconds", 1))


def reach(curve, target):
    """Returns {step, tokens, seconds} where a curve (lines, losses) first falls to `target`, interpolated between two lines.
    None if the curve stays above, or begins at or below `target`: the crossing is then unknown."""
    known = [(row, loss) for row, loss in zip(*curve) if math.isfinite(loss)]
    first = next((i for i, (_, loss) in enumerate(known) if loss <= target), 0)
    if first == 0:
        return None
    (before, high), (row, low) = known[first - 1:first + 1]
    part = (high - target) / (high - low)
    return {name: before[name] + part * (row[name] - before[name]) for name in ("step", "tokens", "seconds")}


def compare(runs, target=None):
    """Returns (kind, target, what `reach` returns for each run). kind: "val" compares validation losses, "train" smoothed
    training losses. Chooses "val" if each run crosses, between two validations, the lowest validation loss that all runs
    reach. target: by default the lowest loss of this kind that all runs reach."""
    for kind in ("val", "train"):
        curves = [(run.val_rows, column(run.val_rows, "val_loss")) if kind == "val" else (run.rows, smooth_column(run, "loss"))
                  for run in runs]
        lowest = max(min(finite(losses), default=math.inf) for _, losses in curves)
        if all(reach(curve, lowest) for curve in curves):
            break
    target = lowest if target is None else target
    return kind, target, [reach(curve, target) for curve in curves]
