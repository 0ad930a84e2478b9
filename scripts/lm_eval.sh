#!/usr/bin/env bash
# Runs EleutherAI's lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness) on a model:
#
#   scripts/lm_eval.sh MODEL [options of lm_eval]
#
# MODEL is a checkpoint (runs/x/step_00001000), a run directory (its newest checkpoint), or any directory that
# transformers loads. Options of lm_eval override the defaults:
#
#   --tasks hellaswag,lambada_openai,piqa,winogrande,arc_easy
#   --device cuda --batch_size auto on a GPU, else --device cpu --batch_size 8
#
# Environment variables:
#
#   TOKENIZER   a directory with a tokenizer that transformers reads, if MODEL has none
#   DTYPE       type of the weights; default: float32, as in the checkpoint
#   LM_EVAL     the program; default: the one in build/venv/bin, else in PATH
#
# The first use of a task downloads its data from huggingface.co to a cache ($HF_HOME, ~/.cache/huggingface). For a machine
# without a network, run the same command elsewhere, copy the cache and set HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1, or
# define tasks on local files (--include_path DIR).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
MODEL=${1:-} TOKENIZER=${TOKENIZER:-}
hint="Name a checkpoint or a run directory, for example runs/gpt2/step_00001000; see --help"
[[ $MODEL != @(--help|-h) ]] || { print_header "${BASH_SOURCE[0]}"; exit; }
[[ $MODEL != @(|-*) ]] || fail 64 "no model before the options" "$hint"
[ -d "$MODEL" ] || fail 65 "$MODEL: no such directory" "$hint"
newest=$(newest_checkpoint "$MODEL")
MODEL=${newest:-${MODEL%/}}
[ -f "$MODEL/config.json" ] && compgen -G "$MODEL/*.safetensors" > /dev/null || fail 65 "$MODEL: no config.json and weights in it" "$hint"
[[ $MODEL$TOKENIZER != *[,=]* ]] || fail 65 "$MODEL: lm_eval takes no , or = in a path" "Use a link with another name"
words=${TOKENIZER:-$MODEL}
[ -f "$words/tokenizer.json" ] || [ -f "$words/vocab.json" -a -f "$words/merges.txt" ] || fail 65 \
    "$words: no tokenizer that transformers reads (tokenizer.json, or vocab.json and merges.txt)" "Set TOKENIZER, and train with --tokenizer next time"

PATH=$root/build/venv/bin:$PATH
LM_EVAL=$(command -v "${LM_EVAL:-lm_eval}") || fail 65 "lm-evaluation-harness is not installed" \
    "Run: python3 -m venv ${top}build/venv && ${top}build/venv/bin/pip install 'lm-eval[hf]' (several GB, with torch)"
[ "$(count_gpus)" = 0 ] && where=(--device cpu --batch_size 8) || where=(--device cuda --batch_size auto)
tasks=(--tasks hellaswag,lambada_openai,piqa,winogrande,arc_easy)
for option in "${@:2}"; do # lm_eval adds up several --tasks
    [[ $option != @(--tasks|--tasks=*|-t) ]] || tasks=()
done
command=("$LM_EVAL" --model hf --model_args "pretrained=$MODEL,dtype=${DTYPE:-float32}${TOKENIZER:+,tokenizer=$TOKENIZER}"
    "${tasks[@]}" "${where[@]}" "${@:2}")
printf '%q ' "${command[@]}" && echo
"${command[@]}" || fail 65 "lm_eval ended with exit code $?, its messages are above" \
    "If it cannot reach huggingface.co: it downloads the tasks' data from there at first use, see --help"
