#!/usr/bin/env bash
NAME=gpt2-124M
. "$(dirname "$0")/launch.sh"
