"""Compares what an engine computed with the oracle: check_engine.py DIR, with the files of dev/test/run/dump_steps.c.

Prints a line a check, as dev/test/test.h does, and exits with 1 where one failed. The error of a tensor is
|a - b| / |b| in the Euclidean norm, b the oracle's; that of a list of numbers the largest of |a - b| / |b|.
"""

import sys
import time
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

import gpt2

TOLERANCE = 1e-5  # fp32 engines
ZERO_TOLERANCE = 1e-6  # of a gradient that is exactly zero, relative to its tensor's norm
SELF_TOLERANCE = 1e-12  # of the oracle's own identities


class Mismatch(Exception):
    pass


class Dump:
    """One case: the engine's tensors and settings, and the oracle's answers to the same."""

    def __init__(self, path):
        with safe_open(path, "numpy") as f:
            self.tensors = {name: f.get_tensor(name) for name in f.keys()}
            self.meta = {key: float(value) for key, value in f.metadata().items()}
        self.heads = int(self.meta["heads"])
        self.params = {name: p.astype(np.float64) for name, p in self.group("param0").items()}
        self.rows = self.get("tokens")  # (steps, B, T + 1)
        self.T = self.rows.shape[2] - 1
        shape = (int(self.meta["steps"]), int(self.meta["batch"]), int(self.meta["seq_len"]) + 1)
        if self.rows.shape != shape or not self.params:
            raise Mismatch(f"tokens are {self.rows.shape}, the settings say {shape}")
        separator = int(self.meta["separator"]) if self.meta["separator"] >= 0 else None
        self.examples = gpt2.examples_fn(self.heads, self.meta["label_smoothing"], separator)
        (losses, nlls), self.gradients, self.head_share = self.examples(self.params, self.rows[0], self.factors_at(1))
        self.losses, self.nlls = np.asarray(losses), np.asarray(nlls)
        self.eval_losses = self.nlls  # nothing drops in an evaluation
        if self.meta["dropout"]:
            loss = lambda params, row: gpt2.tied_loss(params, row, self.heads, separator=separator)[1]
            self.eval_losses = np.asarray(gpt2.jax.jit(gpt2.jax.vmap(loss, (None, 0)))(self.params, self.rows[0]))
        self.gradients = {name: np.asarray(g) for name, g in self.gradients.items()}
        self.head_share = np.asarray(self.head_share)

    def factors_at(self, step):
        """Dropout's factors of the examples of step 1, 2, ..., which are numbered through."""
        if not self.meta["dropout"]:
            return None
        B = self.rows.shape[1]
        first = int(self.meta["first_example"]) + (step - 1) * B
        layers, C = int(self.meta["layers"]), int(self.meta["channels"])
        seed = int(self.meta["seed"])
        return gpt2.mask_factors(self.meta["dropout"], seed, first, B, self.T, C, layers, self.heads)

    def get(self, name):
        if name not in self.tensors:
            raise Mismatch(f"{name} is missing")
        return self.tensors[name]

    def group(self, prefix):
        return {name[len(prefix) + 1 :]: t for name, t in self.tensors.items() if name.startswith(prefix + "/")}

    def zero_part(self, name):
        """Where a tensor's gradient is exactly zero. A constant added to every key shifts a row of scores, which the
        softmax does not see; and with one token there is nothing to attend to, so queries and keys do not matter."""
        zero = np.zeros(self.params[name].shape, dtype=bool)
        C = zero.shape[-1] // 3
        if name.endswith("attn.c_attn.bias"):
            zero[C : 2 * C] = True
        if ".attn.c_attn." in name and self.T == 1:
            zero[..., : 2 * C] = True
        return zero


def worst_of(errors):
    """Raises unless every (name, error) is within the tolerance; NaN is not. Returns the worst."""
    name, error = max(errors, key=lambda item: (np.isnan(item[1]), item[1]))
    if not error <= TOLERANCE:
        raise Mismatch(f"{name}: relative error {error:.3g}, more than {TOLERANCE:g}")
    return name, error


def numbers_error(a, b):
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a.shape != b.shape:
        raise Mismatch(f"shape {a.shape}, want {b.shape}")
    return float(np.max(np.abs(a - b) / np.abs(b)))


def tensor_error(name, a, b, keep=None):
    if a.shape != b.shape:
        raise Mismatch(f"{name}: shape {a.shape}, want {b.shape}")
    difference, b = a.astype(np.float64) - b, np.asarray(b)
    if keep is not None:
        difference, b = difference[keep], b[keep]
    return float(np.linalg.norm(difference.ravel()) / np.linalg.norm(b.ravel()))


