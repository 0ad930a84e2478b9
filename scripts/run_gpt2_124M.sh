#!/usr/bin/env bash
NAME=gpt2-124M # scripts/recipes/gpt2-124M.conf
. "$(dirname "$0")/launch.sh"
