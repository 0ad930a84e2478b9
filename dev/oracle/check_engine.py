"""Compares an engine's results with the oracle: check_engine.py DIR, with the files of dev/test/run/dump_steps.c.

a is the engine's result, b is the oracle's. The error of a tensor is |a - b| / |b| in the Euclidean norm. The error of
a list of numbers is the largest |a - b| / |b|.
"""

import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open

import gpt2
from harness import Mismatch, attempt, finish

TOLERANCE = 1e-5  # fp32 engines
ZERO_TOLERANCE = 1e-6  # norm of the elements that must be exactly zero, relative to the gradient's norm


class Dump:
    """The engine's tensors and settings, and the oracle's results for them."""

    def __init__(self, path):
        with safe_open(path, "numpy") as f:
            self.tensors = {name: f.get_tensor(name) for name in f.keys()}
            self.meta = {key: float(value) for key, value in f.metadata().items()}
        self.heads, self.rows = int(self.meta["heads"]), self.tensors["tokens"]  # (steps, B, T + 1)
        self.params = {name.removeprefix("param0/"): p.astype(np.float64) for name, p in self.tensors.items()
                       if name.startswith("param0/")}
        shape = (int(self.meta["steps"]), int(self.meta["batch"]), int(self.meta["seq_len"]) + 1)
        if self.rows.shape != shape or not self.params:
            raise Mismatch(f"tokens are {self.rows.shape}, the settings say {shape}")
        separator = int(self.meta["separator"]) if self.meta["separator"] >= 0 else None
        exponents = self.exponents()
        self.examples = gpt2.examples_fn(self.heads, self.meta["label_smoothing"], separator, exponents)
        (losses, nlls), gradients = self.examples(self.params, self.rows[0], self.factors_at(1))
        self.losses = {"loss": losses, "nll": nlls, "loss_eval": nlls}
        if self.meta["dropout"] or exponents:  # an evaluation neither drops nor rounds
            self.losses["loss_eval"] = gpt2.losses_fn(self.params, self.heads, separator)(self.rows[0]).mean(axis=1)
        self.gradients = {name: np.asarray(g) for name, g in gradients.items()}

    def exponents(self):
        """Returns a pair per linear layer: its name, and fp8_linear's k (the exponents of x, dy and W; whether the
        weight gradient rounds x and dy; channels with low parts: one of 8 of attn.c_attn's x, of 64 of mlp.c_proj's);
        then the head's, the exponents of its input and of wte. None: not fp8."""
        names, k = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"), self.tensors["exponents"]
        if np.all(k == -128):
            return None
        dw, C = self.meta["fp8_dw"] > 0, int(self.meta["channels"])
        ln1, gelu, channel_0 = 12, 12 + 256, -127  # entries of a block: 12 exponents, channels of ln1, channels of gelu
        low = [[[8 * g + (int(of[ln1 + g]) - channel_0) % 8 for g in range(C // 8)], [], [],
                [64 * g + (int(of[gelu + g]) - channel_0) % 64 for g in range(4 * C // 64)]] for of in k]
        head = ("head", (int(k[-1, 2]), int(k[-1, 10])))
        return tuple((f"h.{l}.{name}", (int(k[l, i]), int(k[l, 7 - i]), int(k[l, 8 + i]), dw, tuple(low[l][i])))
                     for l in range(len(k) - 1) for i, name in enumerate(names)) + (head,)

    def factors_at(self, step):
        """Returns dropout's factors of a step's B examples. Step 1 begins at first_example."""
        if not self.meta["dropout"]:
            return None
        B, T = self.rows.shape[1], self.rows.shape[2] - 1
        first = int(self.meta["first_example"]) + (step - 1) * B
        layers, C = int(self.meta["layers"]), int(self.meta["channels"])
        return gpt2.mask_factors(self.meta["dropout"], int(self.meta["seed"]), first, B, T, C, layers, self.heads)

    def zero_part(self, name):
        """Returns where a tensor's gradient is exactly zero. A constant added to every key shifts a row of scores, which
        does not change the softmax. With a single token, queries and keys have no effect."""
        zero = np.zeros(self.params[name].shape, dtype=bool)
        C = zero.shape[-1] // 3
        if name.endswith("attn.c_attn.bias"):
            zero[C : 2 * C] = True
        if ".attn.c_attn." in name and self.rows.shape[2] == 2:
            zero[..., : 2 * C] = True
        return zero


def differences(a, b):
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b)
    if a.shape != b.shape:
        raise Mismatch(f"shape {a.shape}, want {b.shape}")
    return a - b, b


def numbers_error(a, b):
    difference, b = differences(a, b)
    return np.max(np.abs(difference) / np.abs(b))


def tensor_error(a, b, part=...):
    difference, b = differences(a, b)
    return np.linalg.norm(difference[part].ravel()) / np.linalg.norm(b[part].ravel())


def sources_errors(dump):
    """Returns the errors of row, source_gram, source_numbers and source_cosine. The oracle computes them from all pairs
    of rows; the engine sums each source's gradients first. Averages decay by 2^(-1/4) per step. G2 is a small
    difference, so its error is relative to the source's mean |g_b|^2."""
    K, B = dump.rows.shape[:2]
    p = np.array([dump.meta["share_0"], 1 - dump.meta["share_0"]])
    squares, pairs, errors = np.zeros((K, 2)), np.zeros((K, 2, 2)), {}
    for k in range(K):
        g = dump.gradients if k == 0 else dump.examples(dump.params, dump.rows[k], dump.factors_at(k + 1))[1]
        g = np.concatenate([np.reshape(x, (B, -1)) for name, x in g.items() if ".ln_" in f".{name}"], axis=1)
        of = (np.arange(B) + dump.meta["first_example"] + k * B) % 5 >= 2
        products, member = g @ g.T, np.stack([~of, of]).astype(np.float64)
        squares[k] = member @ np.diag(products)
        pairs[k] = member @ (products - np.diag(np.diag(products))) @ member.T
        if k == 0:
            errors["row"] = numbers_error(dump.tensors["row"][:, :2], np.stack([np.diag(products), dump.losses["nll"]], axis=1))
            errors["source_gram"] = tensor_error(dump.tensors["source_gram"], member @ products @ member.T)
        if B == 1 or dump.rows.shape[2] > 100:  # one row has no pairs; long rows are slow
            return errors
    weights = 2.0 ** (-np.arange(K) / 4)  # dump_steps.c measures step 1 last, so it weighs most
    squares, pairs = (np.average(x, axis=0, weights=weights) for x in (squares, pairs))
    inner, mean = pairs / np.outer(p, p) / (B * (B - 1)), squares / p / B
    wanted = np.stack([squares / squares.sum(), np.diag(inner) / mean, 1 - np.diag(inner) / mean], axis=1)
    errors["source_numbers"] = np.max(np.abs(dump.tensors["source_numbers"] / np.stack([p / p, mean, mean], axis=1) - wanted))
    if B == 4 or not np.isnan(dump.tensors["source_cosine"]):  # with fewer rows the cosine may be insignificant
        errors["source_cosine"] = abs(dump.tensors["source_cosine"] - inner[0, 1] / np.sqrt(inner[0, 0] * inner[1, 1]))
    return errors


def check_case(path):
    dump = Dump(path)
    errors = {name: numbers_error(dump.tensors[name], want) for name, want in dump.losses.items()}
    for name, g in dump.gradients.items():  # (B, ...)
        squares = gpt2.square(g)
        wanted = {"example_sq": squares, "example_sq_sum": squares.sum(), "grad_sq": np.sum(g.sum(axis=0) ** 2)}
        if ".ln_" in f".{name}":
            wanted["example_sq_ln"] = squares.sum()
        elif not np.isnan(dump.tensors[f"example_sq_ln/{name}"]):
            raise Mismatch(f"example_sq_ln/{name}: a number; this mode measures the LayerNorms only")
        for kind, want in wanted.items():
            errors[f"{kind}/{name}"] = numbers_error(dump.tensors[f"{kind}/{name}"], want)

        got, want, zero = dump.tensors[f"grad/{name}"], g.mean(axis=0), dump.zero_part(name)
        errors[f"grad/{name}"] = tensor_error(got, want, ~zero)
        if not np.linalg.norm(got[zero]) <= ZERO_TOLERANCE * np.linalg.norm(want):
            raise Mismatch(f"grad/{name}: {np.linalg.norm(got[zero]):.3g} where it must be zero")

    errors |= sources_errors(dump)
    losses, params = gpt2.train(dump.params, dump.rows, dump.heads, dump.meta, dump.examples, dump.factors_at)
    errors["losses"] = numbers_error(dump.tensors["losses"], losses)
    for name, want in params.items():
        errors[f"paramN/{name}"] = tensor_error(dump.tensors[f"paramN/{name}"], want, ~dump.zero_part(name))
        if not tensor_error(want, dump.params[name]) > 100 * TOLERANCE:
            raise Mismatch(f"{name}: hardly moves, so this would not see a missing update")
    if not dump.tensors["padding_max"] == 0:  # elements that belong to no tensor
        raise Mismatch(f"padding holds {dump.tensors['padding_max']:g}")

    name, error = max(errors.items(), key=lambda item: (np.isnan(item[1]), item[1]))
    if not error <= TOLERANCE:
        raise Mismatch(f"{name}: relative error {error:.3g}, more than {TOLERANCE:g}")
    return f"{len(errors)} comparisons; worst: {name} {error:.2g}"


if __name__ == "__main__":
    paths = sorted(Path(sys.argv[1]).glob("*.safetensors"))
    if not paths:
        sys.exit(f"FAIL oracle/dumps 0.00s: {sys.argv[1]} has no *.safetensors")
    for path in paths:
        attempt(f"oracle/{path.stem}", check_case, path)
    finish()
