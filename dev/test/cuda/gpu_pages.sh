#!/usr/bin/env bash
# Runs the commands of README.md and dev/docs that need a GPU and no network, as written, on a small text:
# dev/test/cuda/gpu_pages.sh TRAINER TOKENIZE DATA. DATA holds tinyshakespeare.txt and gpt2/. Long runs get fewer
# tokens, or the stop signal that their page describes. dev/test/gpu_check.sh runs this script.
#
#     OUT     directory of the logs, NAME.log (a temporary directory)
#     PYTHON  a Python with numpy, scipy, matplotlib (python3); checkpoints are read if it has torch and transformers
#
# Three tracks run side by side on one GPU, because most of their time is start-up.
set -u
cd "$(dirname "$0")/../../.." || exit 70
root=$PWD
program=$(realpath "$1") tokenize=$(realpath "$2") data=$(realpath "$3")
PYTHON=${PYTHON:-python3}
work=$(mktemp -d)
OUT=${OUT:-$work/logs}
mkdir -p "$OUT"
trap 'kill -9 $(jobs -p) 2> /dev/null; rm -rf "$work"' EXIT

# ---- Verdicts and runs -----------------------------------------------------------------------------------------------

tell() { # NAME CODE WHY: PASS if CODE is 0
    if [ "$2" = 0 ]; then echo "PASS gpu_pages/$1"; else echo "FAIL gpu_pages/$1: $3"; fi | tee -a "$work/verdicts"
}

last_words() { grep -hE '^error|Error' "$OUT/$1.log" | tail -n 1 | grep . || tail -n 1 "$OUT/$1.log"; }

page() { # NAME COMMAND...
    local name=$1 code
    shift
    "$@" > "$OUT/$name.log" 2>&1
    code=$?
    tell "$name" $code "exit code $code: $(last_words "$name")"
    return $code
}

says() { # NAME PATTERN: PASS if the page's log matches
    grep -qE "$2" "$OUT/$1.log"
    tell "$1-says" $? "nothing like '$2' in its log; $(last_words "$1")"
}

# Prints the last file that matches a pattern; fails if no file matches.
some() { compgen -G "$1" | sort | tail -n 1 | grep .; }
steps() { grep -c '"loss"' "$1/metrics.jsonl" 2> /dev/null | grep . || echo 0; }

# Starts a command that trains into DIRECTORY; sends it SIGNAL after STEPS steps.
page_stopped() { # NAME DIRECTORY STEPS SIGNAL COMMAND...
    local name=$1 directory=$2 count=$3 signal=$4 job code end=$((SECONDS + 60))
    shift 4
    "$@" > "$OUT/$name.log" 2>&1 &
    job=$!
    while kill -0 $job 2> /dev/null && [ "$(steps "$directory")" -lt "$count" ] && [ $SECONDS -lt $end ]; do sleep 0.05; done
    kill -"$signal" $job 2> /dev/null
    wait $job
    code=$?
    [ $code = 75 ] && some "$directory/step_????????" > /dev/null
    tell "$name" $? "exit code $code, not 75 with a checkpoint: $(last_words "$name")"
}

# Track 1 (gpt2-124M.md): train GPT-2 124M from scratch, stop, resume, evaluate, sample, tune, read with transformers

gpt2=$work/gpt2-124M
recipe() { # LAUNCHER OUT OPTIONS...
    TRAIN="$work/text_train_*.bin" VAL="$work/text_val_*.bin" TOKENIZER=$data/gpt2 PROGRAM=$program OUT=$2 RANKS=1 \
        exec "scripts/$1" "${@:3}"
}

track_124M() {
    local model
    page_stopped run_gpt2_124M "$gpt2" 3 TERM recipe run_gpt2_124M.sh "$gpt2"
    page_stopped run_gpt2_124M-again "$gpt2" $(($(steps "$gpt2") + 2)) USR1 recipe run_gpt2_124M.sh "$gpt2"
    says run_gpt2_124M-again '^resuming from'
    model=$(some "$gpt2/step_????????") || return
    page check "$program" --check "$model"
    page eval-only "$program" --eval-only --model "$model" --val "$work/text_val_*.bin" --tokenizer "$data/gpt2" \
        --hellaswag "$work/hellaswag.jsonl" && says eval-only '[Pp]erplexity'
    page sample-only "$program" --sample-only --model "$model" --tokenizer "$data/gpt2" \
        --prompt 'Once upon a time' --temperature 0.8 --top-k 50 && says sample-only 'Once upon a time'
    page hf-tuned "$program" --model "$model" --train "$work/text_train_*.bin" --val "$work/text_val_*.bin" \
        --seq-len 256 --batch-tokens 4096 --steps 100 --lr 5e-5 --sample-every 50 --out "$work/tuned" || return
    if ! "$PYTHON" -c 'import torch, transformers' 2> /dev/null; then
        echo "SKIP gpu_pages/transformers: no torch and transformers here" | tee -a "$work/verdicts"
        return
    fi
    page transformers "$PYTHON" - "$(some "$work/tuned/step_????????")" << 'PYTHON'
import sys
from transformers import AutoTokenizer, GPT2LMHeadModel
model = GPT2LMHeadModel.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print(tokenizer.decode(model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=50)[0]))
PYTHON
}

