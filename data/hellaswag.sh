#!/usr/bin/env bash
# Fetches HellaSwag's validation part (Zellers et al. 2019, arXiv 1905.07830): 10,042 questions in hellaswag_val.jsonl.
# It is an evaluation, not text to train on. See --help (--tokenizer does nothing here).
NAME=hellaswag
. "$(dirname "$0")/recipe.sh"
result=$OUT/hellaswag_val.jsonl
[ -n "$FORCE" ] || [ ! -f "$result" ] || { echo "$result is there already (--force makes it again)" && exit 0; }
input https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl
mkdir -p "$OUT"
cp "$INPUT" "$result.partial" && mv "$result.partial" "$result"
echo "$result: $(wc -l < "$result") questions"
