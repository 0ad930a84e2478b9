#!/usr/bin/env bash
# Runs test programs and counts what they print: dev/test/run.sh BUILD_DIR TEST...
# A TEST is a program or script that prints a line for each test, beginning with PASS, FAIL or SKIP. A crash, a non-zero
# exit without a FAIL line, or no such line counts as one more failure. So does a TEST that runs longer than half an hour
# ($GNS_TEST_LIMIT seconds; with GNS_LONG=1 eight times as long); it is killed with all processes that it started. A TEST
# that is skipped as a whole exits with 77. $GNS_RUNNER: a program that runs each TEST (dev/test/arm_run.sh).
# Ends with "N passed, N failed, N skipped"; the exit code is 1 if something failed.
set -u
export GNS_BUILD=$1
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000} # llmc/run/program.h says why
unset MAKEFLAGS MFLAGS MAKELEVEL # tests call make with flags of their own
shift
log=$GNS_BUILD/test.log
: > "$log"
limit=${GNS_TEST_LIMIT:-1800} # seconds: ten times the longest on two idle cores
[ "${GNS_LONG:-0}" != 1 ] || limit=$((8 * limit))
mark=$$.$EPOCHREALTIME # in the environment of all processes of a test, in any session

end_marked() {
    grep -lszFx "GNS_TEST=$mark" /proc/[0-9]*/environ | cut -d / -f 3 | xargs -r kill -KILL 2> /dev/null
}

for test in "$@"; do
    name=$(basename "$test")
    start=$EPOCHREALTIME SECONDS=0 why=
    GNS_TEST=$mark timeout --foreground -k 10 "$limit" ${GNS_RUNNER:+"$GNS_RUNNER"} "$test" > "$GNS_BUILD/one.log" 2>&1
    code=$?
    grep -qE '^FAIL ' "$GNS_BUILD/one.log" && failed=1 || failed=0
    if [[ $code == @(124|137) ]] && [ $SECONDS -ge "$limit" ]; then
        end_marked
        why="did not end within $limit s"
    elif [ $failed = 0 ] && { [[ $code != @(0|77) ]] || ! grep -qE '^(PASS|SKIP) ' "$GNS_BUILD/one.log"; }; then
        why="exit code $code"
    fi
    if [ -n "$why" ]; then
        echo "FAIL ${name%.*}: $why; the end of its output:" >> "$GNS_BUILD/one.log"
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
