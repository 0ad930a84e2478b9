"""Measures PyTorch's FSDP2 on GPT-2 over several GPUs of a machine: tok/s and memory per rank. Compare with train_gpt2cu
--zero 3 --recompute block at the same shape.

    torchrun --nproc-per-node 2 dev/bench/torch_fsdp.py --layers 84 --heads 54 --channels 3456 --micro-batch 16 --steps 6

Uses the common settings: fp32 parameters and moments in shards, bf16 for compute, gradients reduced in fp32, blocks
recomputed and compiled, the fused AdamW. Tokens are random."""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torch_block


class GPT2(torch_block.GPT2):
    def forward(self, tokens):  # (B, T + 1) -> mean loss, one row at a time: logits of all rows would not fit
        loss = 0
        for x, targets in zip(self.hidden(tokens[:, :-1]), tokens[:, 1:]):
            loss = loss + torch.utils.checkpoint.checkpoint(self.loss, x, targets, use_reentrant=False)
        return loss / len(tokens)


def build(a):
    with torch.device("meta"):
        model = GPT2(a.layers, a.heads, a.channels, a.vocab_size, a.seq_len)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for i, block in enumerate(model.h):
        if a.recompute:
            block = checkpoint_wrapper(block)
        if a.compile:
            block = torch.compile(block)
        fully_shard(block, mp_policy=policy)
        model.h[i] = block
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0, 0.02) if p.dim() > 1 else p.fill_("weight" in name)
    return model


def main(a):
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    torch.manual_seed(rank)
    model, T = build(a), a.seq_len
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    seconds = []
    for step in range(a.steps):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for i in range(a.micro_steps):
            tokens = torch.randint(a.vocab_size, (a.micro_batch, T + 1), device="cuda")
            (model(tokens) / a.micro_steps).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if rank == 0:
            print(f"step {step}: {seconds[-1]:.3f} s", flush=True)
    free, total = torch.cuda.mem_get_info()
    if rank == 0:
        best = sorted(seconds[2:])[len(seconds[2:]) // 2]
        speed = dist.get_world_size() * a.micro_steps * a.micro_batch * T / best
        parameters = sum(p.numel() for p in model.parameters()) - a.channels * T  # without wpe, as llmc/model/model.h
        flops = 6 * parameters + 6 * a.layers * a.channels * T
        mfu = 100 * flops * speed / (dist.get_world_size() * 989e12)
        print(f"FSDP2: {speed:.0f} tok/s (median step {best:.3f} s), MFU {mfu:.1f}%, peak of the allocator "
              f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, in use {(total - free) / 2**30:.1f} GiB")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 48), ("heads", 25), ("channels", 1600), ("vocab-size", 50257), ("seq-len", 1024),
                          ("micro-batch", 16), ("micro-steps", 1), ("steps", 6)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=True)
    main(parser.parse_args())
