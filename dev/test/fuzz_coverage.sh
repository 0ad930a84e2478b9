#!/usr/bin/env bash
# Runs all readers of bytes from outside under libFuzzer: fuzz_coverage.sh SECONDS [LIBRARY...]
# Each target has this many seconds; an input that fails is kept in build/.
set -u
cd "$(dirname "$0")/../.." || exit 70
source=dev/test/run/fuzz_readers.c
targets=$(sed -n '/^static const Target targets/,/^};/s/^    {"\([^"]*\)".*/\1/p' "$source")
command -v clang > /dev/null || { echo "error: no clang. Run: sudo apt-get install clang libomp-dev" >&2; exit 69; }
mkdir -p build
sources=("$source" train_gpt2.c)
for source in llmc/*/*.c; do
    [[ $source == */main_* || $source == */transport_mpi.c ]] || sources+=("$source")
done
clang -std=gnu11 -O1 -g -fopenmp -Illmc -Wno-everything -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
    -DGNS_LIBFUZZER -o build/fuzz_coverage "${sources[@]}" "${@:2}" || exit
[ -w /dev/shm ] && memory=/dev/shm || memory=build
for target in $targets; do
    echo "== $target"
    scratch=$(mktemp -d -p "$memory")
    TMPDIR=$(realpath "$scratch") GNS_FUZZ_TARGET=$target build/fuzz_coverage -max_total_time="$1" -max_len=65535 \
        -timeout=60 -artifact_prefix="$PWD/build/" -print_final_stats=1 corpus > build/fuzz_coverage.log 2>&1
    code=$?
    rm -rf "$scratch"
    [ $code = 0 ] || { tail -n 30 build/fuzz_coverage.log; exit 1; }
    grep -E 'stat::number_of_executed|DONE' build/fuzz_coverage.log
done
