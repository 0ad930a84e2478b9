#!/usr/bin/env bash
NAME=gpt2-350M # scripts/recipes/gpt2-350M.conf
. "$(dirname "$0")/launch.sh"
