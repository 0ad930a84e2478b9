#!/usr/bin/env bash
# FineWeb-Edu: the educational part of FineWeb, a sample of 10 billion tokens. As data/fineweb.sh; see --help.
NAME=fineweb_edu DATASET=HuggingFaceFW/fineweb-edu exec "$(dirname "$0")/fineweb.sh" "$@"
