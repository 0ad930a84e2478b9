#!/usr/bin/env bash
NAME=gpt2-124M-gns
. "$(dirname "$0")/launch.sh"
