"""The figures of scripts/report.py, each an <svg> element. Needs matplotlib."""

import html
import io
import math

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator, StrMethodFormatter

from run_log import column, finite, loss_curve, reach, smooth_column, time_unit

POINTS = 600  # of a curve at most: keeps the page of a long run small
# Okabe and Ito's colours for colour-blind readers, without the yellow, which vanishes on white; then others.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f4f2a", "#666666", "#882255", "#117733")
INK, FAINT = "#222222", "#8a8a8a"
DASHED = {"lw": 0.8, "ls": (0, (4, 3))}
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "report", "font.family": "sans-serif", "font.size": 10,
         "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": FAINT, "xtick.color": INK, "ytick.color": INK,
         "xtick.major.size": 3, "ytick.major.size": 3, "ytick.minor.size": 0, "axes.linewidth": 0.8,
         "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
         "axes.grid": True, "axes.axisbelow": True, "grid.color": "#e4e4e4", "grid.linewidth": 0.7,
         "axes.spines.top": False, "axes.spines.right": False,
         "text.parse_math": False,  # a $ in a run's name
         "legend.frameon": False, "legend.fontsize": 9, "legend.handlelength": 1.8,
         "lines.solid_capstyle": "round", "figure.constrained_layout.use": True}
plt.rcParams.update(STYLE)
AXES = (("tokens", "tokens"), ("step", "steps"), ("seconds", "time"))


def known(runs, fields):
    """Those of the (name, title) that some run has: no panel is empty."""
    return [(name, title) for name, title in fields if any(finite(run.column(name)) for run in runs)]


def thin(*columns):
    """Every n-th point, and the last one."""
    n = len(columns[0])
    stride = max(1, math.ceil(n / POINTS))
    return [column[(n - 1) % stride::stride] for column in columns]


