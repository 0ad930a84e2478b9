#!/usr/bin/env python3
"""Measures what --dtype fp8 and fp8-dw cost in loss, by forks of a bf16 run. Each fork is trained in every type on the same data.
Losses are paired by place (the step of the fork) and data order. A type may have options: --dtypes "fp8,fp8 --fp8-head".

    forks.py TRAINER SHARDS [--dtypes fp8,fp8-dw] [--model d12] [--rows 16] [--lr 5e-4] [--steps 200] [--orders 4]
             [--places 300,600,1200] [--out build/forks]

Trains on SHARDS (a pattern) in bf16 up to the last place, with a checkpoint at each place. Then trains --orders forks from each
checkpoint, spread over this machine's GPUs. Prints the mean loss over the last 100 steps, minus bf16's, with its standard error.
OUT/forks.jsonl has a line per place and order.
"""
import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys


def train(args, name, options, gpu=0):
    """Trains a run, unless it is finished, and returns its steps' lines of metrics.jsonl."""
    out = os.path.join(args.out, name)
    command = [args.trainer, "--train", args.shards, "--out", out, "--seq-len", "1024", "--micro-batch", str(args.rows),
               "--batch-tokens", str(1024 * args.rows), "--lr", args.lr, "--beta2", "0.98", "--lr-schedule", "constant",
               "--weight-decay", "0.1", "--val-every", "0", "--gns", "ln", *options]
    with open(out + ".log", "a", encoding="utf-8") as log:
        code = subprocess.run(command, stdout=log, stderr=log, env=dict(os.environ, CUDA_VISIBLE_DEVICES=str(gpu))).returncode
    if code:
        sys.exit(f"forks.py: {out}.log: exit code {code}")
    with open(os.path.join(out, "metrics.jsonl"), encoding="utf-8") as lines:
        return [row for row in map(json.loads, lines) if "loss" in row]


def fork(args, place, order, gpu):
    row = {"place": place, "order": order, "rows": args.rows, "steps": args.steps, "lr": args.lr}
    for dtype in ("bf16", *args.dtypes):
        steps = train(args, f"{dtype}-{place}-{order}", [
            "--model", os.path.join(args.out, f"base/step_{place:08d}"), "--with-optimizer", "--steps", str(args.steps),
            "--warmup-tokens", "0", "--seed", str(10 + order), "--checkpoint-every", "0", "--dtype", *dtype.split()], gpu)
        row[dtype] = round(statistics.mean(step["loss"] for step in steps[-100:]), 6)
        row[f"{dtype} overflows"] = steps[-1].get("overflows", 0)
    with open(os.path.join(args.out, "forks.jsonl"), "a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("trainer")
    parser.add_argument("shards")
    parser.add_argument("--dtypes", default="fp8,fp8-dw", type=lambda names: names.split(","))
    parser.add_argument("--model", default="d12")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--lr", default="5e-4")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--orders", type=int, default=4)
    parser.add_argument("--places", default="300,600,1200")
    parser.add_argument("--out", default="build/forks")
    args = parser.parse_args()
    places = [int(place) for place in args.places.split(",")]
    os.makedirs(args.out, exist_ok=True)
    gpus = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, text=True, check=True).stdout.count("GPU ")
    train(args, "base", ["--model", args.model, "--steps", str(max(places)), "--warmup-tokens", "1.6e6", "--seed", "1",
                         "--checkpoint-every", str(places[0]), "--keep", "0"])
    forks = [(place, order) for order in range(args.orders) for place in places]
    with concurrent.futures.ThreadPoolExecutor(gpus) as pool:
        rows = list(pool.map(lambda i: fork(args, *forks[i], i % gpus), range(len(forks))))
    for place, dtype in ((place, dtype) for place in [*places, None] for dtype in args.dtypes):
        of = [row for row in rows if place in (None, row["place"])]
        differences = [row[dtype] - row["bf16"] for row in of]
        error = statistics.stdev(differences) / len(of) ** 0.5 if len(of) > 1 else float("nan")
        print(f"{'all' if place is None else place}: {len(of)} forks, {dtype} - bf16 {statistics.mean(differences):+.5f} "
              f"+- {error:.5f}, {sum(row[f'{dtype} overflows'] for row in of)} overflows")


if __name__ == "__main__":
    main()
