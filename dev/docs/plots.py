#!/usr/bin/env python3
"""The figures of README.md and dev/docs/gns-study.md: plots.py [STUDY] [--muon DIR] [-o DIR]

Without STUDY it writes DIR/loss-time.svg, from dev/results/recipe.jsonl and recipe_curves.json. From the runs of dev/bench/ramp_study.py
it writes DIR/gns-{ramp,loss,layers,exact}.svg and prints their table; from the studies in --muon DIR, gns-muon.svg.
If a batch ran with several tunings, shows the tuning with the most seeds; among equals, that with the lowest mean loss. Curves
show the first seed.
"""

import json
import math
import os
import re
import sys
from statistics import mean

here = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(here, "../../scripts"), os.path.join(here, "../bench")]
from ramp_study import WINDOW, paired, window_loss
from report import show, show_time
from run_log import EXIT_INPUT, Fault, Parser, Run, column, run_main, smooth_column, write_whole

TOLERANCE = 0.001  # nats by which the reference may be above the best constant batch


def end_loss(run):
    """Returns the mean training loss of the last tenth of the tokens, which the study compares."""
    tokens = run.rows[-1]["tokens"]
    return window_loss(run.rows, (1 - WINDOW) * tokens, tokens)


def last_val(run):
    return column(run.val_rows, "val_loss")[-1] if run.val_rows else math.inf


def reference_batch(losses):
    """Returns the largest batch of {batch: mean loss} whose loss is within TOLERANCE of the lowest."""
    best = min(losses.values())
    return max(batch for batch, loss in losses.items() if loss <= best + TOLERANCE)


def load(study):
    """Returns one run per schedule: constant batches by size, then ramps by first rows, kappa and most rows."""
    found = {}  # (ramp, first, kappa, most) -> name, its tuning -> [(seed, run)]
    for place in sorted(os.listdir(study)) if os.path.isdir(study) else []:
        name, _, seed = place.rpartition("-seed")
        if not seed.isdecimal() or not os.path.isdir(os.path.join(study, place)):
            continue
        run = Run(os.path.join(study, place))
        options = run.info["options"]
        ramp, rows = options["ramp"] != "fixed", options["resolved"]
        key = (ramp, rows["batch_min_rows"], options["ramp_kappa"], rows["batch_max_rows"]) if ramp else (
            ramp, rows["batch_ref_rows"], 0, 0)
        found.setdefault(key, {}).setdefault(name, []).append((int(seed), run))
    runs = []
    for (ramp, first, kappa, most), by_tuning in sorted(found.items()):
        best = min(by_tuning.values(), key=lambda seeds: (-len(seeds), mean(end_loss(run) for _, run in seeds)))
        run = min(best, key=lambda seed: seed[0])[1]
        run.seeds = dict(best)
        run.losses = {seed: end_loss(of) for seed, of in best}
        run.ramp, run.size = ramp, first
        run.label = f"ramp from {first} to {most}, kappa {kappa:g}" if ramp else f"{first} rows"
        runs.append(run)
    if not any(not run.ramp for run in runs):
        raise Fault(EXIT_INPUT, f"{study}: no constant batch of dev/bench/ramp_study.py in it")
    return runs


def print_table(runs):
    print("| batch | lr | seeds | steps | time | loss, last tenth | val loss |\n| --- | --- | --- | --- | --- | --- | --- |")
    for run in runs:
        of = run.seeds.values()
        print(f"| {run.label} | {run.info['options']['lr']:.3g} | {len(of)} | {mean(r.rows[-1]['step'] for r in of):,.0f} | "
              f"{show_time(run.rows[-1]['seconds'])} | {show(mean(run.losses.values()), 5)} | "
              f"{show(mean(map(last_val, of)), 5)} |")


