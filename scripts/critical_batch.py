#!/usr/bin/env python3
"""Finds the critical batch of runs.

    critical_batch.py fit RUN RUN...   S_min, E_min and the critical batch from runs at constant batch sizes
    critical_batch.py probe CHECKPOINT the critical batch at a checkpoint, from short branches at k times the batch

fit: McCandlish, Kaplan, Amodei and the OpenAI Dota Team 2018, "An Empirical Model of Large-Batch Training":
a batch B reaches a loss in S steps and E = B S examples (rows of context tokens), with
    (S / S_min - 1) (E / E_min - 1) = 1    (eq. 2.11),    B_crit = E_min / S_min    (eq. 2.12).
probe: Merrill, Arora, Groeneveld and Hajishirzi 2025, "Critical Batch Size Revisited" (arXiv 2505.23971). Every branch
continues one checkpoint, optimizer state included, for the same tokens and examples, at k times the batch and sqrt(k)
times the learning rate (the rule for Adam: Malladi et al. 2022, arXiv 2205.10287). Up to the critical batch the final
losses are alike; above it they rise. The probe trains, so it needs the run's trainer and data.
"""

import glob
import math
import os
import re
import shlex
import shutil
import subprocess

from run_log import (EXIT_INPUT, EXIT_USAGE, EXIT_WRITE, Fault, Parser, Run, column, compare, finite, finite_number,
                     read_bytes, run_main, write_whole)

EXIT_NONFINITE = 76  # the trainer's exit code for a loss that is not finite
POINTS = 8           # validations per branch, at the same tokens in all branches
CHECKPOINT = "step_([0-9]{8}|[1-9][0-9]{8,})"  # archive_step_of in llmc/checkpoint/archive.c defines the names


# ---- fit ------------------------------------------------------------------------------------------------------------

def fit(args):
    import numpy as np
    from scipy.optimize import least_squares

    runs = [Run(path) for path in args.runs]
    kind, target, found = compare(runs, args.target)
    batch = []
    for run, at in zip(runs, found):
        if at is None:
            raise Fault(EXIT_INPUT, f"{run.path}: does not fall to a {kind} loss of {target:.6g} between two lines; choose another --target")
        # Ignore the run's last step, which the horizon may cut.
        batches = {row.get("batch") or 0 for row in run.rows[:-1] or run.rows if row["step"] <= math.ceil(at["step"])}
        if len(batches) != 1 or min(batches) <= 0:
            raise Fault(EXIT_INPUT, f"{run.path}: the batch is not constant; fit needs runs with --ramp fixed")
        batch += batches
    batch = np.array(batch, dtype=float)
    steps = np.array([at["step"] for at in found], dtype=float)
    if len(set(batch)) < 2:
        raise Fault(EXIT_INPUT, "fit needs runs at two batch sizes or more")

    # With E = B S, eq. 2.11 is S = S_min + E_min / B. Fit log S, so that relative errors of all runs have equal weight.
    start = np.log([steps.min() / 2, (batch * steps).min() / 2])
    solved = least_squares(lambda x: np.log(steps) - np.log(np.exp(x[0]) + np.exp(x[1]) / batch), start, xtol=1e-14, ftol=1e-14)
    (s_min, e_min), residuals = np.exp(solved.x), solved.fun
    of_residuals = (residuals @ residuals) / (len(steps) - 2) if len(steps) > 2 else math.nan
    cov = np.linalg.pinv(solved.jac.T @ solved.jac) * of_residuals  # of the logarithms of S_min and E_min

    print(f"To a {kind} loss of {target:.6g}{'' if args.target else ', the lowest that all runs reach'}:")
    print(f"{'batch':>8} {'steps S':>10} {'examples E':>12} {'S of the fit':>13} {'residual':>9}  run")
    for i in np.argsort(batch):
        print(f"{batch[i]:8.0f} {steps[i]:10.1f} {batch[i] * steps[i]:12.0f} {steps[i] / np.exp(residuals[i]):13.1f} "
              f"{100 * np.expm1(residuals[i]):+8.2f}%  {runs[i].path}")
    print("Least squares of log S for (S / S_min - 1)(E / E_min - 1) = 1 (McCandlish et al. 2018, eq. 2.11):")
    for name, value, variance, words in (
            ("S_min ", s_min, cov[0, 0], "steps: no batch, however large, needs fewer"),
            ("E_min ", e_min, cov[1, 1], "examples: no batch, however small, needs fewer"),
            ("B_crit", e_min / s_min, cov[0, 0] + cov[1, 1] - 2 * cov[0, 1],
             "examples: this batch needs twice S_min steps and twice E_min examples")):
        print(f"{name} = {value:.6g}{f' +- {100 * math.sqrt(variance):.2g}%' if math.isfinite(variance) else ''} {words}")
    if len(runs) == 2:
        print("Two runs cannot judge a fit of two unknowns: add a third batch size.")
    if not batch.min() <= e_min / s_min <= batch.max():
        print("B_crit lies outside these batches: an extrapolation; add a run on its other side.")
    for run in runs:
        if (schedule := run.info.get("options", {}).get("lr_schedule")) not in (None, "constant"):
            print(f"warning: {run.path}: --lr-schedule {schedule}: the runs reach the loss at different points of their decay, "
                  "and curves of different batches may cross (arXiv 2601.05034). Use constant, or several --target before it.")
    print("Each run should use the learning rate that suits its batch.")


