#!/usr/bin/env python3
"""Compares batch schedules: trains each with the same seeds, and prints what each costs and what it saves against --against.

    dev/bench/ramp_study.py QUEUE [--out DIR] [--seeds 1,2,3] [--against NAME] [--table]

Each line of QUEUE is a run: its name, then the trainer's options. Options on lines that begin with `all` are defaults for every
run. # begins a comment.

    all    --model d12 --train 'text_train_*.bin' --val 'text_val_*.bin' --micro-batch 16
    all    --train-tokens 80e6 --gns ln
    rows16 --batch-tokens 16384 --lr 5e-4
    ramp16 --batch-tokens 16384 --lr 5e-4 --ramp gns --batch-min 16 --batch-max 512 --ramp-step-rows 1.5

Every run is repeated with every seed. Runs of one seed train on the same examples in the same order. With the same --gns mode,
first batch and learning rate they have the same bits until the schedules differ; the column `equal` counts these steps. So
differences are paired by seed, each with its standard error over the seeds.

DIR/results.jsonl gets a line for each finished run; DIR/NAME-seedS keeps its log. A run that has a line is not repeated.
A stopped study (Ctrl-C, TERM) saves its runs; the same command resumes them, and also runs lines added to QUEUE.

GPU seconds are the sum of the steps' times, without validation and saves. The training loss is the mean over the last tenth of
the tokens. Environment: JOBS, the number of runs side by side (default: one per GPU), which use the GPUs in CUDA_VISIBLE_DEVICES
(default: all); TRAINER (./train_gpt2cu); LAUNCH, a launcher of TRAINER (scripts/mpirun.sh -np 4): runs then go one at a time.
"""

import concurrent.futures
import json
import math
import os
import queue
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../scripts"))
from run_log import EXIT_INPUT, EXIT_USAGE, EXIT_WRITE, Fault, Parser, Run, parse, read_bytes, run_main, write_whole

WINDOW = 0.1  # training losses are compared over this last share of the tokens
EXIT_STOPPED, EXIT_NONFINITE = 75, 76
QUIET = "val-every = 1000000000\ncheckpoint-every = 0\n"  # defaults: validate only at the end, save nothing


def window_loss(rows, begin, end):
    """Returns the mean training loss of the tokens from `begin` to `end`. A step counts by its share of tokens in this range."""
    before, total, weight = 0, 0.0, 0.0
    for row in rows:
        part = max(0, min(row["tokens"], end) - max(before, begin))
        total, weight, before = total + part * row["loss"], weight + part, row["tokens"]
    return total / weight if weight > 0 else math.nan


def paired(values, others):
    """Returns the mean difference of two runs' values {seed: value}, paired by seed, and its standard error."""
    seeds = sorted(set(values) & set(others))
    differences = [values[seed] - others[seed] for seed in seeds]
    if not differences:
        return math.nan, math.nan
    error = statistics.stdev(differences) / math.sqrt(len(seeds)) if len(seeds) > 1 else math.nan
    return statistics.mean(differences), error


def read_queue(path):
    """Returns {run's name: {option: its words}}, in the file's order."""
    runs, shared = {}, {}
    for number, line in enumerate(read_bytes(path, "write a QUEUE; --help shows one").decode(errors="replace").splitlines(), 1):
        where = f"{path} line {number}"
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise Fault(EXIT_INPUT, f"{where}: {error}") from None
        name, options = words[0] if words else "", {}
        for word in words[1:]:
            if word.startswith("--"):
                option, _, value = word.partition("=")
                options[option] = [value] if value else []
            elif not options:
                raise Fault(EXIT_INPUT, f"{where}: {word}: no option; write NAME --option value")
            else:
                options[option].append(word)
        if words and (name in runs or not re.fullmatch(r"\w[\w.,:@+=-]*", name)):
            raise Fault(EXIT_INPUT, f"{where}: {name}: a second run of that name, or no name; choose another")
        if taken := {"--out", "--seed"} & set(options):
            raise Fault(EXIT_INPUT, f"{where}: {taken.pop()} is the study's own; leave it out (--seeds)")
        if name == "all":
            shared |= options
        elif words:
            runs[name] = options
    return {name: shared | own for name, own in runs.items()}


