"""Helpers of the checks in this folder: fail, print a check's line (as dev/test/test.h does), run a program."""

import subprocess
import sys
import time


class Mismatch(Exception):
    pass


failures = 0


def attempt(name, check, *arguments):
    """Runs a check. Prints its result if that is a text, then PASS or FAIL. Returns the result; None if it failed."""
    global failures
    start = time.perf_counter()
    try:
        result, why = check(*arguments), ""
    except Exception as error:  # also an exception in a library that reads a file
        result, why = None, f": {error if isinstance(error, Mismatch) else repr(error)}"
        failures += 1
    if isinstance(result, str):
        print(f"  {result}")
    print(f"{'FAIL' if why else 'PASS'} {name} {time.perf_counter() - start:.2f}s{why}", flush=True)
    return result


def run(directory, *command):
    """Runs a program in a directory. Returns its standard output as bytes."""
    command = [str(word) for word in command]
    done = subprocess.run(command, cwd=directory, capture_output=True, timeout=120)
    if done.returncode:
        last = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise Mismatch(f"{command[0]} ended with {done.returncode}: {last[-400:]}")
    return done.stdout


def finish():
    sys.exit(failures > 0)
