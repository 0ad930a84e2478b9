"""Second opinions on the parts of gpt2.py that nothing but the engine checks, and proof that check_engine.py finds faults.

Transformers checks the forward pass (check_transformers.py), test_math.c AdamW, the schedules and Philox by hand.

test_gpt2.py prints a line a test, as dev/test/test.h does, and exits with 1 where one failed.
"""

import contextlib
import io
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import check_engine
import gpt2

SHAPE = dict(layers=2, heads=2, channels=8, vocab=11, context=9, seq_len=7, batch=3, micro_batch=2, steps=4)
SMOOTHING = 0.2
HYPER = dict(
    optimizer=0, momentum=0.9, adamw_lr_factor=1, label_smoothing=SMOOTHING, lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8,
    weight_decay=0.1, grad_clip=1.0, seed=1, dropout=0.0, separator=-1
)
STEP_TOKENS = SHAPE["batch"] * SHAPE["seq_len"]
HYPER |= dict(warmup_tokens=1.5 * STEP_TOKENS, train_tokens=3 * STEP_TOKENS, final_frac=0.1)


def random_model(rng):  # exact in a dump
    params = gpt2.random_params(rng, SHAPE["layers"], SHAPE["channels"], SHAPE["vocab"], SHAPE["context"])
    return {name: p.astype(np.float64) for name, p in params.items()}


def random_rows(rng, steps):
    return rng.integers(0, SHAPE["vocab"], (steps, SHAPE["batch"], SHAPE["seq_len"] + 1)).astype(np.int32)


# ----------------------------------------------------------------------------------------------------------------------
# The tests


def close(a, b, tolerance, what):
    error = np.max(np.abs(np.asarray(a) - np.asarray(b)) / (np.abs(b) + 1e-300))
    assert error <= tolerance, f"{what}: relative error {error:.3g}, more than {tolerance:g}"


def test_lamb():
    """AdamW's first step is the sign. Its length becomes that of the weights; weights of length 0 take it as it is."""
    hyper = dict(beta1=0.9, beta2=0.99, eps=1e-12, weight_decay=0.0)
    p, g = np.array([[3.0, 4.0], [0.0, 12.0]]), np.array([[0.1, -0.2], [0.3, -0.4]])
    after, _ = gpt2.lamb("h.0.mlp.c_fc.weight", p, g, None, 1, 0.01, hyper)
    close(after, p - 0.01 * 13 / 2 * np.sign(g), 1e-9, "the length of p is 13, of the sign 2")
    after, _ = gpt2.lamb("h.0.mlp.c_fc.bias", 0 * p, g, None, 1, 0.01, hyper)
    close(after, -0.01 * np.sign(g), 1e-9, "from 0")
    after, _ = gpt2.lamb("wte.weight", p, 0 * g, None, 1, 0.01, hyper | dict(weight_decay=0.1))
    close(after + 1e-9, p * (1 - 0.01) + 1e-9, 1e-9, "decay alone: the ratio takes its size away")


def test_muon():
    """Singular vectors stay, singular values go to about 1; queries, keys and values each; what does not decay is AdamW's."""
    rng = np.random.default_rng(4)
    hyper = dict(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, momentum=0.9, adamw_lr_factor=1)
    for shape in ((6, 6), (6, 15), (15, 6)):
        U, S, V = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
        rest = U.T @ gpt2.newton_schulz(U * S @ V) @ V.T
        assert np.abs(rest - np.diag(np.diag(rest))).max() < 1e-12, "other singular vectors"
        assert 0.6 < np.diag(rest)[S > 0.02 * S.max()].min() and np.diag(rest).max() < 1.3, np.diag(rest)
    p, g = rng.normal(size=(2, 4, 12))
    after, buffer = gpt2.muon("h.0.attn.c_attn.weight", p, g, None, 1, 0.01, hyper)
    for k in (slice(0, 4), slice(4, 8), slice(8, 12)):
        want = p[:, k] - 0.01 * (0.2 * 2 * gpt2.newton_schulz(0.19 * g[:, k]) + 0.1 * p[:, k])
        close(after[:, k], want, 1e-12, "a map of attention")
    close(buffer, 0.1 * g, 1e-12, "momentum")
    g2 = rng.normal(size=(4, 12))
    after, _ = gpt2.muon("h.0.mlp.c_fc.weight", p, g2, buffer, 2, 0.01, hyper)
    want = gpt2.newton_schulz(0.1 * g2 + 0.9 * (0.9 * 0.1 * g + 0.1 * g2))
    close(after, p - 0.01 * (0.2 * np.sqrt(12) * want + 0.1 * p), 1e-12, "Nesterov")
    same = gpt2.adamw("wte.weight", p, g, None, 1, 0.01, hyper)[0]
    close(gpt2.muon("wte.weight", p, g, None, 1, 0.01, hyper)[0], same, 0, "the embedding")


