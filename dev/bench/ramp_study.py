#!/usr/bin/env python3
"""The runs of dev/bench/ramp_study.sh and what they say: ramp_study.py OUT, with its choices in the environment.

A choice is tuned by successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943): every combination trains on the
first of SHARES of the tokens, the best third on the next share, and so on; the best then runs with every seed. A run
that is in OUT already is not made again.
"""

import gzip
import itertools
import math
import os
import queue
import shlex
import statistics
import subprocess
import sys
import threading

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../scripts"))
from run_log import EXIT_INPUT, Fault, Run, run_main

WINDOW = 0.1      # the last share of the tokens, whose training loss is compared
TOLERANCE = 0.001 # nats by which the reference may be above the best constant batch
KEPT = 3          # of this many candidates, the best one stays


# ---- Statistics -------------------------------------------------------------------------------------------------------

def window_loss(rows, begin, end):
    """The mean training loss of the tokens from `begin` to `end`. A step that lies partly within counts in part."""
    before, total, weight = 0, 0.0, 0.0
    for row in rows:
        part = max(0, min(row["tokens"], end) - max(before, begin))
        total, weight, before = total + part * row["loss"], weight + part, row["tokens"]
    return total / weight if weight > 0 else math.nan


def paired(losses, others):
    """(mean, its standard error) of the differences of two runs' losses by seed: {seed: loss}."""
    seeds = sorted(set(losses) & set(others))
    differences = [losses[seed] - others[seed] for seed in seeds]
    if not differences:
        return math.nan, math.nan
    error = statistics.stdev(differences) / math.sqrt(len(seeds)) if len(seeds) > 1 else math.nan
    return statistics.mean(differences), error


def reference_batch(losses):
    """The largest batch whose mean loss is within TOLERANCE of the best one's: {batch: mean loss}."""
    best = min(losses.values())
    return max(batch for batch, loss in losses.items() if loss <= best + TOLERANCE)


# ---- Runs -------------------------------------------------------------------------------------------------------------