# ---- probe ----------------------------------------------------------------------------------------------------------

def newest_checkpoint(path):
    """Returns a path that is a whole checkpoint, or a run's newest one."""
    path = os.path.abspath(path)
    found = [name for name in (path, *glob.glob(os.path.join(glob.escape(path), "step_*")))
             if re.fullmatch(CHECKPOINT, os.path.basename(name)) and os.path.exists(os.path.join(name, "MANIFEST.json"))]
    if not found:
        raise Fault(EXIT_INPUT, f"{path}: no checkpoint there; name a run, or one of its step_NNNNNNNN")
    return max(found, key=lambda name: int(os.path.basename(name)[5:]))


class Origin:
    """The checkpoint from which the branches start, and the run that wrote it."""

    def __init__(self, path):
        self.checkpoint = newest_checkpoint(path)
        self.step = int(os.path.basename(self.checkpoint).removeprefix("step_"))
        self.run = Run(os.path.dirname(self.checkpoint))
        self.options = self.run.info.get("options", {})
        self.seq_len = self.options.get("seq_len")
        if not self.seq_len:
            raise Fault(EXIT_INPUT, f"{self.run.info_path}: no seq_len among its options; name a run of this program")
        rows = [row for row in self.run.rows if row["step"] <= self.step]
        if not rows or rows[-1]["step"] != self.step or not all(row.get("batch") and row.get("lr") for row in rows):
            raise Fault(EXIT_INPUT, f"{self.run.metrics_path}: does not reach step {self.step} of the checkpoint, or has "
                        "a step without its batch and lr")
        # If the horizon cut the run's last step, use the batch of the step before it.
        row = rows[-2] if len(rows) > 1 and rows[-1]["batch"] < rows[-2]["batch"] else rows[-1]
        self.batch, self.lr, self.tokens = row["batch"], row["lr"], rows[-1]["tokens"]
        # The measured noise scale of the whole model, in rows; NaN: not measured.
        ratio = [1, *finite(self.run.column("gns_ratio")[:self.step])][-1]
        self.noise_scale = row.get("gns_total") or (row.get("gns_ln") or math.nan) * ratio


