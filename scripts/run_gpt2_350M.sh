#!/usr/bin/env bash
# GPT-2 350M on 31.5 billion tokens (60,000 steps), with llm.c's settings.
NAME=gpt2-350M # scripts/recipes/gpt2-350M.conf
. "$(dirname "$0")/launch.sh"
launch "$@"