def svg_of(figure, title):
    """The figure as an <svg> element, without date and prologue: equal runs make equal pages."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    plt.close(figure)
    svg = text.getvalue()
    svg = svg[svg.index("<svg"):]
    return svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(title, quote=True)}"', 1)


def loss_limits(runs):
    """From the lowest loss to the highest smoothed one after 5% of the tokens: the fall from the random start would
    flatten the rest."""
    losses = []
    for run in runs:
        losses += [x for x, row in zip(smooth_column(run, "loss"), run.rows)
                   if row["tokens"] >= 0.05 * run.rows[-1]["tokens"]] + run.val_column("val_loss")
    low, high = min(finite(losses), default=0), max(finite(losses), default=0)
    margin = 0.05 * (high - low) or 0.1
    return low - margin, high + margin


def run_key(figure, runs, *more):
    """One legend above all panels: the runs by colour, then the kinds of line. The blank: a label that begins with _ is
    not shown."""
    runs = [Line2D([], [], color=colour, lw=2.5, label=f" {run.label}") for run, colour in zip(runs, colours(runs))]
    handles = [*(runs if len(runs) > 1 else []), *more]
    if handles:
        figure.legend(handles=handles, loc="outside upper left", ncols=6)


def kind_of_line(label, **how):
    return Line2D([], [], label=label, **{"color": INK, "lw": 1.6, **how})


def draw_loss(runs, target=None):
    """Against tokens, steps and time. target: the loss at which the runs are compared."""
    figure, panels = plt.subplots(1, len(known(runs, AXES)), figsize=(14, 4.7), sharey=True)
    unit, length = time_unit(max(finite(run.rows[-1]["seconds"] for run in runs), default=0))
    for axes, (name, label) in zip(panels, known(runs, AXES)):
        scale = length if name == "seconds" else 1
        for run, colour in zip(runs, colours(runs)):
            x, raw, soft = thin([x / scale for x in run.column(name)], run.column("loss"), smooth_column(run, "loss"))
            axes.plot(x, raw, color=colour, alpha=0.13, lw=0.6)
            axes.plot(x, soft, color=colour, lw=1.7)
            if run.val_rows:
                axes.plot([x / scale for x in run.val_column(name)], run.val_column("val_loss"), "o-", color=colour,
                          ms=3.2, lw=0.8, markerfacecolor="white", markeredgewidth=0.9,
                          markevery=max(1, len(run.val_rows) // 25))
        if target is not None:
            axes.axhline(target, color=INK, **DASHED)
        if name == "seconds":
            axes.set(title="against time", xlabel=unit)
        else:
            token_axis(axes, title=f"against {label}", xlabel=label)
    panels[0].set(ylim=loss_limits(runs), ylabel="loss (nats a token)")
    marks = [kind_of_line("training, smoothed"), kind_of_line("single steps", alpha=0.3, lw=0.8)]
    if any(run.val_rows for run in runs):
        marks.append(kind_of_line("validation", lw=0.8, marker="o", ms=4, markerfacecolor="white"))
    if target is not None:
        marks.append(kind_of_line("loss of the comparison below", **DASHED))
    run_key(figure, runs, *marks)
    return figure


TARGETS = 60  # losses that the runs are compared at


def savings(runs, kind):
    """(losses, {run: {axis: per cent saved}}) of every run but the first, at losses from the first run's start to its
    best; NaN where one of the two does not cross the loss, or the axis is not known."""
    curves = [loss_curve(run, kind) for run in runs]
    first = finite(curves[0][1])
    high, low = min(loss_limits(runs[:1])[1], first[0]), min(first)
    targets = [high - (high - low) * i / (TARGETS - 1) for i in range(TARGETS)]
    firsts, *found = [[reach(curve, target) for target in targets] for curve in curves]
    return targets, {run: {name: [100 * (1 - at[name] / base[name]) if at and base and base[name] > 0 else math.nan
                                  for at, base in zip(ats, firsts)] for name, _ in AXES} for run, ats in zip(runs[1:], found)}


def draw_savings(runs, kind):
    """What each run saves against the first, in per cent, at every loss that both cross. None where there is none."""
    targets, saved = savings(runs, kind)
    shown = [i for i in range(TARGETS) if any(math.isfinite(of["tokens"][i]) for of in saved.values())]
    axes_shown = [(name, label) for name, label in AXES if any(finite(of[name]) for of in saved.values())]
    if len(shown) < 2:
        return None
    figure, panels = plt.subplots(1, len(axes_shown), figsize=(14, 3.7), sharey=True, squeeze=False)
    for axes, (name, label) in zip(panels.flat, axes_shown):
        axes.axhline(0, color=colours(runs)[0], lw=1.5)
        for run, colour in zip(runs[1:], colours(runs)[1:]):
            axes.plot(targets, saved[run][name], color=colour, lw=1.6)
        axes.set(title=f"{label} saved", xlabel="loss reached (nats a token)", xlim=(targets[shown[0]], targets[shown[-1]]))
    axes = panels[0, 0]
    axes.set_ylabel("per cent of the first run's")
    axes.set_ylim(max(-150, axes.get_ylim()[0]), min(105, axes.get_ylim()[1]))
    run_key(figure, runs)
    return figure


def draw_tests(runs):
    """Accuracy on HellaSwag by the length-normalised likelihood of the endings (solid) and by the plain one (dotted)."""
    figure, axes = plt.subplots(figsize=(9, 4))
    for run, colour in zip(runs, colours(runs)):
        for name, how in (("hellaswag_norm", "o-"), ("hellaswag", "o:")):
            axes.plot(column(run.test_rows, "tokens"), [100 * x for x in column(run.test_rows, name)], how, color=colour,
                      ms=3.5, lw=1.4)
    axes.axhline(25, color=FAINT, **DASHED)
    token_axis(axes, title="HellaSwag", ylabel="right answers (%)")
    run_key(figure, runs, kind_of_line("length-normalised"), kind_of_line("plain", ls=":"),
            kind_of_line("chance", color=FAINT, **DASHED))
    return figure


def gns_source(run):
    return next((name for name in ("gns_ln", "gns_ranks")
                 if any(x > 0 for x in run.column(name) + run.column(name + "_lower"))), None)


def batches_of(run):
    """Tokens and batch of every step but the last, which the horizon may cut short."""
    return [run.column(name)[:-1] or run.column(name) for name in ("tokens", "batch")]


def token_axis(axes, **labels):
    """Numbers with k, M and B along the axis of tokens; its title and labels."""
    axes.set(**{"xlabel": "tokens", **labels})
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def plain_log(axis):
    """A logarithmic axis with plain numbers, not powers of ten."""
    axis.axes.set_yscale("log")
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def band(axes, tokens, scale, se, **how):
    """One standard error either way, but not below a twentieth of the scale: a logarithmic axis has no 0."""
    bottom = [max(x - e, x / 20) for x, e in zip(scale, se)]
    axes.fill_between(tokens, bottom, [x + e for x, e in zip(scale, se)], lw=0, **how)


def above_0(values):
    """NaN for a value that is not above 0."""
    return [x if x is not None and x > 0 else math.nan for x in values]


def draw_gns(runs):
    """A panel for each run: the noise scale, thinned, its standard error and 95% lower bound, the whole model's, the batch."""
    rows, columns = -(-len(runs) // 2), min(2, len(runs))
    figure, panels = plt.subplots(rows, columns, squeeze=False, sharey=True,
                                  figsize=(14 if columns > 1 else 11, 4.4 * rows + 0.4))
    curves = [thin(run.column("tokens"), above_0(run.column(name)), run.column(name + "_se"), above_0(run.column(name + "_lower")))
              if (name := gns_source(run)) else ([], [], [], []) for run in runs]
    limit_gns(panels[0, 0], [x for _, scale, _, _ in curves for x in scale],
              [x for run in runs for x in batches_of(run)[1]])
    for axes, run, colour, (at, scale, se, lower) in zip(panels.flat, runs, colours(runs), curves):
        axes.step(*thin(*batches_of(run)), where="post", color="black", lw=1.5)
        if at:
            band(axes, at, scale, se, color=colour, alpha=0.22)
            axes.plot(at, scale, color=colour, lw=1.3)
            samples = [above_0(column(sampled(run), name)) for name in ("tokens", "gns_total", "gns_total_se")]
            band(axes, *samples, color=FAINT, alpha=0.15)
            axes.plot(*samples[:2], color=FAINT, lw=1)
            plot_bound(axes, at, lower, color=colour)
        else:
            axes.text(0.5, 0.5, "no noise scale was measured (--gns off)", ha="center", va="center",
                      transform=axes.transAxes, color="#666")
        plain_log(axes.yaxis)
        token_axis(axes, title=run.label, ylabel="rows")
    for axes in panels.flat[len(runs):]:
        axes.set_visible(False)
    colour = colours(runs)[0]
    of = "of the LayerNorms" if "gns_ln" in map(gns_source, runs) else "from the ranks"
    whole = [kind_of_line("whole model, where it was sampled", color=FAINT, lw=1)]
    run_key(figure, runs[:1], kind_of_line("batch", color="black"), kind_of_line(f"noise scale {of}", color=colour),
            Patch(color=colour, alpha=0.22, lw=0, label="one standard error"),
            kind_of_line("lower bound, 95%", color=colour, lw=0.9, ls=":"), *(whole if any(map(sampled, runs)) else []))
    return figure


def plot_bound(axes, at, lower, **how):
    """Call once the axis has its limits: a bound above them, or infinite, runs along the top."""
    top = 0.97 * axes.get_ylim()[1]
    axes.plot(at, [min(x, top) for x in lower], lw=0.8, ls=":", **how)


def limit_gns(axes, scale, batch):
    """Scales from the 1st to the 99th percentile, and the batch: a few wild estimates would fill the plot."""
    batch = [x for x in batch if x > 0]
    known = sorted(finite(scale)) or sorted(batch)
    if not known:
        return
    low, high = known[len(known) // 100], known[-1 - len(known) // 100]
    axes.set_ylim(0.5 * min([low, *batch]), 4 * max([high, *batch]))


def sampled(run):
    """The rows of steps that measured every tensor, at most POINTS of them."""
    rows = [row for row in run.rows if "gns_layer" in row or "gns_total" in row]
    return rows[::max(1, math.ceil(len(rows) / POINTS))]


LABELLED_LAYERS = 6  # more than these have a colour bar
LAYER_COLOURS = plt.get_cmap("viridis_r")


def draw_layers(runs):
    """Two panels for each run with samples, by layer and by type, with the whole model's scale in both."""
    runs = [run for run in runs if sampled(run)]
    figure, panels = plt.subplots(len(runs), 2, figsize=(14, 4.2 * len(runs) + 0.3), squeeze=False, sharey="row")
    for pair, run in zip(panels, runs):
        rows = sampled(run)
        tokens, whole = column(rows, "tokens"), above_0(column(rows, "gns_total"))
        n = max(len(row.get("gns_layer", [])) for row in rows)
        layers = [(f"layer {l}" if n <= LABELLED_LAYERS else None, LAYER_COLOURS(0.08 + 0.92 * l / max(1, n - 1)),
                   above_0((row.get("gns_layer", []) + [None] * n)[l] for row in rows)) for l in range(n)]
        names = sorted({name.removeprefix("gns_type_") for row in rows for name in row if name.startswith("gns_type_")})
        types = [({"ln": "LayerNorm", "mlp": "MLP"}.get(name, name), colour, above_0(column(rows, f"gns_type_{name}")))
                 for colour, name in zip(COLOURS, names)]
        for axes, curves, title in zip(pair, (layers, types), ("by layer", "by type")):
            for label, colour, values in curves:
                axes.plot(tokens, values, color=colour, lw=1.2, label=label)
            axes.plot(tokens, whole, color="black", ls=(0, (5, 2)), lw=1.4, label="whole model")
            plain_log(axes.yaxis)
            token_axis(axes, title=f"{run.label}, {title}", ylabel="rows")
            axes.legend(loc="lower right", ncols=2)
        if n > LABELLED_LAYERS:
            bar = figure.colorbar(ScalarMappable(Normalize(0, n - 1), LAYER_COLOURS), ax=pair[0], pad=0.01, aspect=40, label="layer")
            bar.outline.set_visible(False)
        limit_gns(pair[0], whole + [x for _, _, values in layers + types for x in values], [])
    return figure


RATES = (("lr", "learning rate"), ("batch", "batch (rows)"), ("grad_norm", "gradient norm"), ("tok_per_s", "throughput (tokens/s)"))


def draw_rates(runs):
    """Learning rate and batch as they are; gradient norm and throughput also smoothed, within limits that a few wild steps do
    not stretch. None where nothing of it is known."""
    if not known(runs, RATES):
        return None
    figure, panels = plt.subplots(1, len(known(runs, RATES)), figsize=(14, 3.9), squeeze=False)
    for axes, (name, title) in zip(panels.flat, known(runs, RATES)):
        noisy, softened = name in ("grad_norm", "tok_per_s"), []
        for run, colour in zip(runs, colours(runs)):
            tokens, values = batches_of(run) if name == "batch" else (run.column("tokens"), run.column(name))
            x, raw, soft = thin(tokens, values, smooth_column(run, name) if noisy else values)
            if noisy:
                axes.plot(x, raw, color=colour, alpha=0.16, lw=0.6)
            axes.plot(x, soft, color=colour, lw=1.5, drawstyle="steps-post" if name == "batch" else "default")
            softened += [y for at, y in zip(x, soft) if at >= 0.02 * x[-1] and math.isfinite(y)]
        if name == "grad_norm" and softened and min(softened) > 0:
            plain_log(axes.yaxis)
            axes.set_ylim(0.5 * min(softened), 2 * max(softened))
            axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
            axes.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}"))
        elif name == "tok_per_s" and softened:
            axes.set_ylim(0, 1.3 * max(softened))
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        else:
            axes.set_ylim(bottom=0)
            if name == "lr":
                axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        token_axis(axes, title=title)
    run_key(figure, runs)
    return figure


def colours(runs):
    """By a run's number on the page: it keeps its colour in figures that leave others out."""
    return [COLOURS[getattr(run, "number", i) % len(COLOURS)] for i, run in enumerate(runs)]


def draw_knee(batch, steps, s_min, e_min):
    """Examples against steps to one loss: the runs, and the fit E = E_min S / (S - S_min) with its knee at B_crit."""
    figure, axes = plt.subplots(figsize=(7, 5))
    low, high = min(batch.min(), e_min / s_min) / 4, 4 * max(batch.max(), e_min / s_min)
    sizes = [low * (high / low) ** (i / 200) for i in range(201)]
    axes.plot([s_min + e_min / b for b in sizes], [b * s_min + e_min for b in sizes], color=FAINT, lw=1.5, label="fit")
    axes.plot(2 * s_min, 2 * e_min, "s", color=COLOURS[1], label=f"B_crit = {e_min / s_min:.4g} rows")
    axes.plot(steps, batch * steps, "o", color=COLOURS[0], label="runs")
    for b, s in zip(batch, steps):
        axes.annotate(f" {b:g}", (s, b * s))
    axes.axvline(s_min, color=FAINT, **DASHED)
    axes.axhline(e_min, color=FAINT, **DASHED)
    axes.set(xscale="log", yscale="log", xlabel="steps S", ylabel="examples E")
    axes.legend()
    return figure
