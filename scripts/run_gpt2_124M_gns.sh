#!/usr/bin/env bash
# GPT-2 124M on the 9.9 billion tokens of run_gpt2_124M.sh. The batch grows with the measured gradient noise scale, from
# 64 rows (65,536 tokens) to 2048 (2.1 million). The learning rate is scaled with the batch: run_gpt2_124M.sh's rate is
# for its batch (dev/docs/gns.md).
NAME=gpt2-124M-gns # scripts/recipes/gpt2-124M-gns.conf
. "$(dirname "$0")/launch.sh"
launch "$@"
