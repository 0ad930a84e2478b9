#!/usr/bin/env bash
NAME=gpt2-350M-gns
. "$(dirname "$0")/launch.sh"
