"""critical_batch.py probe: measures the critical batch at one checkpoint of a run by training on at several batches.

Branched training: Merrill, Arora, Groeneveld and Hajishirzi 2025, "Critical Batch Size Revisited" (arXiv 2505.23971).
Every branch continues one checkpoint, optimizer state included, for the same number of tokens, at k times the batch and
sqrt(k) times the learning rate (the rule for Adam: Malladi et al. 2022, arXiv 2205.10287). Up to the critical batch the
final losses are alike; above it they rise. Here every branch also sees the same examples in the same order.
"""

import math
import os
import re
import shlex
import shutil
import subprocess

from run_log import COUNT, EXIT_INPUT, EXIT_USAGE, EXIT_WRITE, Fault, Run, finite, read_json, write_whole

EXIT_NONFINITE = 76  # the trainer's code for a diverged branch
POINTS = 8           # validations per branch, at the same tokens in all branches

def step_of(name):
    """Returns the step of a checkpoint's name (archive_step_of in llmc/checkpoint/archive.c); None for another name."""
    match = re.fullmatch(r"step_([0-9]{8}|[1-9][0-9]{8,17})", name)
    return int(match[1]) if match else None


def newest_checkpoint(path):
    names = [name for name in (os.listdir(path) if os.path.isdir(path) else []) if step_of(name) is not None
             and os.path.exists(os.path.join(path, name, "MANIFEST.json"))]
    if not names:
        raise Fault(EXIT_INPUT, f"{path}: no checkpoint (step_NNNNNNNN) in it; name a run, or its step_NNNNNNNN")
    return os.path.join(os.path.abspath(path), max(names, key=step_of))


class Origin:
    """The checkpoint that the branches start from, and its run."""

    def __init__(self, path):
        path = os.path.abspath(path)
        self.checkpoint = newest_checkpoint(path) if step_of(os.path.basename(path)) is None else path
        self.run = Run(os.path.dirname(self.checkpoint))
        state = os.path.join(self.checkpoint, "training", "state.json")
        if not os.path.exists(state):  # an older build wrote it here
            state = os.path.join(self.checkpoint, "state.json")
        state = read_json(state, {"step!": COUNT, "tokens!": COUNT})
        self.step, self.tokens = state["step"], state["tokens"]
        self.options = read_json(self.run.info_path, {"options!": {"seq_len!": COUNT}})["options"]
        self.seq_len = self.options["seq_len"]
        rows = [row for row in self.run.rows if row["step"] <= self.step]
        if not rows or rows[-1]["step"] != self.step or not all(row.get("batch") and row.get("lr") for row in rows):
            raise Fault(EXIT_INPUT, f"{self.run.metrics_path}: does not reach step {self.step} of the checkpoint, or has "
                        "a step without its batch and lr")
        # The horizon may cut a run's last step short. Then use the batch of the step before.
        row = rows[-2] if len(rows) > 1 and rows[-1]["batch"] < rows[-2]["batch"] else rows[-1]
        self.batch, self.lr = row["batch"], row["lr"]
        # The measured noise scale of the whole model, in rows; NaN: not measured.
        ratio = [1, *finite(self.run.column("gns_ratio")[:self.step])][-1]
        self.noise_scale = row.get("gns_total") or (row.get("gns_ln") or math.nan) * ratio


class Branch:
    """One batch: its directory, its options and, after training, its loss (infinite: diverged)."""

    def __init__(self, origin, batch, tokens, out):
        self.batch, self.factor = batch, batch / origin.batch
        self.lr = origin.lr * math.sqrt(self.factor)
        self.steps = tokens // (batch * origin.seq_len)
        self.out = os.path.join(out, f"batch_{batch}")
        self.done = os.path.join(self.out, "done")
        self.horizon = origin.tokens + tokens
        # Options that differ from the run's own. The trainer prints a note for those without effect.
        self.options = {"out": os.path.abspath(self.out), "batch_tokens": batch * origin.seq_len, "train_tokens": self.horizon,
                        "lr": self.lr, "lr_schedule": "constant", "warmup_tokens": 0, "ramp": "fixed", "gns": "ln",
                        "sample_every": 0, "hellaswag_every": 0, "checkpoint_every": 0}
        if origin.options.get("val"):
            self.options["val_every"] = self.steps // POINTS

    def is_done(self):
        """True if an earlier call has trained it. Another branch in its directory is an error."""
        there = os.path.join(self.out, "run.json")
        there = read_json(there, {"options!": {}})["options"] if os.path.exists(there) else self.options
        for name, value in self.options.items():
            if name != "out" and there.get(name) != value:
                raise Fault(EXIT_USAGE, f"{self.out}: holds a branch with another --{name.replace('_', '-')}; "
                            "choose another --out, or remove it")
        return os.path.exists(self.done)

    def train(self, origin, program, directory):
        """Trains from a copy of the checkpoint in the branch's own directory. Removes all checkpoints afterwards."""
        place, log = os.path.join(self.out, os.path.basename(origin.checkpoint)), os.path.join(self.out, "log")
        try:
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(origin.checkpoint, place)
            with open(log, "ab") as file:
                words = [f"--{name.replace('_', '-')}={value}" for name, value in self.options.items()]
                code = subprocess.run([*program, "--config", os.path.abspath(origin.run.info_path), *words],
                                      cwd=directory, stdout=file, stderr=file, stdin=subprocess.DEVNULL).returncode
        except FileNotFoundError as error:
            raise Fault(EXIT_INPUT, f"{error.filename}: {error.strerror} (--program and --launch say what to run)") from None
        except (OSError, shutil.Error) as error:
            raise Fault(EXIT_WRITE, f"{self.out}: cannot write: {error}") from None
        if code not in (0, EXIT_NONFINITE):
            with open(log, encoding="utf-8", errors="replace") as file:
                last = [*file, "it said nothing\n"][-2:][0].strip()
            raise Fault(code if code > 0 else 70, f"{program[0]} ended with {code}: {last} (see {log})")
        write_whole(self.done, "diverged\n" if code else "trained\n")
        for name in os.listdir(self.out):
            if step_of(name) is not None:
                shutil.rmtree(os.path.join(self.out, name))

    def read_loss(self, origin):
        with open(self.done, encoding="utf-8") as file:
            if file.read() == "diverged\n":
                return math.inf
        run = Run(self.out, begin=origin.tokens)
        if run.val_rows:
            return run.val_column("val_loss")[-1]
        # Return the mean over the last eighth of the examples: they are the same in every branch.
        begin = self.horizon - (self.horizon - origin.tokens) / POINTS
        last = [(loss, batch) for at, loss, batch in zip(*map(run.column, ("tokens", "loss", "batch"))) if at > begin]
        return sum(loss * batch for loss, batch in last) / sum(batch for _, batch in last)


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


