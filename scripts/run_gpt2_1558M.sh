#!/usr/bin/env bash
# GPT-2 1558M on 33.6 billion tokens (32,000 steps), with llm.c's settings.
NAME=gpt2-1558M
OPTIONS=(
    --model gpt2-1558M --micro-batch 16 --seq-len 1024 --batch-tokens 1048576 --steps 32000 --zero 1
    --lr 6e-4 --warmup-tokens 734003200 --final-lr-frac 0.1 --weight-decay 0.1
    --val-every 250 --val-tokens 10485760 --checkpoint-every 1000
)
. "$(dirname "$0")/launch.sh"
launch "$@"
