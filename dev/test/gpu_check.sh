#!/usr/bin/env bash
# Runs everything that needs a GPU: tests, sanitizers, benchmarks, and a run beside PyTorch's. Prints one table at the
# end. Full logs are in $OUT.
#
#     dev/test/gpu_check.sh [tests] [sanitize] [bench] [resume] [pages] [parity]  (default: tests bench)
#
#     BUILD   where the programs are (build): $BUILD/cuda-BF16, -FP16 and -FP32, $BUILD/cpu. If they are missing,
#             `make cuda-programs` builds them. Programs built elsewhere need no headers here.
#     DATA    directory with tinyshakespeare.txt and gpt2/ ($GNS_TEST_DATA)
#     OUT     logs and run directories (build/gpu_check)
#     TEXTS   directories with source text, for parity (/usr /opt)
#     TOOLS   tools of compute-sanitizer (memcheck racecheck initcheck synccheck)
#     TOOL_LIMIT  seconds for each program under a tool (200)
#     STEPS   steps of parity (200: 105 million tokens)
# shellcheck disable=SC2046,SC2086
set -u
. "$(dirname "$0")/stages.sh"
check_stages "tests sanitize bench resume pages parity" "$@"
export LC_ALL=C                               # numbers with a point
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000} # see llmc/run/program.h
cd "$root" || exit 70
BUILD=${BUILD:-build} DATA=${DATA:-${GNS_TEST_DATA:-}} OUT=${OUT:-build/gpu_check} TEXTS=${TEXTS:-/usr /opt}
TOOLS=${TOOLS:-memcheck racecheck initcheck synccheck} TOOL_LIMIT=${TOOL_LIMIT:-200} STEPS=${STEPS:-200}
bf16=$BUILD/cuda-BF16 tokenize=$BUILD/cpu/data/tokenize
source_bytes=0
gpus=$(count_gpus)
[ "$gpus" -gt 0 ] || gpus=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
begin_table "$OUT"

# Runs a command. Writes its output to $OUT/NAME.log, and its verdict and time to the table.
check() { # NAME LIMIT_SECONDS COMMAND...
    local name=$1 start=$EPOCHREALTIME code verdict=PASS
    timeout "$2" "${@:3}" > "$OUT/$name.log" 2>&1
    code=$?
    [ $code = 0 ] || verdict="FAIL($code)"
    [ $code != 77 ] || verdict=SKIP
    ! grep -qE '^FAIL' "$OUT/$name.log" || verdict=FAIL
    row "$verdict" "$name" "$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f s", b - a }')"
    grep -E '^FAIL|^error' "$OUT/$name.log" | head -n 5 | sed 's/^/    /'
    return $code
}

show() { # NAME PATTERN: adds the matching lines of a log to the table
    grep -E "$2" "$OUT/$1.log" | sed 's/^/    /' | tee -a "$table"
}

needs() { # STAGE FILE...: fails if DATA lacks one of the files
    local file
    for file in "${@:2}"; do [ -e "$DATA/$file" ] || { row SKIP "$1" "no $file in DATA"; return 1; }; done
}

tests() {
    local precision program
    for precision in BF16 FP16 FP32; do
        for program in "$BUILD/cuda-$precision"/dev/test/*/test_*_cuda; do
            check "$(basename "$program")-$precision" 300 "$program"
        done
    done
}

# Runs every kernel, with small sizes, under every tool. The programs of one tool run at the same time. initcheck does
# not see cuBLASLt's bulk stores and reports their results as unwritten, so it runs only the tests without cuBLASLt.
# test_filled_memory (in the stage tests) finds the engine's reads of unwritten memory: memory full of NaN and memory
# full of zeros must give the same bits.
sanitize() {
    local tool program name
    for tool in $TOOLS; do
        for program in "$bf16"/dev/test/*/test_*_cuda; do
            name=$(basename "$program")
            case $tool-$name in
            *-test_shard_cuda | *-test_device_cuda) ;; # these run only the engine's kernels, or none
            racecheck-test_optimizers*) row SKIP "$tool-$name" "it reports races within cuBLASLt's batched products" ;;
            initcheck-test_engine* | initcheck-test_matmul* | initcheck-test_optimizers* | initcheck-test_logits*) row SKIP "$tool-$name" "see test_filled_memory in the stage tests" ;;
            *) check "$tool-$name" "$TOOL_LIMIT" compute-sanitizer --tool "$tool" --error-exitcode 1 "$program" 1 small & ;;
            esac
        done
        wait
    done
}

bench() {
    local program
    for program in "$bf16"/dev/bench/bench_*; do
        [[ $program == *bench_engine ]] || check "$(basename "$program")" 200 "$program"
    done
    speed d12 64 1024 60 tune
    speed d24 32 1024 40 tune
    speed d48 16 1024 30 tune
    speed d6 8 256 300 # small, to see whether the device waits for the host
    speed demo 16 64 500
}

