"""GPT-2 and its training step in JAX, float64, from the formulas: the oracle of the engines.

The oracle shares no code with the engines. Sources: Radford et al. 2019 (GPT-2), Ba et al. 2016 (layer
normalisation), Vaswani et al. 2017 (attention), Hendrycks and Gimpel 2016 (GELU), Loshchilov and Hutter 2019
(AdamW), Loshchilov and Hutter 2017 (cosine), Srivastava et al. 2014 (dropout), Salmon et al. 2011 (Philox), Szegedy
et al. 2016 (label smoothing), You et al. 2020 (LAMB), Jordan et al. 2024 and Liu et al. 2025 (Muon). Parameters are
a dict from Hugging Face's names to arrays; weights are (in, out). Shapes: T sequence, V vocabulary, C channels, H
heads, D = C / H, B batch.
"""

import functools
import importlib.metadata
import os

# Compile without optimisation, since these models run for milliseconds, but compile for seconds. Leave thunks out, too,
# but not in jaxlib 0.7.0, where programs without thunks fail.
flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if importlib.metadata.version("jaxlib").startswith("0.6."):
    flags += " --xla_cpu_use_thunk_runtime=false"
os.environ.setdefault("XLA_FLAGS", flags)

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_traceback_in_locations_limit", 0)  # a tenth of the time went into places in the source

LN_EPS = 1e-5
WTE = "wte.weight"


