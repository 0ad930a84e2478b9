#!/usr/bin/env python3
"""Measures, at checkpoints of runs, the noise scale in several metrics, and how well the optimizer's direction follows the gradient.

    metric_study.py RUN/step_NNNNNNNN ... --train 'SHARDS' [--out FILE]   PyTorch and safetensors; 124M parameters need a GPU
    metric_study.py check                                                 the formulas against closed forms; numpy

G, Sigma: mean and covariance of a row's gradient. g_B: mean gradient of B rows. u: a direction. Batches and scales are in rows. +-
is a jackknife over 16 blocks. The gradients belong to the examples that the run would read next.
  B_*       tr(P Sigma) / G'PG. P = 1 (McCandlish et al. 2018, arXiv 1812.06162); `weighted`: P = 1 / (sqrt v + eps).
  e(B)      A step -eta u changes a quadratic loss by -eta <G, u> + eta^2 u'Hu / 2. The best eta gives -(E<G, u>)^2 / (2 E u'Hu). For
            H = h I this is -|G|^2 / 2h times the squared cosine e(B) = (E<G, u(g_B)>)^2 / (|G|^2 E|u(g_B)|^2).
  B_u_*     The batch at which e is half its limit; fits 1 / e = (1 + B_u / B) / limit. The fit is exact, with B_u = tr Sigma / |G|^2,
            for u = g; also for sign and U V' if noise and elements of G are Gaussian with one variance each.
  B_rho_*   B (1 - rho) / rho at the run's batch, rho = E<f_B, u(g_B)> / E<g_B, u(g_B)>, f_B from other rows. If u = Pg: tr(P Sigma) / G'PG.
  B_dual_*  (E|noise of a row| / |G|)^2 in the norm |x| = <x, u(x)>: sum of absolute values for sign, nuclear norm for Muon (dual
            norms as in Naganuma et al. 2026, arXiv 2602.03001). |G| is the limit of E<G, u> in the fit.
c = B_all / B_ln, c_u = B_u / B_ln and k_u = B_u / B_all, with B_u of `fresh` and the blocks' matrices.
Directions: `sign`; `spectral` (llmc/math/muon.h, blocks' matrices); `step`, the optimizer's next step; `fresh`, this step without
old momentum. `step` and `fresh` clip the gradient; AdamW's v includes this gradient."""

import argparse
import json
import math
import os
import sys

import numpy as np

BLOCKS = 16


