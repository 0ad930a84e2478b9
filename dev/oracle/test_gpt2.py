"""Second opinions on the parts of gpt2.py that nothing but the engine checks. transformers checks the forward pass
(check_transformers.py), test_math.c AdamW, the schedules and Philox by hand."""

import numpy as np

import gpt2
from harness import attempt, finish


def close(a, b, tolerance, what):
    error = np.max(np.abs(np.asarray(a) - np.asarray(b)) / (np.abs(b) + 1e-300))
    assert error <= tolerance, f"{what}: relative error {error:.3g}, more than {tolerance:g}"


def test_lamb():
    """AdamW's first step is the gradient's sign. LAMB scales it to the length of the weights, unless that is 0."""
    hyper = dict(beta1=0.9, beta2=0.99, eps=1e-12, weight_decay=0.0)
    p, g = np.array([[3.0, 4.0], [0.0, 12.0]]), np.array([[0.1, -0.2], [0.3, -0.4]])
    after, _ = gpt2.lamb("h.0.mlp.c_fc.weight", p, g, None, 1, 0.01, hyper)
    close(after, p - 0.01 * 13 / 2 * np.sign(g), 1e-9, "the length of p is 13, of the sign 2")
    after, _ = gpt2.lamb("h.0.mlp.c_fc.bias", 0 * p, g, None, 1, 0.01, hyper)
    close(after, -0.01 * np.sign(g), 1e-9, "from 0")
    after, _ = gpt2.lamb("wte.weight", p, 0 * g, None, 1, 0.01, hyper | dict(weight_decay=0.1))
    close(after + 1e-9, p * (1 - 0.01) + 1e-9, 1e-9, "decay alone: the ratio takes its size away")


def test_muon():
    """Singular vectors stay and singular values become about 1, of queries, keys and values apart. AdamW updates other tensors."""
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


if __name__ == "__main__":
    attempt("gpt2/lamb", test_lamb)
    attempt("gpt2/muon", test_muon)
    finish()
