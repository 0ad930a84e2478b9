"""Checks gpt2.py's newton_schulz. check_engine.py compares the rest of gpt2.py with the engine, and
check_transformers.py the engine with transformers. test_optimizers.c checks AdamW; test_math.c compares schedules with
rates computed by hand, and Philox with published answers."""

import numpy as np

import gpt2
from harness import attempt, finish


def test_newton_schulz():
    """Singular vectors do not change; singular values become about 1."""
    rng = np.random.default_rng(4)
    for shape in ((6, 6), (6, 15), (15, 6)):
        U, S, V = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
        rest = U.T @ gpt2.newton_schulz(U * S @ V) @ V.T
        assert np.abs(rest - np.diag(np.diag(rest))).max() < 1e-12, "other singular vectors"
        assert 0.6 < np.diag(rest)[S > 0.02 * S.max()].min() and np.diag(rest).max() < 1.3, np.diag(rest)


if __name__ == "__main__":
    attempt("gpt2/newton_schulz", test_newton_schulz)
    finish()