def draw_ramp(plots, run, others):
    """Left: the values from which the ramp chooses the batch. Right: the LayerNorms' noise scale of every run."""
    figure, (left, right) = plots.plt.subplots(1, 2, figsize=(13, 4.8), width_ratios=(3, 2))
    at, target, aim, lower, batch = plots.thin(*(run.column(name)[:-1] for name in (
        "tokens", "ramp_target", "ramp_aim", "ramp_target_lower", "batch")))
    left.plot(at, plots.above_0(target), color="tab:orange", lw=1.2, label="target: kappa x noise scale of the whole model")
    plots.limit_gns(left, target, batch)
    plots.plot_bound(left, at, plots.above_0(aim), color="tab:blue", label="aim: one standard error below it")
    plots.plot_bound(left, at, plots.above_0(lower), color="tab:red", label="lower bound of the target, 95%")
    left.step(at, batch, where="post", color="black", lw=1.6, label="batch")
    left.set(title=run.label, ylabel="rows")
    for i, other in enumerate(others):
        at, scale = plots.thin(other.column("tokens")[:-1], other.column("gns_ln")[:-1])
        right.plot(at, plots.above_0(scale), color=f"C{i}", lw=1, label=other.label)
    plots.limit_gns(right, [x for other in others for x in other.column("gns_ln")[:-1]], [1])
    right.set(title="noise scale of the LayerNorms, at every batch")
    for axes in (left, right):
        axes.set_yscale("log")
        plots.token_axis(axes)
        axes.legend()
    return figure