def print_result(origin, branches, tolerance, kind):
    low, high, crossing = critical_batch([b.batch for b in branches], [b.loss for b in branches], tolerance)
    print(f"\n{'batch':>8} {'k':>6} {'lr':>10} {'steps':>7} {kind + ' loss':>12} {'above the first':>16}")
    for b in branches:
        print(f"{b.batch:8d} {b.factor:6g} {b.lr:10.3g} {b.steps:7d} {b.loss:12.4f} {b.loss - branches[0].loss:+16.4f}")
    print(f"\nAfter {branches[0].horizon - origin.tokens:,} tokens from step {origin.step}; an infinite loss has diverged; harm: more "
          f"than {tolerance:g} above the smallest batch.")
    if high is None:
        print(f"No batch tried does harm: the critical batch here is {low} rows or more. Try larger --factors.")
    elif low == branches[0].batch and crossing <= low:
        print(f"Already {high} rows do harm: the critical batch here is below that. Try smaller --factors, or more --tokens.")
    else:
        print(f"The critical batch here lies between {low} and {high} rows; the loss crosses the tolerance at {crossing:.3g}.")
    if origin.noise_scale > 0:
        print(f"The run's noise scale there: {origin.noise_scale:.3g} rows.")
    k = low / origin.batch
    print(f"Recommendation: from here on --batch-tokens {low * origin.seq_len} ({low} rows) with --lr times {math.sqrt(k):.3g} "
          f"takes 1/{k:.3g} of the steps and costs no data." if k > 1 else
          f"Recommendation: stay at {origin.batch} rows; a larger batch would cost data.")


def probe(args):
    origin = Origin(args.origin)
    out = args.out or os.path.join(origin.run.path, f"probe_{origin.step:08d}")
    batches = sorted({round(k * origin.batch) for k in args.factors})
    if batches[0] < 1 or len(batches) < 2:
        raise Fault(EXIT_USAGE, f"--factors: two batches or more are needed, of one row at least; the run's has {origin.batch}")
    if math.lcm(*batches) > 4 * batches[-1]:
        raise Fault(EXIT_USAGE, "--factors: these batches have no small common multiple; use powers of two")
    # Every batch makes whole steps between validations, so all are compared at the same tokens.
    grid = POINTS * math.lcm(*batches) * origin.seq_len
    wanted = args.tokens or max(origin.tokens // 20, 4 * POINTS * batches[-1] * origin.seq_len)
    tokens = -(-wanted // grid) * grid
    # Use the run's own program, in the directory that its paths are relative to.
    part = (origin.run.parts or [{"command": ["./train_gpt2"]}])[-1]
    program = [*shlex.split(args.launch), os.path.abspath(args.program) if args.program else [*part["command"], "./train_gpt2"][0]]
    directory = part.get("directory", ".")
    branches = [Branch(origin, batch, tokens, out) for batch in batches]

    print(f"from {origin.checkpoint}: {origin.tokens:,} tokens done, batch {origin.batch} rows, lr {origin.lr:.4g}")
    print(f"{len(branches)} branches of {tokens:,} tokens each, in {out}")
    for branch in branches:
        done = branch.is_done()
        print(f"batch {branch.batch}: " + ("already trained" if done else f"{branch.steps} steps"), flush=True)
        if not done:
            branch.train(origin, program, directory if os.path.isdir(directory) else ".")
        branch.loss = branch.read_loss(origin)
    if not math.isfinite(branches[0].loss):
        raise Fault(EXIT_INPUT, f"{branches[0].out}: the smallest batch has diverged, so there is nothing to compare")
    print_result(origin, branches, args.tolerance, "val" if origin.options.get("val") else "train")