def random_params(rng, layers, C, V, T):
    """Draws fp32 parameters with which biases and LayerNorms matter (with GPT-2's initial values they do not)."""
    shapes = {"wte.weight": (V, C), "wpe.weight": (T, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
    for i in range(layers):
        for name, inner, outer in (("attn.c_attn", C, 3 * C), ("attn.c_proj", C, C), ("mlp.c_fc", C, 4 * C),
                                   ("mlp.c_proj", 4 * C, C)):
            shapes[f"h.{i}.{name}.weight"], shapes[f"h.{i}.{name}.bias"] = (inner, outer), (outer,)
        for name in ("ln_1", "ln_2"):
            shapes[f"h.{i}.{name}.weight"] = shapes[f"h.{i}.{name}.bias"] = (C,)
    params = {}
    for name, shape in shapes.items():
        deviation = 0.3 if name.startswith("w") else 0.2 if len(shape) == 1 else shape[0] ** -0.5
        mean = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
        params[name] = (mean + deviation * rng.standard_normal(shape)).astype(np.float32)
    return params


def layer_norm(x, weight, bias):  # (T, C)
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)  # divided by C, not C - 1
    return (x - mean) / jnp.sqrt(variance + LN_EPS) * weight + bias


def gelu(x):  # the tanh form
    return 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    e = jnp.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def e4m3(x, k):
    """Returns the e4m3 number nearest to x 2^k, times 2^-k (Micikevicius et al. 2022). e4m3 has steps of 2^(e-3) in
    [2^e, 2^(e+1)) for e >= -6, up to 448, and steps of 2^-9 below 2^-6."""
    _, exponent = jnp.frexp(x * 2.0**k)
    step = 2.0 ** (jnp.maximum(exponent - 1, -6) - 3)
    return jnp.clip(jnp.round(x * 2.0**k / step) * step, -448, 448) * 2.0**-k


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def fp8_linear(x, weight, bias, k):
    """Returns x W + b. This product, and its input gradient dy W^T, round their factors to e4m3. k: exponents of x, dy
    and W, whether the weight gradient x^T dy rounds its factors, and channels of x whose rounding error this product
    also takes, rounded in turn."""
    high = e4m3(x, k[0])
    low = jnp.where(jnp.isin(jnp.arange(x.shape[-1]), jnp.array(k[4])), e4m3(x - high, k[0]), 0)
    return (high + low) @ e4m3(weight, k[2]) + bias


fp8_linear.defvjp(lambda x, weight, bias, k: (fp8_linear(x, weight, bias, k), (x, weight)),
                  lambda k, saved, dy: (e4m3(dy, k[1]) @ e4m3(saved[1], k[2]).T,
                                        e4m3(saved[0], k[0]).T @ e4m3(dy, k[1]) if k[3] else saved[0].T @ dy,
                                        dy.sum(axis=0)))


def linear(params, name, x, exponents):
    weight, bias = params[name + ".weight"], params[name + ".bias"]
    return fp8_linear(x, weight, bias, exponents[name]) if exponents else x @ weight + bias


def attention(params, name, x, heads, document, drop, exponents):  # (T, C)
    T, C = x.shape
    qkv = linear(params, name + ".c_attn", x, exponents).reshape(T, 3, heads, C // heads)
    q, k, v = (qkv[:, i].transpose(1, 0, 2) for i in range(3))  # (H, T, D)
    scores = q @ k.transpose(0, 2, 1) / jnp.sqrt(C // heads)  # (H, T, T)
    causal = jnp.tril(jnp.ones((T, T), dtype=bool))
    same = document[:, None] == document[None, :]
    probabilities = softmax(jnp.where(causal & same, scores, -jnp.inf))
    mixed = (drop(name + ".probability", probabilities) @ v).transpose(1, 0, 2).reshape(T, C)
    return linear(params, name + ".c_proj", mixed, exponents)


def logits(params, tokens, heads, factors=None, separator=None, exponents=None):
    """Returns the logits (T, V) of a row of tokens (T). factors: from mask_factors; None: no dropout. separator: the
    token that opens a document; attention stays within a document, positions restart. None: the row is one document.
    exponents: fp8_linear's k by layer name; "head": exponents of the last LayerNorm's output and of wte, which only the
    product of the logits rounds. None: nothing rounds."""
    T = jnp.arange(len(tokens))
    opens = jnp.asarray(tokens == separator).at[0].set(True) if separator is not None else T == 0
    document = jnp.cumsum(opens)
    position = T - jnp.max(jnp.where(opens & (T <= T[:, None]), T, 0), axis=1)
    drop = lambda place, x: x if factors is None else x * factors[place]
    layers = sum(name.endswith(".ln_1.weight") for name in params)
    x = drop("embedding", params[WTE][tokens] + params["wpe.weight"][position])
    norm = lambda name, x: layer_norm(x, params[name + ".weight"], params[name + ".bias"])
    for i in range(layers):
        h = f"h.{i}"
        x = x + drop(f"{h}.attn", attention(params, f"{h}.attn", norm(f"{h}.ln_1", x), heads, document, drop, exponents))
        hidden = gelu(linear(params, f"{h}.mlp.c_fc", norm(f"{h}.ln_2", x), exponents))
        x = x + drop(f"{h}.mlp", linear(params, f"{h}.mlp.c_proj", hidden, exponents))
    x, wte = norm("ln_f", x), params[WTE]
    if not exponents:
        return x @ wte.T
    rounded = e4m3(x, exponents["head"][0]) @ e4m3(wte, exponents["head"][1]).T
    return x @ wte.T + jax.lax.stop_gradient(rounded - x @ wte.T)


def philox(counter, key, rounds=10):
    """Returns Philox4x32's words (..., 4) of counters (..., 4) and a key of two words; 32-bit words in uint64
    arrays."""
    c, low = np.asarray(counter, dtype=np.uint64), np.uint64(0xFFFFFFFF)
    for i in range(rounds):
        k = [np.uint64((word + i * weyl) % 2**32) for word, weyl in zip(key, (0x9E3779B9, 0xBB67AE85))]
        a, b = np.uint64(0xD2511F53) * c[..., 0], np.uint64(0xCD9E8D57) * c[..., 2]
        high = lambda p: p >> np.uint64(32)
        c = np.stack([high(b) ^ c[..., 1] ^ k[0], b & low, high(a) ^ c[..., 3] ^ k[1], a & low], axis=-1)
    return c


def keep_factors(p, seed, example, place, layer, heads, rows, columns):
    """Returns factors (heads, rows, columns), as llmc/math/dropout.h defines them: 0 for a dropped element, else
    1 / (1 - p). p is a multiple of 2^-15."""
    h, r, c = np.meshgrid(np.arange(heads), np.arange(rows), np.arange(columns), indexing="ij")
    counter = np.zeros(h.shape + (4,), dtype=np.uint64)
    pair = place == 1  # both coordinates are tokens: attention's probabilities
    block_row, block_column = (r // 16 * 8 + r % 8, c // 16 * 4 + c % 8 // 2) if pair else (r, c // 8)
    word = c // 8 % 2 * 2 + r // 8 % 2 if pair else c % 8 // 2
    counter[..., 0] = block_row * 2**16 + block_column
    counter[..., 1] = place * 2**20 + layer * 2**10 + h
    counter[..., 2] = example % 2**32
    counter[..., 3] = 2**31 + example // 2**32
    words = philox(counter, (seed % 2**32, seed // 2**32), 7)
    bits = np.take_along_axis(words, word[..., None], axis=-1)[..., 0] >> (16 * (c % 2)).astype(np.uint64)
    return np.where(bits % np.uint64(2**15) < p * 2**15, 0.0, 1 / (1 - p))


def mask_factors(p, seed, first, B, T, C, layers, heads):
    """Returns the factors of examples first, first + 1, ..., by place: arrays (B, ...)."""
    p = round(p * 2**15) / 2**15
    examples = range(first, first + B)
    of = lambda *shape: np.stack([keep_factors(p, seed, e, *shape) for e in examples])
    factors = {"embedding": of(0, 0, 1, T, C)[:, 0]}
    for i in range(layers):
        factors[f"h.{i}.attn.probability"] = of(1, i, heads, T, T)
        factors[f"h.{i}.attn"], factors[f"h.{i}.mlp"] = of(2, i, 1, T, C)[:, 0], of(3, i, 1, T, C)[:, 0]
    return factors


def token_losses(params, row, heads, smoothing=0.0, factors=None, separator=None, exponents=None):
    """Returns the cross-entropies of a row (T + 1) with smoothed and with plain targets: two arrays (T)."""
    z = logits(params, row[:-1], heads, factors, separator, exponents)
    z = z - z.max(axis=-1, keepdims=True)
    log_p = z - jnp.log(jnp.exp(z).sum(axis=-1, keepdims=True))
    V = z.shape[-1]
    words = jnp.eye(V)[row[1:]]
    wanted = (1 - smoothing) * words + smoothing * jnp.full(V, 1 / V)
    return -(wanted * log_p).sum(axis=-1), -(words * log_p).sum(axis=-1)


def losses_fn(params, heads, separator=None):
    """Returns a compiled function from rows (B, T + 1) to the cross-entropies (B, T) with plain targets."""
    params = {name: jnp.asarray(p, dtype=jnp.float64) for name, p in params.items()}
    return jax.jit(jax.vmap(lambda row: token_losses(params, row, heads, separator=separator)[1]))


@functools.cache
def examples_fn(heads, smoothing=0.0, separator=None, exponents=None):
    """Returns a compiled function of (params, rows (B, T + 1), dropout's factors). It returns the losses L_b (B),
    means over T, with and without label smoothing, and the gradients of every L_b by name, each (B, ...). exponents:
    pairs (name, exponents)."""

    def loss(params, row, factors):
        smoothed, plain = token_losses(params, row, heads, smoothing, factors, separator, dict(exponents or ()))
        return smoothed.mean(), (smoothed.mean(), plain.mean())

    def one(params, row, factors):
        gradient, losses = jax.grad(loss, has_aux=True)(params, row, factors)
        return losses, gradient

    compiled = jax.jit(jax.vmap(one, in_axes=(None, 0, 0)))
    return lambda params, rows, factors=None: compiled(params, rows, factors)


def square(x):
    """Returns |g_b|^2 of per-example gradients (B, ...)."""
    return (x**2).reshape(len(x), -1).sum(axis=1)


def schedule(tokens, lr, warmup_tokens, train_tokens, final_frac):
    """Returns the rate: a linear warm-up, then half a cosine from lr to final_frac * lr."""
    if tokens < warmup_tokens:
        return lr * tokens / warmup_tokens
    progress = min(1.0, (tokens - warmup_tokens) / max(1.0, train_tokens - warmup_tokens))
    return lr * (final_frac + (1 - final_frac) * (1 + np.cos(np.pi * progress)) / 2)


def clipped(gradient, grad_clip):
    """Clips the batch's mean gradient by its global norm."""
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in gradient.values()))
    scale = min(1.0, grad_clip / norm) if grad_clip > 0 else 1.0
    return {name: scale * np.asarray(g) for name, g in gradient.items()}


def adam_direction(g, moments, step, beta1, beta2, eps):
    """Returns (direction, moments) of one tensor at step 1, 2, ..."""
    m, v = moments or (0.0, 0.0)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    return (m / (1 - beta1**step)) / (np.sqrt(v / (1 - beta2**step)) + eps), (m, v)


# Optimizers update one tensor: (name, p, g, moments, step, lr, hyper) -> (p, moments). Tensors of two dimensions decay.


def adamw(name, p, g, moments, step, lr, h):
    direction, moments = adam_direction(g, moments, step, h["beta1"], h["beta2"], h["eps"])
    decay = h["weight_decay"] if p.ndim >= 2 else 0.0
    return p - lr * (direction + decay * p), moments


def lamb(name, p, g, moments, step, lr, h):
    """You et al. 2020, algorithm 2."""
    r, moments = adam_direction(g, moments, step, h["beta1"], h["beta2"], h["eps"])
    r = r + (h["weight_decay"] if p.ndim >= 2 else 0.0) * p
    weights, update = np.sqrt(np.sum(p**2)), np.sqrt(np.sum(r**2))
    ratio = weights / update if weights > 0 and update > 0 else 1.0
    return p - lr * ratio * r, moments


def newton_schulz(G):
    """Jordan et al. 2024: five steps of the quintic iteration, on G or its transpose, whichever is the wider one."""
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.T if G.shape[0] > G.shape[1] else G
    X = X / (np.linalg.norm(X) + 1e-7)
    for _ in range(5):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if G.shape[0] > G.shape[1] else X


def muon(name, p, g, moments, step, lr, h):
    """Jordan et al. 2024 with Nesterov's momentum, steps sized as in Liu et al. 2025; for the blocks' matrices."""
    if not (name.startswith("h.") and p.ndim == 2):
        return adamw(name, p, g, moments, step, h["adamw_lr_factor"] * lr, h)
    buffer = np.zeros_like(p) if moments is None else moments
    buffer = h["momentum"] * buffer + (1 - h["momentum"]) * g
    nesterov = (1 - h["momentum"]) * g + h["momentum"] * buffer
    maps = 3 if name.endswith("attn.c_attn.weight") else 1
    step_of = lambda G: 0.2 * np.sqrt(max(G.shape)) * newton_schulz(G.T).T  # G.T: (out, in), as in Jordan's code
    update = np.concatenate([step_of(G) for G in np.split(nesterov, maps, axis=1)], axis=1)
    return p - lr * (update + h["weight_decay"] * p), buffer


OPTIMIZERS = (adamw, lamb, muon)


def train(params, batches, heads, hyper, examples=None, factors_at=lambda step: None):
    """Trains on batches (steps, B, T + 1). Returns the batch-mean loss before each update, and the final parameters.
    hyper: optimizer (its number), lr, warmup_tokens, train_tokens, final_frac, grad_clip, and the optimizer's settings.
    factors_at: dropout's factors of step 1, 2, ..."""
    examples = examples or examples_fn(heads)
    update = OPTIMIZERS[int(hyper["optimizer"])]
    moments, losses, tokens = dict.fromkeys(params), [], 0
    for step, rows in enumerate(batches, start=1):
        (loss, _), per_example = examples(params, rows, factors_at(step))
        gradient = clipped({name: np.asarray(g).mean(axis=0) for name, g in per_example.items()}, hyper["grad_clip"])
        losses.append(float(loss.mean()))
        tokens += rows.shape[0] * (rows.shape[1] - 1)  # trained on after this step
        lr = schedule(tokens, hyper["lr"], hyper["warmup_tokens"], hyper["train_tokens"], hyper["final_frac"])
        params = dict(params)
        for name, g in gradient.items():
            params[name], moments[name] = update(name, params[name], g, moments[name], step, lr, hyper)
    return np.array(losses), params
