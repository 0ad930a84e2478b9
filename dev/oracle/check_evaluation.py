"""Compares evaluation with the oracle: check_evaluation.py BUILD, with the compiled programs.

Scores made-up questions of HellaSwag's form and a validation shard in float64. Compares the scores with those that
--eval-only prints, at several lengths and micro-batches.
"""

import json
import math
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import gpt2
import harness
from harness import Mismatch, attempt, finish, run

VOCAB = 256  # tokens are bytes
TOLERANCE = 2e-5  # relative error of sums and losses
PRINTED = 1e-6  # slightly more than half a unit of the last printed digit
WORDS = """the a man woman dog roof guitar water then slowly quickly is was starts to pull cut wash her his and with
from red café naïve 12 3.5 (again) "quoted" don't into out of , . !""".split()


class World:
    """A directory with a model, questions and a validation shard."""

    def __init__(self, work, rng, questions, layers, heads, channels, context):
        self.work = Path(work)
        self.params = gpt2.random_params(rng, layers, channels, VOCAB, context)
        self.model = self.work / "model"
        self.model.mkdir()
        save_file(self.params, self.model / "model.safetensors")
        config = dict(model_type="gpt2", n_layer=layers, n_head=heads, n_embd=channels, n_positions=context,
                      vocab_size=VOCAB)
        (self.model / "config.json").write_text(json.dumps(config))
        self.questions = [random_question(rng, (4, 12)[i % 2]) for i in range(questions)]  # half of them fit in 40 tokens
        self.jsonl, self.shard = self.work / "q.jsonl", self.work / "val.bin"
        self.jsonl.write_text("".join(json.dumps(q) + "\n" for q in self.questions))
        self.tokens = np.frombuffer("".join(sentence(rng, 25) for _ in range(40)).encode(), np.uint8).astype(int)
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, len(self.tokens)
        self.shard.write_bytes(header.tobytes() + self.tokens.astype("<u2").tobytes())
        self.row_losses = gpt2.losses_fn(self.params, heads)  # compiled once per length

    def losses(self, rows):
        """Returns the losses (N, T), in float64, of rows (N, T + 1), padded at the end."""
        return np.concatenate([self.row_losses(row[None]) for row in rows])


def sentence(rng, most):
    return " ".join(rng.choice(WORDS, size=rng.integers(2, most)))


def random_question(rng, most):
    endings = [sentence(rng, most) for _ in range(4)]
    return dict(ind=0, ctx=sentence(rng, 20), endings=endings, label=int(rng.integers(4)), split="val")


# ---- HellaSwag by the definition in llmc/text/hellaswag.h ------------------------------------------------------------


def oracle_hellaswag(world, T):
    """Returns two results of `score`, acc and acc_norm, over the questions whose endings fit in T tokens."""
    rows, begins, counts, asked = [], [], [], []
    for i, q in enumerate(world.questions):
        context = list(q["ctx"].encode())
        endings = [list((" " + ending).encode()) for ending in q["endings"]]
        if max(map(len, endings)) > T:
            continue
        asked.append(i)
        for ending in endings:
            row = (context + ending)[-(T + 1):]
            begins.append(len(row) - len(ending))
            counts.append(len(ending))
            rows.append(row + [0] * (T + 1 - len(row)))
    losses = world.losses(np.array(rows))
    sums = [losses[i, b - 1 : b - 1 + n].sum() for i, (b, n) in enumerate(zip(begins, counts))]
    sums, counts = np.reshape(sums, (-1, 4)), np.reshape(counts, (-1, 4))
    labels = np.array([world.questions[i]["label"] for i in asked])
    return dict(acc=score(sums, labels), acc_norm=score(sums / counts, labels))


def score(losses, labels):
    """Returns the share of right answers, and the share of questions whose two best endings are too close to tell
    apart."""
    best = np.sort(losses, axis=1)
    return np.mean(losses.argmin(axis=1) == labels), np.mean(best[:, 1] < best[:, 0] * (1 + TOLERANCE))


def close(got, want, what):
    if not abs(got - want) <= TOLERANCE * abs(want):
        raise Mismatch(f"{what}: {got}, want {want}")


def printed_number(text, name):
    found = re.search(rf"^ *{name} +([0-9.]+)", text, re.MULTILINE)
    if not found:
        raise Mismatch(f"no {name} in: {text[-400:]}")
    return float(found.group(1))


def oracle_validation(world, T, rows=None):
    windows = (len(world.tokens) - 1) // T
    rows = rows or windows
    starts = [i * windows // rows * T for i in range(rows)]
    batch = np.array([world.tokens[s : s + T + 1] for s in starts])
    return world.losses(batch).mean()


def check_eval_only(build, world, T):
    want, loss = oracle_hellaswag(world, T), oracle_validation(world, T)
    before = sorted(world.work.rglob("*"))
    options = ["--eval-only", "--model", world.model, "--val", world.shard, "--seq-len", T,
               "--tokenizer", "bytes"]
    for rows in (5, 64):
        text = run(world.work, build / "train_gpt2", *options, "--hellaswag", world.jsonl, "--micro-batch", rows).decode()
        close(printed_number(text, "loss"), loss, "loss")
        close(printed_number(text, "perplexity"), math.exp(loss), "perplexity")
        close(printed_number(text, "bits per byte"), loss / math.log(2), "bits per byte")  # a token is a byte
        for name in ("acc", "acc_norm"):
            share, ambiguous = want[name]
            if not abs(printed_number(text, name) - share) <= PRINTED + ambiguous:
                raise Mismatch(f"{name}: {printed_number(text, name)}, want {share}")
    text = run(world.work, build / "train_gpt2", *options, "--val-tokens", 3 * T - 1).decode()
    close(printed_number(text, "loss"), oracle_validation(world, T, 3), "loss of 3 windows")
    if sorted(world.work.rglob("*")) != before:
        raise Mismatch("files were written")


def main(build):
    seed = int(os.environ.get("SEED", time.time_ns() % 10**9))
    with tempfile.TemporaryDirectory() as work:
        world = World(work, np.random.default_rng(seed), questions=16, layers=2, heads=2, channels=32, context=200)
        for T in (96, 40, 200):  # 96 cuts some contexts; at 40 most of the longer questions do not fit
            attempt(f"evaluation/eval_only_T{T}", check_eval_only, build, world, T)
    if harness.failures:
        print(f"  SEED={seed}")
    finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
