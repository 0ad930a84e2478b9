#!/usr/bin/env python3
"""Compares builds and settings of the engine by the speed of whole training steps. Each build runs in its own process.

    turns.py [--units N] [--seconds S] [--raw] MODEL MICRO_BATCH SEQ_LEN NAME=PROGRAM[,WORD...]:MODE[,MODE...] ...

PROGRAM is bench_engine, of this build or an earlier one; WORDs are bench_engine's words; a MODE is off, ln, exact or (with the
word fp8) fp8. ln/61: micro-steps of 61 rows; ln/16x8: steps of 8 micro-steps of 16 rows. Each NAME and MODE is an arm. All
processes exist at the same time and take turns of --seconds. Two rounds are a unit. The second round has the opposite order, so a
steady drift of the card's clock cancels. Prints each arm's median step and speed, and the median of the units' ratios to the first
arm's speed, with its standard error.
"""
import argparse
import math
import statistics
import subprocess
import sys
import time


class Process:
    def __init__(self, program, words, shape):
        command = [program, *shape, "1", *words, "turns"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"turns.py: {self.process.args} ended with {self.process.wait()}")
        return line

    def turn(self, mode, skipped, steps):
        mode, _, rows = mode.partition("/")
        rows, _, micro_steps = rows.partition("x")
        self.process.stdin.write(f"{mode} {rows or 0} {micro_steps or 1} {skipped} {steps}\n")
        self.process.stdin.flush()
        ms, tokens = self.line().split()
        return float(ms), int(tokens)

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def ratio(turns, others):
    """Returns the percentage by which the speed is above the others', and its standard error."""

    def speeds(of):
        return [(a[1] + b[1]) / (a[0] + b[0]) for a, b in zip(of[::2], of[1::2])]

    ratios = [100 * (a / b - 1) for a, b in zip(speeds(turns), speeds(others))]
    middle = statistics.median(ratios)
    # A median's standard error is 1.2533 times the mean's. The standard deviation is 1.4826 times the median distance.
    return middle, 1.2533 * 1.4826 * statistics.median(abs(x - middle) for x in ratios) / math.sqrt(len(ratios))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=6, help="of two rounds of all arms (6)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn, after 0.2 that do not count (0.5)")
    parser.add_argument("--raw", action="store_true", help="print every turn: seconds, arm, milliseconds")
    for name in ("MODEL", "MICRO_BATCH", "SEQ_LEN"):
        parser.add_argument(name)
    parser.add_argument("build", nargs="+", metavar="NAME=PROGRAM[,WORD...]:MODE[,MODE...]")
    args = parser.parse_args()
    builds, shape = {}, [args.MODEL, args.MICRO_BATCH, args.SEQ_LEN]
    for text in args.build:
        name, rest = text.split("=", 1)
        command, modes = rest.rsplit(":", 1)
        program, *words = command.split(",")
        builds[name] = (program, words, modes.split(","))
    processes = {name: Process(program, words, shape) for name, (program, words, _) in builds.items()}
    for process in processes.values():
        process.line()  # ready
    arms = [(name, mode) for name, (_, _, modes) in builds.items() for mode in modes]
    ms = {arm: processes[arm[0]].turn(arm[1], 2, 2)[0] for arm in arms}
    results, start = {arm: [] for arm in arms}, time.monotonic()
    for _ in range(args.units):
        for arm in arms + arms[::-1]:
            skipped, counted = (math.ceil(1e3 * seconds / ms[arm] - 0.5) for seconds in (0.2, args.seconds))
            ms[arm], tokens = processes[arm[0]].turn(arm[1], max(skipped, 1), max(counted, 1))
            results[arm].append((ms[arm], tokens))
            if args.raw:
                print(f"{time.monotonic() - start:.2f} {' '.join(arm)} {ms[arm]}")
    for process in processes.values():
        process.end()
    for arm in arms:
        step = statistics.median(t for t, _ in results[arm])
        line = f"{' '.join(arm):16} {step:9.3f} ms a step {1e3 * results[arm][0][1] / step:9.0f} tok/s"
        if arm != arms[0]:
            middle, error = ratio(results[arm], results[arms[0]])
            line += f" {middle:+6.2f}% +- {error:.2f}% of the speed of {' '.join(arms[0])}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
