#!/usr/bin/env bash
# GPT-2 124M on 9.9 billion tokens (18,865 steps), with llm.c's settings: the loss of OpenAI's model on 8 GPUs in an hour or so.
NAME=gpt2-124M
OPTIONS=(
    --model gpt2-124M --micro-batch 64 --seq-len 1024 --batch-tokens 524288 --steps 18865 --zero 1
    --lr 6e-4 --warmup-tokens 367001600 --final-lr-frac 0 --weight-decay 0.1
    --val-every 250 --val-tokens 10485760 --checkpoint-every 1000
)
. "$(dirname "$0")/launch.sh"
launch "$@"
