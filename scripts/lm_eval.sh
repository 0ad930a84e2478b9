#!/usr/bin/env bash
# Runs EleutherAI's lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness) on a model:
#
#   scripts/lm_eval.sh [options] MODEL [-- options of lm_eval]
#
# MODEL is a checkpoint (runs/x/step_00001000), a run directory, whose newest checkpoint is taken, or any directory that
# transformers loads.
#
#   --tasks LIST      hellaswag,lambada_openai,piqa,winogrande,arc_easy
#   --tokenizer DIR   where MODEL has no tokenizer of its own: a directory with one that transformers reads
#   --device NAME     cuda where there is a GPU, else cpu
#   --batch-size N    auto on a GPU, else 8
#   --dtype NAME      float32: what the checkpoint holds
#   --out DIR         keep the results there, as JSON; otherwise they are only printed
#   --offline         do not ask the network: the tasks' data must be in the cache already
#
# The tasks' data come from huggingface.co at their first use and stay in its cache ($HF_HOME, ~/.cache/huggingface). For
# a machine without a network, run the same command once where there is one and take the cache along, or define tasks on
# local files (-- --include_path DIR). LM_EVAL names the program; otherwise build/venv/bin or PATH has it.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

TASKS=hellaswag,lambada_openai,piqa,winogrande,arc_easy
TOKENIZER='' DEVICE='' BATCH='' DTYPE=float32 OUT='' OFFLINE='' MODEL=''
while [ $# -gt 0 ]; do
    case $1 in
    --tasks | --tokenizer | --device | --batch-size | --dtype | --out)
        [ $# -gt 1 ] && [ -n "$2" ] || fail 64 "$1 needs a value" "See --help" ;;&
    --tasks) TASKS=$2 && shift ;;
    --tokenizer) TOKENIZER=$2 && shift ;;
    --device) DEVICE=$2 && shift ;;
    --batch-size) BATCH=$2 && shift ;;
    --dtype) DTYPE=$2 && shift ;;
    --out) OUT=$2 && shift ;;
    --offline) OFFLINE=1 ;;
    --help | -h) print_header "${BASH_SOURCE[0]}" && exit ;;
    --) shift && break ;;
    -*) fail 64 "$1: unknown" "See --help; options of lm_eval itself go behind --" ;;
    *) [ -z "$MODEL" ] || fail 64 "two models: $MODEL and $1" "Give one"
        MODEL=$1 ;;
    esac
    shift
done

need_model() {
    local newest
    [ -n "$MODEL" ] || fail 64 "no model" "Name a checkpoint, for example runs/gpt2/step_00001000; see --help"
    [ -d "$MODEL" ] || fail 65 "$MODEL: no such directory" "Name a checkpoint or a run directory"
    newest=$(newest_checkpoint "$MODEL")
    MODEL=${newest:-${MODEL%/}}
    [ -f "$MODEL/config.json" ] || fail 65 "$MODEL: no config.json" "Name a checkpoint or a run directory"
    compgen -G "$MODEL/*.safetensors" > /dev/null || fail 65 "$MODEL: no weights in it" "Name a checkpoint or a run directory"
    case $MODEL,$TOKENIZER in
    *,*,* | *=*) fail 65 "$MODEL: lm_eval takes no , or = in a path" "Use a link with another name" ;;
    esac
}

has_tokenizer() { [ -f "$1/tokenizer.json" ] || { [ -f "$1/vocab.json" ] && [ -f "$1/merges.txt" ]; }; }

need_tokenizer() {
    if [ -n "$TOKENIZER" ]; then
        has_tokenizer "$TOKENIZER" ||
            fail 65 "$TOKENIZER: no tokenizer that transformers reads (tokenizer.json, or vocab.json and merges.txt)" "Name its directory"
    else
        has_tokenizer "$MODEL" || fail 65 "$MODEL has no tokenizer" "Give --tokenizer DIR, and train with --tokenizer next time"
    fi
}

need_harness() {
    local program
    for program in ${LM_EVAL:+"$LM_EVAL"} "$root/build/venv/bin/lm_eval" lm_eval; do
        LM_EVAL=$(command -v "$program") && return
    done
    fail 65 "lm-evaluation-harness is not installed" \
        "Run: python3 -m venv ${top}build/venv && ${top}build/venv/bin/pip install 'lm-eval[hf]' (several GB, with torch)"
}

has_gpu() { nvidia-smi --list-gpus 2> /dev/null | grep -q '^GPU '; }

need_model
need_tokenizer
need_harness
if has_gpu; then : "${DEVICE:=cuda}"; else : "${DEVICE:=cpu}"; fi
if [[ $DEVICE = cuda* ]]; then : "${BATCH:=auto}"; else : "${BATCH:=8}"; fi
[ -z "$OFFLINE" ] || export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_EVALUATE_OFFLINE=1 TRANSFORMERS_OFFLINE=1

command=("$LM_EVAL" --model hf --model_args "pretrained=$MODEL,dtype=$DTYPE${TOKENIZER:+,tokenizer=$TOKENIZER}"
    --tasks "$TASKS" --device "$DEVICE" --batch_size "$BATCH" ${OUT:+--output_path "$OUT"} "$@")
printf '%q ' "${command[@]}" && echo
code=0
"${command[@]}" || code=$?
[ $code = 0 ] || fail 65 "lm_eval ended with exit code $code, what it said stands above" \
    "If it could not reach huggingface.co: the tasks' data come from there at first use, see --help"
