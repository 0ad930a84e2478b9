#!/usr/bin/env bash
NAME=gpt2-350M
. "$(dirname "$0")/launch.sh"
