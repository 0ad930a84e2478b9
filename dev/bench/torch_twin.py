"""Trains GPT-2 in PyTorch on the same data, in the same order, from the same weights as the CUDA trainer. Compares loss curves
and speed.

    torch_twin.py train --train 'DIR/x_train_*.bin' --val 'DIR/x_val_*.bin' --out twin.jsonl [--follow RUN]
        [settings as the trainer's]
    torch_twin.py compare RUN/metrics.jsonl twin.jsonl
    torch_twin.py order --train 'a_*.bin:0.7 b_*.bin:0.3' --seq-len T --seed S --first E --count N

The twin computes in bf16 autocast with torch.compile, scaled_dot_product_attention and the fused AdamW. Data order,
initial weights and schedule are written again here, from their definitions (llmc/text/shards.h, permutation.h, mixture.h,
rng.h, model.h, schedule.h). Equal curves thus check both versions. `order` prints each example's window and tokens.

With --follow the twin loads each checkpoint of RUN when it reaches the checkpoint's step. Training amplifies rounding: within
100 steps two runs of one program with different micro-batches differ by 0.01 to 0.02 nats. A difference of this size over the few
steps between two checkpoints means that formulas differ.
"""

import argparse
import glob
import json
import math
import os
import sys
import time

import numpy as np

MASK32, MASK64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
GOLDEN = 0x9E3779B97F4A7C15


# ---------------------------------------------------------------------------------------------------------------------
# Data order (llmc/math/permutation.h, llmc/text/shards.h)


def mix(x):
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK64
    return x ^ x >> 31


def permutation_example(n, seed, example):
    """Returns which of n windows is example `example` of a run, by a Feistel network with cycle walking."""
    epoch, x = divmod(example, n)
    key = mix(mix(seed + GOLDEN & MASK64) + epoch * GOLDEN & MASK64)
    bits = max(n - 1, 0).bit_length()
    low_bits = bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << bits - low_bits) - 1
    while True:
        low, high, round_key = x & low_mask, x >> low_bits, key
        for r in range(8):
            round_key = round_key + GOLDEN & MASK64
            if r % 2 == 0:
                high ^= mix(mix(round_key) ^ low) & high_mask
            else:
                low ^= mix(mix(round_key) ^ high) & low_mask
        x = high << low_bits | low
        if x < n:
            return x