def batches(groups):
    """Returns masks (batches, groups): batches of 1, 2, 4, ... groups within a block, then of 2, 4 and 8 successive blocks."""
    g, per = np.arange(groups), groups // BLOCKS
    small = [g // k == i for k in 2 ** np.arange(int(math.log2(per)) + 1) for i in range(groups // k)]
    return np.array(small + [(g // per - b) % BLOCKS < w for w in (2, 4, 8) for b in range(BLOCKS)])


def scale(K, keep):
    """Returns (tr Sigma / |G|^2 in groups, |G|^2) from inner products (groups, groups)."""
    K, n = K[np.ix_(keep, keep)], keep.sum()
    g2 = (K.sum() - np.trace(K)) / (n * (n - 1))
    return (np.trace(K) / n - g2) / g2, g2


def curve(M, Q, masks, keep):
    """Returns four arrays over batch sizes: size, E<G, u>, E<g, u>, E|u|^2. M (batches, groups): <u of batch, g of group>; Q: |u|^2."""
    sizes, found = masks.sum(1), []
    for k in np.unique(sizes):
        s = (sizes == k) & ~(masks & ~keep).any(1)
        other = keep & ~masks[s]
        found.append((k, ((M[s] * other).sum(1) / other.sum(1)).mean(), (M[s] * masks[s]).sum(1).mean() / k, Q[s].mean()))
    return np.array(found).T


def half_batch(B, e):
    """Returns (B_u, the limit of e), from a fit that minimises the relative errors of 1 / e."""
    a, b = np.linalg.lstsq(np.stack([e, e / B], 1), np.ones(len(B)), rcond=None)[0]
    return b / a, 1 / a


def jackknife(f, groups):
    """Returns {name: (value, standard error)}. f(mask of kept groups) returns {name: value}."""
    block = np.arange(groups) * BLOCKS // groups
    whole, parts = f(block >= 0), [f(block != b) for b in range(BLOCKS)]
    return {k: (x, math.sqrt((BLOCKS - 1) * np.var([p[k] for p in parts]))) for k, x in whole.items()}


def orthogonalize(x):
    """Orthogonalizes matrices (n, a, b) as llmc/math/muon.h does, with its scale; in bf16 on a GPU."""
    y = x if x.shape[1] <= x.shape[2] else x.mT
    y = y / (y.square().sum((1, 2), keepdim=True).sqrt() + 1e-7)
    y = y.bfloat16() if y.is_cuda else y
    for _ in range(5):
        A = y @ y.mT
        y = 3.4445 * y + (-4.7750 * A + 2.0315 * A @ A) @ y
    return (y if x.shape[1] <= x.shape[2] else y.mT).float() * 0.2 * math.sqrt(max(x.shape[1:]))


def directions(o, g, m, v, step, matrix):
    """Returns {name: u} of clipped gradients g (n, ...) and the moments of their tensor. matrix: Muon updates it."""
    u = {"sign": g.sign()} | ({"spectral": orthogonalize(g)} if matrix else {})
    if matrix and o["optimizer"] == "muon":
        mu = o["momentum"]
        return u | {"fresh": u["spectral"], "step": orthogonalize((1 - mu) * g + mu * (mu * m + (1 - mu) * g))}
    beta1, beta2, factor = o["beta1"], o["beta2"], o["adamw_lr_factor"] if o["optimizer"] == "muon" else 1.0
    root = ((beta2 * v + (1 - beta2) * g * g) / (1 - beta2 ** (step + 1))).sqrt() + o["eps"]
    return u | {"fresh": factor * g / root, "step": factor * (beta1 * m + (1 - beta1) * g) / (1 - beta1 ** (step + 1)) / root}


def measure(a, path):
    import torch
    import torch_block
    import torch_twin

    run = os.path.dirname(os.path.abspath(path))
    info, state = json.load(open(f"{run}/run.json")), json.load(open(f"{path}/training/state.json"))
    o, step, shape = info["options"], state["step"], argparse.Namespace(**info["model"])
    row = next(x for x in map(json.loads, open(f"{run}/metrics.jsonl")) if x.get("step") == step)
    r = a.rows or int(2 ** min(max(round(math.log2((row["gns_total"] or 1) / 16)), 0), 4))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch_block.GPT2(shape.layers, shape.heads, shape.channels, shape.vocab, shape.context).to(device)
    adam = torch.optim.AdamW(model.parameters())  # only holds the moments
    shape.vocab_size, shape.seq_len = shape.vocab, shape.context
    torch_twin.load_checkpoint(torch, shape, model, adam, path, step)
    tokens = torch_twin.Order(a.train, o["seq_len"], o["seed"]).shuffled(state["examples"], a.groups * r)
    tensors = dict(model.named_parameters())
    grads, losses = {n: torch.empty(a.groups, *p.shape, device=device) for n, p in tensors.items()}, []
    for i in range(a.groups):
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(torch.from_numpy(tokens[i * r : (i + 1) * r]).to(device))
        loss.backward()
        losses.append(loss.item())
        for n, p in tensors.items():
            grads[n][i] = p.grad

    masks, noise = batches(a.groups), np.zeros((BLOCKS, a.groups))
    for b in range(BLOCKS):  # (g_i - g_j) / sqrt 2 of two groups of every block: the noise of one group
        noise[b, b * a.groups // BLOCKS + np.arange(2)] = math.sqrt(0.5), -math.sqrt(0.5)
    W, gram, found = np.concatenate([masks / masks.sum(1, keepdims=True), noise]), {}, {}
    kinds = {n: {"all", "ln" if "ln" in n else "matrix" if n[:2] == "h." and p.dim() == 2 else "all"} for n, p in tensors.items()}

    def add(to, name, n, x):
        for kind in kinds[n]:
            to[name + kind] = to.get(name + kind, 0) + x.double().cpu().numpy()

    for n, D in grads.items():
        add(gram, "", n, D.flatten(1) @ D.flatten(1).T)
    norm = np.sqrt(np.einsum("sg,gh,sh->s", W, gram["all"], W))
    C = torch.tensor(W / np.maximum(1, norm / (o["grad_clip"] or math.inf))[:, None], dtype=torch.float32, device=device)
    for n, p in tensors.items():
        matrix, moments = "matrix" in kinds[n], (adam.state[p]["exp_avg"], adam.state[p]["exp_avg_sq"])
        size = p.shape[0] // (3 if "qkv" in n else 1) if matrix else max(1, 2**21 // p[0].numel())  # 2M elements at a time, or a matrix
        for D, m, v in zip(grads.pop(n).split(size, dim=1), *(x.split(size) for x in moments)):
            D = D.flatten(1)
            if not (matrix and o["optimizer"] == "muon"):
                P = 1 / ((v / (1 - o["beta2"] ** step)).sqrt() + o["eps"])
                add(gram, "weighted_", n, D * P.flatten() @ D.T)
            for name, u in directions(o, (C @ D).view(len(W), *m.shape), m, v, step, matrix).items():
                add(found, name + "_", n, torch.cat([u.flatten(1) @ D.T, u.flatten(1).square().sum(1, keepdim=True)], 1))

    found = {k: M for k, M in found.items() if k[-2:] != "ln" and k != "spectral_all"}
    near = int(np.clip(round(math.log2(state["batch"] / r)), 1, len(set(masks.sum(1))) - 2))

    def numbers(keep):
        scales = {k: scale(K, keep) for k, K in gram.items()}
        out = {"B_" + k: r * x for k, (x, _) in scales.items()}
        for name, M in found.items():
            B, A, own, Q = curve(M[: len(masks), :-1], M[: len(masks), -1], masks, keep)
            g2, B = scales[name.split("_")[1]][1], B * r
            e, rho = A**2 / Q / g2, A / own
            out[f"B_u_{name}"], limit = half_batch(B, e)
            out[f"B_rho_{name}"] = (B * (1 - rho) / rho)[near]
            if name[:4] in ("sign", "spec"):
                out[f"B_dual_{name}"] = r * (M[len(masks) :, :-1] * noise).sum(1).mean() ** 2 / (limit * g2 * Q[-1])
            out |= {f"cos_{name}": math.copysign(math.sqrt(e[near]), A[near])} | {f"e_{name}_{b:.0f}": x for b, x in zip(B, e)}
        u = out["B_u_fresh_matrix"]
        return out | {"c": out["B_all"] / out["B_ln"], "c_u": u / out["B_ln"], "k_u": u / out["B_all"]}

    pair = lambda x: [float(f"{y:.5g}") if math.isfinite(y) else None for y in x]
    head = {"path": path, "optimizer": o["optimizer"], "tokens": state["tokens"], "batch": state["batch"], "rows": r, "groups": a.groups,
            "loss": float(np.mean(losses)), "run_gns_ln": row["gns_ln"], "run_gns_total": row["gns_total"]}
    return head | {k: pair(x) for k, x in jackknife(numbers, a.groups).items()}


def check():
    """Measures Gaussian gradients with known G and Sigma, in float64. Returns how many measurements miss their closed form."""
    rng, masks, keep, bad = np.random.default_rng(1), batches(64), np.ones(64, bool), 0

    def compare(name, measured, exact, tolerance):
        nonlocal bad
        bad += not abs(measured / exact - 1) < tolerance
        print(f"{name}: {measured:.5g}, closed form {exact:.5g}")

    def run(g, u):
        flat = [x.reshape(len(x), -1) for x in (g, u(np.tensordot(masks / masks.sum(1, keepdims=True), g, 1)))]
        B, A, own, Q = curve(flat[1] @ flat[0].T, (flat[1] ** 2).sum(1), masks, keep)
        return B, A, own, A**2 / Q, Q

    n = 20000  # elements of very different signal and noise
    G, sigma = rng.normal(size=n) * np.exp(rng.normal(size=n)), 6 * np.exp(rng.normal(size=n))
    g = G + sigma * rng.normal(size=(64, n))
    for name, P in (("P = 1", np.ones(n)), ("P = 1 / sigma", 1 / sigma)):
        B, A, own, e, _ = run(g, lambda x: P * x)
        exact = (P * sigma**2).sum() / (P * G**2).sum()
        compare(f"scale, {name}", scale(g * P @ g.T, keep)[0], exact, 0.05)
        compare(f"B_rho of Pg, {name}", (B * (own - A) / A)[3], exact, 0.05)
        compare(f"B_u of Pg, {name}", half_batch(B, e)[0], (P**2 * sigma**2).sum() / (P**2 * G**2).sum(), 0.05)
    mean = np.vectorize(lambda b: sum(abs(x) * math.erf(abs(x) * math.sqrt(b / 2) / s) for x, s in zip(G, sigma)))
    B, A, _, e, _ = run(g, np.sign)
    for b, x, y in zip(B, A, mean(B)):
        compare(f"sign: E<G, u> at {b:.0f}", x, y, 0.03)
    G, sigma = rng.normal(size=(12, 32, 32)), 6.0  # isotropic
    g = G + sigma * rng.normal(size=(64, *G.shape))
    for name, u in (("sign", np.sign), ("spectral", lambda x: (lambda U, _, V: U @ V)(*np.linalg.svd(x)))):
        B, A, _, e, Q = run(g, u)
        compare(f"{name}, Gaussian G: B_u", half_batch(B, e)[0], sigma**2 / (G**2).mean(), 0.1)
    stein = 8 / (3 * math.pi) * (G**2).sum() / (sigma * math.sqrt(32))  # Stein's lemma, noise alone
    compare("spectral: E<G, u> at 1", A[0] * math.sqrt(1 + 1 / sigma**2), stein, 0.05)
    compare("spectral: |G|", math.sqrt(half_batch(B, e)[1] * Q[0]), np.linalg.svd(G, compute_uv=False).sum(), 0.03)
    return bad


COLUMNS = ("B_ln B_all c B_weighted_ln B_weighted_all B_u_fresh_matrix c_u k_u B_rho_fresh_matrix "
           "B_dual_sign_matrix B_dual_spectral_matrix cos_fresh_matrix cos_step_matrix").split()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    parser.add_argument("--train")
    parser.add_argument("--out", default=os.devnull, help="gets a JSON line per checkpoint")
    parser.add_argument("--groups", type=int, default=64, help="a multiple of 16")
    parser.add_argument("--rows", type=int, default=0, help="rows of a group (default: a 16th of the run's noise scale, 1 to 16)")
    a = parser.parse_args()
    if a.checkpoints == ["check"]:
        return check()
    print("optimizer tokens loss", *COLUMNS)
    for path in a.checkpoints:
        x = measure(a, path)
        print(x["optimizer"], x["tokens"], f"{x['loss']:.3f}", *(f"{x[k][0]:.3g}+-{x[k][1] or 0:.1g}" for k in COLUMNS), flush=True)
        with open(a.out, "a") as f:
            f.write(json.dumps(x) + "\n")


if __name__ == "__main__":
    sys.exit(main())
