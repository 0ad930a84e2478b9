#!/usr/bin/env bash
NAME=gpt2-1558M # scripts/recipes/gpt2-1558M.conf
. "$(dirname "$0")/launch.sh"
