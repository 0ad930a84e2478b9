"""GPT-2 and its training step in JAX, float64, from the formulas: the engines are checked against this.

Nothing here is shared with the engines, and nothing is fast. Sources: Radford et al. 2019 (GPT-2), Ba et al. 2016
(layer normalisation), Vaswani et al. 2017 (attention), Hendrycks and Gimpel 2016 (GELU), Loshchilov and Hutter 2019
(AdamW), Loshchilov and Hutter 2017 (cosine), Szegedy et al. 2016 (label smoothing). Parameters are a dict from Hugging Face's names to arrays; weights lie as
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


def attention(params, name, x, heads):  # (T, C)
    T, C = x.shape
    qkv = linear(params, name + ".c_attn", x).reshape(T, 3, heads, C // heads)
    q, k, v = (qkv[:, i].transpose(1, 0, 2) for i in range(3))  # (H, T, D)
    scores = q @ k.transpose(0, 2, 1) / jnp.sqrt(C // heads)  # (H, T, T)
    causal = jnp.tril(jnp.ones((T, T), dtype=bool))
    probabilities = softmax(jnp.where(causal, scores, -jnp.inf))
    mixed = (probabilities @ v).transpose(1, 0, 2).reshape(T, C)
    return linear(params, name + ".c_proj", mixed)


def logits(params, head, tokens, heads):
    """Logits (T, V) of one row of tokens (T). head: the output weight, (V, C), apart from the input embedding."""
    layers = sum(name.endswith(".ln_1.weight") for name in params)
    x = params[WTE][tokens] + params["wpe.weight"][: len(tokens)]
    norm = lambda name, x: layer_norm(x, params[name + ".weight"], params[name + ".bias"])
    for i in range(layers):
        h = f"h.{i}"
        x = x + attention(params, f"{h}.attn", norm(f"{h}.ln_1", x), heads)
        x = x + linear(params, f"{h}.mlp.c_proj", gelu(linear(params, f"{h}.mlp.c_fc", norm(f"{h}.ln_2", x))))
    return norm("ln_f", x) @ head.T


def example_loss(params, head, row, heads, smoothing=0.0):
    """L_b: mean over T of the cross-entropy with the words' distribution; and with the words themselves. row (T + 1)."""
    z = logits(params, head, row[:-1], heads)
    z = z - z.max(axis=-1, keepdims=True)
    log_p = z - jnp.log(jnp.exp(z).sum(axis=-1, keepdims=True))
    V = z.shape[-1]
    words = jnp.eye(V)[row[1:]]
    wanted = (1 - smoothing) * words + smoothing * jnp.full(V, 1 / V)
    return -(wanted * log_p).sum(axis=-1).mean(), -(words * log_p).sum(axis=-1).mean()


def tied_loss(params, row, heads, smoothing=0.0):
    """L_b as a function of the parameters as they are: the head is the embedding."""
    return example_loss(params, params[WTE], row, heads, smoothing)


@functools.cache
def examples_fn(heads, smoothing=0.0):
    """A compiled function from (params, rows (B, T + 1)) to the losses (B), with label smoothing and without, the gradient
    of every L_b by name, each (B, ...), and of the tied tensor the head's share U alone (the embedding's share is
    E = g - U)."""

    def one(params, row):
        losses, gradient = jax.value_and_grad(tied_loss, has_aux=True)(params, row, heads, smoothing)
        head_share, _ = jax.grad(example_loss, argnums=1, has_aux=True)(params, params[WTE], row, heads, smoothing)
        return losses, gradient, head_share

    return jax.jit(jax.vmap(one, in_axes=(None, 0)))


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


def train(params, batches, heads, hyper, examples=None):
    """AdamW over batches (steps, B, T + 1). Returns the batch-mean losses before each update and the
    parameters at the end. hyper: lr, warmup_tokens, train_tokens, final_frac, and adamw's own."""
    examples = examples or examples_fn(heads)
    adam = {key: hyper[key] for key in ("beta1", "beta2", "eps", "weight_decay", "grad_clip")}
    moments, losses, tokens = None, [], 0
    for step, rows in enumerate(batches, start=1):
        (loss, _), per_example, _ = examples(params, rows)
        gradient = {name: np.asarray(g).mean(axis=0) for name, g in per_example.items()}
        losses.append(float(loss.mean()))
        tokens += rows.shape[0] * (rows.shape[1] - 1)  # done after this step
        lr = schedule(tokens, hyper["lr"], hyper["warmup_tokens"], hyper["train_tokens"], hyper["final_frac"])
        params, moments = adamw(params, gradient, moments, step, lr, **adam)
    return np.array(losses), params
