#!/usr/bin/env python3
"""Shows a run in Weights & Biases: to_wandb.py RUN [--follow] [--project NAME] [--id ID] [--dry-run]

Options and commands become the config. Every step with its validation and test becomes a row of the history. Samples
become a table. --follow waits for the run and sends what is new, until Ctrl-C. --dry-run prints what would be sent; it
needs neither the package nor a network. wandb's variables apply: WANDB_MODE=offline (writes files for `wandb sync`),
WANDB_ENTITY, WANDB_DIR. The same --id continues a run in W&B. If a resumed run repeats steps that W&B has, W&B keeps its
values and gets only later steps.
"""

import math
import os

from run_log import EXIT_INPUT, Fault, Parser, add_follow_options, command_text, numbers_of, read_new, run_main

SAMPLE_COLUMNS = ["step", "tokens", "prompt", "text"]


def config_of(run):
    """Returns the options, the other fields of run.json, and the commands as a shell reads them."""
    rest = {name: value for name, value in run.info.items() if name not in ("options", "parts")}
    return {**run.info.get("options", {}), "run": rest, "commands": [command_text(part, " && ") for part in run.parts]}


def upload(args):
    """Sends the run. W&B accepts more values for the last step that it has, none for earlier steps."""
    target, last = None, 0
    try:
        for run, begins, parts, lines, samples in read_new([args.run], args):
            if not (parts or lines or samples):
                continue
            numbers = [{name: x for name, x in numbers_of(line).items() if math.isfinite(x)} for line in lines]
            if args.dry_run:
                print(f"{run.path}: {len(run.rows)} steps, {len(config_of(run))} options, {len(samples)} samples")
                print("numbers: " + ", ".join(sorted({name for row in numbers for name in row})))
                continue
            if not target:
                import wandb

                target = wandb.init(project=args.project, name=run.name, id=args.id, resume="allow" if args.id else None,
                                    config=config_of(run), dir=os.environ.get("WANDB_DIR", run.path))
                last = target.step
                target.define_metric("tokens")
                for name in ("loss", "loss_nll", "val_loss"):
                    target.define_metric(name, step_metric="tokens", summary="min")
            elif begins:
                print(f"{run.path}: went back to an earlier step; W&B keeps its steps up to {last}", flush=True)
            if parts:
                target.config.update(config_of(run), allow_val_change=True)
            for line, row in zip(lines, numbers):
                if line["step"] >= last:
                    last = line["step"]
                    target.log(row, step=last)
            if samples:  # send all samples, since a table cannot grow in W&B
                rows = [[sample.get(name) for name in SAMPLE_COLUMNS] for sample in run.samples]
                target.log({"samples": wandb.Table(columns=SAMPLE_COLUMNS, data=rows)}, step=last)
    finally:
        if target:
            target.finish()
            print(f"uploaded to {target.url}" if target.url else "written; wandb sync uploads it")


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="a run's directory (run.json, metrics.jsonl, samples.jsonl)")
    add_follow_options(parser)
    parser.add_argument("--project", default="gns.c", help="default: %(default)s")
    parser.add_argument("--id", help="ID of the run in W&B; the same ID updates the same run")
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent")
    args = parser.parse_args()
    try:
        upload(args)
    except Exception as error:  # in some versions wandb's errors have no common base class
        if args.dry_run or isinstance(error, (Fault, ImportError)):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Fault(EXIT_INPUT, f"wandb: {reason} (try `wandb login`, or WANDB_MODE=offline)") from None


if __name__ == "__main__":
    run_main(main, "wandb")
