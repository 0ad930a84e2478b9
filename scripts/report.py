#!/usr/bin/env python3
"""Makes one self-contained HTML page of one or more runs: report.py RUN... [-o report.html]

Shows loss against tokens, steps and time; what each run saves against the first run, up to the lowest loss that all runs
reach; noise scale (with error band) and batch; noise scale by layer and by type; learning rate, gradient norm, throughput;
samples, commands and options.
"""

import html
import itertools
import json
import math
import os

from outliers import outliers_text
from run_log import (EXIT_INPUT, Fault, Parser, Run, column, command_text, compare, finite, finite_number, run_main,
                     smooth_column, time_unit, write_whole)

PAGE_BEGIN = '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>'
PAGE_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1120px; margin: 2.5em auto; padding: 0 1.2em; color: #222 }
h2 { margin: 2em 0 .3em; border-bottom: 1px solid #ccc } .note, figcaption { color: #666; margin: .2em 0 .8em }
figure { margin: .6em 0; page-break-inside: avoid } svg { width: 100%; height: auto }
table { display: block; overflow-x: auto; border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: 3px 18px 3px 0; text-align: left; vertical-align: top; border-bottom: 1px solid #ddd } .n { text-align: right }
pre { font: 13px/1.4 ui-monospace, monospace; background: #f6f6f4; padding: .7em 1em; white-space: pre-wrap; overflow-wrap: anywhere }
pre b { color: #0072b2 }
"""


def table(head, rows):
    """Returns a table, with text in the first column and numbers in the others."""
    def cells(tag, row):
        return "".join(f'<{tag}{" class=n" * (i > 0)}>{html.escape(str(x))}</{tag}>' for i, x in enumerate(row))
    body = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in rows)
    return f"<table><tr>{cells('th', head)}</tr>\n{body}</table>\n"


def show(x, digits=4):
    return "-" if x is None or not math.isfinite(x) else f"{x:.{digits}g}"


def show_time(seconds):
    unit, length = time_unit(seconds)
    return f"{seconds / length:.1f} {unit}" if math.isfinite(seconds) else "-"


def totals_table(runs):
    tested = any(run.test_rows for run in runs)
    rows = []
    for run in runs:
        last, vals = run.rows[-1], finite(column(run.val_rows, "val_loss")) or [math.nan]
        clipped = [bool(row["clipped"]) for row in run.rows if "clipped" in row]  # logs of older builds do not say
        right = run.test_rows[-1].get("hellaswag_norm") if run.test_rows else None
        rows.append([run.label, f"{last['tokens']:,}", f"{last['step']:,}", show_time(last["seconds"]),
                     show(smooth_column(run, "loss")[-1]), show(vals[-1]), show(min(vals)),
                     f"{100 * sum(clipped) / len(clipped):.3g}%" if clipped else "-",
                     *(["-" if right is None else f"{100 * right:.1f}%"] if tested else [])])
    head = ["run", "tokens", "steps", "time", "train loss", "val loss", "best val loss", "clipped steps"]
    return table(head + ["HellaSwag"] * tested, rows)


def savings_section(runs, kind, target, found):
    rows = []
    for run, at in zip(runs, found):
        if at is None:
            rows.append([run.label, "does not cross it"] + ["-"] * 5)
            continue
        saved = {x: "" if run is runs[0] else f"{100 * (1 - at[x] / found[0][x]):+.1f}%"
                 if found[0] and found[0][x] > 0 and math.isfinite(at[x]) else "-" for x in at}
        rows.append([run.label, f"{at['tokens']:,.0f}", saved["tokens"], f"{at['step']:,.0f}", saved["step"],
                     show_time(at["seconds"]), saved["seconds"]])
    words = "validation loss" if kind == "val" else "smoothed training loss"
    return (f"<h2>Saved to equal loss</h2>\n<p class=note>To a {words} of {target:.4f}; saved against the first run "
            f"({html.escape(runs[0].label)}), negative where a run took more.</p>\n"
            + table(["run", "tokens", "saved", "steps", "saved", "time", "saved"], rows))


def samples_section(runs):
    """Shows at most 8 samples at even distances over each run, with the first and the last."""
    out = ""
    for run in runs:
        n, last = min(len(run.samples), 8), len(run.samples) - 1
        out += f"<h3>{html.escape(run.label)}</h3>\n" * bool(n)
        for sample in (run.samples[i * last // max(1, n - 1)] for i in range(n)):
            prompt, text = sample.get("prompt") or "", sample["text"]
            said = f"<b>{html.escape(prompt)}</b>" if prompt and text.startswith(prompt) else ""
            at = f"step {sample['step']:,}" + (f", {sample['tokens']:,} tokens" if sample.get("tokens") else "")
            out += f"<p class=note>{at}</p><pre>{said}{html.escape(text[len(prompt):] if said else text)}</pre>\n"
    return out and f"<h2>Samples along the way</h2>\n<p class=note>Coloured: the prompt.</p>\n{out}"


def sources_section(runs):
    """Shows the noise of each source of a mixture, and the cosines of the sources' mean gradients, at a run's last step."""
    def known(run, name):
        x, se = (run.rows[-1].get(field) for field in (name, name + "_se"))
        return "-" if se is None else f"{x:.3g} +- {se:.2g}"

    lines = [[source["files"], run.label, f"{100 * source['share']:.1f}%"]
             + [known(run, f"gns_source_{i}{what}") for what in ("", "_g2", "_s", "_scale")]
             + [", ".join(known(run, f"gns_cosine_{k}_{i}") for k in range(i))]
             for run in runs if run.rows[-1].get("gns_source_0_se") is not None
             for i, source in enumerate(run.info.get("train_data", {}).get("sources", []))]
    head = ["source", "run", "of the rows", "of the noise", "G2", "S", "noise scale", "cosine with those before"]
    return lines and f"<h2>Noise by source</h2>\n<p class=note>From the LayerNorms' gradients.</p>\n{table(head, lines)}" or ""


def outliers_section(runs):
    texts = [(run.label, outliers_text(run, most=12)) for run in runs]
    out = "".join(f"<h3>{html.escape(label)}</h3>\n<pre>{html.escape(text)}</pre>\n" for label, text in texts if text)
    return out and f"<h2>Outliers</h2>\n<p class=note>scripts/outliers.py says what the kinds are.</p>\n{out}"


def commands_section(runs):
    """Shows where, when, how and with which options each part of a run started; for later parts, changed options."""
    out = ""
    for run in runs:
        ends = [part.get("first_step", 1) - 1 for part in run.parts[1:]] + [run.rows[-1]["step"]]
        out += f"<h3>{html.escape(run.label)}</h3>\n" * bool(run.parts)
        for part, end in zip(run.parts, ends):
            about = (f"steps {part.get('first_step', 1):,} to {end:,}, started {part.get('started', 'at some time')}, "
                     f"on {part.get('host', 'some machine')}, {part.get('ranks', 1)} rank{'s' * (part.get('ranks', 1) != 1)}, "
                     f"program {part.get('program_xxh3_128', 'unknown')[:12]}")
            words = ", ".join(f"{name} = {value}" for name, value in flatten(part.get("options", {})).items())
            out += f"<p class=note>{html.escape(about)}</p><pre>{html.escape(command_text(part))}</pre>\n"
            out += f"<p class=note>{'With' if part is run.parts[0] else 'Changed:'} {html.escape(words)}.</p>\n" if words else ""
    return out and f"<h2>Commands</h2>\n{out}"


def flatten(info, prefix=""):
    """Returns {name: text}. A nested field is named OBJECT.FIELD."""
    out = {}
    for name, value in info.items():
        out |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {
            prefix + name: value if isinstance(value, str) else json.dumps(value)}
    return out


def options_section(runs):
    """Shows run.json without its parts: first the fields in which the runs differ, then the others."""
    flat = [flatten({name: x for name, x in run.info.items() if name != "parts"}) for run in runs]
    rows = [[name] + [fields.get(name, "") for fields in flat] for name in dict.fromkeys(itertools.chain(*flat))]
    rows.sort(key=lambda row: len(set(row[1:])) == 1)
    return ("<h2>Options</h2>\n<p class=note>A run's last part had these; the commands above show what a part changed. "
            "Those in which the runs differ come first.</p>\n" + table(["option"] + [run.label for run in runs], rows))


def headline(run):
    """Returns the model, the data and the machine in one line."""
    forms = {"parameters": "{:,} parameters", "layers": "{} layers", "channels": "{} channels", "seq_len": "T = {}",
             "tokens": "{:,} training tokens", "engine": "{}", "program": "{}"}
    known = run.info | {name: x for part in ("options", "train_data", "model") for name, x in run.info.get(part, {}).items()}
    return " &middot; ".join(html.escape(form.format(known[name])) for name, form in forms.items() if name in known)


def page(runs, target, plots):
    names = [run.label for run in runs[:2]] + ([f"{len(runs) - 2} more"] if len(runs) > 2 else [])
    title = html.escape(("Run " if len(runs) == 1 else "") + " and ".join(names))
    lines = {headline(run) for run in runs}
    sections = [f"<h1>{title}</h1>\n"] + [f"<p class=note>{line}</p>\n" for line in lines if len(lines) == 1] + [totals_table(runs)]
    numbers = itertools.count(1)

    def figure(name, note, drawn):
        sections.append(f"<h2>{name}</h2>\n<figure>{plots.svg_of(drawn, name)}\n"
                        f"<figcaption>Figure {next(numbers)}. {note}</figcaption></figure>\n")

    comparison = compare(runs, target)
    if len(runs) > 1:
        target = comparison[1]
    figure("Loss", "Bold: training, smoothed; faint: single steps; circles: validation"
           f"{'' if target is None else '; dashed: the loss to compare at'}. Time is training alone, from each step's "
           "tok_per_s, without validation and checkpoints. The fall from the random start may lie above the plot.",
           plots.draw_loss(runs, target))
    if len(runs) > 1:
        sections.append(savings_section(runs, *comparison))
    if any(plots.has_noise_scale(run) for run in runs):
        figure("Gradient noise scale and batch", "Black: the batch. Coloured: the noise scale of the LayerNorms, with a band "
               "of one standard error; dotted: its lower bound, 95%; grey: the whole model's, where it was sampled. The "
               "noise scale is the batch at which noise and signal are equal, in rows (examples of one context each), as "
               "the run averaged it. Gaps: the squared mean gradient is not above 0, and only the lower bound is known; a "
               "bound above the plot, or infinite, runs along the top.", plots.draw_gns(runs))
    if any(plots.sampled(run) for run in runs):
        figure("Noise scale by layer and by type", "From the steps that measured the gradient of every tensor.",
               plots.draw_layers(runs))
    if plots.known(runs, plots.RATES):
        figure("Learning rate, batch, gradient norm and throughput", "Gradient norm before clipping, and tokens per second: "
               "smoothed over single steps. HellaSwag: by the endings' length-normalised likelihood; 0.25 is chance.",
               plots.draw_rates(runs))
    sections += [sources_section(runs), outliers_section(runs), samples_section(runs), commands_section(runs),
                 options_section(runs)]
    return f"{PAGE_BEGIN}{title}</title>\n<style>{PAGE_STYLE}</style></head><body>\n{''.join(sections)}</body></html>\n"


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's directory (run.json, metrics.jsonl)")
    parser.add_argument("-o", "--out", help="file to write (default: RUN/report.html; for several runs report.html)")
    parser.add_argument("--target", type=finite_number, help="loss to compare at (default: the lowest that all runs reach)")
    args = parser.parse_args()
    runs = [Run(path) for path in args.runs]
    names = [run.name for run in runs]
    for run in runs:
        if not finite(run.column("loss")):
            raise Fault(EXIT_INPUT, f"{run.metrics_path}: no loss in it; let the run make some steps")
        run.label = run.name if names.count(run.name) == 1 else os.fsencode(run.path).decode(errors="replace")

    import report_plots

    out = args.out or (os.path.join(runs[0].path, "report.html") if len(runs) == 1 else "report.html")
    write_whole(out, page(runs, args.target, report_plots), PAGE_BEGIN)
    print(out)


if __name__ == "__main__":
    run_main(main, "matplotlib tokenizers")
