#!/usr/bin/env bash
# Runs the tests of the CPU's kernels, and runs of --dry-run and the trainer, in a build for AVX2 without AVX-512.
set -u
. "$(dirname "$0")/../checks.sh" avx2
case $build in *-san* | *-avx2) skip_suite "this build's own tests do" ;; esac
grep -qw avx2 /proc/cpuinfo || skip_suite "this machine has no AVX2"
grep -qw avx512f /proc/cpuinfo || skip_suite "the other tests run its kernels: this machine has no AVX-512"
unset MAKEFLAGS MFLAGS MAKELEVEL NATIVE SAN CFLAGS
export GNS_BUILD=build/cpu-avx2-test
mkdir -p $GNS_BUILD/data && ln -sf "$tokenize" $GNS_BUILD/data

# Only llmc/cpu and train_gpt2.c choose instructions: links the other objects of the present build.
tests=(dev/test/cpu/test_*.c)
tests=("${tests[@]%.c}")
objects=$(ls $build/llmc/*/*.o | sed "/run\/main_/d; s|^$build/llmc/cpu/|$GNS_BUILD/llmc/cpu/|" | xargs)
begin
returns 0 make --no-print-directory -s -j2 AVX2=1 BUILD=$GNS_BUILD OBJECTS="$objects" $GNS_BUILD/train_gpt2 "${tests[@]/#/$GNS_BUILD/}"
end compiles
for test in "${tests[@]/#/$GNS_BUILD/}" dev/test/plan/test_plan.sh; do
    "$test" | sed -E '/^SKIP /d; s/^(PASS|FAIL) /\1 avx2: /' # skipped: bf16
    [[ ${PIPESTATUS[0]} == @(0|77) ]] || failed=1
done
exit $failed