class Study:
    """suffix: "" or "_2", of the variables of the first or the second size."""

    def __init__(self, out, suffix):
        self.out, self.suffix = out, suffix
        self.tokens, self.seq_len = int(float(self.get("TOKENS"))), int(self.get("SEQ_LEN"))
        self.seeds = self.get("SEEDS").split()
        self.warmup_steps = int(self.get("WARMUP_STEPS"))
        self.shares = [float(share) for share in self.get("SHARES").split()]
        if self.shares[-1:] != [1] or self.shares != sorted(self.shares) or self.shares[0] <= 0:
            raise Fault(EXIT_INPUT, f"SHARES{suffix}: {self.get('SHARES')}: shares of the tokens must grow from above 0 to 1")
        self.made = {}

    def get(self, name):
        return os.environ[name + self.suffix]

    def choices(self, kind, size, **fixed):
        """Every combination for a constant batch of `size` rows, or for a ramp with kappa `size`, or with kappa and most
        rows `size`, "0.65:64"."""
        lists = [fixed.get(name, self.get(name)).split() for name in ("LRS", "BETA2S", "DECAYS", "FINALS")]
        return [(kind, size, *rest) for rest in itertools.product(*lists)]

    def options(self, run, first):
        """The rates are those of 32 rows; those of other constant batches follow the square root. Where a GPU measures every
        step exactly, a ramp and its constant batch have the same bits until the ramp leaves it: the fast fall of the first
        tenth, where rounding alone moves the final loss by a few thousandths, is then the same in both."""
        kind, size, lr, beta2, decay, final, seed, share = run
        rows, tokens = int(size) if kind == "constant" else first, int(self.tokens * share)
        warmup = max(tokens // 20, self.warmup_steps * rows * self.seq_len)
        out = f"""--seed {seed} --lr {float(lr) * math.sqrt(rows / 32):.6g} --batch-tokens {rows * self.seq_len}
            --beta2 {beta2} --weight-decay {decay} --final-lr-frac {final} --train-tokens {tokens}
            --warmup-tokens {warmup} --seq-len {self.seq_len} --micro-batch {self.get("MICRO_BATCH")}
            --val-tokens {self.get("VAL_TOKENS")} --val-every 1000000000 --checkpoint-every 0 {self.get("SHAPE")}"""
        if kind == "ramp":
            kappa, most = (*size.split(":"), os.environ["BATCH_MAX"])[:2]
            out += f" --ramp gns --batch-min {rows} --batch-max {most} --ramp-kappa {kappa}"
        return out.split()

    def train(self, run, first, worker, gpu, launch=()):
        """launch: the command that starts the trainer, where it is not one process of this study's."""
        kind, size, lr, beta2, decay, final, seed, share = run
        start = f"-from{first}" if kind == "ramp" else ""
        name = f"{kind}-{'kappa' if kind == 'ramp' else ''}{size}{start}-lr{lr}-beta{beta2}-decay{decay}-final{final}" \
               f"-share{share:g}-seed{seed}" + ("-launched" if launch else "")
        kept, log = os.path.join(self.out, name), os.path.join(self.out, name + ".log")
        if not os.path.exists(os.path.join(kept, "metrics.jsonl.gz")):
            work = os.path.join(os.environ["WORK"], f"{worker}{self.suffix}")
            subprocess.run(["rm", "-rf", work], check=True)
            command = [*launch, os.environ["TRAINER"], "--train", self.get("TRAIN"), "--val", self.get("VAL"), "--out", work,
                       *self.options(run, first)]
            with open(log, "w", encoding="utf-8") as file:
                code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False,
                                      env={**os.environ, **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})}).returncode
            if code:
                raise Fault(1, f"FAIL {name}: exit code {code}: see {log}: {shlex.join(command)}")
            os.makedirs(kept, exist_ok=True)
            os.replace(os.path.join(work, "run.json"), os.path.join(kept, "run.json"))
            with open(os.path.join(work, "metrics.jsonl"), "rb") as file, gzip.open(kept + "/metrics.jsonl.gz", "wb") as to:
                to.write(file.read())
        self.made[run, first, bool(launch)] = Made(Run(kept), int(self.tokens * share))
        return self.made[run, first, bool(launch)]

    def train_all(self, runs, first):
        """Side by side, the workers in turn on the GPUs. The first fault is raised once all workers have stopped."""
        left, faults, jobs = queue.SimpleQueue(), [], int(os.environ["JOBS"])
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(jobs)))).split(",")
        for run in runs:
            left.put(run)

        def work(worker):
            while not faults:
                try:
                    self.train(left.get_nowait(), first, worker, gpus[worker % len(gpus)])
                except queue.Empty:
                    return
                except (Fault, OSError) as fault:
                    faults.append(fault)

        workers = [threading.Thread(target=work, args=(k,)) for k in range(jobs)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if faults:
            raise faults[0]

    def halve(self, choices, first):
        """The best of the choices on the first seed, and then its runs with every seed."""
        for share in self.shares:
            runs = [(*choice, self.seeds[0], share) for choice in choices]
            self.train_all(runs, first)
            runs.sort(key=lambda run: self.made[run, first, False].loss)
            keep = 1 if share == 1 else math.ceil(len(runs) / KEPT)
            choices = [run[:-2] for run in runs[:keep]]
        runs = [(*choices[0], seed, 1) for seed in self.seeds]
        self.train_all(runs, first)
        return Result(self, choices[0], first, runs)


class Made:
    """What the study needs of a run's log."""

    def __init__(self, log, tokens):
        self.loss = window_loss(log.rows, (1 - WINDOW) * tokens, tokens)
        self.val, self.steps, self.seconds = log.val_rows[-1]["val_loss"], log.rows[-1]["step"], log.rows[-1]["seconds"]
        self.clipped = statistics.mean(bool(row.get("clipped")) for row in log.rows)


class Result:
    """A tuned batch or ramp, with every seed."""

    def __init__(self, study, choice, first, runs):
        made = [study.made[run, first, False] for run in runs]
        self.choice, self.first = choice, first
        self.name = f"{choice[1]} rows" if choice[0] == "constant" else f"ramp from {first}, kappa {choice[1]}"
        self.losses = {run[-2]: of.loss for run, of in zip(runs, made)}
        self.loss, self.val, self.steps, self.seconds, self.clipped = (
            statistics.mean(getattr(of, name) for of in made) for name in ("loss", "val", "steps", "seconds", "clipped"))
        self.spread = statistics.pstdev(of.steps for of in made)


# ---- The study --------------------------------------------------------------------------------------------------------

def report(results, constant, reference):
    """A line each: constant batches against the reference, ramps against the batch that they start from, and in a second
    line against the reference where that is another; the differences are those of the losses of the same examples by seed."""
    yield (f"{'run':<26} {'lr at 32':>8} {'beta2':>6} {'decay':>6} {'final':>6} {'steps':>8} {'+-':>6} {'fewer':>6} "
           f"{'seconds':>8} {'clipped':>7} {'val loss':>8} {'loss':>8} {'difference':>10} {'+-':>7}")
    for result in results:
        ramp = result.choice[0] == "ramp"
        others = dict.fromkeys((constant[result.first], reference) if ramp else (reference,))
        for of, other in enumerate(others):
            difference, error = paired(result.losses, other.losses)
            lr, beta2, decay, final = result.choice[2:]
            name = f"  against {other.name}" if of else result.name
            yield (f"{name:<26} {lr:>8} {beta2:>6} {decay:>6} {final:>6} {result.steps:8.0f} {result.spread:6.1f} "
                   f"{100 * (1 - result.steps / other.steps):5.1f}% {result.seconds:8.1f} {100 * result.clipped:6.1f}% "
                   f"{result.val:8.4f} {result.loss:8.4f} {difference:+10.4f} {error:7.4f}")
    yield f"reference: {reference.name}, the largest constant batch within {TOLERANCE} of the best; seeds: {len(reference.losses)}"


def edges(results, study):
    """A rate that is best at the end of its list may not be the best."""
    rates = sorted(map(float, study.get("LRS").split()))
    for result in results:
        if len(rates) > 1 and float(result.choice[2]) in (rates[0], rates[-1]):
            yield f"note: {result.name}: the best rate, {result.choice[2]}, is at the end of LRS{study.suffix}; widen it"


def wall_clock(study, reference, ramp):
    """The first seed once more, started by LAUNCH, without other runs beside it."""
    launch = os.environ["LAUNCH"].split()
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    made = [study.train((*of.choice, study.seeds[0], 1.0), of.first, 0, gpus, launch) for of in (reference, ramp)]
    yield (f"{os.environ['LAUNCH']}: {reference.name} {made[0].seconds:.1f} s, loss {made[0].loss:.4f}; {ramp.name} "
           f"{made[1].seconds:.1f} s, loss {made[1].loss:.4f}: {made[0].seconds / made[1].seconds:.2f} times as fast")


def study_size(out, suffix, fixed):
    """Tunes every constant batch, finds the reference, tunes the ramps. Returns the reference."""
    os.makedirs(out, exist_ok=True)
    study = Study(out, suffix)
    batches = [int(rows) for rows in study.get("BATCHES").split()]
    starts = [kappa.partition("@")[::2] for kappa in study.get("KAPPAS").split()]
    if missing := [rows for _, rows in starts if rows and int(rows) not in batches]:
        raise Fault(EXIT_INPUT, f"KAPPAS{suffix}: a ramp from {missing[0]} rows, which are not in BATCHES{suffix}")
    constant = {rows: study.halve(study.choices("constant", str(rows), **fixed), rows) for rows in batches}
    first = reference_batch({rows: result.loss for rows, result in constant.items()})
    ramps = [study.halve(study.choices("ramp", size, **fixed), int(rows or first)) for size, rows in starts]
    results = [*constant.values(), *ramps]
    lines = [*report(results, constant, constant[first]), *edges(results, study)]
    if os.environ["LAUNCH"] and ramps:
        lines += wall_clock(study, constant[ramps[0].first], ramps[0])
    print("\n".join(lines), flush=True)
    with open(os.path.join(out, "table.txt"), "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return constant[first]


def main():
    if len(sys.argv) != 2:
        raise Fault(EXIT_INPUT, "ramp_study.py OUT: dev/bench/ramp_study.sh calls it")
    reference = study_size(sys.argv[1], "", {})
    if os.environ["TRAIN_2"]: # with what was best at the first size, and rates of its own
        beta2, decay, final = reference.choice[3:]
        study_size(os.path.join(sys.argv[1], "second"), "_2", {"BETA2S": beta2, "DECAYS": decay, "FINALS": final})


if __name__ == "__main__":
    run_main(main, "")