def check_cross_term(dump):
    """The oracle with itself: |E + U|^2 = |E|^2 + |U|^2 + 2 <E, U> for the tied tensor, the cross term large enough
    to be missed."""
    g, U = dump.gradients[gpt2.WTE], dump.head_share
    E = g - U
    cross = (E * U).reshape(len(g), -1).sum(axis=1)
    parts = gpt2.square(E) + gpt2.square(U) + 2 * cross
    error = numbers_error(parts, gpt2.square(g))
    share = np.max(np.abs(2 * cross) / gpt2.square(g))
    if not error <= SELF_TOLERANCE:
        raise Mismatch(f"the parts differ from the whole by {error:.3g}")
    if not share > 100 * TOLERANCE:
        raise Mismatch(f"a cross term of {share:.3g} of the whole would not be missed")
    return f"2<E,U> up to {share:.2g} of the whole", error


def check_loss(dump):
    wanted = {"loss": dump.losses, "nll": dump.nlls, "loss_eval": dump.eval_losses}
    return worst_of([(name, numbers_error(dump.get(name), want)) for name, want in wanted.items()])


def check_grad(dump):
    errors = []
    for name, g in dump.gradients.items():
        got, want, zero = dump.get(f"grad/{name}"), g.mean(axis=0), dump.zero_part(name)
        errors.append((name, tensor_error(name, got, want, ~zero)))
        noise = np.linalg.norm(got[zero]) / np.linalg.norm(want)
        if not noise <= ZERO_TOLERANCE:
            raise Mismatch(f"{name}: what must be zero is {noise:.3g} of the gradient")
    return worst_of(errors)


def check_tensors(dump, kind, want):
    """want: of the examples' gradients (B, ...) of a tensor."""
    return worst_of([(name, numbers_error(dump.get(f"{kind}/{name}"), want(g))) for name, g in dump.gradients.items()])


def check_example_sq(dump):
    return check_tensors(dump, "example_sq", gpt2.square)


def check_example_sq_sum(dump):
    return check_tensors(dump, "example_sq_sum", lambda g: gpt2.square(g).sum())


def check_grad_sq(dump):
    """|sum over b of g_b|^2 as the engine reports it."""
    return check_tensors(dump, "grad_sq", lambda g: np.sum(g.sum(axis=0) ** 2))


def check_example_sq_ln(dump):
    """Sums of the LayerNorm backward alone: in this mode the other tensors are not measured."""
    errors = []
    for name, g in dump.gradients.items():
        got = dump.get(f"example_sq_ln/{name}")
        if ".ln_" in f".{name}":
            errors.append((name, numbers_error(got, gpt2.square(g).sum())))
        elif not np.isnan(got):
            raise Mismatch(f"{name}: {got:g}, want NaN")
    return worst_of(errors)


def check_training(dump):
    """Ten steps of the optimizer: the losses on the way and the parameters at the end."""
    losses, params = gpt2.train(dump.params, dump.rows, dump.heads, dump.meta, dump.examples, dump.factors_at)
    errors = [("losses", numbers_error(dump.get("losses"), losses))]
    for name, want in params.items():
        errors.append((name, tensor_error(name, dump.get(f"paramN/{name}"), want, ~dump.zero_part(name))))
    moved = min(tensor_error(name, params[name], dump.params[name]) for name in params)
    if not moved > 100 * TOLERANCE:
        raise Mismatch(f"a tensor moved by {moved:.3g} only: the check would not see a missing update")
    return worst_of(errors)


def check_padding(dump):
    """Elements of the flat arrays that belong to no tensor stay zero."""
    most = float(dump.get("padding_max"))
    if not most == 0:
        raise Mismatch(f"padding holds {most:g}")
    return "largest", most


CHECKS = (check_cross_term, check_loss, check_grad, check_grad_sq, check_example_sq, check_example_sq_sum)
CHECKS += (check_example_sq_ln, check_training, check_padding)


def attempt(what, function, argument):
    """Prints the line of a check. Returns what it returned; None where it failed."""
    start = time.perf_counter()
    try:
        result = function(argument)
    except (Mismatch, SafetensorError, KeyError, ValueError) as why:
        print(f"FAIL oracle/{what} {time.perf_counter() - start:.2f}s: {why!r}", flush=True)
        return None
    worst = f"  worst: {result[0]} {result[1]:.2g}\n" if isinstance(result, tuple) else ""
    print(f"{worst}PASS oracle/{what} {time.perf_counter() - start:.2f}s", flush=True)
    return result


def check_file(path):
    """Whether every check of one dump passed."""
    dump = attempt(f"{path.stem}/dump", Dump, path)
    return dump is not None and None not in [
        attempt(f"{path.stem}/{check.__name__.removeprefix('check_')}", check, dump) for check in CHECKS
    ]


def main(directory):
    paths = sorted(Path(directory).glob("*.safetensors"))
    if not paths:
        print(f"FAIL oracle/dumps 0.00s: {directory} has no *.safetensors")
    return 0 if paths and all([check_file(path) for path in paths]) else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
