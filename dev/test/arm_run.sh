#!/usr/bin/env bash
# Runs a program built with ARM=1 under qemu, with all of qemu's CPU features. Runs a script natively. For make
# test-arm: dev/test/arm_run.sh PROGRAM [ARGUMENT...]
set -eu
[[ $1 != *.sh ]] || exec "$@"
case ${1##*/} in # skip tests that take minutes, and tests that count threads, since qemu adds threads
test_gns) export GNS_ONLY="test_identities test_tracker test_lower_formula test_calibration test_ratio test_groups" ;;
test_shard) export GNS_ONLY=test_awaited_weights ;;
esac
libraries=$(dirname "$(realpath "$0")")/../../build/arm64/usr/lib/aarch64-linux-gnu
exec qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH="$libraries" "$@"
