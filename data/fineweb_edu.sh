#!/usr/bin/env bash
# Makes shards of FineWeb-Edu, FineWeb's educational part: a sample of 10 billion tokens. Runs data/fineweb.sh.
NAME=fineweb_edu DATASET=HuggingFaceFW/fineweb-edu exec "$(dirname "$0")/fineweb.sh" "$@"
