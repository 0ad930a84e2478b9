"""GPT-2 and its training step in JAX, float64, from the formulas: the engines are checked against this.

Nothing here is shared with the engines, and nothing is fast. Sources: Radford et al. 2019 (GPT-2), Ba et al. 2016
(layer normalisation), Vaswani et al. 2017 (attention), Hendrycks and Gimpel 2016 (GELU), Loshchilov and Hutter 2019
(AdamW), Loshchilov and Hutter 2017 (cosine), Srivastava et al. 2014 (dropout), Salmon et al. 2011 (Philox). Parameters are a dict from Hugging Face's names to arrays; weights lie as
(in, out). Shapes: T sequence, V vocabulary, C channels, H heads, D = C / H, B batch.
"""

import functools
import os

# These models run for milliseconds and compile for seconds.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)

LN_EPS = 1e-5
WTE = "wte.weight"


def layer_norm(x, weight, bias):  # (T, C)
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)  # of the population, not of the sample
    return (x - mean) / jnp.sqrt(variance + LN_EPS) * weight + bias


def gelu(x):  # the tanh form
    return 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    e = jnp.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def linear(params, name, x):
    return x @ params[name + ".weight"] + params[name + ".bias"]


def attention(params, name, x, heads, document, drop):  # (T, C)
    T, C = x.shape
    qkv = linear(params, name + ".c_attn", x).reshape(T, 3, heads, C // heads)
    q, k, v = (qkv[:, i].transpose(1, 0, 2) for i in range(3))  # (H, T, D)
    scores = q @ k.transpose(0, 2, 1) / jnp.sqrt(C // heads)  # (H, T, T)
    causal = jnp.tril(jnp.ones((T, T), dtype=bool))
    same = document[:, None] == document[None, :]
    probabilities = softmax(jnp.where(causal & same, scores, -jnp.inf))
    mixed = (drop(name + ".probability", probabilities) @ v).transpose(1, 0, 2).reshape(T, C)
    return linear(params, name + ".c_proj", mixed)


def logits(params, head, tokens, heads, factors=None, separator=None):
    """Logits (T, V) of one row of tokens (T). head: the output weight, (V, C), apart from the input embedding. factors:
    of dropout's masks, by place, as mask_factors makes them; None: nothing drops. separator: opens a document, which nothing else
    sees, and in which positions restart; None: a row is one document."""
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
        x = x + drop(f"{h}.attn", attention(params, f"{h}.attn", norm(f"{h}.ln_1", x), heads, document, drop))
        hidden = gelu(linear(params, f"{h}.mlp.c_fc", norm(f"{h}.ln_2", x)))
        x = x + drop(f"{h}.mlp", linear(params, f"{h}.mlp.c_proj", hidden))
    return norm("ln_f", x) @ head.T


def philox(counter, key):
    """Philox4x32-10: words (..., 4) of counters (..., 4) and a key of two words, all of 32 bits, in uint64 arrays."""
    c, low = np.asarray(counter, dtype=np.uint64), np.uint64(0xFFFFFFFF)
    for i in range(10):
        k = [np.uint64((word + i * weyl) % 2**32) for word, weyl in zip(key, (0x9E3779B9, 0xBB67AE85))]
        a, b = np.uint64(0xD2511F53) * c[..., 0], np.uint64(0xCD9E8D57) * c[..., 2]
        high = lambda p: p >> np.uint64(32)
        c = np.stack([high(b) ^ c[..., 1] ^ k[0], b & low, high(a) ^ c[..., 3] ^ k[1], a & low], axis=-1)
    return c


def keep_factors(p, seed, example, place, layer, heads, rows, columns):
    """0 where an element drops, else 1 / (1 - p): (heads, rows, columns), by the definition in llmc/math/dropout.h. p is a
    multiple of 2^-16."""
    h, r, c = np.meshgrid(np.arange(heads), np.arange(rows), np.arange(columns), indexing="ij")
    counter = np.zeros(h.shape + (4,), dtype=np.uint64)
    counter[..., 0] = r * 2**16 + c // 128 * 16 + c % 16
    counter[..., 1] = place * 2**20 + layer * 2**10 + h
    counter[..., 2] = example % 2**32
    counter[..., 3] = 2**31 + example // 2**32
    words = philox(counter, (seed % 2**32, seed // 2**32))
    half = c // 16 % 8
    bits = np.take_along_axis(words, (half // 2)[..., None], axis=-1)[..., 0] >> (16 * (half % 2)).astype(np.uint64)
    return np.where(bits % np.uint64(2**16) < p * 2**16, 0.0, 1 / (1 - p))


def mask_factors(p, seed, first, B, T, C, layers, heads):
    """The factors of examples first, first + 1, ..., by place: arrays (B, ...)."""
    p = round(p * 2**16) / 2**16
    examples = range(first, first + B)
    of = lambda *shape: np.stack([keep_factors(p, seed, e, *shape) for e in examples])
    factors = {"embedding": of(0, 0, 1, T, C)[:, 0]}
    for i in range(layers):
        factors[f"h.{i}.attn.probability"] = of(1, i, heads, T, T)
        factors[f"h.{i}.attn"], factors[f"h.{i}.mlp"] = of(2, i, 1, T, C)[:, 0], of(3, i, 1, T, C)[:, 0]
    return factors


def example_loss(params, head, row, heads, factors=None, separator=None):
    """L_b: mean over T of the cross-entropy; row (T + 1)."""
    z = logits(params, head, row[:-1], heads, factors, separator)
    z = z - z.max(axis=-1, keepdims=True)
    log_p = z - jnp.log(jnp.exp(z).sum(axis=-1, keepdims=True))
    return -log_p[jnp.arange(len(row) - 1), row[1:]].mean()


def tied_loss(params, row, heads, factors=None, separator=None):
    """L_b as a function of the parameters as they are: the head is the embedding."""
    return example_loss(params, params[WTE], row, heads, factors, separator)


@functools.cache
def examples_fn(heads, separator=None):
    """A compiled function from (params, rows (B, T + 1), dropout's factors) to the losses (B), the gradient of every L_b by name, each
    (B, ...), and of the tied tensor the head's share U alone (the embedding's share is E = g - U)."""

    def one(params, row, factors):
        loss, gradient = jax.value_and_grad(tied_loss)(params, row, heads, factors, separator)
        head_share = jax.grad(example_loss, argnums=1)(params, params[WTE], row, heads, factors, separator)
        return loss, gradient, head_share

    compiled = jax.jit(jax.vmap(one, in_axes=(None, 0, 0)))
    return lambda params, rows, factors=None: compiled(params, rows, factors)


def square(x):
    """|g_b|^2 of per-example gradients (B, ...)."""
    return (x**2).reshape(len(x), -1).sum(axis=1)


def schedule(tokens, lr, warmup_tokens, train_tokens, final_frac):
    """Linear warm-up, then half a cosine from lr to final_frac x lr."""
    if tokens < warmup_tokens:
        return lr * tokens / warmup_tokens
    progress = min(1.0, (tokens - warmup_tokens) / max(1.0, train_tokens - warmup_tokens))
    return lr * (final_frac + (1 - final_frac) * (1 + np.cos(np.pi * progress)) / 2)


def adamw(params, gradient, moments, step, lr, beta1, beta2, eps, weight_decay, grad_clip):
    """One step, t = 1, 2, ... Clips the batch's mean gradient by its global norm; decays tensors of two dimensions."""
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in gradient.values()))
    scale = min(1.0, grad_clip / norm) if grad_clip > 0 else 1.0
    new_params, new_moments = {}, {}
    for name, p in params.items():
        g = scale * np.asarray(gradient[name])
        m, v = moments[name] if moments else (0.0, 0.0)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        step_size = (m / (1 - beta1**step)) / (np.sqrt(v / (1 - beta2**step)) + eps)
        decay = weight_decay if p.ndim >= 2 else 0.0
        new_params[name] = p - lr * (step_size + decay * p)
        new_moments[name] = (m, v)
    return new_params, new_moments


def train(params, batches, heads, hyper, examples=None, factors_at=lambda step: None):
    """AdamW over batches (steps, B, T + 1). Returns the batch-mean losses before each update and the
    parameters at the end. hyper: lr, warmup_tokens, train_tokens, final_frac, and adamw's own. factors_at: dropout's factors of step 1, 2, ..."""
    examples = examples or examples_fn(heads)
    adam = {key: hyper[key] for key in ("beta1", "beta2", "eps", "weight_decay", "grad_clip")}
    moments, losses, tokens = None, [], 0
    for step, rows in enumerate(batches, start=1):
        loss, per_example, _ = examples(params, rows, factors_at(step))
        gradient = {name: np.asarray(g).mean(axis=0) for name, g in per_example.items()}
        losses.append(float(loss.mean()))
        tokens += rows.shape[0] * (rows.shape[1] - 1)  # done after this step
        lr = schedule(tokens, hyper["lr"], hyper["warmup_tokens"], hyper["train_tokens"], hyper["final_frac"])
        params, moments = adamw(params, gradient, moments, step, lr, **adam)
    return np.array(losses), params
