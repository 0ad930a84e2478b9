"""Draws the figures of scripts/report.py and dev/docs/plots.py. Needs matplotlib."""

import html
import io
import math

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator, StrMethodFormatter  # the locators are for plots.py

from run_log import column, finite, smooth_column, time_unit

POINTS = 600  # most points of a curve, so that pages of long runs stay small
# Okabe and Ito's colours for colour-blind readers, without yellow (it vanishes on white); then others.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f4f2a", "#666666", "#882255", "#117733")
FAINT = "#8a8a8a"
DASHED = {"lw": 0.8, "ls": (0, (4, 3))}
plt.rcParams.update({
    "svg.fonttype": "none", "svg.hashsalt": "report", "text.parse_math": False,  # a run's name may contain $
    "axes.edgecolor": FAINT, "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e4e4e4", "axes.spines.top": False, "axes.spines.right": False,
    "ytick.minor.size": 0, "legend.frameon": False, "legend.fontsize": 9, "figure.constrained_layout.use": True,
    "axes.prop_cycle": plt.cycler(color=COLOURS)})  # run i has the colour Ci
AXES = (("tokens", "tokens"), ("step", "steps"), ("seconds", "time"))
RATES = (("lr", "learning rate"), ("batch", "batch (rows)"), ("grad_norm", "gradient norm"), ("tok_per_s", "throughput (tokens/s)"),
         ("hellaswag_norm", "HellaSwag (right answers)"))


def known(runs, fields):
    """Returns the fields (name, title) that some run has, so that no panel is empty."""
    return [(name, title) for name, title in fields if any(finite(column(run.lines, name)) for run in runs)]


def thin(*columns):
    """Returns every n-th value of each column, and the last one."""
    n = len(columns[0])
    stride = max(1, math.ceil(n / POINTS))
    return [np.array(column[(n - 1) % stride::stride], float) for column in columns]


def above_0(values):
    """Replaces values that are not above 0 by NaN."""
    values = np.array(list(values), float)
    return np.where(values > 0, values, math.nan)


