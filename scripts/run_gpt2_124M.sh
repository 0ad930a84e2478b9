#!/usr/bin/env bash
# GPT-2 124M on 9.9 billion tokens (18,865 steps), with llm.c's settings: the loss of OpenAI's model on 8 GPUs in an hour or so.
NAME=gpt2-124M # scripts/recipes/gpt2-124M.conf
. "$(dirname "$0")/launch.sh"
launch "$@"
