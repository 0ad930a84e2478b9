#!/usr/bin/env bash
# Links bench_engine with the CUDA engine of an earlier build beside this one's, so that one process measures both by turns:
# before.sh TREE [MAKE_VARIABLE=VALUE...] builds the engine in TREE, a checkout of the earlier commit, and writes
# build/cuda-BF16/bench_before; then: bench_before d12 64 1024 20 before. The C library is this tree's: the earlier engine
# must share its headers (llmc/model, llmc/math).
set -eu
cd "$(dirname "$0")/../.."
tree=$1 out=build/cuda-${PRECISION:-BF16}
shift
make -s "$@" "$out/dev/bench/bench_engine"
make -s -C "$tree" "$@" "$out/dev/bench/bench_engine"
mkdir -p "$out/before"
objects=("$tree/$out/train_gpt2.o" "$tree/$out"/llmc/cuda/*.o)
nm -g --defined-only -P "${objects[@]}" | awk 'NF > 1 && $1 !~ /^DW\.ref|^_Z[A-Z]*(St|N[A-Z]*(St|4cuda|2cub|6thrust))/ { print $1, "before_" $1 }' | sort -u > "$out/before/names"
for object in "${objects[@]}"; do
    objcopy --redefine-syms="$out/before/names" "$object" "$out/before/$(basename "$object")"
done
link=$(make -sn "$@" -W "$out/dev/bench/bench_engine.o" "$out/dev/bench/bench_engine" | grep ' -o [^ ]*/bench_engine ')
compile=$(make -sn "$@" -W dev/bench/bench_engine.c "$out/dev/bench/bench_engine.o" | grep ' -c -o ')
eval "${compile/-c -o $out\/dev\/bench\/bench_engine.o/-DGNS_BEFORE=before_cuda_engine -c -o $out\/before\/bench.o}"
link=${link/-o $out\/dev\/bench\/bench_engine /-o $out\/bench_before }
eval "${link/$out\/dev\/bench\/bench_engine.o/$out\/before\/*.o}"
