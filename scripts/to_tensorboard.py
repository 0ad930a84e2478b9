#!/usr/bin/env python3
"""Shows runs in TensorBoard: to_tensorboard.py RUN... [--follow], then tensorboard --logdir RUN

Writes a run's metrics, samples and commands as an event file into the run's directory. Empties the event file of an
earlier call. --follow waits for the run and writes what the run adds, until Ctrl-C. If a resume cuts the run's logs back to
its checkpoint, --follow writes everything again, and TensorBoard drops the steps that the resume took back.
A tag is the name in metrics.jsonl, with gns/ and ramp/ as groups. Times are seconds of training after the run's start.
"""

import calendar
import contextlib
import glob
import os
import re
import threading
import time

from run_log import EXIT_WRITE, Fault, Parser, add_follow_options, command_text, numbers_of, read_new, run_main

SUFFIX = ".gns"  # ends the names of this script's event files


def verbatim(text):
    """Indents a text by four blanks. TensorBoard renders texts as Markdown, which shows such lines as they are."""
    return "".join(f"    {line}\n" for line in text.removesuffix("\n").split("\n"))


def show(args):
    """Writes the runs' event files. Returns {path: steps}."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writers, steps = {}, {}
    try:
        for run, begins, parts, lines, samples in read_new(args.runs, args):
            if begins:
                if run.path in writers:
                    print(f"{run.path}: went back to an earlier step; writing all of it again", flush=True)
                    writers[run.path].close()
                for old in glob.glob(os.path.join(glob.escape(run.path), f"events.out.tfevents.*{SUFFIX}")):
                    os.truncate(old, 0)  # a live TensorBoard stays at a removed file that it has not read to the end
                writers[run.path] = EventFileWriter(run.path, max_queue_size=1000, filename_suffix=SUFFIX)
                # The start of a session makes a live TensorBoard drop old points.
                writers[run.path].add_event(Event(wall_time=time.time(), session_log=SessionLog(status=SessionLog.START)))
            start = 0  # the run's start, in seconds since 1970; 0: unknown
            with contextlib.suppress(IndexError, KeyError, ValueError):
                start = calendar.timegm(time.strptime(run.parts[0]["started"], "%Y-%m-%dT%H:%M:%SZ"))
            seconds = {line["step"]: line["seconds"] for line in run.lines}
            latest = max(seconds.values(), default=0)

            def write(step, summary):
                writers[run.path].add_event(Event(wall_time=start + seconds.get(step, latest), step=step, summary=summary))

            for line in lines:
                values = [Summary.Value(tag=re.sub("^(gns|ramp)_", r"\1/", name), simple_value=x)
                          for name, x in numbers_of(line).items() if name not in ("tokens", "seconds") or "loss" in line]
                write(line["step"], Summary(value=values))
            for part in parts:
                write(part.get("first_step", 1), text_pb("command", verbatim(command_text(part))))
            for sample in samples:
                write(sample["step"], text_pb("sample", verbatim(sample["text"])))
            writers[run.path].flush()
            steps[run.path] = len(run.rows)
    finally:
        for writer in writers.values():
            writer.close()
    return steps


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's directory (run.json, metrics.jsonl)")
    add_follow_options(parser)
    args = parser.parse_args()
    threading.excepthook = lambda _: None  # quiet: an error of EventFileWriter's thread is raised here too
    try:
        steps = show(args)
    except OSError as error:
        raise Fault(EXIT_WRITE, f"{error.filename or args.runs[0]}: cannot write: {error.strerror}; free some space") from None
    for path, number in steps.items():
        print(f"{path}: {number} steps; tensorboard --logdir {path} shows them")


if __name__ == "__main__":
    run_main(main, "tensorboard")
