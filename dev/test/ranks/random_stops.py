#!/usr/bin/env python3
"""Stops runs of two ranks at random moments, under random delays of their threads and MPI calls: make test-stops.

    dev/test/ranks/random_stops.py BUILD STOPS [SIDE_BY_SIDE]

BUILD has train_gpt2 and data/tokenize. A stop is one or two of SIGUSR1, SIGTERM, SIGINT and SIGHUP to scripts/mpirun.sh,
to a rank or to both, or SIGKILL to mpirun.sh or mpirun, while the ranks start or train. Within a minute all processes
must be gone, with exit code 75 and a checkpoint. At two signals it may be 78: one 2 s after the first ends a rank. What
SIGKILL ends has the code that follows; a run that trained is saved all the same. The directory of a stop that went
wrong stays, and its name is printed.
"""

import collections
import concurrent.futures
import contextlib
import glob
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
SIGNALS = [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
TARGETS = [["launcher"], ["rank"], ["launcher", "launcher"], ["rank", "rank"], ["launcher", "rank"], ["rank", "launcher"]]
KILLED = {"launcher": -signal.SIGKILL, "mpirun": 78}  # exit codes
MODEL = "--model d1 --channels 32 --heads 1 --vocab-size 256 --seq-len 16 --micro-batch 4 --batch-tokens 192 --threads 1"
LIMIT = 60  # seconds that a run may take to start, and to end


def catches_usr1(process):
    try:
        with open(f"/proc/{process}/status") as status:
            return int(re.search(r"SigCgt:\s*(\w+)", status.read())[1], 16) >> (signal.SIGUSR1 - 1) & 1
    except (OSError, TypeError):
        return False


def send(process, number):
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def find_marked(mark):
    """Command line by process id, of the processes whose environment has GNS_STOP=MARK."""
    found = {}
    for path in glob.glob("/proc/[0-9]*"):
        try:
            with open(f"{path}/environ", "rb") as environ, open(f"{path}/cmdline", "rb") as command:
                if f"GNS_STOP={mark}".encode() in environ.read().split(b"\0"):
                    found[int(path[6:])] = command.read().replace(b"\0", b" ").decode()
        except OSError:
            pass
    return found


class Stop:
    def __init__(self, work, build, number):
        self.directory = os.path.join(work, f"stop{number}")
        self.log = os.path.join(self.directory, "log")
        self.mark = f"{os.getpid()}.{number}"
        self.kills = random.random() < 0.2
        self.targets = [random.choice(list(KILLED))] if self.kills else random.choice(TARGETS)
        self.signals = [signal.SIGKILL] if self.kills else [random.choice(SIGNALS) for _ in self.targets]
        self.early = random.random() < 0.4
        self.name = ", ".join(f"{s.name} to {t}" for s, t in zip(self.signals, self.targets))
        self.command = [f"{ROOT}/scripts/mpirun.sh", "-np", "2", "--oversubscribe", "--allow-run-as-root"]
        self.command += ["-x", f"LD_PRELOAD={work}/delays.so", os.path.abspath(f"{build}/train_gpt2")]
        self.command += ["--train", f"{work}/text_train_*.bin", *MODEL.split(), "--val-every", "0", "--steps", "100000000"]
        self.command += ["--zero", random.choice("0123"), "--checkpoint-every", random.choice(["0", "5", "50"])]
        self.command += ["--out", "run"]
        self.environment = dict(os.environ, GNS_STOP=self.mark, OMPI_MCA_mpi_yield_when_idle="1", OMPI_MCA_btl="self,vader",
                                DELAYS_MOST=random.choice(["0", "3000", "30000"]), DELAYS_CRASH=f"{self.directory}/crash")

    def start(self):
        def begin():
            os.nice(5)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)

        os.mkdir(self.directory)
        with open(self.log, "w") as log:
            return subprocess.Popen(self.command, cwd=self.directory, env=self.environment, stdout=log, stderr=log,
                                    preexec_fn=begin, start_new_session=True)

    def said(self):
        with open(self.log, errors="replace") as log:
            return log.read()

    def listeners(self, target, job):
        """Processes that a signal to `target` may go to: ranks and mpirun.sh once they can be asked; mpirun."""
        if target == "launcher":
            return [job.pid] * catches_usr1(job.pid)
        start = "mpirun " if target == "mpirun" else self.command[self.command.index("--train") - 1] + " "
        return [p for p, command in find_marked(self.mark).items() if command.startswith(start) and (target != "rank" or catches_usr1(p))]

    def await_moment(self, job):
        """A random one after the first target can hear; mostly while the ranks train."""
        end = time.monotonic() + LIMIT
        while job.poll() is None and time.monotonic() < end:
            if self.listeners(self.targets[0], job) and (self.early or "step  " in self.said()):
                break
            time.sleep(0.05)
        time.sleep(random.random() * 0.3)

    def ask(self, job):
        for target, number in zip(self.targets, self.signals):
            if listeners := self.listeners(target, job):
                send(random.choice(listeners), number)
            time.sleep(random.random() * 0.3)

    def leftovers(self):
        """Command lines of processes that stay after the launcher's end. Ranks that save have time."""
        end = time.monotonic() + LIMIT / 2
        while (left := find_marked(self.mark)) and time.monotonic() < end:
            time.sleep(0.1)
        if left:
            self.note_state()
        for process in left:
            send(process, signal.SIGKILL)
        return list(left.values())

    def note_state(self):
        with open(f"{self.directory}/state", "a") as state:
            for process, command in find_marked(self.mark).items():
                with contextlib.suppress(OSError), open(f"/proc/{process}/status") as status:
                    print(process, command, *re.findall(r"(?:State|PPid|Sig\w+|ShdPnd):.*", status.read()), sep="\n  ", file=state)

    def fault(self, code):
        """What is wrong with its end; "": nothing."""
        left = self.leftovers()
        if os.path.exists(f"{self.directory}/crash"):
            with open(f"{self.directory}/crash") as crash:
                return "crash: " + crash.readline().strip()
        if left:
            return f"exit code {code}, and left: {left}"
        wanted = [KILLED[self.targets[0]]] if self.kills else [75, 78] if len(self.signals) > 1 else [75]
        if code not in wanted:
            return f"exit code {code}"
        must_save = "step  " in self.said() if self.kills else code == 75
        return "nothing is saved" if must_save and not glob.glob(f"{self.directory}/run/step_*/MANIFEST.json") else ""

    def run(self):
        job = self.start()
        try:
            self.await_moment(job)
            self.ask(job)
            code = job.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = "none within a minute"
            self.note_state()
            send(job.pid, signal.SIGKILL)
            job.wait()
        fault = self.fault(code)
        if not fault:
            shutil.rmtree(self.directory)
        return code, fault


