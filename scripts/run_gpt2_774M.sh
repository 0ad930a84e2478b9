#!/usr/bin/env bash
NAME=gpt2-774M
. "$(dirname "$0")/launch.sh"
