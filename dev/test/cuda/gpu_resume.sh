#!/usr/bin/env bash
# dev/test/cuda/gpu_resume.sh TRAINER TOKENIZE TEXT: a run that is killed and later stopped resumes both times, and ends
# with the bits of an undisturbed run. Runs with other optimizers or with masks are only stopped. dev/test/gpu_check.sh
# runs this script. TRAINER may be the CPU trainer, which has stricter tests: dev/test/run/test_resume.c, test_crash.c.
# With LAUNCH="scripts/mpirun.sh -np 2" in the environment a run has two ranks, and no rank is killed.
set -u
. "$(dirname "$0")/../../../scripts/common.sh"
trainer=$1 tokenize=$2 text=$3
work=$(mktemp -d)
end_all() {
    local job
    for job in $(jobs -p); do kill -9 -- "-$job" || kill -9 "$job"; done 2> /dev/null
    rm -rf "$work"
}
trap end_all EXIT
failed=0

verdict() { # NAME CODE WHY: prints PASS if CODE is 0, else FAIL and WHY
    if [ "$2" = 0 ]; then echo "PASS gpu_resume/$1"; else echo "FAIL gpu_resume/$1: $3" && failed=1; fi
}

"$tokenize" --tokenizer bytes --out "$work/text" --val-fraction 0.05 "$text" > "$work/tokenize.log" 2>&1 || cat "$work/tokenize.log"

train() { # RUN OPTIONS...
    # shellcheck disable=SC2086
    exec ${LAUNCH:-} "$trainer" --train "$work/text_train_*.bin" --val "$work/text_val_*.bin" --out "$work/$1" --vocab-size 256 \
        --layers 3 --heads 3 --channels 192 --seq-len 128 --micro-batch 8 --lr 1e-3 --train-tokens 300000 \
        --ramp linear --batch-min 8 --batch-max 40 --batch-tokens 2048 --gns exact --gns-exact-every 3 \
        --checkpoint-every 7 --keep 2 --val-every 40 "${@:2}" >> "$work/$1.log" 2>&1
}

steps() { grep -c '"loss"' "$work/$1/metrics.jsonl" 2> /dev/null | grep . || echo 0; } # 0 without a file

# Starts a run, sends it SIGNAL after STEPS logged steps, and prints its exit code.
stop_after() { # RUN STEPS SIGNAL OPTIONS...
    (train "$1" "${@:4}") &
    local pid=$!
    while kill -0 $pid 2> /dev/null && [ "$(steps "$1")" -lt "$2" ]; do sleep 0.02; done
    kill -"$3" $pid
    wait $pid 2> /dev/null
    echo $?
}

# state and without_clock print state.json and metrics.jsonl without fields that depend on directory or time.
state() { grep -vE '"(out|metrics_bytes|seconds)"' "$work/$1/$2/training/state.json"; } # RUN CHECKPOINT
without_clock() { sed -E 's/"(tok_per_s|slowest_rank|wait_share|mfu|memory[a-z_]*)": [^,}]*,? ?//g' "$work/$1/metrics.jsonl"; }

# Checks that run PARTS ended like run WHOLE: weights, moments and state of the last checkpoint, and metrics.
verdict_same() { # NAME WHOLE PARTS
    local last file
    last=$(basename "$(newest_checkpoint "$work/$2")")
    for file in model.safetensors training/optimizer.safetensors; do
        cmp -s "$work/$2/$last/$file" "$work/$3/$last/$file"
        verdict "$1/same_bits/$file" $? "$last differs"
    done
    diff <(state "$2" "$last") <(state "$3" "$last") > "$work/$3.diff"
    verdict "$1/same_state" $? "$(head -n 3 "$work/$3.diff")"
    diff <(without_clock "$2") <(without_clock "$3") > "$work/$3.diff"
    verdict "$1/same_metrics" $? "$(head -n 3 "$work/$3.diff")"
    "$trainer" --check "$work/$3/$last" > "$work/$3.check.log" 2>&1
    verdict "$1/check" $? "$(tail -n 1 "$work/$3.check.log")"
}

resumes() { # NAME OPTIONS...: stops the run once, within the ramp
    local name=$1 code last
    (train "$name" "${@:2}")
    verdict "$name/whole" $? "$(tail -n 1 "$work/$name.log")"
    code=$(stop_after "$name-parts" 30 TERM "${@:2}")
    verdict "$name/stopped" $((code != 75)) "exit code $code: $(tail -n 1 "$work/$name-parts.log")"
    (train "$name-parts" "${@:2}")
    verdict "$name/finished" $? "$(tail -n 1 "$work/$name-parts.log")"
    [ "$(grep -c '^resuming' "$work/$name-parts.log")" = 1 ]
    verdict "$name/resumed" $? "$(grep -c '^resuming' "$work/$name-parts.log") times"
    verdict_same "$name" "$name" "$name-parts"
    last=$(basename "$(newest_checkpoint "$work/$name")")
    cmp -s "$work/$name/$last/model.safetensors" "$work/whole/$last/model.safetensors"
    [ $? = 1 ] # 1: the files differ; 2: a file is missing
    verdict "$name/another_run" $? "its options change nothing"
}

(train whole)
verdict whole $? "$(tail -n 1 "$work/whole.log")"
if [ -z "${LAUNCH:-}" ]; then
    code=$(stop_after parts 20 KILL)
    verdict killed $((code != 137)) "exit code $code"
fi
code=$(stop_after parts 60 TERM)
verdict stopped $((code != 75)) "exit code $code: $(tail -n 1 "$work/parts.log")"
(train parts)
verdict finished $? "$(tail -n 1 "$work/parts.log")"
[ "$(grep -c '^resuming' "$work/parts.log")" = $((${LAUNCH:+-1} + 2)) ]
verdict resumed $? "$(grep -c '^resuming' "$work/parts.log") times"
verdict_same parts whole parts
last=$(basename "$(newest_checkpoint "$work/whole")")

# In this vocabulary newline is <|endoftext|>, so each line is a document.
mkdir "$work/lines" && cp "$work/whole/$last/merges.txt" "$work/lines" &&
    sed 's/"\xc4\x8a": 10/"<|endoftext|>": 10/' "$work/whole/$last/vocab.json" > "$work/lines/vocab.json"
set -m # so each job below has its own process group, which the trap ends
resumes muon --optimizer muon > "$work/muon.verdicts" &
resumes lamb --optimizer lamb > "$work/lamb.verdicts" &
resumes masks --dropout 0.1 --label-smoothing 0.1 --document-mask --tokenizer "$work/lines" > "$work/masks.verdicts" &
! nvidia-smi --query-gpu=compute_cap --format=csv,noheader | grep -qx 9.0 || resumes fp8 --dtype fp8-dw --fp8-head > "$work/fp8.verdicts" &
wait
set +m
cat "$work"/*.verdicts
! grep -q ^FAIL "$work"/*.verdicts || failed=1
exit $failed