def train_branch(origin, out, batch, tokens, program, directory):
    """Trains a branch with one batch size in the directory `out`, from a copy of the checkpoint. Writes the branch's last
    loss to out/loss, infinity if the branch has diverged. Removes all checkpoints in `out`."""
    log, copy = os.path.join(out, "log"), os.path.join(out, os.path.basename(origin.checkpoint))
    interval = tokens // (batch * origin.seq_len * POINTS)  # steps between validations
    # Options that differ from the run's. The trainer prints a note for options without effect.
    options = {"out": os.path.abspath(out), "batch_tokens": batch * origin.seq_len, "train_tokens": origin.tokens + tokens,
               "lr": origin.lr * math.sqrt(batch / origin.batch), "lr_schedule": "constant", "warmup_tokens": 0, "ramp": "fixed",
               "gns": "ln", "on_spike": "none", "patience": 0, "stop_at_loss": 0, "max_hours": 0, "sample_every": 0, "hellaswag_every": 0,
               "val_every": interval if origin.options.get("val") else 0, "checkpoint_every": 0, "keep_best": "false"}
    try:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(origin.checkpoint, copy)
        with open(log, "ab") as file:
            words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
            code = subprocess.run([*program, "--config", os.path.abspath(origin.run.info_path), *words],
                                  cwd=directory, stdout=file, stderr=file, stdin=subprocess.DEVNULL).returncode
    except FileNotFoundError as error:
        raise Fault(EXIT_INPUT, f"{error.filename}: {error.strerror} (--program and --launch say what to run)") from None
    except OSError as error:
        raise Fault(EXIT_WRITE, f"{out}: cannot write: {error.strerror or error}; choose another place") from None
    if code not in (0, EXIT_NONFINITE):
        with open(log, encoding="utf-8", errors="replace") as file:
            last = [*file, "it said nothing\n"][-2:][0].strip()
        raise Fault(code if code > 0 else 70, f"{program[0]} ended with {code}: {last} (see {log})")
    loss = math.inf
    if code == 0:
        run = Run(out)
        last = run.column("loss")[-interval:]  # their examples are the same in every branch
        loss = column(run.val_rows, "val_loss")[-1] if run.val_rows else sum(last) / len(last)
    write_whole(os.path.join(out, "loss"), f"{loss}\n")
    for checkpoint in glob.glob(os.path.join(glob.escape(out), "step_*")):
        shutil.rmtree(checkpoint)


def critical_batch(batches, losses, tolerance):
    """Returns (largest batch without harm, next larger one or None, batch where the loss crosses the tolerance or None).

    Batches ascend. Harm: a loss more than `tolerance` above the smallest batch's. Batches above the first with harm do
    not count. The crossing is interpolated linearly in the logarithm of the batch."""
    harm = [loss - losses[0] for loss in losses]
    first = next((i for i, x in enumerate(harm) if not x <= tolerance), None)
    if first is None:
        return batches[-1], None, None
    low, high = batches[first - 1], batches[first]
    part = (tolerance - harm[first - 1]) / (harm[first] - harm[first - 1]) if math.isfinite(harm[first]) else 0.0
    return low, high, low * (high / low) ** part