def draw_loss(plots, runs):
    """Left: smoothed training loss against steps. Right: every seed's loss above the reference's, by steps."""
    figure, (left, right) = plots.plt.subplots(1, 2, figsize=(13, 4.8))
    constant = {run.size: run for run in runs if not run.ramp}
    reference = constant[reference_batch({size: mean(run.losses.values()) for size, run in constant.items()})]
    lowest, last = math.inf, []
    for i, run in enumerate(runs):
        soft = smooth_column(run, "loss")
        last, lowest = last + [soft[-1]], min([lowest, *soft])
        left.plot(*plots.thin(run.column("step"), soft), color=f"C{i}", lw=1.1, label=run.label)
        differences = {seed: run.losses[seed] - reference.losses[seed] for seed in run.losses if seed in reference.losses}
        steps = [run.seeds[seed].rows[-1]["step"] for seed in differences]
        right.plot(steps, differences.values(), ".", color=f"C{i}", ms=4, alpha=0.5)
        middle, error = paired(run.losses, reference.losses)
        right.errorbar(mean(steps), middle, error if error > 0 else 0, fmt="s" if run.ramp else "o", color=f"C{i}", capsize=3,
                       label=run.label)
    right.axhline(0, color=plots.FAINT, **plots.DASHED)
    left.set(xscale="log", yscale="log", xlabel="steps", ylabel="training loss (nats per token)",
             xlim=(min(len(run.rows) for run in runs) / 5, None), ylim=(0.97 * lowest, 1.5 * max(last)))
    right.set(xscale="log", xlabel="steps", title=f"loss of the last tenth, above {reference.label}")
    for axis in (left.yaxis, left.xaxis, right.xaxis):
        axis.set_major_locator(plots.LogLocator(subs=(1, 2, 5) if axis != left.yaxis else range(1, 10)))
        axis.set_major_formatter(plots.StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(plots.NullLocator())
    left.legend()
    right.legend()
    return figure


def draw_exact(plots, run):
    """Left: the whole model's noise scale, exact at every step, and c times the LayerNorms'. Right: their ratio."""
    rows = [row for row in run.rows if row.get("gns_total") and row.get("gns_ln") and row.get("gns_ratio")]
    at, exact, se, ln, ratio = plots.thin(*([row.get(name) or math.nan for row in rows] for name in (
        "tokens", "gns_total", "gns_total_se", "gns_ln", "gns_ratio")))
    calibrated = [a * c for a, c in zip(ln, ratio)]
    figure, (left, right) = plots.plt.subplots(1, 2, figsize=(13, 4.2), width_ratios=(3, 2))
    left.fill_between(at, *([max(x + sign * d, 0.01) for x, d in zip(exact, se)] for sign in (-1, 1)), alpha=0.25, lw=0)
    left.plot(at, exact, lw=1.2, label="exact, with a standard error")
    left.plot(at, calibrated, lw=1.0, label="LayerNorms x c")
    plots.limit_gns(left, exact, [1])
    left.set(title="noise scale of the whole model", ylabel="rows")
    right.plot(at, [x / y for x, y in zip(calibrated, exact)], lw=1.0)
    right.axhline(1, color=plots.FAINT, **plots.DASHED)
    right.set(title="LayerNorms x c, in parts of exact", ylim=(0.5, 1.5))
    left.set_yscale("log")
    left.legend()
    for axes in (left, right):
        plots.token_axis(axes)
    return figure


def draw_muon(plots, directory):
    """Left: the noise scale over whole runs that end at similar losses. Right: final losses of short runs, by batch."""
    figure, (left, right) = plots.plt.subplots(1, 2, figsize=(13, 4.6))
    for name, colour in (("AdamW", "tab:blue"), ("Muon", "tab:orange")):
        whole, short = (load(os.path.join(directory, name.lower() + kind)) for kind in ("", "-short"))
        for run in whole:
            rows = [row for row in run.rows if row.get("gns_total")]
            if not rows:
                raise Fault(EXIT_INPUT, f"{run.path}: no exact noise scale")
            at, scale = plots.thin(*([row[field] for row in rows] for field in ("tokens", "gns_total")))
            left.plot([100 * x / at[-1] for x in at], scale, color=colour, lw=1.3,
                      label=f"{name}, {run.label}, {at[-1] / 1e6:.0f} million tokens")
        right.plot([run.size for run in short], [last_val(run) for run in short], "o-", color=colour, label=name)
    left.set(yscale="log", ylim=(10, 1000), xlabel="share of the tokens (%)", ylabel="rows",
             title="noise scale of the whole model")
    right.set(xscale="log", xlabel="batch (rows)", ylabel="validation loss (nats per token)",
              title=f"after {short[0].rows[-1]['tokens'] / 1e6:.0f} million tokens, at the best settings tried")
    right.xaxis.set_major_locator(plots.LogLocator(base=2))
    right.xaxis.set_minor_locator(plots.NullLocator())
    for axis in (right.xaxis, left.yaxis):
        axis.set_major_formatter(plots.StrMethodFormatter("{x:g}"))
    left.legend()
    right.legend()
    return figure


# colour, name of the series, its curve in recipe_curves.json or None, and {name in recipe.jsonl: label of its ends}.
LOSS_TIME = (
    ("#666666", "AdamW, 16 rows", "a160", {"a16": "80M", "a160": "160M"}),
    ("#0072b2", "AdamW, 4 rows: the lowest of 50 after 16M tokens", "a160_tuned",
     {"a4_2.5e-4_0.995_hold.4_warm8_zero_beta1.8_wd.3_80M": "80M",
      "a4_2.5e-4_0.995_hold.4_warm8_zero_beta1.8_wd.3_160M": "160M"}),
    ("#56b4e9", "AdamW, 8 rows, the same settings", None, {"a8_2.5e-4_0.995_hold.4_warm8_zero_beta1.8_wd.3_80M": "80M"}),
    ("#d55e00", "Muon, --ramp gns and what goes with it", "m70",
     {"b99_b8_m90": "26M", "b99_b8_m90_36": "36M", "b99_b8_m90_42": "42M", "b99_b8_m90_70": "70M"}),
    ("#000000", "the same in fp8-dw", None, {"b99_b8_m90_36_fp8dw": "", "b99_b8_m90_38_fp8dw": "38M", "b99_b8_m90_100_fp8dw": "100M"}))


def draw_loss_time(plots):
    """Training loss of each series' longest run against seconds, and validation loss at the end of every run."""
    with open(os.path.join(here, "../results/recipe.jsonl"), encoding="utf-8") as file:
        runs = [json.loads(line) for line in file]
    with open(os.path.join(here, "../results/recipe_curves.json"), encoding="utf-8") as file:
        curves = json.load(file)
    figure, axes = plots.plt.subplots(figsize=(7.5, 4.2))
    for color, series, curve, names in LOSS_TIME:
        if curve:
            axes.plot(*zip(*curves[curve]), color=color, label=series)
        else:
            axes.plot([], [], "o", color=color, label=series)
        for name, label in names.items():
            seconds, losses = zip(*((run["gpu_seconds"], run["val_loss"]) for run in runs if run["name"] == name))
            axes.plot(seconds, losses, "o", color=color)
            axes.annotate(label, (mean(seconds), min(losses)), (-11, -10) if curve else (0, -18), fontsize=8, color=color,
                          textcoords="offset points", ha="center")
    axes.set(xlabel="seconds on one H200", ylabel="loss (nats per token)", xlim=(0, 345), ylim=(0.75, 2.5),
             title="124M on source code: training loss; validation loss at a run's end (tokens)")
    axes.legend()
    return figure


def compact(svg):
    """Returns the figure in half the bytes: coordinates in tenths of a point, the font's name once, no needless elements."""
    svg = re.sub(r'(?<= d=")[^"]*', lambda d: re.sub(r"(\.\d)\d+", r"\1", d.group()), svg)
    svg = re.sub(r'(\b[xy]="|[(, ])(\d+\.\d)\d+(?=[", )])', r"\1\2", svg)
    svg = re.sub(r" font-family: 'DejaVu Sans'[^;\"]*;?", "", svg)
    svg = svg.replace("<style type=\"text/css\">", "<style type=\"text/css\">text{font-family: 'DejaVu Sans', sans-serif} ", 1)
    svg = re.sub(r'(?<= d=")[^"]*', lambda d: re.sub(r"\s*([LMQCz])\s*", r"\1", d.group().strip()), svg)
    svg = re.sub(r"\n +", "\n", re.sub(r' transform="rotate\(-0 [^"]*"', "", svg))
    svg, found = re.sub(r'<g id="[a-z]+[\w.]*">', "<g>", svg), 1
    while found: # groups of one element
        svg, found = re.subn(r"<g>\n(<(?:use|path|text)\b[^\n]*>\n)</g>\n", r"\1", svg)
    return svg


def write_figure(plots, path, title, figure):
    write_whole(path, compact(plots.svg_of(figure, title)) + "\n")


def main():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("study", nargs="?", metavar="STUDY", help="the OUT of dev/bench/ramp_study.py")
    parser.add_argument("--muon", metavar="DIR", help="a directory of four studies: adamw, muon, adamw-short, muon-short")
    parser.add_argument("-o", "--out", default=os.path.dirname(os.path.abspath(__file__)), metavar="DIR",
                        help="where the figures go (default: beside this program)")
    args = parser.parse_args()
    runs = load(args.study) if args.study else []
    if args.study and not any(run.ramp for run in runs):
        raise Fault(EXIT_INPUT, f"{args.study}: no ramp of dev/bench/ramp_study.py in it")
    import report_plots as plots

    if not runs:
        write_figure(plots, os.path.join(args.out, "loss-time.svg"), "Validation loss against training time",
                     draw_loss_time(plots))
        return
    plots.POINTS = 180  # of a curve: small files
    ramp = next(run for run in runs if run.ramp)
    if not any(x > 0 for x in ramp.column("ramp_target")):
        raise Fault(EXIT_INPUT, f"{ramp.path}: no ramp_target: of a build before the smooth ramp, or nothing was measured")
    if args.muon:
        points, plots.POINTS = plots.POINTS, 60
        write_figure(plots, os.path.join(args.out, "gns-muon.svg"), "Noise scale and batch under Muon",
                     draw_muon(plots, args.muon))
        plots.POINTS = points
    for name, title, figure in (
            ("ramp", "Noise scale and batch", draw_ramp(plots, ramp, runs)),
            ("loss", "Loss against steps, and every seed's difference", draw_loss(plots, runs)),
            ("layers", "Noise scale by layer and by type", plots.draw_layers([ramp])),
            ("exact", "Noise scale, exact and by the LayerNorms", draw_exact(plots, ramp))):
        write_figure(plots, os.path.join(args.out, f"gns-{name}.svg"), title, figure)
    print_table(runs)


if __name__ == "__main__":
    run_main(main, "matplotlib")
