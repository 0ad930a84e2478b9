"""GPT-2 in PyTorch, as torch_twin.py and torch_fsdp.py train it."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        C, self.heads = channels, heads
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.fcproj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):  # (B, T, C)
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, layers, heads, channels, vocab, seq_len):
        super().__init__()
        self.vocab = vocab
        padded = (vocab + 127) // 128 * 128  # for whole tiles; the loss ignores the rows after the vocabulary
        self.wte = nn.Parameter(torch.zeros(padded, channels))
        self.wpe = nn.Parameter(torch.zeros(seq_len, channels))
        self.h = nn.ModuleList([Block(channels, heads) for _ in range(layers)])
        self.lnf = nn.LayerNorm(channels)

    def hidden(self, tokens):  # (B, T) -> (B, T, C)
        x = F.embedding(tokens, self.wte) + self.wpe[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lnf(x)

    def loss(self, x, targets):  # mean
        return F.cross_entropy(F.linear(x, self.wte)[..., : self.vocab].float().flatten(0, -2), targets.flatten())

    def forward(self, tokens):  # (B, T + 1) -> mean loss
        return self.loss(self.hidden(tokens[:, :-1]), tokens[:, 1:])
