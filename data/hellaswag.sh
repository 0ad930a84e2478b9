#!/usr/bin/env bash
# HellaSwag (Zellers et al. 2019, arXiv 1905.07830), its validation part: 10,042 questions in hellaswag_val.jsonl, an
# evaluation and not text to train on. See --help (--tokenizer does nothing here).
NAME=hellaswag
. "$(dirname "$0")/recipe.sh"
recipe_options "$@"
result=$OUT/hellaswag_val.jsonl
[ -n "$FORCE" ] || [ ! -f "$result" ] || { echo "$result is there already (--force makes it again)" && exit 0; }
input https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl
command -v "$PYTHON" > /dev/null || fail 65 "python3 is missing" "It checks the file: install python3"
check='
import json, sys
questions = 0
for line in open(sys.argv[1], encoding="utf-8"):
    try:
        q = json.loads(line)
        assert len(q["endings"]) == 4 and q["ctx"] and 0 <= int(q["label"]) < 4
        questions += 1
    except (ValueError, KeyError, TypeError, AssertionError):
        sys.exit(f"error: {sys.argv[1]} line {questions + 1}: not a question of HellaSwag. Get the file again")
if questions == 0 or (not sys.argv[2] and questions != 10042):
    sys.exit(f"error: {sys.argv[1]}: {questions} questions, not 10042. Get the file again")
'
"$PYTHON" -c "$check" "$INPUT" "${FROM:+any}" || { [ -n "$FROM" ] || rm -f "$INPUT"; exit 65; }
mkdir -p "$OUT"
rm -f "$result.partial" # it may be a link
cp "$INPUT" "$result.partial" && mv "$result.partial" "$result"
echo "$result: $(wc -l < "$result") questions"
