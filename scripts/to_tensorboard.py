#!/usr/bin/env python3
"""Shows runs in TensorBoard: to_tensorboard.py RUN... [--follow], then tensorboard --logdir RUN

Writes the metrics, samples and commands of a run as an event file into the run's directory, and replaces the one of an
earlier call. --follow waits for the run and keeps writing what it adds, until Ctrl-C. A resume cuts the run's logs back
to its checkpoint: everything is then written again, and TensorBoard drops the steps that were taken back.
Times are training time, counted from the run's start.
"""

import calendar
import glob
import os
import sys
import threading
import time

sys.dont_write_bytecode = True
from run_log import EXIT_WRITE, Fault, Live, Parser, add_follow_options, command_text, follow, run_main

try:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    missing = None
except ImportError as error:
    missing = error

SUFFIX = ".gns"  # of this script's event files
TAGS = {"tokens": "progress/tokens", "batch": "progress/batch_rows", "loss": "loss/train", "loss_nll": "loss/train_nll",
        "val_loss": "loss/val", "lr": "optimizer/lr", "grad_norm": "optimizer/grad_norm",
        "tok_per_s": "speed/tok_per_s", "mfu": "speed/mfu", "hellaswag": "test/hellaswag_acc",
        "hellaswag_norm": "test/hellaswag_acc_norm", "gns_ratio": "gns/ratio_total_to_ln",
        "clipped": "optimizer/clipped", "loss_scale": "optimizer/loss_scale", "overflows": "optimizer/overflows",
        "ramp_target": "ramp/target", "ramp_aim": "ramp/aim",
        "ramp_target_lower": "ramp/target_lower_bound"}
for group in ("ln", "ranks", "total"):
    TAGS |= {f"gns_{group}": f"gns/{group}", f"gns_{group}_se": f"gns/{group}_standard_error",
             f"gns_{group}_lower": f"gns/{group}_lower_bound"}


def scalars_of(row):
    """{tag: number} of a line of metrics.jsonl."""
    out = {}
    for name, value in row.items():
        if name == "gns_layer":
            out |= {f"gns_by_layer/{i:02d}": x for i, x in enumerate(value)}
        elif name.startswith("gns_type_"):
            out["gns_by_type/" + name.removeprefix("gns_type_")] = value
        elif name in TAGS and (name != "tokens" or "loss" in row):
            out[TAGS[name]] = value
    return {tag: x for tag, x in out.items() if x is not None}


def verbatim(text):
    """TensorBoard renders texts as Markdown, which shows lines after four blanks as they are."""
    return "".join(f"    {line}\n" for line in text.removesuffix("\n").split("\n"))


def start_time(parts):
    """Seconds since 1970 at the run's start; 0 where run.json does not have it."""
    try:
        return calendar.timegm(time.strptime(parts[0]["started"], "%Y-%m-%dT%H:%M:%SZ"))
    except (IndexError, KeyError, ValueError):
        return 0


class EventFile:
    """The event file of one run, and how much of the run's logs it holds."""

    def __init__(self, path):
        self.path, self.writer, self.live = path, None, Live(path)

    def begin(self):
        """Begins a new file in place of the last one. Its session start makes a live TensorBoard drop what it has."""
        for old in glob.glob(os.path.join(glob.escape(self.path), f"events.out.tfevents.*{SUFFIX}")):
            if os.path.islink(old) or not os.path.isfile(old):
                continue
            if os.path.getsize(old) > 0:
                os.truncate(old, 0)  # a live TensorBoard that finds its file removed never looks for the next one
            else:
                os.remove(old)
        self.writer = EventFileWriter(self.path, max_queue_size=1000, filename_suffix=SUFFIX)
        self.writer.add_event(Event(wall_time=time.time(), session_log=SessionLog(status=SessionLog.START)))

    def add(self, parts, rows, samples):
        if not self.writer:
            self.begin()
        for row in rows:
            self.write(row["step"], Summary(value=[Summary.Value(tag=tag, simple_value=x)
                                                   for tag, x in scalars_of(row).items()]))
        for part in parts:
            self.write(part.get("first_step", 1), text_pb("command", verbatim(command_text(part))))
        for sample in samples:
            self.write(sample["step"], text_pb("sample", verbatim(sample["text"])))
        self.writer.flush()

    def write(self, step, summary):
        wall_time = start_time(self.live.parts) + self.live.seconds_at(step)
        self.writer.add_event(Event(wall_time=wall_time, step=step, summary=summary))

    def went_back(self):
        print(f"{self.path}: went back to an earlier step; writing all of it again", flush=True)
        self.writer.close()
        self.writer = None

    def finish(self):
        if self.writer:
            self.writer.close()


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's directory (run.json, metrics.jsonl)")
    add_follow_options(parser)
    args = parser.parse_args()
    if missing:
        raise missing
    threading.excepthook = lambda _: None  # an error of EventFileWriter's thread is raised here as well
    files = [EventFile(path) for path in args.runs]
    try:
        follow(files, args)
    except OSError as error:
        raise Fault(EXIT_WRITE, f"{error.filename or args.runs[0]}: cannot write: {error.strerror}") from None
    for file in files:
        print(f"{file.path}: {len(file.live.seconds)} steps; tensorboard --logdir {file.path} shows them")


if __name__ == "__main__":
    run_main(main, "tensorboard")