class Shards:
    """Windows of T + 1 tokens that start at multiples of T and never cross a shard."""

    def __init__(self, pattern, T):
        self.T = T
        paths = sorted({path for word in pattern.split() for path in glob.glob(word)})
        if not paths:
            sys.exit(f"error: no shard matches {pattern}")
        self.tokens = [np.memmap(path, np.uint16, "r", offset=1024) for path in paths]
        self.first = np.cumsum([0] + [max(len(t) - 1, 0) // T for t in self.tokens])
        self.windows = int(self.first[-1])

    def window(self, w):
        shard = int(np.searchsorted(self.first, w, side="right")) - 1
        start = (w - int(self.first[shard])) * self.T
        return self.tokens[shard][start : start + self.T + 1]

    def spread(self, first, count, rows):
        """Picks `rows` windows, evenly spread over the shards. Returns picks [first, first + count)."""
        return np.stack([self.window(r * self.windows // rows) for r in range(first, first + count)]).astype(np.int64)


class Order:
    """The sources of --train, in the order of a seed (llmc/math/mixture.h)."""

    def __init__(self, value, T, seed):
        words, self.seed, self.places = value.split(), seed, []
        weighted = [word.rpartition(":") for word in words] if ":" in value else [(value, ":", "1")]
        weights = [float(weight) for _, _, weight in weighted]
        self.sources = [Shards(pattern, T) for pattern, _, _ in weighted]
        self.ends = [sum(weights[: s + 1]) / sum(weights) for s in range(len(weights))]
        self.numbers = [0] * len(weights)

    def place(self, example):
        """Returns an example's source, and its number among the source's examples."""
        while len(self.places) <= example:
            bits = mix(mix(self.seed + 2 * GOLDEN & MASK64) + len(self.places) * GOLDEN & MASK64)
            source = sum(bits >> 11 >= end * 2**53 for end in self.ends[:-1])
            self.places.append((source, self.numbers[source]))
            self.numbers[source] += 1
        return self.places[example]

    def window(self, example):
        """Returns the number of an example's window among the windows of all sources, and its tokens."""
        source, number = self.place(example)
        shards = self.sources[source]
        w = permutation_example(shards.windows, self.seed + source, number)
        return sum(s.windows for s in self.sources[:source]) + w, shards.window(w)

    def shuffled(self, first, count):
        return np.stack([self.window(e)[1] for e in range(first, first + count)]).astype(np.int64)


def print_order(a):
    order = Order(a.train, a.seq_len, a.seed)
    for example in range(a.first, a.first + a.count):
        window, tokens = order.window(example)
        print(window, *tokens)


# ---------------------------------------------------------------------------------------------------------------------
# Initial weights (llmc/math/rng.h, llmc/model/model.h)


def philox_normals(torch, seed, stream, n, device):
    """Returns n float64 normals. Box-Muller turns block i of Philox4x32-10 (Salmon et al. 2011) into draw i."""
    index = torch.arange(n, dtype=torch.int64, device=device)
    c = [index & MASK32, index >> 32, torch.full_like(index, stream & MASK32), torch.full_like(index, stream >> 32)]
    k0, k1 = seed & MASK32, seed >> 32

    def product(a, x):  # 32 x 32 -> 64 bits, high and low half; int64 wraps without changing the bits
        p = (a - (1 << 32)) * x + (x << 32)
        return p >> 32 & MASK32, p & MASK32

    for _ in range(10):
        h0, l0 = product(0xD2511F53, c[0])
        h1, l1 = product(0xCD9E8D57, c[2])
        c = [h1 ^ c[1] ^ k0, l1, h0 ^ c[3] ^ k1, l0]
        k0, k1 = k0 + 0x9E3779B9 & MASK32, k1 + 0xBB67AE85 & MASK32
    u1 = ((c[1] << 21 | c[0] >> 11).double() + 1.0) * 2.0**-53
    u2 = (c[3] << 21 | c[2] >> 11).double() * 2.0**-53
    return torch.sqrt(-2.0 * torch.log(u1)) * torch.cos(2 * math.pi * u2)


def initial_tensors(torch, a, device, shapes_only=False):
    """Yields (name, values) of all tensors in flat order, weights as (in, out)."""
    L, C, stream = a.layers, a.channels, 0

    def normal(name, rows, columns, scale):
        nonlocal stream
        if shapes_only:
            return name, torch.empty(rows, columns, device="meta")
        values = philox_normals(torch, a.seed, stream, rows * columns, device)
        stream += 1
        return name, (values * scale).float().view(rows, columns)

    def constant(name, n, value):
        nonlocal stream
        stream += 1
        return name, torch.full((n,), value, device=device)

    yield normal("wte", a.vocab_size, C, 0.02)
    yield normal("wpe", a.seq_len, C, 0.02)
    residual = 0.02 / math.sqrt(2 * L)
    for l in range(L):
        h = f"h.{l}."
        yield constant(h + "ln1.weight", C, 1.0)
        yield constant(h + "ln1.bias", C, 0.0)
        yield normal(h + "qkv.weight", C, 3 * C, 0.02)
        yield constant(h + "qkv.bias", 3 * C, 0.0)
        yield normal(h + "proj.weight", C, C, residual)
        yield constant(h + "proj.bias", C, 0.0)
        yield constant(h + "ln2.weight", C, 1.0)
        yield constant(h + "ln2.bias", C, 0.0)
        yield normal(h + "fc.weight", C, 4 * C, 0.02)
        yield constant(h + "fc.bias", 4 * C, 0.0)
        yield normal(h + "fcproj.weight", 4 * C, C, residual)
        yield constant(h + "fcproj.bias", C, 0.0)
    yield constant("lnf.weight", C, 1.0)
    yield constant("lnf.bias", C, 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# The model


def build_model(torch, a, device):
    from torch_block import GPT2  # needs PyTorch

    model = GPT2(a.layers, a.heads, a.channels, a.vocab_size, a.seq_len).to(device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, values in initial_tensors(torch, a, device):
            if values.dim() == 2 and name not in ("wte", "wpe"):
                values = values.t()  # nn.Linear keeps (out, in)
            parameters[name][: values.shape[0]].copy_(values)
    return model


def schedule_lr(a, tokens, horizon):
    if tokens < a.warmup_tokens:
        return a.lr * tokens / a.warmup_tokens
    done = min((tokens - a.warmup_tokens) / max(horizon - a.warmup_tokens, 1), 1.0)
    return a.lr * (a.final_lr_frac + (1 - a.final_lr_frac) * (0.5 + 0.5 * math.cos(math.pi * done)))


def train(a):
    import torch

    device = "cuda"
    torch.backends.cuda.matmul.allow_tf32 = True
    rows, T = a.batch_tokens // a.seq_len, a.seq_len
    if rows % a.micro_batch:
        sys.exit("error: the batch must be a multiple of the micro-batch here")
    micro_steps, horizon = rows // a.micro_batch, a.steps * a.batch_tokens
    data = Order(a.train, T, a.seed)
    val = Shards(a.val, T) if a.val else None
    model = build_model(torch, a, device)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": a.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=a.lr, betas=(a.beta1, a.beta2), eps=a.eps, fused=True)
    compiled = torch.compile(model)
    autocast = torch.autocast("cuda", torch.bfloat16)

    def to_device(tokens):
        return torch.from_numpy(tokens).pin_memory().to(device, non_blocking=True)

    def validate():
        rows = min(a.val_tokens // T, val.windows)
        if rows % a.micro_batch:
            sys.exit("error: --val-tokens must be a multiple of the micro-batch here, and no more than there are")
        losses = []
        with torch.no_grad(), autocast:
            for first in range(0, rows, a.micro_batch):
                losses.append(compiled(to_device(val.spread(first, a.micro_batch, rows))).double())
        return torch.stack(losses).mean().item()

    out = open(a.out, "w")
    seconds = []
    part, parts = a.part
    for step in range((part - 1) * a.steps // parts + 1, part * a.steps // parts + 1):
        directory = checkpoint_of(a.follow, step - 1)
        if os.path.isdir(directory):
            load_checkpoint(torch, a, model, optimizer, directory, step - 1)
            print(f"step {step} starts from {directory}", flush=True)
        start = time.perf_counter()
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for i in range(micro_steps):
            first = ((step - 1) * micro_steps + i) * a.micro_batch
            batch = to_device(data.shuffled(first, a.micro_batch))
            with autocast:
                part = compiled(batch) / micro_steps
            part.backward()
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), a.grad_clip if a.grad_clip > 0 else math.inf)
        for group in optimizer.param_groups:
            group["lr"] = schedule_lr(a, step * a.batch_tokens, horizon)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        record = {"step": step, "tokens": step * a.batch_tokens, "loss": loss.item(), "grad_norm": norm.item()}
        took = time.perf_counter() - start
        seconds.append(took)
        record["tok_per_s"] = a.batch_tokens / took
        if val and (step == a.steps or (a.val_every and step % a.val_every == 0)):
            record["val_loss"] = validate()
        print(json.dumps(record), file=out, flush=True)
        if step % 20 == 0 or step == a.steps:
            print(f"step {step} loss {record['loss']:.4f} {record['tok_per_s']:.0f} tok/s", flush=True)
    best = sorted(seconds)[len(seconds) // 2]
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(f"twin: {a.batch_tokens / best:.0f} tok/s (median step {1e3 * best:.2f} ms), peak {memory:.1f} GiB")


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints of the run that is followed (llmc/checkpoint/checkpoint.h, safetensors.h)

HUGGING_FACE = {"ln1": "ln_1", "ln2": "ln_2", "qkv": "attn.c_attn", "proj": "attn.c_proj", "fc": "mlp.c_fc",
                "fcproj": "mlp.c_proj", "lnf": "ln_f"}  # fmt: skip


def checkpoint_of(run, step):
    return f"{run}/step_{step:08d}" if run else ""


def load_checkpoint(torch, a, model, optimizer, directory, step):
    """Loads weights and moments after `step` into model and optimizer. A moment's file holds a flat array: all tensors in order,
    wte with its padding, each beginning at a multiple of 64."""
    from safetensors.torch import load_file

    weights = load_file(f"{directory}/model.safetensors")
    flat = load_file(f"{directory}/training/optimizer.safetensors")
    moments = [next(v for k, v in flat.items() if k.startswith(m)) for m in ("moment1.", "moment2.")]
    offset = 0
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for name, values in initial_tensors(torch, a, "cpu", shapes_only=True):
            p = parameters[name]
            matrix = values.dim() == 2 and name not in ("wte", "wpe")  # nn.Linear keeps (out, in)
            path = ".".join(HUGGING_FACE.get(part, part) for part in name.split("."))
            stored = weights[f"transformer.{path}" + ("" if "." in path else ".weight")]
            p[: stored.shape[0] if not matrix else None].copy_(stored.t() if matrix else stored)
            state = optimizer.state[p]
            state["step"] = torch.tensor(float(step), device=p.device)
            for key, m in zip(("exp_avg", "exp_avg_sq"), moments):
                part = m[offset : offset + p.numel()]
                part = part.view(p.shape[1], p.shape[0]).t() if matrix else part.view(p.shape)
                state[key] = part.contiguous().to(p.device)
            offset += (p.numel() + 63) // 64 * 64
    assert all(len(m) == offset for m in moments), "the moments are of another model"


# ---------------------------------------------------------------------------------------------------------------------
# Comparison


def read_curve(path):
    loss, val, speed = {}, {}, []
    for line in open(path):
        r = json.loads(line)
        if "step" in r and r.get("loss") is not None:
            loss[r["step"]] = r["loss"]
        if r.get("val_loss") is not None:
            val[r["step"]] = r["val_loss"]
        if r.get("tok_per_s"):
            speed.append(r["tok_per_s"])
    return loss, val, sorted(speed)[len(speed) // 2]


def compare(a):
    ours, our_val, our_speed = read_curve(a.ours)
    twin, twin_val, twin_speed = read_curve(a.twin)
    steps = sorted(set(ours) & set(twin))
    smooth_ours = smooth_twin = weight = worst = signed = 0.0
    decay = 0.5 ** (1 / a.half_life)
    print(f"{'step':>6} {'ours':>9} {'twin':>9} {'smoothed':>9} {'smoothed':>9} {'difference':>10}")
    for i, s in enumerate(steps):
        weight = decay * weight + 1
        smooth_ours = decay * smooth_ours + ours[s]
        smooth_twin = decay * smooth_twin + twin[s]
        difference = (smooth_ours - smooth_twin) / weight
        signed += (ours[s] - twin[s]) / len(steps)
        worst = max(worst, abs(difference))
        if i % max(len(steps) // 20, 1) == 0 or s == steps[-1]:
            print(
                f"{s:6d} {ours[s]:9.4f} {twin[s]:9.4f} {smooth_ours / weight:9.4f} {smooth_twin / weight:9.4f} "
                f"{difference:+10.4f}"
            )
    for s in sorted(set(our_val) & set(twin_val)):
        print(f"val at {s}: ours {our_val[s]:.4f}, twin {twin_val[s]:.4f}, difference {our_val[s] - twin_val[s]:+.4f}")
        worst = max(worst, abs(our_val[s] - twin_val[s]))
    print(f"largest difference {worst:.4f} nats over {len(steps)} steps, mean {signed:+.5f}")
    print(f"ours {our_speed:.0f} tok/s, twin {twin_speed:.0f} tok/s: {our_speed / twin_speed:.3f}x")
    if a.tolerance is None:
        return 0 if steps else 1
    if set(ours) != set(twin):
        print(f"FAIL torch_twin/parity: ours has {len(ours)} steps, the twin {len(twin)}")
        return 1
    finite = math.isfinite(sum([*ours.values(), *twin.values(), *our_val.values(), *twin_val.values()]))  # max ignores NaN
    ok = bool(steps) and worst <= a.tolerance and finite
    print("PASS" if ok else "FAIL", f"torch_twin/parity within {a.tolerance}")
    return 0 if ok else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    t = commands.add_parser("train")
    t.add_argument("--train", required=True)
    t.add_argument("--val", default="")
    t.add_argument("--out", required=True)
    t.add_argument("--part", type=lambda x: tuple(map(int, x.split("/"))), default=(1, 1), metavar="I/N",
                   help="with --follow: the I-th of N parts of the steps, which run side by side")
    t.add_argument("--follow", default="", metavar="RUN", help="run directory whose checkpoints are loaded on the way")
    for name, kind, default in [
        ("layers", int, 12), ("heads", int, 12), ("channels", int, 768), ("vocab-size", int, 50257),
        ("seq-len", int, 1024), ("micro-batch", int, 64), ("batch-tokens", int, 65536), ("steps", int, 100),
        ("lr", float, 6e-4), ("warmup-tokens", float, 0), ("final-lr-frac", float, 0.1), ("weight-decay", float, 0.1),
        ("beta1", float, 0.9), ("beta2", float, 0.95), ("eps", float, 1e-8), ("grad-clip", float, 1.0),
        ("val-every", int, 0), ("val-tokens", int, 1 << 20), ("seed", int, 1),
    ]:  # fmt: skip
        t.add_argument("--" + name, type=kind, default=default)
    o = commands.add_parser("order")
    o.add_argument("--train", required=True)
    for name in ("seq-len", "seed", "first", "count"):
        o.add_argument("--" + name, type=int, required=True)
    c = commands.add_parser("compare")
    c.add_argument("ours")
    c.add_argument("twin")
    c.add_argument("--tolerance", type=float, help="nats between the smoothed curves; without it there is no verdict")
    c.add_argument("--half-life", type=float, default=10, help="of the smoothing, steps")
    a = parser.parse_args()
    return {"train": train, "order": print_order, "compare": compare}[a.command](a)


if __name__ == "__main__":
    sys.exit(main())
