#!/usr/bin/env bash
# Makes shards of TinyStories (Eldan and Li 2023, arXiv 2305.07759), the version by GPT-4: 2.2 GB, with its own
# validation file. See --help.
NAME=tinystories
. "$(dirname "$0")/recipe.sh"
base=https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main
input $base/TinyStoriesV2-GPT4-valid.txt hub
val=$INPUT
input $base/TinyStoriesV2-GPT4-train.txt hub
need_tokenize
# Tokenize a sample first, so that a fault stops the recipe while the old shards are whole. Remove the old training
# shards before writing either split: by data/writer.h, the first training shard shows that both splits are whole.
probe=$(mktemp -d)
trap 'rm -rf "$probe"' EXIT
head -c 4096 "$val" > "$probe/text"
OUT=$probe tokenize --invalid bytes --split val "$probe/text" > /dev/null
rm -f "$OUT/$NAME"_train_*.bin
FORCE=--force
tokenize --separator '<|endoftext|>' --split val "$val"
tokenize --separator '<|endoftext|>' --split train "$INPUT"
