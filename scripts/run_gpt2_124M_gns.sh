#!/usr/bin/env bash
# GPT-2 124M on the 9.9 billion tokens of run_gpt2_124M.sh, with a batch that grows with the measured gradient noise scale,
# from 64 rows (65,536 tokens) to 2048 (2.1 million). The learning rate is that of run_gpt2_124M.sh's batch, scaled with the
# batch (dev/docs/gns.md).
NAME=gpt2-124M-gns
OPTIONS=(
    --model gpt2-124M --micro-batch 64 --seq-len 1024 --batch-tokens 524288 --train-tokens 9890693120 --zero 1
    --ramp gns --batch-min 64 --batch-max 2048 --gns ln
    --lr 6e-4 --warmup-tokens 367001600 --final-lr-frac 0 --weight-decay 0.1
    --val-every 1000 --val-tokens 10485760 --checkpoint-every 1000
)
. "$(dirname "$0")/launch.sh"
launch "$@"
