#!/usr/bin/env bash
# Runs test programs and counts their results: dev/test/run.sh BUILD_DIR TEST... A TEST is a program or script that
# prints a line for each test, beginning with PASS, FAIL or SKIP. One more failure is counted for a crash, for a
# non-zero exit without a FAIL line, for no line at all, and for a TEST that runs longer than half an hour
# ($GNS_TEST_LIMIT seconds; with GNS_LONG=1 eight times as long). That TEST is killed with all processes that it
# started. A TEST that skips all its tests exits with 77. $GNS_RUNNER: a program that runs each TEST
# (dev/test/arm_run.sh). Four TESTs ($GNS_TEST_JOBS) run at a time, since many mostly wait; they start in the order
# given. A TEST's output is printed when the TEST ends, with its seconds and core-seconds (user and system). Each TEST
# has its own TMPDIR, since directories that Open MPI leaves in TMPDIR slow down every later mpirun. Prints "N passed, N
# failed, N skipped" at the end. Exits with 1 if something failed.
set -u
export GNS_BUILD=$1
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000} # see llmc/run/program.h
export HWLOC_COMPONENTS=${HWLOC_COMPONENTS--pci,-linux:pci,-linux:io} # listing PCI devices slows an mpirun by a fifth
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1} # NumPy's threads would mostly poll
unset MAKEFLAGS MFLAGS MAKELEVEL # tests call make with flags of their own
shift
log=$GNS_BUILD/test.log
: > "$log"
: > "$log.ended" # one line per TEST that has ended
at_a_time=${GNS_TEST_JOBS:-4}
[[ $at_a_time == [1-9]*([0-9]) ]] || { echo "GNS_TEST_JOBS is $at_a_time; set it to 1 or more"; exit 64; }
limit=${GNS_TEST_LIMIT:-1800} # seconds: ten times the longest test on two idle cores
[ "${GNS_LONG:-0}" != 1 ] || limit=$((8 * limit))

end_marked() { # MARK: kills all processes of a test, in any session
    grep -lszFx "GNS_TEST=$1" /proc/[0-9]*/environ | cut -d / -f 3 | xargs -r kill -KILL 2> /dev/null
}

one() { # TEST
    local name mark scratch out code failed=0 start=$EPOCHREALTIME begun=$SECONDS why=
    name=$(basename "$1")
    mark=$BASHPID.$start
    scratch=$(mktemp -d) && chmod 755 "$scratch" && out=$scratch/.output || exit 70 # 755: some tests change user
    GNS_TEST=$mark TMPDIR=$scratch timeout --foreground -k 10 "$limit" ${GNS_RUNNER:+"$GNS_RUNNER"} "$1" > "$out" 2>&1
    code=$?
    times > "$scratch/.times" # line 2: user and system time of the test
    ! grep -qE '^FAIL ' "$out" || failed=1
    if [[ $code == @(124|137) ]] && [ $((SECONDS - begun)) -ge "$limit" ]; then
        end_marked "$mark"
        why="did not end within $limit s"
    elif [ $failed = 0 ] && { [[ $code != @(0|77) ]] || ! grep -qE '^(PASS|SKIP) ' "$out"; }; then
        why="exit code $code"
    fi
    {
        flock 9 # one TEST prints at a time
        {
            cat "$out"
            if [ -n "$why" ]; then
                echo "FAIL ${name%.*}: $why; the end of its output:"
                tail -n 20 "$out" | sed 's/^/  | /'
            fi
            awk -v name="$name" -v a="$start" -v b="$EPOCHREALTIME" -F '[ms ]+' \
                'NR == 2 { printf "---- %s: %.1f s, %.1f core-s\n", name, b - a, 60 * ($1 + $3) + $2 + $4 }' "$scratch/.times"
        } | tee -a "$log"
        echo "$name" >> "$log.ended"
    } 9> "$log.lock"
    rm -rf "$scratch"
}

for test in "$@"; do
    while [ "$(jobs -rp | wc -l)" -ge "$at_a_time" ]; do wait -n; done # wait -n may report a job that ended long ago
    one "$test" &
done
wait
for ((gone = $# - $(wc -l < "$log.ended"); gone > 0; gone--)); do
    echo "FAIL run.sh: a test left no result; is there room for a directory in ${TMPDIR:-/tmp}?" | tee -a "$log"
done

count() { grep -cE "^$1 " "$log"; }
echo
grep -E '^FAIL ' "$log" | sed 's/^FAIL/failed:/'
echo "$(count PASS) passed, $(count FAIL) failed, $(count SKIP) skipped"
[ "$(count FAIL)" = 0 ]
