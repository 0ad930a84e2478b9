#!/usr/bin/env bash
# GPT-2 774M on 150 billion tokens (286,102 steps), with llm.c's settings.
NAME=gpt2-774M
OPTIONS=(
    --model gpt2-774M --micro-batch 32 --seq-len 1024 --batch-tokens 524288 --steps 286102 --zero 1
    --lr 2.5e-4 --warmup-tokens 367001600 --final-lr-frac 0 --weight-decay 0.1
    --val-every 250 --val-tokens 10485760 --checkpoint-every 1000
)
. "$(dirname "$0")/launch.sh"
launch "$@"
