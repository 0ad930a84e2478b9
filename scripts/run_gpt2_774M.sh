#!/usr/bin/env bash
NAME=gpt2-774M # scripts/recipes/gpt2-774M.conf
. "$(dirname "$0")/launch.sh"
