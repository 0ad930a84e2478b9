#!/usr/bin/env bash
# TinyStories (Eldan and Li 2023, arXiv 2305.07759), the version written by GPT-4: 2.2 GB, with its own validation
# file. See --help.
NAME=tinystories
. "$(dirname "$0")/recipe.sh"
recipe_options "$@"
base=https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main
input $base/TinyStoriesV2-GPT4-valid.txt hub
val=$INPUT
input $base/TinyStoriesV2-GPT4-train.txt hub
need_tokenize
# The first training shard says that both splits are whole (data/writer.h): an older one goes before the validation.
rm -f "$OUT/${NAME}_train_000000.bin"
FORCE=--force
tokenize --separator '<|endoftext|>' --split val "$val"
tokenize --separator '<|endoftext|>' --split train "$INPUT"
