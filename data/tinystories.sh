#!/usr/bin/env bash
# TinyStories (Eldan and Li 2023, arXiv 2305.07759), the version told by GPT-4: 2.2 GB, with a validation file of its
# own. See --help.
NAME=tinystories
. "$(dirname "$0")/recipe.sh"
recipe_options "$@"
no_more_options
base=https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main
input $base/TinyStoriesV2-GPT4-valid.txt hub
val=$INPUT
input $base/TinyStoriesV2-GPT4-train.txt hub
need_tokenize
# The validation first: the training shards are what says that all is done. With both a state and validation shards, it is
# the training shards that were interrupted.
if [ ! -f "$OUT/$NAME.state" ] || ! compgen -G "$OUT/${NAME}_val_*.bin" > /dev/null; then
    rm -f "$OUT/$NAME"_val_*.bin
    tokenize --separator '<|endoftext|>' --split val "$val"
fi
tokenize --separator '<|endoftext|>' --split train "$INPUT"