def oracle_dump():
    """The dump of a perfect fp32 engine."""
    rng = np.random.default_rng(3)
    params, rows = random_model(rng), random_rows(rng, SHAPE["steps"])
    (losses, nlls), gradients, _ = gpt2.examples_fn(SHAPE["heads"], SMOOTHING)(params, rows[0])
    step_losses, after = gpt2.train(params, rows, SHAPE["heads"], HYPER, gpt2.examples_fn(SHAPE["heads"], SMOOTHING))
    losses, nlls = np.asarray(losses), np.asarray(nlls)
    dump = {"tokens": rows, "loss": losses, "nll": nlls, "loss_eval": nlls.copy(), "losses": step_losses}
    dump["padding_max"] = np.array(0.0)
    for name, g in gradients.items():
        g = np.asarray(g)
        dump[f"param0/{name}"] = np.float32(params[name])
        dump[f"paramN/{name}"] = np.float32(after[name])
        dump[f"grad/{name}"] = np.float32(g.mean(axis=0))
        dump[f"grad_sq/{name}"] = np.array(np.sum(g.sum(axis=0) ** 2))
        dump[f"example_sq/{name}"] = np.asarray(gpt2.square(g))
        dump[f"example_sq_sum/{name}"] = np.array(gpt2.square(g).sum())
        measured = ".ln_" in f".{name}"
        dump[f"example_sq_ln/{name}"] = dump[f"example_sq_sum/{name}"] if measured else np.array(np.nan)
    return dump


def failures(dump, directory, settings=None):
    """The checks that fail on a dump, by name."""
    path = Path(directory) / "case.safetensors"
    save_file(dump, path, {key: repr(value) for key, value in (SHAPE | HYPER | (settings or {})).items()})
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = check_engine.main(directory)
    lines = [line.split() for line in out.getvalue().splitlines()]
    failed = [line[1].removeprefix("oracle/case/") for line in lines if line[0] == "FAIL"]
    assert code == (1 if failed else 0), f"exit code {code} with {failed}"
    return failed


def test_checker():
    """check_engine.py passes the perfect dump, and fails every wrong one, in the right place."""
    good = oracle_dump()
    with tempfile.TemporaryDirectory() as directory:
        assert failures(good, directory) == [], failures(good, directory)
        places = {
            "loss": "loss", "nll": "loss", "loss_eval": "loss", "losses": "training", "padding_max": "padding",
            "grad/h.1.mlp.c_fc.weight": "grad", "grad_sq/wpe.weight": "grad_sq",
            "example_sq/wte.weight": "example_sq", "example_sq_sum/ln_f.bias": "example_sq_sum",
            "example_sq_ln/h.0.ln_1.weight": "example_sq_ln", "paramN/h.0.attn.c_attn.bias": "training",
        }
        for name, check in places.items():
            off, nan = good[name].copy(), good[name].copy()
            off.flat[-1] = off.flat[-1] + 3e-5 * np.linalg.norm(off) + (1e-9 if name == "padding_max" else 0)
            nan.flat[0] = np.nan
            missing = {key: value for key, value in good.items() if key != name}
            for what, dump in (("off", good | {name: off}), ("NaN", good | {name: nan}), ("missing", missing)):
                assert failures(dump, directory) == [check], f"{name} {what}: {failures(dump, directory)}"
        zero = {"example_sq_ln/wte.weight": np.array(0.0)}
        assert failures(good | zero, directory) == ["example_sq_ln"], "zero for what was not measured"
        key_bias = good["grad/h.0.attn.c_attn.bias"].copy()
        key_bias[8] += 1e-3
        assert failures(good | {"grad/h.0.attn.c_attn.bias": key_bias}, directory) == ["grad"], "key bias"
        for key, value in dict(lr=4e-3, weight_decay=0.0, grad_clip=0.0, warmup_tokens=1, beta1=0.8).items():
            assert failures(good, directory, {key: value}) == ["training"], f"another {key}"
        assert failures(good, directory, {"heads": 4}) != [], "another number of heads"
        assert failures(good, directory, {"dropout": 0.01, "first_example": 0}) != [], "dropout"
        separator = int(good["tokens"][0, 0, 3])
        assert failures(good, directory, {"separator": separator}) != [], "documents"
        assert failures({"loss": good["loss"]}, directory) == ["dump"], "no parameters"
        (Path(directory) / "case.safetensors").write_bytes(b"")
        with contextlib.redirect_stdout(io.StringIO()):
            assert check_engine.main(directory) == 1, "an empty file passes"
    with tempfile.TemporaryDirectory() as empty, contextlib.redirect_stdout(io.StringIO()):
        assert check_engine.main(empty) == 1, "no dumps at all pass"


def main():
    failed = False
    for test in (test_lamb, test_muon, test_checker):
        start = time.perf_counter()
        try:
            test()
            verdict, why = "PASS", ""
        except AssertionError as error:
            verdict, why, failed = "FAIL", f": {error}", True
        print(f"{verdict} gpt2/{test.__name__} {time.perf_counter() - start:.2f}s{why}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
