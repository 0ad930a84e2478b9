#!/usr/bin/env bash
NAME=gpt2-1558M
. "$(dirname "$0")/launch.sh"
