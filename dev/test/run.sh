#!/usr/bin/env bash
# Runs test programs and counts what they print: dev/test/run.sh BUILD_DIR TEST...
# A TEST is a program or script that prints a line a test, beginning with PASS, FAIL or SKIP. One that ends otherwise
# than it should (a crash, a non-zero exit without a FAIL line, or no line at all) counts as a failure of its own; 77
# is the code of one that is skipped as a whole.
# Ends with "N passed, N failed, N skipped"; the exit code is 1 where something failed.
set -u
export GNS_BUILD=$1
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000} # llmc/program.h says why
unset MAKEFLAGS MFLAGS MAKELEVEL # a test that calls make asks for what it wants
shift
log=$GNS_BUILD/test.log
: > "$log"

for test in "$@"; do
    name=$(basename "$test")
    start=$EPOCHREALTIME
    "$test" > "$GNS_BUILD/one.log" 2>&1
    code=$?
    grep -qE '^FAIL ' "$GNS_BUILD/one.log" && failed=1 || failed=0
    if [ $failed = 0 ] && { [[ $code != @(0|77) ]] || ! grep -qE '^(PASS|SKIP) ' "$GNS_BUILD/one.log"; }; then
        echo "FAIL ${name%.*}: exit code $code; the end of its output:" >> "$GNS_BUILD/one.log"
        tail -n 20 "$GNS_BUILD/one.log" | sed 's/^/  | /' | grep -v '^  | FAIL' >> "$GNS_BUILD/one.log"
    fi
    cat "$GNS_BUILD/one.log"
    cat "$GNS_BUILD/one.log" >> "$log"
    printf -- '---- %s: %.1f s\n' "$name" "$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { print b - a }')"
done

count() { grep -cE "^$1 " "$log"; }
echo
grep -E '^FAIL ' "$log" | sed 's/^FAIL/failed:/'
echo "$(count PASS) passed, $(count FAIL) failed, $(count SKIP) skipped"
[ "$(count FAIL)" = 0 ]