# Track 2: a ramp and its analysis (gns.md), reports (gpt2-124M.md), 1% of the study (gns-study.md)

track_gns() {
    local run=$work/ramp bytes="--train $work/bytes_train_*.bin --vocab-size 256 --layers 3 --heads 4 --channels 128 --seq-len 64 --micro-batch 32"
    page gns-ramp "$program" --train "$work/bytes_train_*.bin" --val "$work/bytes_val_*.bin" --vocab-size 256 \
        --layers 3 --heads 4 --channels 128 --seq-len 64 --micro-batch 32 --train-tokens 1e6 --lr 2e-3 --warmup-tokens 150000 \
        --batch-tokens 512 --ramp gns --batch-min 8 --batch-max 128 --out "$run" || return
    page ramp-replay "$program" --train "$work/bytes_train_*.bin" --vocab-size 256 --layers 3 --heads 4 \
        --channels 128 --seq-len 64 --micro-batch 32 --train-tokens 3e5 --val-every 0 --batch-tokens 512 \
        --ramp "replay:$run/metrics.jsonl" --out "$work/replay"
    page report "$PYTHON" scripts/report.py "$run" "$work/replay" -o "$work/report.html"
    page probe "$PYTHON" scripts/critical_batch.py probe "$run" --factors 1,2,4 --tokens 20000 && says probe 'critical batch'
    page wandb "$PYTHON" scripts/to_wandb.py "$run" --dry-run
    printf '%s\n' "a $bytes --batch-tokens 2048 --train-tokens 1e6" "b $bytes --batch-tokens 8192 --train-tokens 1e6" > "$work/queue"
    page ramp_study env TRAINER="$program" "$PYTHON" dev/bench/ramp_study.py "$work/queue" --out "$work/study"
}

# Track 3: llm.c's flags (coming-from.md), a plan and a run on a GPU (README.md), the recipe of a ramp, --tune

tuned() { # OUT OPTIONS...
    "$program" --train "$work/text_train_*.bin" --model d6 --seq-len 1024 --micro-batch 8 --batch-tokens 8192 \
        --steps 20 --val-every 0 --checkpoint-every 10 --keep 0 --out "$@"
}
weights() { cksum < "$(some "$1/step_????????")/model.safetensors"; }

# A resume with or without --tune keeps the stored choices, and ends with the bits of the run that made them.
pages_tune() {
    local a=$work/tune b name
    page tune tuned "$a" --tune || return
    grep -qE '"tuning": ".{20,}"' "$a/run.json"
    tell tune-stored $? "no choices in run.json"
    for name in tune-again tune-not-again; do
        b=$work/$name
        cp -r "$a" "$b" && rm -r "$(some "$b/step_????????")"
        if [ $name = tune-again ]; then page $name tuned "$b" --tune; else page $name tuned "$b"; fi || return
        says $name '^resuming from'
        [ "$(weights "$a")" = "$(weights "$b")" ]
        tell $name-same-bits $? "other weights"
    done
}

track_flags() {
    page version "$program" --version
    page dry-run "$program" --dry-run --model gpt2-124M --micro-batch 64 --batch-tokens 524288 --train-tokens 10e9 \
        --price 3 && says dry-run '^run .*cost'
    page llm.c-flags "$program" -i "$work/text_train_*.bin" -j "$work/text_val_*.bin" -o "$work/log124M" -e d12 \
        -b 64 -t 1024 -d 524288 -r 0 -z 1 -c 0.1 -l 0.0006 -q 0.0 -u 700 -n 5000 -v 250 -h 1 -y 1 -x 3 \
        --tokenizer "$data/gpt2" --hellaswag "$work/hellaswag.jsonl"
    page_stopped readme-gpu "$work/readme" 1 INT "$program" --train "$work/text_train_*.bin" \
        --val "$work/text_val_*.bin" --model gpt2-124M --micro-batch 64 --batch-tokens 524288 --train-tokens 10e9 --lr 6e-4 \
        --warmup-tokens 367e6 --out "$work/readme"
    page_stopped run_gpt2_124M_gns "$work/gns" 20 USR1 recipe run_gpt2_124M_gns.sh "$work/gns" --tokenizer "$data/gpt2" \
        --hellaswag "$work/hellaswag.jsonl" --hellaswag-every 250 --sample-every 1000 --prompt Once
    pages_tune
}

for kind in text bytes; do
    vocabulary=$data/gpt2
    [ $kind = text ] || vocabulary=bytes
    page "tokenize-$kind" "$tokenize" --tokenizer "$vocabulary" --out "$work/$kind" --val-fraction 0.1 "$data/tinyshakespeare.txt"
done
for question in 1 2 3; do
    echo '{"ctx": "'$question' people sit at a table. They", "endings": ["eat.", "table of.", "is blue.", "quickly the."], "label": 0}'
done > "$work/hellaswag.jsonl"

cd "$root" || exit 70
tracks=()
for track in 124M gns flags; do
    "track_$track" &
    tracks+=($!)
done
wait "${tracks[@]}"
! grep -q '^FAIL' "$work/verdicts"
