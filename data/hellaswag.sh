#!/usr/bin/env bash
# HellaSwag (Zellers et al. 2019, arXiv 1905.07830), its validation part: 10,042 questions in hellaswag_val.jsonl, an
# evaluation and not a text to train on. See --help (--tokenizer does nothing here).
NAME=hellaswag
. "$(dirname "$0")/recipe.sh"
recipe_options "$@"
no_more_options
result=$OUT/hellaswag_val.jsonl
[ -n "$FORCE" ] || [ ! -f "$result" ] || { echo "$result is there already (--force makes it again)" && exit 0; }
input https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl
command -v "$PYTHON" > /dev/null || fail 65 "python3 is missing" "It checks the file: install python3"
mkdir -p "$OUT"
"$PYTHON" - "$INPUT" "$result" "${FROM:+any}" << 'END' || { [ -n "$FROM" ] || rm -f "$INPUT"; exit 65; }
import json, os, sys
source, result, any_number = sys.argv[1:4]
questions = 0
with open(source, encoding="utf-8") as lines:
    for number, line in enumerate(lines, 1):
        try:
            q = json.loads(line)
            assert len(q["endings"]) == 4 and q["ctx"] and 0 <= int(q["label"]) < 4
            questions += 1
        except (ValueError, KeyError, TypeError, AssertionError):
            sys.exit(f"error: {source} line {number}: not a question of HellaSwag. Get the file again")
if questions == 0 or (not any_number and questions != 10042):
    sys.exit(f"error: {source}: {questions} questions, not 10042. Get the file again")
if os.path.lexists(result + ".partial"):
    os.remove(result + ".partial")  # it may be a link
with open(source, "rb") as a, open(result + ".partial", "xb") as b:
    b.write(a.read())
os.replace(result + ".partial", result)
print(f"{result}: {questions} questions")
END
