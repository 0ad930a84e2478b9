#!/usr/bin/env bash
# GPT-2 774M on 150 billion tokens (286,102 steps), with llm.c's settings.
NAME=gpt2-774M # scripts/recipes/gpt2-774M.conf
. "$(dirname "$0")/launch.sh"
launch "$@"
