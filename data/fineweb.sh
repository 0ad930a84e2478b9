#!/usr/bin/env bash
# FineWeb (Penedo et al. 2024, arXiv 2406.17557), a sample of 10 billion tokens; one document in a hundred is validation.
# The parquet files are read by data/parquet_to_jsonl.py (pyarrow) and piped into data/tokenize. See --help.
NAME=${NAME:-fineweb}
DATASET=${DATASET:-HuggingFaceFW/fineweb}
USAGE="--sample 10BT|100BT|350BT    which sample (10BT)
  --files N                    only its first N files of about 2 GB; fewer is quicker (all)"
. "$(dirname "$0")/recipe.sh"
recipe_options "$@"
sample=10BT files=
set -- ${REST[@]+"${REST[@]}"}
while [ $# -gt 0 ]; do
    [ $# -gt 1 ] || fail 64 "$1: unknown, or needs a value" "See --help"
    case $1 in
    --sample) sample=$2 ;;
    --files) files=$2 ;;
    *) fail 64 "$1: unknown" "See --help" ;;
    esac
    shift 2
done
[[ $files =~ ^([1-9][0-9]*)?$ ]] || fail 64 "--files $files: not a whole number from 1" "See --help"
"$PYTHON" -c 'import pyarrow.parquet' 2> /dev/null || fail 65 "$PYTHON has no pyarrow, which reads parquet" \
    "Say PYTHON=/path/of/one/that/has/it in front of the command, or: python3 -m venv ${top}build/venv && ${top}build/venv/bin/pip install pyarrow"

inputs=()
if [ -n "$FROM" ]; then
    inputs=("$FROM"/*.parquet)
    [ -f "${inputs[0]}" ] || fail 65 "$FROM: no parquet files in it" "Name the directory that holds them"
    [ -z "$files" ] || inputs=("${inputs[@]:0:$files}")
else
    # Path and SHA-256 of every file, from the Hub.
    mkdir -p "$DOWNLOAD"
    rm -f "$DOWNLOAD/$sample.json"
    fetch "https://huggingface.co/api/datasets/$DATASET/tree/main/sample/$sample" "$DOWNLOAD/$sample.json"
    "$PYTHON" -c 'import json, sys
for file in sorted(json.load(open(sys.argv[1])), key=lambda f: f["path"]):
    if file["path"].endswith(".parquet"): print(file["path"], file["lfs"]["oid"])' \
        "$DOWNLOAD/$sample.json" > "$DOWNLOAD/$sample.list" ||
        fail 65 "the list of $DATASET's files has another form" "Get the files yourself and say --from DIR"
    while read -r path sum; do
        [ -z "$files" ] || [ ${#inputs[@]} -lt "$files" ] || break
        input "https://huggingface.co/datasets/$DATASET/resolve/main/$path" "$sum"
        inputs+=("$INPUT")
    done < "$DOWNLOAD/$sample.list"
fi
need_tokenize
"$PYTHON" "$root/data/parquet_to_jsonl.py" "${inputs[@]}" | tokenize --format jsonl --val-fraction 0.01 - || {
    codes=("${PIPESTATUS[@]}")
    [ "${codes[1]}" = 0 ] || exit "${codes[1]}"
    rm -f "$OUT/$NAME"_{train,val}_*.bin
    fail 65 "the text broke off: the shards in $OUT were incomplete and are removed" "Correct what is said above"
}
