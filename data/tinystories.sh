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
# Makes the small validation anew every time, in a directory that exists until all is done. What an interrupted command
# left may be incomplete, or of another vocabulary.
said=$(OUT=$UNFINISHED FORCE=--force tokenize --separator '<|endoftext|>' --split val "$val")
tokenize --separator '<|endoftext|>' --split train "$INPUT"
rm -f "$OUT/$NAME"_val_*.bin
mv "$UNFINISHED/$NAME"_val_*.bin "$OUT"
rm -r "$UNFINISHED"
echo "${said/"$UNFINISHED"/"$OUT"}"
