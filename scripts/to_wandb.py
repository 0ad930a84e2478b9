#!/usr/bin/env python3
"""Uploads a run to Weights & Biases after the fact: to_wandb.py RUN [--project NAME] [--offline | --dry-run]

Options and commands become the config, every step with its validation and test a row of the history, samples a table.
--offline writes files for `wandb sync`; --dry-run prints what would be sent, without the package or a network. A run that
has resumed can be uploaded again under the same --id.
"""

import math
import os
import sys

sys.dont_write_bytecode = True
from run_log import EXIT_INPUT, Fault, Parser, Run, command_text, run_main


def config_of(run):
    """The options, the other fields of run.json, and the commands as a shell reads them."""
    rest = {name: value for name, value in run.info.items() if name not in ("options", "parts")}
    commands = [command_text(part, " && ") for part in run.parts()]
    return {**run.info.get("options", {}), "run": rest, "commands": commands}


def history_of(run):
    """[(step, {name: number})], ascending: one entry for all lines of a step; finite numbers only, lists by element."""
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


def upload(wandb, run, args, config, history):
    place = args.dir or run.path
    target = wandb.init(project=args.project, entity=args.entity, name=args.name or run.name, id=args.id,
                        resume="allow" if args.id else None, config=config,
                        mode="offline" if args.offline else "online", dir=place)
    target.define_metric("tokens")
    for name in ("loss", "val_loss"):
        target.define_metric(name, step_metric="tokens", summary="min")
    for step, numbers in history:
        target.log(numbers, step=int(step))
    if run.samples:
        samples = [[sample.get(name) for name in SAMPLE_COLUMNS] for sample in run.samples]
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
    parser.add_argument("--name", help="of the run in W&B (default: the directory's)")
    parser.add_argument("--id", help="of the run in W&B: the same one updates the same run")
    parser.add_argument("--dir", help="for wandb's files (default: RUN/wandb)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--offline", action="store_true", help="write files for `wandb sync`, without a network")
    how.add_argument("--dry-run", action="store_true", help="print what would be sent")
    args = parser.parse_args()
    run = Run(args.run)
    config, history = config_of(run), history_of(run)
    if args.dry_run:
        print(f"{run.path}: {len(history)} steps to {history[-1][0]}, {len(config)} options, {len(run.samples)} samples")
        print("numbers: " + ", ".join(sorted({name for _, numbers in history for name in numbers})))
        return
    import wandb

    try:
        upload(wandb, run, args, config, history)
    except Exception as error:  # no base of wandb's errors is in all its versions
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Fault(EXIT_INPUT, f"wandb: {reason} (try `wandb login`, or --offline)") from None


if __name__ == "__main__":
    run_main(main, "wandb")
