#!/usr/bin/env bash
# Runs tests of the CPU kernels and of the loop, the trainer and --dry-run in a build for AVX2, which lacks AVX-512 and bf16.
set -u
. "$(dirname "$0")/../checks.sh" avx2
case $build in *-san* | *-avx2) skip_suite "this build's own tests do" ;; esac
grep -qw avx2 /proc/cpuinfo || skip_suite "this machine has no AVX2"
grep -qw avx512f /proc/cpuinfo || skip_suite "this machine has no AVX-512, so the other tests run the AVX2 kernels"
unset MAKEFLAGS MFLAGS MAKELEVEL NATIVE SAN CFLAGS
export GNS_BUILD=build/cpu-avx2-test

# Recompile only llmc/cpu, train_gpt2.c and test_matmul.c, whose instructions differ; link the other objects of the
# present build.
tests=(dev/test/{cpu/test_*,run/test_loop}.c)
tests=("${tests[@]%.c}")
objects=$(ls llmc/*/*.c | sed "s|^|$build/|; s|c\$|o|" | xargs ls 2> /dev/null | sed "/run\/main_/d; s|^$build/llmc/cpu/|$GNS_BUILD/llmc/cpu/|" | xargs)
mkdir -p $GNS_BUILD/dev/test/cpu && cp $build/dev/test/cpu/*.o $GNS_BUILD/dev/test/cpu && rm $GNS_BUILD/dev/test/cpu/test_matmul.o
begin
returns 0 make --no-print-directory -s -j2 $(printf -- '-o %s ' $GNS_BUILD/dev/test/cpu/*.o) AVX2=1 BUILD=$GNS_BUILD OBJECTS="$objects" $GNS_BUILD/train_gpt2 "${tests[@]/#/$GNS_BUILD/}"
end compiles
for test in "${tests[@]/#/$GNS_BUILD/}"; do
    "$test" | sed -E '/^SKIP /d; s/^(PASS|FAIL) /\1 avx2: /' # drops SKIP lines, since AVX2 has no bf16
    [[ ${PIPESTATUS[0]} == @(0|77) ]] || failed=1
done
seq 999 > "$work/text" && "$tokenize" --tokenizer bytes --out "$work/t" "$work/text" > "$work/log" 2>&1
begin
small=(--train "$work/t_train_000000.bin" --vocab-size 256 --model d2 --channels 64 --seq-len 64 --micro-batch 4
    --batch-tokens 256 --steps 3 --threads 1)
returns 0 $GNS_BUILD/train_gpt2 "${small[@]}" --dry-run
check "no step is planned" grep -qE '^  .* tok/s, MFU ' "$work/log"
returns 0 $GNS_BUILD/train_gpt2 "${small[@]}" --out "$work/run"
end trainer
exit $failed