def text_of(options):
    return shlex.join(word for name, words in options.items() for word in (name, *words))


def result_of(run):
    """Returns a finished run's line of results.jsonl."""
    last = run.rows[-1]
    return {"tokens": last["tokens"], "steps": last["step"],
            "val_loss": run.val_rows[-1]["val_loss"] if run.val_rows else None,
            "train_loss": window_loss(run.rows, (1 - WINDOW) * last["tokens"], last["tokens"]),
            "gpu_seconds": round(last["seconds"], 3), "card": run.info.get("engine"), "build": run.info.get("program")}


class Study:
    def __init__(self, args):
        self.runs, self.out, self.seeds = read_queue(args.queue), args.out, args.seeds
        self.results, self.lock, self.running, self.faults, self.stopped = {}, threading.Lock(), {}, [], False
        os.makedirs(self.out, exist_ok=True)
        self.results_path, self.quiet = (os.path.join(self.out, name) for name in ("results.jsonl", "quiet.conf"))
        write_whole(self.quiet, QUIET, QUIET)
        if os.path.exists(self.results_path):
            for number, line in enumerate(read_bytes(self.results_path).splitlines(), 1):
                result = parse(f"{self.results_path} line {number}", line, ("name", "seed", "options"))
                self.results[result["name"], result["seed"]] = result

    def place(self, name, seed):
        return os.path.join(self.out, f"{name}-seed{seed}")

    def train(self, name, seed, options, gpu):
        kept, work = self.place(name, seed), self.place(name, seed) + ".work"
        if os.path.lexists(kept) and not os.path.isdir(work):
            raise Fault(EXIT_WRITE, f"{kept}: not a run of {self.results_path}; move it away, or give the run another name")
        words = [word for option, values in options.items() for word in (option, *values)]
        command = [*shlex.split(os.environ.get("LAUNCH", "")), os.environ.get("TRAINER", "./train_gpt2cu"), "--config",
                   self.quiet, *words, "--seed", str(seed), "--out", work]
        with open(kept + ".log", "ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                       env={**os.environ, **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})})
            self.running[name, seed] = process
            code = process.wait()
            del self.running[name, seed]
        if code not in (0, EXIT_NONFINITE):
            raise Fault(code if code > 0 else 70, f"{name}, seed {seed}: exit code {code}: see {kept}.log: {shlex.join(command)}")
        if code == 0:
            os.makedirs(kept, exist_ok=True)
            for log in ("run.json", "metrics.jsonl"):
                shutil.copyfile(os.path.join(work, log), os.path.join(kept, log))
        result = {"name": name, "seed": seed, "options": text_of(options)}
        result |= result_of(Run(kept)) if code == 0 else {"diverged": True}
        with self.lock:
            self.results[name, seed] = result
            with open(self.results_path, "a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        shutil.rmtree(work)
        print(f"{name}, seed {seed}: " + (f"{result['steps']} steps, {result['gpu_seconds']} s" if code == 0 else "diverged"), flush=True)

    def stop(self, *_):
        self.stopped = True
        for process in list(self.running.values()):
            process.terminate()

    def train_all(self):
        """Trains what has no result yet. A run that fails does not stop the others."""
        found = [] if os.environ.get("LAUNCH") else visible_gpus()
        jobs = 1 if os.environ.get("LAUNCH") else int(os.environ.get("JOBS", len(found) or 1))
        gpus = queue.SimpleQueue()  # those that are free; with more jobs than GPUs each is there several times
        for k in range(jobs):
            gpus.put(found[k % len(found)] if found else None)

        def work(run):
            gpu = gpus.get()
            try:
                if not self.stopped:
                    self.train(*run, gpu)
            except (Fault, OSError) as fault:
                if not self.stopped:
                    print(f"FAIL {fault}", file=sys.stderr, flush=True)
                self.faults.append(fault)
            finally:
                gpus.put(gpu)

        runs = [(name, seed, options) for seed in self.seeds for name, options in self.runs.items()]
        for name, seed, options in runs:
            if self.results.get((name, seed), {"options": text_of(options)})["options"] != text_of(options):
                raise Fault(EXIT_USAGE, f"{name}: has run with other options ({self.results_path}); give it another name")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.stop)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            list(pool.map(work, [run for run in runs if run[:2] not in self.results]))
        if self.stopped:
            raise Fault(EXIT_STOPPED, "stopped, and the runs were asked to save; the same command goes on")

    def equal_steps(self, name, other, seed):
        """Returns the number of steps before the first step in which the losses of two runs differ."""
        losses = [Run(self.place(of, seed)).column("loss") for of in (name, other)]
        return next((i for i, (a, b) in enumerate(zip(*losses)) if a != b), min(map(len, losses)))

    def table(self, against):
        names = [name for name in self.runs if any((name, seed) in self.results for seed in self.seeds)]
        against = against or next(iter(names), None)
        if against not in names:
            raise Fault(EXIT_USAGE, f"{against or 'the queue'}: no finished run; let one finish first")

        def values(name, field):
            found = {seed: self.results.get((name, seed), {}).get(field) for seed in self.seeds}
            return {seed: x for seed, x in found.items() if x is not None}

        yield (f"{'run':<24} {'seeds':>5} {'steps':>8} {'fewer':>6} {'+-':>4} {'seconds':>8} {'less':>6} {'+-':>4} "
               f"{'val loss':>8} {'above':>8} {'+-':>7} {'tr. loss':>8} {'above':>8} {'+-':>7} {'equal':>6}")
        for name in names:
            line = f"{name:<24} {len(values(name, 'tokens')):5d}"
            for field, digits in (("steps", 0), ("gpu_seconds", 1)):
                mine, first = values(name, field), values(against, field)
                saved = {seed: 100 * (1 - mine[seed] / first[seed]) for seed in set(mine) & set(first) if first[seed]}
                middle, error = paired(saved, dict.fromkeys(saved, 0.0))
                line += f" {mean(mine):8.{digits}f} {middle:5.1f}% {error:4.1f}"
            for field in ("val_loss", "train_loss"):
                middle, error = paired(values(name, field), values(against, field))
                line += f" {mean(values(name, field)):8.4f} {middle:+8.4f} {error:7.4f}"
            pairs = [seed for seed in values(name, "tokens") if seed in values(against, "tokens")]
            equal = [self.equal_steps(name, against, seed) for seed in pairs
                     if all(os.path.isdir(self.place(of, seed)) for of in (name, against))]
            yield line + f" {min(equal, default=0):6d}"
        yield f"paired by seed with {against}; diverged: {sum('diverged' in of for of in self.results.values())}"


def mean(values):
    return statistics.mean(values.values()) if values else math.nan


def visible_gpus():
    if devices := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return devices.split(",")
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    except OSError:
        return []
    return [str(i) for i in range(len(re.findall("^GPU ", listed, re.M)))]


def seeds(text):
    return list(dict.fromkeys(map(int, text.split(","))))


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("queue", metavar="QUEUE", help="a file with one run per line: NAME OPTIONS...")
    parser.add_argument("--out", default="build/ramp_study", metavar="DIR", help="results and logs (default: %(default)s)")
    parser.add_argument("--seeds", type=seeds, default="1", metavar="N,N...",
                        help="every run trains with each (default: %(default)s)")
    parser.add_argument("--against", metavar="NAME", help="the run that others are compared with (default: the first)")
    parser.add_argument("--table", action="store_true", help="train nothing, print the table")
    args = parser.parse_args()
    if not re.fullmatch("[1-9][0-9]{0,2}", os.environ.get("JOBS", "1")):
        raise Fault(EXIT_USAGE, f"JOBS is {os.environ['JOBS']}; set it to the number of runs side by side")
    study = Study(args)
    if not args.table:
        study.train_all()
    if study.results:
        print("\n".join(study.table(args.against)), flush=True)
    if study.faults:
        raise study.faults[0]


if __name__ == "__main__":
    run_main(main)
