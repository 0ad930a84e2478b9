"""The figures of scripts/report.py, each as an <svg> element. Loaded only where there is something to draw."""

import html
import io
import math

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.ticker import EngFormatter, StrMethodFormatter

from run_log import smooth, span_of, time_unit

POINTS = 600         # of a curve at most: a page of a long run stays small
COLOURS = plt.get_cmap("tab10").colors
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "report", "font.family": "sans-serif", "font.size": 10,
         "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False,
         "legend.frameon": False, "legend.fontsize": 9, "figure.constrained_layout.use": True}
AXES = (("tokens", "tokens"), ("step", "steps"), ("seconds", "time"))


def style():
    return plt.rc_context(STYLE)


def thin(*columns):
    """Every n-th point, and the last one."""
    n = len(columns[0])
    stride = max(1, math.ceil(n / POINTS))
    kept = [i for i in range(n) if (n - 1 - i) % stride == 0]
    return [[column[i] for i in kept] for column in columns]


def longest(runs):
    return max((run.rows[-1]["seconds"] for run in runs if math.isfinite(run.rows[-1]["seconds"])), default=0.0)


def svg_of(figure, title):
    """The figure as an <svg> element to stand in a page, without date and prologue: equal runs make equal pages."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    plt.close(figure)
    svg = text.getvalue()
    svg = svg[svg.index("<svg"):]
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title, quote=True)}"', 1)


def no_data(axes, text):
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color="#666")


def loss_limits(runs):
    """From the lowest loss up to the highest smoothed one after the first 2% of the tokens: the fall from the random
    start would flatten all the rest."""
    losses = []
    for run in runs:
        tokens = run.column("tokens")
        curve = smooth(tokens, run.column("loss"), span_of(run))
        losses += [x for x, at in zip(curve, tokens) if at >= 0.02 * tokens[-1] and math.isfinite(x)]
        losses += [x for x in run.val_column("val_loss") if math.isfinite(x)]
    if not losses:
        return None
    low, high = min(losses), max(losses)
    margin = 0.05 * (high - low) or 0.1
    return low - margin, high + margin


def draw_loss(runs):
    figure, panels = plt.subplots(1, 3, figsize=(14, 4.6), sharey=True)
    unit, length = time_unit(longest(runs))
    for axes, (name, label) in zip(panels, AXES):
        scale = length if name == "seconds" else 1
        for run, colour in zip(runs, colours(runs)):
            at = [x / scale for x in run.column(name)]
            loss = run.column("loss")
            soft = smooth(run.column("tokens"), loss, span_of(run))
            x, raw, soft = thin(at, loss, soft)
            axes.plot(x, raw, color=colour, alpha=0.18, lw=0.7)
            axes.plot(x, soft, color=colour, lw=1.5, label=f"{run.label} train, smoothed")
            if run.val_rows:
                axes.plot([x / scale for x in run.val_column(name)], run.val_column("val_loss"), "o--", color=colour,
                          ms=4, lw=1, markeredgecolor="white", label=f"{run.label} val")
        if name == "tokens":
            token_axis(axes)
        else:
            axes.set_xlabel(f"{label} ({unit})" if name == "seconds" else label)
    limits = loss_limits(runs)
    if limits:
        panels[0].set_ylim(*limits)
    panels[0].set_ylabel("loss (nats a token)")
    panels[0].legend()
    return figure


def gns_source(run):
    return next((name for name in ("gns_ln", "gns_ranks") if any(x > 0 for x in run.column(name))), None)


def batches_of(run):
    """Tokens and batch of every step but the last, which may be a smaller rest."""
    return [run.column(name)[:-1] or run.column(name) for name in ("tokens", "batch")]


def token_axis(axes):
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def draw_gns(runs):
    """A panel a run: the scale, its band of one standard error, its 95% lower bound, and the batch as steps."""
    figure, panels = plt.subplots(len(runs), 1, figsize=(11, 4.2 * len(runs)), squeeze=False)
    for axes, run, colour in zip(panels[:, 0], runs, colours(runs)):
        name = gns_source(run)
        axes.step(*thin(*batches_of(run)), where="post", color="black", lw=1.3,
                  label="batch of the step")
        if name:
            tokens, scale, se, lower = thin(*(run.column(x) for x in ("tokens", name, name + "_se", name + "_lower")))
            scale = [x if x > 0 else math.nan for x in scale]
            lower = [x if x > 0 else math.nan for x in lower]
            # An error bar that reaches 0 has no place on a logarithmic axis: a twentieth of the scale stands for it.
            bottom = [max(x - e, x / 20) for x, e in zip(scale, se)]
            axes.fill_between(tokens, bottom, [x + e for x, e in zip(scale, se)], color=colour, alpha=0.22, lw=0,
                              label="one standard error")
            axes.plot(tokens, scale, color=colour, lw=1.2,
                      label=f"noise scale of the {'LayerNorms' if name == 'gns_ln' else 'ranks'} ({name})")
            axes.plot(tokens, lower, color=colour, lw=0.8, ls=":", label="lower bound, 95%")
            limit_gns(axes, scale, batches_of(run)[1])
        else:
            no_data(axes, "no noise scale was measured (--gns off)")
        axes.set_yscale("log")
        axes.set(title=run.label, ylabel="rows")
        token_axis(axes)
        axes.legend(loc="upper left", ncols=2)
    return figure


def limit_gns(axes, scale, batch):
    """Scales from the 1st to the 99th percentile, and the batch: single wild estimates would take up the plot."""
    known = sorted(x for x in scale if math.isfinite(x))
    batch = [x for x in batch if x > 0]
    if not known:
        return
    low, high = known[len(known) // 100], known[-1 - len(known) // 100]
    axes.set_ylim(0.5 * min([low, *batch]), 4 * max([high, *batch]))


def sampled(run):
    return [row for row in run.rows if "gns_layer" in row or "gns_total" in row]


def positive(rows, get):
    out = []
    for row in rows:
        x = get(row)
        out.append(x if x is not None and x > 0 else math.nan)
    return out


def draw_layers(runs):
    """Two panels a run with samples: by layer, and by type. The whole model's scale stands in both."""
    runs = [run for run in runs if sampled(run)]
    figure, panels = plt.subplots(len(runs), 2, figsize=(14, 4.4 * len(runs)), squeeze=False, sharey="row")
    for (left, right), run in zip(panels, runs):
        rows = sampled(run)
        stride = max(1, math.ceil(len(rows) / POINTS))
        rows = rows[::stride]
        tokens = [row["tokens"] for row in rows]
        layers = max(len(row.get("gns_layer", [])) for row in rows)
        for l in range(layers):
            values = positive(rows, lambda row: (row.get("gns_layer", []) + [None] * layers)[l])
            left.plot(tokens, values, color=plt.get_cmap("viridis")(l / max(1, layers - 1)), lw=1,
                      label=f"layer {l}" if l in (0, layers - 1) or layers <= 6 else None)
        for colour, name in zip(COLOURS, sorted({n for row in rows for n in row if n.startswith("gns_type_")})):
            right.plot(tokens, positive(rows, lambda row: row.get(name)), color=colour, lw=1,
                       label=name.removeprefix("gns_type_"))
        for axes, title in ((left, "by layer"), (right, "by type")):
            axes.plot(tokens, positive(rows, lambda row: row.get("gns_total")), "k--", lw=1.4, label="whole model")
            axes.set_yscale("log")
            axes.set(title=f"{run.label}, {title}", ylabel="rows")
            token_axis(axes)
            axes.legend()
    return figure


def draw_rates(runs):
    figure, panels = plt.subplots(1, 3, figsize=(14, 4.2))
    for axes, (name, title, unit) in zip(panels, (("lr", "learning rate", ""), ("grad_norm", "gradient norm", ""),
                                                  ("tok_per_s", "throughput", "tokens/s"))):
        for run, colour in zip(runs, colours(runs)):
            tokens, values = run.column("tokens"), run.column(name)
            soft = smooth(tokens, values, span_of(run)) if name != "lr" else values
            x, raw, soft = thin(tokens, values, soft)
            if name != "lr":
                axes.plot(x, raw, color=colour, alpha=0.2, lw=0.6)
            axes.plot(x, soft, color=colour, lw=1.4, label=run.label)
        if not any(run.has(name) for run in runs):
            no_data(axes, "not in this log")
        if name == "grad_norm":
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))
        else:
            axes.set_ylim(bottom=0)
        axes.set(title=title, ylabel=unit)
        token_axis(axes)
    if len(runs) > 1:
        panels[0].legend()
    return figure


def colours(runs):
    return [COLOURS[i % len(COLOURS)] for i in range(len(runs))]
