#!/usr/bin/env bash
# Measures this build and writes dev/RESULTS.md: make results, or
#
#     dev/bench/results.sh [cpu] [gpu] [ranks] [draw]    (default: cpu; gpu with a GPU; ranks with two GPUs; draw)
#
#     cpu    make bench, and bench_save (a save against dd): a quarter of an hour on a quiet machine
#     gpu    whole steps, sampling, attention and a plan on one GPU: at most 8 minutes. Runs built programs (make
#            cuda-programs); needs no network, no compiler and no git
#     ranks  the stages "agree" and "scaling" of dev/test/ranks_check.sh, on all GPUs of this machine
#     draw   dev/RESULTS.md from OUT/*.json; measures nothing
#
#     BUILD  directory of the programs (build): $BUILD/cuda-BF16, $BUILD/cpu
#     OUT    directory of the figures (dev/results): OUT/PART.json, and whole logs in OUT/PART.log/ (not in git)
set -u
. "$(dirname "$0")/../test/stages.sh"
check_stages "cpu gpu ranks draw" "$@"
export LC_ALL=C
cd "$root" || exit 70
BUILD=${BUILD:-build} OUT=${OUT:-dev/results}

# Runs a command, writes its output to NAME.log and appends it to `commands`. Sets failed=1 if the command fails.
run() { # NAME COMMAND...
    local code
    echo "$1: ${*:2}"
    timeout "${LIMIT:-240}" "${@:2}" > "$logs/$1.log" 2>&1
    code=$?
    [ $code = 0 ] || { echo "error: $1 exits with $code: $(tail -n 1 "$logs/$1.log")" >&2; failed=1; }
    printf '%s\t%s\n' "$1" "${*:2}" >> "$logs/commands"
}
begin() { # PART
    part=$1 logs=$OUT/$1.log
    mkdir -p "$logs" || exit 74
    : > "$logs/commands"
}
record() { # VERSION_LINE MACHINE
    python3 dev/bench/results.py record "$part" "$logs" "$OUT/$part.json" "$1" "$2" || failed=1
}

cpu() {
    make -s -j2 train_gpt2 data/tokenize "$BUILD"/cpu/dev/bench/{bench_cpu,bench_step,bench_engine,bench_save} || exit 1
    begin cpu
    LIMIT=1500 run bench dev/bench/bench_cpu.sh "$BUILD/cpu"
    LIMIT=900 run save "$BUILD/cpu/dev/bench/bench_save" /tmp gpt2-124M 5
    record "$(./train_gpt2 --version)" "$(nproc) threads, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
}

gpu() {
    local bench=$BUILD/cuda-BF16/dev/bench/bench_engine
    begin gpu
    run d12 "$bench" d12 64 1024 15 exact
    run d24 "$bench" d24 32 1024 12 exact
    run d48 "$bench" d48 16 1024 8 exact
    run d12-fp8 "$bench" d12 64 1024 5 fp8 head
    run d12-fp8-dw "$bench" d12 64 1024 5 fp8-dw head exact
    run d24-fp8 "$bench" d24 32 1024 4 fp8 head
    run d24-fp8-dw "$bench" d24 32 1024 4 fp8-dw head exact
    run d48-fp8 "$bench" d48 16 1024 2 fp8 head
    run d48-fp8-dw "$bench" d48 16 1024 2 fp8-dw head exact
    run d48-8-micro-steps "$bench" d48 16 1024 2 accumulate fp8-dw head exact
    run d12-sampling "$bench" d12 1 1024 8 sample
    run d24-sampling "$bench" d24 1 1024 8 sample
    run d12-attention "$BUILD/cuda-BF16/dev/bench/bench_kernels" d12 quick only=attention
    run d12-plan "$BUILD/cuda-BF16/train_gpt2cu" --dry-run --model gpt2-124M --micro-batch 64 --batch-tokens 524288 --train-tokens 10e9
    record "$("$BUILD/cuda-BF16/train_gpt2cu" --version)" \
        "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)"
}

ranks() {
    begin ranks
    LIMIT=1600 run ranks env "BUILD=$BUILD" "OUT=$logs/runs" dev/test/ranks_check.sh agree scaling
    record "$("$BUILD/cuda-BF16/train_gpt2cu" --version)" \
        "$(count_gpus) x $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)"
}

draw() { python3 dev/bench/results.py draw "$OUT" dev/RESULTS.md || failed=1; }

failed=0
if [ $# = 0 ]; then
    set -- cpu draw
    [ "$(count_gpus)" -lt 1 ] || set -- cpu gpu draw
    [ "$(count_gpus)" -lt 2 ] || set -- cpu gpu ranks draw
fi
for part in "$@"; do $part; done
exit $failed
