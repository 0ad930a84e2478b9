#!/usr/bin/env bash
# The CPU trainer and the data program compile for 64-bit Arm without a warning, Arm's own code included. If qemu is
# installed, they print their help. make test-arm tests their results.
set -u
. "$(dirname "$0")/../checks.sh" arm_build
case $build in *-san*) skip_suite "make test-arm runs no sanitizers" ;; esac
[ "$(uname -m)" != aarch64 ] || skip_suite "this machine is one: the other tests run on it"
note=$(scripts/deps.sh arm 2>&1) || skip_suite "$(tail -n 1 <<< "$note")"
unset MAKEFLAGS MFLAGS MAKELEVEL NO_MPI NATIVE SAN CFLAGS
arm=build/cpu-arm64-check

begin
programs="$arm/train_gpt2 $arm/data/tokenize"
# shellcheck disable=SC2086
returns 0 make --no-print-directory -s -j2 ARM=1 BUILD=$arm CFLAGS="-O0 -Werror" $programs
check "$(grep -E 'error|warning' "$work/log" | head -n 4)" [ ! -s "$work/log" ]
for program in $programs; do
    [ $wrong = 0 ] || break
    check "$program is for another machine" [ "$(od -An -t u2 -j 18 -N 2 "$program" | xargs)" = 183 ] # EM_AARCH64
    ! command -v qemu-aarch64 > /dev/null || returns 0 dev/test/arm_run.sh "$program" --help
done
end compiles
exit $failed