def prepare(build):
    work = tempfile.mkdtemp(prefix="stops.")
    subprocess.run(["mpicc", "-O1", "-shared", "-fPIC", "-o", f"{work}/delays.so", f"{ROOT}/dev/test/preload/delays.c",
                    "-ldl", "-lpthread"], check=True)
    subprocess.run([f"{build}/data/tokenize", "--tokenizer", "bytes", "--out", f"{work}/text", "--val-fraction", "0.1",
                    f"{ROOT}/README.md"], check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return work


def main():
    build, stops, side_by_side = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 4
    work, begun = prepare(build), time.monotonic()
    ends, faults, lock = collections.Counter(), [], threading.Lock()

    def stop_one(number):
        stop = Stop(work, build, number)
        code, fault = stop.run()
        with lock:
            ends["SIGKILL" if stop.kills else " and ".join(stop.targets), code] += 1
            if fault:
                faults.append(fault)
                print(f"{stop.directory}: {stop.name}: {fault}", flush=True)
            if sum(ends.values()) % 250 == 0:
                print(f"{sum(ends.values())} stops, {len(faults)} faults, {time.monotonic() - begun:.0f} s", flush=True)

    with concurrent.futures.ThreadPoolExecutor(side_by_side) as threads:
        list(threads.map(stop_one, range(stops)))
    for (target, code), count in sorted(ends.items(), key=str):
        print(f"  {count:5} {target}: exit code {code}")
    seconds = time.monotonic() - begun
    print(f"{'FAIL' if faults else 'PASS'} stops/random_stops {seconds:.2f}s: {stops} stops, {len(faults)} faults")
    if not faults:
        shutil.rmtree(work)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
