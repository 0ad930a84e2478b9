#!/usr/bin/env bash
NAME=gpt2-350M-gns # scripts/recipes/gpt2-350M-gns.conf
. "$(dirname "$0")/launch.sh"
