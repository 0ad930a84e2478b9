#!/usr/bin/env bash
# GPT-2 1558M on 33.6 billion tokens (32,000 steps), with llm.c's settings.
NAME=gpt2-1558M # scripts/recipes/gpt2-1558M.conf
. "$(dirname "$0")/launch.sh"
launch "$@"