def probe(args):
    origin = Origin(args.origin)
    out = args.out or os.path.join(origin.run.path, f"probe_{origin.step:08d}")
    batches = sorted({round(k * origin.batch) for k in args.factors})
    if batches[0] < 1 or len(batches) < 2:
        raise Fault(EXIT_USAGE, f"--factors: two batches or more are needed, of one row at least; the run's has {origin.batch}")
    if math.lcm(*batches) > 4 * batches[-1]:
        raise Fault(EXIT_USAGE, "--factors: these batches have no small common multiple; use powers of two")
    # Every batch makes whole steps between validations, so that branches are compared at the same tokens.
    grid = POINTS * math.lcm(*batches) * origin.seq_len
    wanted = args.tokens or max(origin.tokens // 20, 4 * POINTS * batches[-1] * origin.seq_len)
    tokens = max(1, math.ceil(wanted / grid)) * grid
    # Use the run's program, in the directory to which the run's paths are relative.
    part = (origin.run.parts or [{"command": ["./train_gpt2"]}])[-1]
    program = [*args.launch, os.path.abspath(args.program) if args.program else [*part["command"], "./train_gpt2"][0]]
    directory = part.get("directory", ".")

    print(f"from {origin.checkpoint}: {origin.tokens:,} tokens done, batch {origin.batch} rows, lr {origin.lr:.4g}")
    print(f"{len(batches)} branches of {tokens:,} tokens each, in {out}")
    losses = []
    for batch in batches:
        place = os.path.join(out, f"batch_{batch}-{tokens}")
        done = os.path.exists(os.path.join(place, "loss"))
        print(f"batch {batch}: " + ("already trained" if done else f"{tokens // (batch * origin.seq_len)} steps"), flush=True)
        if not done:
            train_branch(origin, place, batch, tokens, program, directory if os.path.isdir(directory) else ".")
        try:
            losses.append(float(read_bytes(os.path.join(place, "loss"))))
        except ValueError:
            raise Fault(EXIT_INPUT, f"{place}/loss: not a number; remove it, and the branch trains again") from None
        if not math.isfinite(losses[0]):
            raise Fault(EXIT_INPUT, f"{place}: the smallest batch has diverged, so there is nothing to compare")

    kind = "val" if origin.options.get("val") else "train"
    low, high, crossing = critical_batch(batches, losses, args.tolerance)
    print(f"\n{'batch':>8} {'k':>6} {'lr':>10} {'steps':>7} {kind + ' loss':>12} {'above the first':>16}")
    for batch, loss in zip(batches, losses):
        k = batch / origin.batch
        print(f"{batch:8d} {k:6g} {origin.lr * math.sqrt(k):10.3g} {tokens // (batch * origin.seq_len):7d} {loss:12.4f} "
              f"{loss - losses[0]:+16.4f}")
    print(f"\nAfter {tokens:,} tokens from step {origin.step}; an infinite loss has diverged; harm: more "
          f"than {args.tolerance:g} above the smallest batch.")
    if high is None:
        print(f"No batch tried does harm: the critical batch here is {low} rows or more. Try larger --factors.")
    elif low == batches[0] and crossing <= low:
        print(f"Already {high} rows do harm: the critical batch here is below that. Try smaller --factors, or more --tokens.")
    else:
        print(f"The critical batch here lies between {low} and {high} rows; the loss crosses the tolerance at {crossing:.3g}.")
    if origin.noise_scale > 0:
        print(f"The run's noise scale there: {origin.noise_scale:.3g} rows.")
    k = low / origin.batch
    print(f"Recommendation: from here on --batch-tokens {low * origin.seq_len} ({low} rows) with --lr times {math.sqrt(k):.3g} "
          f"takes 1/{k:.3g} of the steps and costs no data." if k > 1 else
          f"Recommendation: stay at {origin.batch} rows; a larger batch would cost data.")


def factors(text):
    return [finite_number(word) for word in text.split(",")]


def main():
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="fit|probe")
    one = commands.add_parser("fit", help="S_min, E_min and B_crit from runs at several constant batches")
    one.add_argument("runs", nargs="+", metavar="RUN")
    one.add_argument("--target", type=finite_number, help="loss to reach (default: the lowest that all runs reach)")
    one.set_defaults(act=fit)
    two = commands.add_parser("probe", help="branches from a checkpoint at several batches, at equal tokens")
    two.add_argument("origin", metavar="CHECKPOINT", help="RUN/step_NNNNNNNN, or RUN for the run's newest one")
    two.add_argument("--factors", type=factors, default="1,2,4,8", metavar="K,K...",
                       help="batches to try, as multiples of the run's batch at the checkpoint (default: %(default)s)")
    two.add_argument("--tokens", type=finite_number, help="tokens of each branch, rounded up to whole steps of all branches "
                       "(default: 5%% of the checkpoint's tokens, at least 32 steps of the largest batch)")
    two.add_argument("--tolerance", type=finite_number, default=0.01, help="harmless excess of a loss over the smallest "
                       "batch's, in nats per token (default: %(default)s)")
    two.add_argument("--program", help="the trainer (default: the run's own, from its directory)")
    two.add_argument("--launch", type=shlex.split, default="", metavar="WORDS",
                     help="words in front of the trainer, such as 'mpirun -np 8'")
    two.add_argument("--out", help="directory for the branches (default: RUN/probe_NNNNNNNN)")
    two.set_defaults(act=probe)
    args = parser.parse_args()
    args.act(args)


if __name__ == "__main__":
    run_main(main, "numpy scipy")
