"""What the checks of this folder share: how a check fails, prints its line (as dev/test/test.h does), and runs a program."""

import subprocess
import sys
import time


class Mismatch(Exception):
    pass


failures = 0


def attempt(name, check, *arguments):
    """Runs a check and prints its line, after what the check returned. Returns that; None where it failed."""
    global failures
    start = time.perf_counter()
    try:
        result, why = check(*arguments), ""
    except Exception as error:  # whatever a reader raises is a failure of the file that it reads
        result, why = None, f": {error if isinstance(error, Mismatch) else repr(error)}"
        failures += 1
    if isinstance(result, str):
        print(f"  {result}")
    print(f"{'FAIL' if why else 'PASS'} {name} {time.perf_counter() - start:.2f}s{why}", flush=True)
    return result


def run(directory, *command):
    """Runs a program in a directory. Returns its standard output, bytes."""
    command = [str(word) for word in command]
    done = subprocess.run(command, cwd=directory, capture_output=True, timeout=120)
    if done.returncode:
        last = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise Mismatch(f"{command[0]} ended with {done.returncode}: {last[-400:]}")
    return done.stdout


def finish():
    sys.exit(failures > 0)
