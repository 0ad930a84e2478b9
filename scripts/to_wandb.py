#!/usr/bin/env python3
"""Uploads a run to Weights & Biases after the fact: to_wandb.py RUN [--project NAME] [--offline | --dry-run]

Its options and commands become the config; every step one row of the history, with the validation and the test that
belong to it; samples a table. --offline writes what `wandb sync` uploads later; --dry-run says what would be sent and
needs neither the package nor a network. A run that goes on can be uploaded again under the same --id.
"""

import math
import os
import sys

sys.dont_write_bytecode = True
from run_log import EXIT_INPUT, Fault, Parser, Run, command_text, missing_package, run_main


def config_of(run):
    """Options one by one, what else run.json says under its own names, and the commands as a shell reads them."""
    rest = {name: value for name, value in run.info.items() if name not in ("options", "parts")}
    commands = [command_text(part, " && ") for part in run.parts()]
    return {**run.info.get("options", {}), "run": rest, "commands": commands}


def history_of(run):
    """[(step, {name: number})], ascending: a step's lines together, a list's elements apart, only what is finite."""
    history = {}
    for row in sorted(run.rows + run.val_rows + run.test_rows, key=lambda row: row["step"]):
        numbers = history.setdefault(row["step"], {})
        for name, value in row.items():
            if isinstance(value, list):
                numbers.update({f"{name}/{i:02d}": x for i, x in enumerate(value) if x is not None})
            elif value is not None and math.isfinite(value):
                numbers[name] = value
    for numbers in history.values():
        del numbers["step"]  # wandb's own
    return list(history.items())


SAMPLE_COLUMNS = ["step", "tokens", "prompt", "text"]


def samples_of(run):
    return [[sample.get(name) for name in SAMPLE_COLUMNS] for sample in run.samples]


def say(run, config, history, samples):
    names = sorted({name for _, numbers in history for name in numbers})
    print(f"{run.path}: {len(history)} steps to {history[-1][0]}, {len(config)} options, {len(samples)} samples")
    print("numbers: " + ", ".join(names))


def upload(wandb, run, args, config, history, samples):
    mode = "offline" if args.offline else "online"
    place = args.dir or run.path
    target = wandb.init(project=args.project, entity=args.entity, name=args.name or run.name, id=args.id,
                        resume="allow" if args.id else None, config=config, mode=mode, dir=place)
    target.define_metric("tokens")
    for name in ("loss", "val_loss"):
        target.define_metric(name, step_metric="tokens", summary="min")
    for step, numbers in history:
        target.log(numbers, step=int(step))
    if samples:
        target.log({"samples": wandb.Table(columns=SAMPLE_COLUMNS, data=samples)}, step=int(history[-1][0]))
    target.finish()
    if args.offline:
        print(f"written under {os.path.join(place, 'wandb')}; wandb sync uploads it")
    else:
        print(f"uploaded to {target.url}")


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="a run's directory (run.json, metrics.jsonl, samples.jsonl)")
    parser.add_argument("--project", default="gns.c", help="default: %(default)s")
    parser.add_argument("--entity", help="user or team (default: wandb's)")
    parser.add_argument("--name", help="of the run there (default: the directory's)")
    parser.add_argument("--id", help="the run's own mark there: the same one goes on with the same run")
    parser.add_argument("--dir", help="where wandb keeps its files (default: RUN/wandb)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--offline", action="store_true", help="write files for `wandb sync`, use no network")
    how.add_argument("--dry-run", action="store_true", help="say what would be sent")
    args = parser.parse_args()
    run = Run(args.run)
    config, history, samples = config_of(run), history_of(run), samples_of(run)
    if args.dry_run:
        return say(run, config, history, samples)
    try:
        import wandb
    except ImportError as error:
        raise missing_package("wandb", error) from None
    try:
        upload(wandb, run, args, config, history, samples)
    except Exception as error:  # wandb's errors share no base that all its versions have
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Fault(EXIT_INPUT, f"wandb: {reason} (try `wandb login`, or --offline)") from None


if __name__ == "__main__":
    run_main(main)
