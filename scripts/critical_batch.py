#!/usr/bin/env python3
"""Finds the critical batch from existing runs.

    critical_batch.py fit RUN RUN...   S_min, E_min and the critical batch from runs at constant batch sizes
    critical_batch.py probe CHECKPOINT the critical batch there, measured: short branches at k times the batch

McCandlish, Kaplan, Amodei and the OpenAI Dota Team 2018, "An Empirical Model of Large-Batch Training":
a batch B reaches a loss in S steps and E = B S examples (rows of context tokens), with
    (S / S_min - 1) (E / E_min - 1) = 1    (eq. 2.11),    B_crit = E_min / S_min    (eq. 2.12).
The probe is the branched training of Merrill et al. 2025 (arXiv 2505.23971). It trains, so it needs the run's trainer
and data.
"""

import math
import sys

sys.dont_write_bytecode = True
from run_log import (EXIT_INPUT, Fault, Parser, Run, common_kind, common_target, finite_number, loss_curve, reach, run_main,
                     write_whole)

from branched_probe import probe


def constant_batch(run, step):
    """Returns the batch in rows up to `step`. Ignores the run's last step: the horizon may cut it short."""
    batches = {row.get("batch") or 0 for row in run.rows[:-1] or run.rows if row["step"] <= math.ceil(step)}
    if len(batches) != 1 or min(batches) <= 0:
        raise Fault(EXIT_INPUT, f"{run.path}: the batch is not constant; fit needs runs with --ramp fixed")
    return batches.pop()


def fit_minima(batch, steps):
    """Returns (S_min, E_min), the covariance of their logarithms (NaN for two runs) and the residuals of log S."""
    import numpy as np
    from scipy.optimize import least_squares

    # Start from eq. 2.11 as S_min / S + E_min / E = 1, which is linear in the minima. Then fit log S by least squares:
    # the relative errors of all runs weigh alike.
    start = np.linalg.lstsq(np.stack([1 / steps, 1 / (batch * steps)], 1), np.ones(len(steps)), rcond=None)[0]
    start = np.log(np.maximum(start, 1e-3 * np.array([steps.min(), (batch * steps).min()])))
    # With E = B S, eq. 2.11 is S = S_min + E_min / B.
    fit = least_squares(lambda x: np.log(steps) - np.log(np.exp(x[0]) + np.exp(x[1]) / batch), start, xtol=1e-14, ftol=1e-14)
    variance = (fit.fun @ fit.fun) / (len(steps) - 2) if len(steps) > 2 else math.nan
    return np.exp(fit.x), np.linalg.pinv(fit.jac.T @ fit.jac) * variance, fit.fun


def fit(args):
    import numpy as np

    runs = [Run(path) for path in args.runs]
    kind = common_kind(runs)
    target = common_target(runs, kind) if args.target is None else args.target
    found = [reach(loss_curve(run, kind), target) for run in runs]
    for run, at in zip(runs, found):
        if at is None:
            raise Fault(EXIT_INPUT, f"{run.path}: does not fall to a {kind} loss of {target:.6g} between two lines; choose another --target")
    batch = np.array([constant_batch(run, at["step"]) for run, at in zip(runs, found)], dtype=float)
    steps = np.array([at["step"] for at in found], dtype=float)
    if len(set(batch)) < 2:
        raise Fault(EXIT_INPUT, "fit needs runs at two batch sizes or more")
    (s_min, e_min), cov, residuals = fit_minima(batch, steps)

    print(f"To a {kind} loss of {target:.6g}{'' if args.target else ', the lowest that all runs reach'}:")
    print(f"{'batch':>8} {'steps S':>10} {'examples E':>12} {'S of the fit':>13} {'residual':>9}  run")
    for i in np.argsort(batch):
        print(f"{batch[i]:8.0f} {steps[i]:10.1f} {batch[i] * steps[i]:12.0f} {steps[i] / np.exp(residuals[i]):13.1f} "
              f"{100 * np.expm1(residuals[i]):+8.2f}%  {runs[i].path}")
    print("Least squares of log S for (S / S_min - 1)(E / E_min - 1) = 1 (McCandlish et al. 2018, eq. 2.11):")
    for name, value, variance, words in (
            ("S_min ", s_min, cov[0, 0], "steps: no batch, however large, needs fewer"),
            ("E_min ", e_min, cov[1, 1], "examples: no batch, however small, needs fewer"),
            ("B_crit", e_min / s_min, cov[0, 0] + cov[1, 1] - 2 * cov[0, 1],
             "examples: this batch needs twice S_min steps and twice E_min examples")):
        print(f"{name} = {value:.6g}{f' +- {100 * math.sqrt(variance):.2g}%' if math.isfinite(variance) else ''} {words}")
    if len(runs) == 2:
        print("Two runs determine the two unknowns and leave no residual: add a third batch size to judge the fit.")
    if not batch.min() <= e_min / s_min <= batch.max():
        print("B_crit lies outside these batches: an extrapolation; add a run on its other side.")
    for run in runs:
        if (schedule := run.info.get("options", {}).get("lr_schedule")) not in (None, "constant"):
            print(f"warning: {run.path}: --lr-schedule {schedule}: the runs reach the loss at different points of their decay, "
                  "and curves of different batches may cross (arXiv 2601.05034). Use constant, or several --target before it.")
    print("Each run should use the learning rate that suits its batch.")
    if args.plot:
        import report_plots
        write_whole(args.plot, report_plots.svg_of(report_plots.draw_knee(batch, steps, s_min, e_min), "E against S"))


def factors(text):
    values = [finite_number(word) for word in text.split(",")]
    if not all(0 < k <= 1024 for k in values):
        raise ValueError
    return values


def tokens(text):
    value = finite_number(text)
    if not 1 <= value <= 1e15 or value != int(value):
        raise ValueError
    return int(value)


def main():
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="fit|probe")
    one = commands.add_parser("fit", help="S_min, E_min and B_crit from runs at several constant batches")
    one.add_argument("runs", nargs="+", metavar="RUN")
    one.add_argument("--target", type=finite_number, help="loss to reach (default: the lowest that all runs reach)")
    one.add_argument("--plot", metavar="FILE", help="also draw the knee, E against S, as SVG")
    one.set_defaults(act=fit)
    two = commands.add_parser("probe", help="branches from a checkpoint at several batches, at equal tokens")
    two.add_argument("origin", metavar="CHECKPOINT", help="RUN/step_NNNNNNNN, or RUN for its newest")
    two.add_argument("--factors", type=factors, default="1,2,4,8", metavar="K,K...",
                       help="batches to try, as multiples of the run's there (default: %(default)s)")
    two.add_argument("--tokens", type=tokens, help="of each branch, rounded up to whole steps of all (default: 5%% of "
                       "the checkpoint's, at least 32 steps of the largest batch)")
    two.add_argument("--tolerance", type=finite_number, default=0.01, help="loss in nats per token above the smallest batch's "
                       "that does no harm (default: %(default)s)")
    two.add_argument("--program", help="the trainer (default: the run's own, from its directory)")
    two.add_argument("--launch", default="", metavar="WORDS", help="words before the trainer, as 'mpirun -np 8'")
    two.add_argument("--out", help="directory for the branches (default: RUN/probe_NNNNNNNN)")
    two.set_defaults(act=probe)
    args = parser.parse_args()
    args.act(args)


if __name__ == "__main__":
    run_main(main, "numpy scipy matplotlib")
