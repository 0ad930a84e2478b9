#!/usr/bin/env bash
# Runs EleutherAI's lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness) on a model:
#
#   scripts/lm_eval.sh [options] MODEL [-- options of lm_eval]
#
# MODEL is a checkpoint (runs/x/step_00001000), a run directory (its newest checkpoint), or any directory that
# transformers loads.
#
#   --tasks LIST      hellaswag,lambada_openai,piqa,winogrande,arc_easy
#   --tokenizer DIR   with a tokenizer that transformers reads, if MODEL has none
#   --device NAME     cuda if there is a GPU, else cpu
#   --batch-size N    auto on a GPU, else 8
#   --dtype NAME      float32, as the checkpoint
#   --out DIR         also write the results there, as JSON
#   --offline         use no network: the tasks' data must be in the cache
#
# The first use of a task downloads its data from huggingface.co to a cache ($HF_HOME, ~/.cache/huggingface). For a machine
# without a network, run the same command elsewhere and copy the cache, or define tasks on local files (-- --include_path
# DIR). LM_EVAL names the program; default: the one in build/venv/bin, then in PATH.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

tasks=hellaswag,lambada_openai,piqa,winogrande,arc_easy
tokenizer='' device='' batch_size='' dtype=float32 out='' offline='' MODEL=''
while [ $# -gt 0 ]; do
    case $1 in
    --tasks | --tokenizer | --device | --batch-size | --dtype | --out)
        [ $# -gt 1 ] && [ -n "$2" ] || fail 64 "$1 needs a value" "See --help"
        name=${1#--}
        printf -v "${name/-/_}" %s "$2"
        shift ;;
    --offline) offline=1 ;;
    --help | -h) print_header "${BASH_SOURCE[0]}" && exit ;;
    --) shift && break ;;
    -*) fail 64 "$1: unknown" "See --help; options of lm_eval itself go after --" ;;
    *) [ -z "$MODEL" ] || fail 64 "two models: $MODEL and $1" "Give one"
        MODEL=$1 ;;
    esac
    shift
done

hint="Name a checkpoint or a run directory"
[ -n "$MODEL" ] || fail 64 "no model" "Name a checkpoint, for example runs/gpt2/step_00001000; see --help"
[ -d "$MODEL" ] || fail 65 "$MODEL: no such directory" "$hint"
newest=$(newest_checkpoint "$MODEL")
MODEL=${newest:-${MODEL%/}}
[ -f "$MODEL/config.json" ] || fail 65 "$MODEL: no config.json" "$hint"
compgen -G "$MODEL/*.safetensors" > /dev/null || fail 65 "$MODEL: no weights in it" "$hint"
[[ $MODEL$tokenizer != *[,=]* ]] || fail 65 "$MODEL: lm_eval takes no , or = in a path" "Use a link with another name"

has_tokenizer() { [ -f "$1/tokenizer.json" ] || { [ -f "$1/vocab.json" ] && [ -f "$1/merges.txt" ]; }; }
has_tokenizer "${tokenizer:-$MODEL}" || [ -z "$tokenizer" ] ||
    fail 65 "$tokenizer: no tokenizer that transformers reads (tokenizer.json, or vocab.json and merges.txt)" "Name its directory"
has_tokenizer "${tokenizer:-$MODEL}" || fail 65 "$MODEL has no tokenizer" "Give --tokenizer DIR, and train with --tokenizer next time"

for program in ${LM_EVAL:+"$LM_EVAL"} "$root/build/venv/bin/lm_eval" lm_eval ''; do
    LM_EVAL=$(command -v "$program") && break
done
[ -n "$LM_EVAL" ] || fail 65 "lm-evaluation-harness is not installed" \
    "Run: python3 -m venv ${top}build/venv && ${top}build/venv/bin/pip install 'lm-eval[hf]' (several GB, with torch)"
[ "$(count_gpus)" = 0 ] && : "${device:=cpu}" || : "${device:=cuda}"
[[ $device == cuda* ]] && : "${batch_size:=auto}" || : "${batch_size:=8}"
[ -z "$offline" ] || export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_EVALUATE_OFFLINE=1 TRANSFORMERS_OFFLINE=1

command=("$LM_EVAL" --model hf --model_args "pretrained=$MODEL,dtype=$dtype${tokenizer:+,tokenizer=$tokenizer}"
    --tasks "$tasks" --device "$device" --batch_size "$batch_size" ${out:+--output_path "$out"} "$@")
printf '%q ' "${command[@]}" && echo
code=0
"${command[@]}" || code=$?
[ $code = 0 ] || fail 65 "lm_eval ended with exit code $code, its messages are above" \
    "If it cannot reach huggingface.co: it downloads the tasks' data from there at first use, see --help"
