#!/usr/bin/env bash
NAME=gpt2-124M-gns # scripts/recipes/gpt2-124M-gns.conf
. "$(dirname "$0")/launch.sh"
