"""Times GPT-2 training steps in PyTorch on the CPU, for comparison: torch_cpu.py LAYERS HEADS CHANNELS VOCAB T B THREADS.

Uses fp32 (DTYPE=bf16: autocast to bf16), fused scaled_dot_product_attention, fused AdamW, gradient clipping and, with
COMPILE=1, torch.compile. Prints the best and the median time of a step, and tokens per second, on random tokens.
"""
import os
import statistics
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

L, NH, C, V, T, B, THREADS = map(int, sys.argv[1:8])
torch.set_num_threads(THREADS)
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.fcproj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        q, k, v = (y.view(B, T, NH, C // NH).transpose(1, 2) for y in self.qkv(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.fcproj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(T, C)
        self.blocks, self.ln_f = nn.ModuleList(Block() for _ in range(L)), nn.LayerNorm(C)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens):
        x = self.wte(tokens[:, :-1]) + self.wpe.weight
        for block in self.blocks:
            x = block(x)
        logits = self.ln_f(x) @ self.wte.weight.t()
        return F.cross_entropy(logits.view(-1, V), tokens[:, 1:].reshape(-1))


def main():
    model = GPT2()
    forward = torch.compile(model) if os.environ.get("COMPILE") == "1" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    seconds = []
    steps = int(os.environ.get("STEPS", "8"))
    for _ in range(steps + 2):
        tokens = torch.randint(V, (B, T + 1))
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=os.environ.get("DTYPE") == "bf16"):
            loss = forward(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
    best, median = min(seconds[2:]), statistics.median(seconds[2:])
    print(f"PyTorch {torch.__version__}: {1e3 * median:.1f} ms a step (best {1e3 * best:.1f}), {B * T / median:.0f} tok/s")


main()