speed() { # MODEL MICRO_BATCH SEQ_LEN ROUNDS WORD...
    check "speed-$1" 120 "$bf16/dev/bench/bench_engine" "$@"
    show "speed-$1" '^[^ ].*(tok/s|GiB$|against)'
}

# Kills, stops and resumes a run.
resume() {
    needs resume tinyshakespeare.txt || return
    check resume 200 dev/test/cuda/gpu_resume.sh "$bf16/train_gpt2cu" "$tokenize" "$DATA/tinyshakespeare.txt"
    show resume '^PASS'
}

# Runs the commands of README.md and dev/docs.
pages() {
    local verdict name why
    needs pages tinyshakespeare.txt gpt2 || return
    check pages 180 env OUT="$OUT/pages" dev/test/cuda/gpu_pages.sh "$bf16/train_gpt2cu" "$tokenize" "$DATA"
    sed -nE 's#^(PASS|FAIL|SKIP) gpu_pages/#\1 #p' "$OUT/pages.log" |
        while read -r verdict name why; do row "$verdict" "pages-${name%:}" "$why"; done
}

source_text() { # BYTES: makes token shards of this machine's source text
    [ "$source_bytes" -lt "$1" ] || return 0
    source_bytes=$1
    rm -f "$work"/source_*.bin
    find $TEXTS -xdev -type f \( -name '*.py' -o -name '*.c' -o -name '*.h' -o -name '*.hpp' \) \
        -size +1k -size -1000k 2> /dev/null | LC_ALL=C sort > "$work/source.list"
    check tokenize 300 "$tokenize" --tokenizer "$DATA/gpt2" --out "$work/source" --invalid bytes \
        --files-from "$work/source.list" --format text --val-every-file 50 --max-bytes "$1"
    tail -n 3 "$OUT/tokenize.log"
}

recipe() { # MICRO_BATCH MICRO_STEPS STEPS: prints the options that our trainer and the twin share
    local batch_tokens=$(($1 * $2 * 1024))
    echo --seq-len 1024 --micro-batch "$1" --batch-tokens $batch_tokens --steps "$3" --lr 1e-4 --beta2 0.99 --warmup-tokens \
        $((batch_tokens * $3 / 2)) --final-lr-frac 0.1 --weight-decay 0.1 --seed 1 --val-every 100 --val-tokens 1048576
}

# Runs our trainer, then the twin. If EVERY > 0, our trainer saves every EVERY steps, the twin resumes from these
# checkpoints, and each GPU runs a part of the twin's steps.
beside_twin() { # NAME MODEL LAYERS HEADS CHANNELS MICRO_BATCH MICRO_STEPS STEPS GPU EVERY [TOLERANCE]
    local name=$1 data=(--train "$work/source_train_*.bin" --val "$work/source_val_*.bin") follow=() parts=1 part twins=()
    [ "${10}" = 0 ] || follow=(--follow "$work/$name") parts=$gpus
    CUDA_VISIBLE_DEVICES=$9 check "$name-ours" 400 "$bf16/train_gpt2cu" "${data[@]}" \
        --out "$work/$name" --model "$2" --checkpoint-every "${10}" --keep 0 $(recipe "$6" "$7" "$8")
    for ((part = 1; part <= parts; part++)); do
        CUDA_VISIBLE_DEVICES=$((($9 + part - 1) % gpus)) check "$name-torch-$part" 500 python3 dev/bench/torch_twin.py \
            train "${follow[@]}" --part "$part/$parts" "${data[@]}" --out "$work/$name-torch-$part.jsonl" \
            --layers "$3" --heads "$4" --channels "$5" $(recipe "$6" "$7" "$8") &
        twins[part]=$!
    done
    wait "${twins[@]}"
    cat "$work/$name"-torch-*.jsonl > "$OUT/$name-torch.jsonl"
    cp "$work/$name/metrics.jsonl" "$OUT/$name-ours.jsonl"
    rm -rf "${work:?}/$name"
    check "$name" 60 python3 dev/bench/torch_twin.py compare ${11:+--tolerance "${11}"} "$OUT/$name-ours.jsonl" \
        "$OUT/$name-torch.jsonl"
    tail -n 40 "$OUT/$name.log"
    show "$name" 'tok/s|largest'
}

# Every 10 steps the twin starts again from our weights and moments (torch_twin.py). Needs 30 GB for twenty checkpoints.
parity() {
    source_text 450000000
    beside_twin parity-d12 d12 12 12 768 64 8 "$STEPS" 0 10 0.01
}

[ -x "$bf16/dev/test/cuda/test_engine_cuda" ] || make -j"$(nproc)" cuda-programs || exit 1
[ $# -gt 0 ] || set -- tests bench
for stage in "$@"; do $stage; done
show_table