def svg_of(figure, title):
    """Returns the figure as an <svg> element, without date and prologue, so that equal runs make equal pages."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    plt.close(figure)
    svg = text.getvalue()
    return svg[svg.index("<svg"):].replace("<svg", f'<svg role="img" aria-label="{html.escape(title, quote=True)}"', 1)


def token_axis(axes, **labels):
    """Labels the axes. Numbers along the axis of tokens end in k, M or G."""
    axes.set(**{"xlabel": "tokens", **labels})
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def plain_log(axis):
    """Makes the axis logarithmic, with plain numbers at powers of two."""
    axis.axes.set_yscale("log", base=2)
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def run_key(figure, runs):
    """Draws one legend above all panels: the runs by colour. A blank precedes a run's label, because Matplotlib hides
    labels that begin with _."""
    if len(runs) > 1:
        handles = [Line2D([], [], label=f" {run.label}", color=f"C{i}", lw=2.5) for i, run in enumerate(runs)]
        figure.legend(handles=handles, loc="outside upper left", ncols=6)


def draw_loss(runs, target=None):
    """Draws losses against tokens, steps and time. target: the loss at which the runs are compared."""
    figure, panels = plt.subplots(1, len(known(runs, AXES)), figsize=(14, 4.7), sharey=True)
    unit, length = time_unit(max(finite(run.rows[-1]["seconds"] for run in runs), default=0))
    shown = []  # the limits are of these losses: with the first ones, later differences would be invisible
    for axes, (name, label) in zip(panels, known(runs, AXES)):
        scale = length if name == "seconds" else 1
        for i, run in enumerate(runs):
            x, raw, soft = thin(run.column(name), run.column("loss"), smooth_column(run, "loss"))
            at, losses = (np.array(column(run.val_rows, field)) for field in (name, "val_loss"))
            shown += finite([*soft[x >= 0.05 * x[-1]], *losses]) if name == "tokens" else []
            axes.plot(x / scale, raw, color=f"C{i}", alpha=0.13, lw=0.6)
            axes.plot(x / scale, soft, color=f"C{i}", lw=1.7)
            axes.plot(at / scale, losses, "o-", color=f"C{i}", ms=3.2, lw=0.8, markerfacecolor="white",
                      markevery=max(1, len(losses) // 25))
        if target is not None:
            axes.axhline(target, color="black", **DASHED)
        if name == "seconds":
            axes.set(title="against time", xlabel=unit)
        else:
            token_axis(axes, title=f"against {label}", xlabel=label)
    margin = 0.05 * (max(shown) - min(shown)) or 0.1
    panels[0].set(ylim=(min(shown) - margin, max(shown) + margin), ylabel="loss (nats per token)")
    run_key(figure, runs)
    return figure


# ---- The noise scale ------------------------------------------------------------------------------------------------

def has_noise_scale(run):
    return any(x > 0 for x in run.column("gns_ln") + run.column("gns_ln_lower"))


def batches_of(run):
    """Returns tokens and batch of every step but the last, whose batch the horizon may cut."""
    return [run.column(name)[:-1] or run.column(name) for name in ("tokens", "batch")]


def plot_scale(axes, tokens, scale, se, colour):
    """Draws a noise scale with its standard error: not below a twentieth of it, since a logarithmic axis has no 0."""
    axes.fill_between(tokens, np.maximum(scale - se, scale / 20), scale + se, lw=0, color=colour, alpha=0.2)
    axes.plot(tokens, scale, color=colour, lw=1.2)


def plot_bound(axes, at, lower, **how):
    """Draws the lower bound. Call this once the axis has its limits: a bound above them is drawn along the top."""
    axes.plot(at, np.minimum(lower, 0.97 * axes.get_ylim()[1]), lw=0.8, ls=":", **how)


def limit_gns(axes, scale, batch):
    """Limits the axis to the batches and the 1st to 99th percentile of the scales. A few wild scales would stretch it."""
    batch = [x for x in batch if x > 0]
    known = sorted(finite(scale)) or sorted(batch)
    if known:
        axes.set_ylim(0.5 * min([known[len(known) // 100], *batch]), 4 * max([known[-1 - len(known) // 100], *batch]))


def sampled(run):
    """Returns the rows of steps that measured every tensor, at most POINTS of them."""
    rows = [row for row in run.rows if "gns_layer" in row or "gns_total" in row]
    return rows[::max(1, math.ceil(len(rows) / POINTS))]


def draw_gns(runs):
    """Draws a panel per run: the noise scale (thinned), its standard error and 95% lower bound, the whole model's scale,
    the batch."""
    figure, panels = plt.subplots(len(runs), figsize=(14, 4.4 * len(runs) + 0.4), squeeze=False, sharey=True)
    curves = [thin(run.column("tokens"), above_0(run.column("gns_ln")), run.column("gns_ln_se"), above_0(run.column("gns_ln_lower")))
              for run in runs]
    limit_gns(panels[0, 0], [x for _, scale, _, _ in curves for x in scale], [x for run in runs for x in batches_of(run)[1]])
    for i, (axes, run, (at, scale, se, lower)) in enumerate(zip(panels.flat, runs, curves)):
        axes.step(*thin(*batches_of(run)), where="post", color="black", lw=1.5)
        plot_scale(axes, at, scale, se, f"C{i}")
        plot_bound(axes, at, lower, color=f"C{i}")
        plot_scale(axes, *(above_0(column(sampled(run), name)) for name in ("tokens", "gns_total", "gns_total_se")), FAINT)
        plain_log(axes.yaxis)
        none = "" if has_noise_scale(run) else ": no noise scale was measured (--gns off)"
        token_axis(axes, title=run.label + none, ylabel="rows")
    return figure


def draw_layers(runs):
    """Draws two panels, by layer and by type, for each run that measured every tensor. Both show the whole model's scale."""
    runs = [run for run in runs if sampled(run)]
    figure, panels = plt.subplots(len(runs), 2, figsize=(14, 4.2 * len(runs) + 0.3), squeeze=False, sharey="row")
    shade = plt.get_cmap("viridis_r")
    for pair, run in zip(panels, runs):
        rows = sampled(run)
        tokens, whole = column(rows, "tokens"), above_0(column(rows, "gns_total"))
        n = max(len(row.get("gns_layer", [])) for row in rows)
        layers = [(f"layer {l}" if l in (0, n - 1) else None, shade(0.08 + 0.92 * l / max(1, n - 1)),
                   above_0((row.get("gns_layer", []) + [None] * n)[l] for row in rows)) for l in range(n)]
        names = sorted({name.removeprefix("gns_type_") for row in rows for name in row if name.startswith("gns_type_")})
        types = [({"ln": "LayerNorm", "mlp": "MLP"}.get(name, name), f"C{i}", above_0(column(rows, f"gns_type_{name}")))
                 for i, name in enumerate(names)]
        for axes, curves, title in zip(pair, (layers, types), ("by layer", "by type")):
            for label, colour, values in curves:
                axes.plot(tokens, values, color=colour, lw=1.2, label=label)
            axes.plot(tokens, whole, color="black", ls=(0, (5, 2)), lw=1.4, label="whole model")
            plain_log(axes.yaxis)
            token_axis(axes, title=f"{run.label}, {title}", ylabel="rows")
            axes.legend(loc="lower right", ncols=2)
        limit_gns(pair[0], [*whole, *(x for _, _, values in layers + types for x in values)], [])
    return figure


def draw_rates(runs):
    """Draws a panel per field of RATES, gradient norm and throughput also smoothed. A few wild steps do not stretch the
    limits of these two."""
    figure, panels = plt.subplots(1, len(known(runs, RATES)), figsize=(14, 3.9), squeeze=False)
    for axes, (name, title) in zip(panels.flat, known(runs, RATES)):
        noisy, softened = name in ("grad_norm", "tok_per_s"), []
        for i, run in enumerate(runs):
            rows = name == "hellaswag_norm" and run.test_rows or run.rows
            tokens, values = batches_of(run) if name == "batch" else (column(rows, "tokens"), column(rows, name))
            x, raw, soft = thin(tokens, values, smooth_column(run, name) if noisy else values)
            if noisy:
                axes.plot(x, raw, color=f"C{i}", alpha=0.16, lw=0.6)
            axes.plot(x, soft, color=f"C{i}", lw=1.5, drawstyle="steps-post" if name == "batch" else "default",
                      marker="o" if name == "hellaswag_norm" else "", ms=3.2)
            softened += finite(soft[x >= 0.02 * x[-1]])
        if name == "grad_norm" and softened and min(softened) > 0:
            plain_log(axes.yaxis)
            axes.set_ylim(0.5 * min(softened), 2 * max(softened))
        else:
            axes.set_ylim(0.2 if name == "hellaswag_norm" and all(x > 0.2 for x in softened) else 0,
                          1.3 * max(softened) if noisy and softened else None)
            axes.yaxis.set_major_formatter(EngFormatter(sep="") if name == "tok_per_s" else StrMethodFormatter("{x:g}"))
        token_axis(axes, title=title)
    run_key(figure, runs)
    return figure
