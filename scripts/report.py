#!/usr/bin/env python3
"""One self-contained HTML page of one run or several: report.py RUN... [-o report.html]

Loss over tokens, steps and time; the noise scale with its error band over the batch, by layer and by type; learning
rate, gradient norm, throughput; the options; and what the other runs save to the loss that all of them reach.
"""

import argparse
import html
import json
import math
import os
import sys

sys.dont_write_bytecode = True
from run_log import (EXIT_INPUT, EXIT_USAGE, EXIT_WRITE, Fault, Parser, Run, common_kind, common_target,
                     missing_package, reach, run_main, smooth, span_of, time_unit)

MOST_RUNS = 10  # as many as there are colours

PAGE_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1120px; margin: 2em auto; padding: 0 1em; color: #222 }
svg { width: 100%; height: auto } h2 { margin: 1.6em 0 .3em } .note { color: #666; margin: .2em 0 }
table { border-collapse: collapse; font-size: 14px } td, th { padding: 2px 12px 2px 0; text-align: left }
tr { border-bottom: 1px solid #ddd } td.n, th.n { text-align: right } tr.differs { background: #fff3cd }
.wide { overflow-x: auto }
"""


def table(head, rows, marked=()):
    """The first column is text, the others are numbers; rows named in `marked` are highlighted."""
    def cells(tag, row):
        return "".join(f'<{tag}{"" if i == 0 else " class=n"}>{html.escape(str(x))}</{tag}>' for i, x in enumerate(row))
    body = "".join(f'<tr{" class=differs" if row[0] in marked else ""}>{cells("td", row)}</tr>\n' for row in rows)
    return f'<div class="wide"><table><tr>{cells("th", head)}</tr>\n{body}</table></div>\n'


def show(x, digits=4):
    return "-" if x is None or not math.isfinite(x) else f"{x:.{digits}g}"


def show_time(seconds):
    if not math.isfinite(seconds):
        return "-"
    unit, length = time_unit(seconds)
    return f"{seconds / length:.1f} {unit}"


def show_saved(before, now):
    """Of the first run's, in per cent; minus where this run took more."""
    known = math.isfinite(before) and math.isfinite(now) and before > 0
    return f"{100 * (1 - now / before):+.1f}%" if known else "-"


def totals_table(runs):
    rows = []
    for run in runs:
        last, vals = run.rows[-1], [x for x in run.val_column("val_loss") if math.isfinite(x)]
        soft = smooth(run.column("tokens"), run.column("loss"), span_of(run))[-1]
        rows.append([run.label, f"{last['tokens']:,}", f"{last['step']:,}", show_time(last["seconds"]), show(soft),
                     show(vals[-1] if vals else None), show(min(vals) if vals else None)])
    return table(["run", "tokens", "steps", "time", "train loss", "val loss", "best val loss"], rows)


def savings_section(runs, target):
    kind = common_kind(runs)
    target = common_target(runs, kind) if target is None else target
    found = [reach(run, kind, target) for run in runs]
    first, rows = found[0], []
    for run, at in zip(runs, found):
        if at is None:
            rows.append([run.label] + ["not reached"] + ["-"] * 5)
            continue
        saved = [show_saved(first[x], at[x]) if first else "-" for x in ("tokens", "step", "seconds")]
        rows.append([run.label, f"{at['tokens']:,.0f}", saved[0], f"{at['step']:,.0f}", saved[1],
                     show_time(at["seconds"]), saved[2]])
    words = "validation loss" if kind == "val" else "smoothed training loss"
    return (f"<h2>Saved to equal loss</h2>\n<p class=note>To a {words} of {target:.4f}; saved against the first run "
            f"({html.escape(runs[0].label)}), minus where a run took more.</p>\n"
            + table(["run", "tokens", "saved", "steps", "saved", "time", "saved"], rows))


def flatten(info, prefix=""):
    out = {}
    for name, value in info.items():
        if isinstance(value, dict):
            out.update(flatten(value, f"{prefix}{name}."))
        else:
            out[prefix + name] = value if isinstance(value, str) else json.dumps(value)
    return out


def options_table(runs):
    """Everything in run.json, the options first; marked where the runs differ."""
    flat = [flatten(run.info.get("options", {}))
            | flatten({name: x for name, x in run.info.items() if name != "options"}, "run: ") for run in runs]
    names = list(dict.fromkeys(name for options in flat for name in options))
    rows = [[name] + [options.get(name, "") for options in flat] for name in names]
    differs = {row[0] for row in rows if len(set(row[1:])) > 1}
    return table(["option"] + [run.label for run in runs], rows, differs), bool(differs)


def page(runs, target, plots):
    title = "Run " + runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    sections = [f"<h1>{html.escape(title)}</h1>\n", totals_table(runs)]

    def figure(name, note, drawn):
        sections.append(f"<h2>{name}</h2>\n<p class=note>{note}</p>\n{plots.svg_of(drawn, name)}\n")

    figure("Loss", "Faint: single steps. The random start may lie above the plot. Time is training alone, from "
           "tok_per_s, without validation and checkpoints.", plots.draw_loss(runs))
    if len(runs) > 1:
        sections.append(savings_section(runs, target))
    if any(plots.gns_source(run) for run in runs):
        figure("Gradient noise scale and batch", "In rows (examples of one context each). Gaps: the squared mean "
               "gradient is not above 0, so that only the lower bound is known.", plots.draw_gns(runs))
    if any(plots.sampled(run) for run in runs):
        figure("Noise scale by layer and by type", "From the steps that measured every gradient (--gns exact).",
               plots.draw_layers(runs))
    figure("Learning rate, gradient norm, throughput", "Faint: single steps; strong: smoothed.", plots.draw_rates(runs))
    options, differs = options_table(runs)
    note = "<p class=note>Marked: where the runs differ.</p>\n" if differs else ""
    sections.append(f"<h2>Options</h2>\n{note}{options}")
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
            f"<style>{PAGE_STYLE}</style></head><body>\n{''.join(sections)}</body></html>\n")


def write_whole(path, text):
    """The file is there whole or not at all."""
    partial = path + ".tmp"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except OSError as error:
        if os.path.exists(partial):
            os.remove(partial)
        raise Fault(EXIT_WRITE, f"{path}: cannot write: {error.strerror}") from None


def label(runs):
    """The directory's name, or its whole path where two have the same."""
    names = [run.name for run in runs]
    for run in runs:
        run.label = run.name if names.count(run.name) == 1 else run.path


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's directory (run.json, metrics.jsonl)")
    parser.add_argument("-o", "--out", default="report.html", help="file to write (default: %(default)s)")
    parser.add_argument("--target", type=float, help="loss to compare at (default: the lowest that all runs reach)")
    args = parser.parse_args()
    runs = [Run(path) for path in args.runs]
    if len(runs) > MOST_RUNS:
        raise Fault(EXIT_USAGE, f"{len(runs)} runs; {MOST_RUNS} can be told apart")
    for run in runs:
        if not run.has("loss"):
            raise Fault(EXIT_INPUT, f"{os.path.join(run.path, 'metrics.jsonl')}: no loss in it")
    label(runs)
    try:
        import report_plots
    except ImportError as error:
        raise missing_package("matplotlib", error) from None
    with report_plots.style():
        text = page(runs, args.target, report_plots)
    write_whole(args.out, text)
    print(args.out)


if __name__ == "__main__":
    run_main(main)
