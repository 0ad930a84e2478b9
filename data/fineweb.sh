#!/usr/bin/env bash
# Makes shards of FineWeb's sample of 10 billion tokens (Penedo et al. 2024, arXiv 2406.17557). One document in a
# hundred goes to validation. data/parquet_to_jsonl.py (pyarrow) pipes the parquet files into data/tokenize. See --help.
# fineweb_edu.sh sources this script and makes shards of FineWeb-Edu, FineWeb's educational part.
NAME=$(basename "$0" .sh)
DATASET=${DATASET:-HuggingFaceFW/${NAME/_/-}}
SAMPLE=10BT FILES=
FLAGS="sample files"
USAGE="--sample 10BT|100BT|350BT    which sample (10BT)
  --files N                    only its first N files of about 2 GB; fewer is quicker (all)"
. "$(dirname "$0")/recipe.sh"
[[ $FILES =~ ^([1-9][0-9]*)?$ ]] || fail 64 "--files $FILES: not a whole number from 1" "See --help"
"$PYTHON" -c 'import pyarrow.parquet' 2> /dev/null || fail 65 "$PYTHON has no pyarrow, which reads parquet" \
    "Say PYTHON=/path/of/one/that/has/it in front of the command, or: python3 -m venv ${top}build/venv && ${top}build/venv/bin/pip install pyarrow"

inputs=()
if [ -n "$FROM" ]; then
    inputs=("$FROM"/*.parquet)
    [ -f "${inputs[0]}" ] || fail 65 "$FROM: no parquet files in it" "Name the directory that holds them"
    [ -z "$FILES" ] || inputs=("${inputs[@]:0:$FILES}")
else
    # Get the path and SHA-256 of every file from the Hub.
    mkdir -p "$DOWNLOAD"
    rm -f "$DOWNLOAD/$SAMPLE.json"
    fetch "https://huggingface.co/api/datasets/$DATASET/tree/main/sample/$SAMPLE" "$DOWNLOAD/$SAMPLE.json"
    "$PYTHON" -c 'import json, sys
for file in sorted(json.load(open(sys.argv[1])), key=lambda f: f["path"]):
    if file["path"].endswith(".parquet"): print(file["path"], file["lfs"]["oid"])' \
        "$DOWNLOAD/$SAMPLE.json" > "$DOWNLOAD/$SAMPLE.list" ||
        fail 65 "the list of $DATASET's files has another form" "Get the files yourself and say --from DIR"
    while read -r path sum; do
        [ -z "$FILES" ] || [ ${#inputs[@]} -lt "$FILES" ] || break
        input "https://huggingface.co/datasets/$DATASET/resolve/main/$path" "$sum"
        inputs+=("$INPUT")
    done < "$DOWNLOAD/$SAMPLE.list"
fi
need_tokenize
# If the text breaks off, data/tokenize gets a line that it refuses. It then keeps earlier shards and makes none.
{ "$PYTHON" "$root/data/parquet_to_jsonl.py" "${inputs[@]}" || echo "the text broke off" 2> /dev/null; } |
    tokenize --format jsonl --val-fraction 0.01 -
