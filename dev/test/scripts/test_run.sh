#!/usr/bin/env bash
# Tests the counts of dev/test/run.sh. A test that never ends is one failure, and the other tests still run.
set -u
. "$(dirname "$0")/../checks.sh" run

fake() { # NAME: makes a test from standard input
    { echo '#!/usr/bin/env bash' && cat; } > "$work/test_$1.sh" && chmod +x "$work/test_$1.sh"
}
fake good <<< 'echo "PASS good/one"; echo "SKIP good/two: why"'
fake bad <<< 'echo "FAIL bad/one: why"; exit 1'
fake crash <<< 'echo "PASS crash/one"; kill -SEGV $$'
fake silent <<< 'exit 0'
fake absent <<< 'echo "SKIP absent: not here"; exit 77'
# Starts a process in another session, as mpirun may start ranks.
fake endless <<< "echo 'PASS endless/one'; setsid sleep 1000 & echo \$! > '$work/apart'; sleep 1000; echo 'PASS endless/two'"
runs() { # LAST_LINE CODE NAME...: runs these tests; checks the last line and the exit code
    local last=$1 want=$2 code
    shift 2
    dev/test/run.sh "$work" "${@/#/$work/test_}" > "$work/log" 2>&1
    code=$?
    [ $code = "$want" ] && [ "$(tail -n 1 "$work/log")" = "$last" ] || { echo "exit code $code"; cat "$work/log"; return 1; }
}
counts() {
    runs "1 passed, 0 failed, 2 skipped" 0 good.sh absent.sh &&
        runs "2 passed, 3 failed, 1 skipped" 1 bad.sh crash.sh silent.sh good.sh &&
        says "$work/log" "FAIL test_crash: exit code 139" && says "$work/log" "FAIL test_silent: exit code 0"
}
alive() { grep -qs '^State:[[:space:]]*[^ZX[:space:]]' "/proc/$1/status"; } # PROCESS: fails for a zombie
ends_what_never_ends() { # ends the test and all processes that it started, then runs the next test
    GNS_TEST_LIMIT=8 runs "2 passed, 1 failed, 1 skipped" 1 endless.sh good.sh &&
        says "$work/log" "FAIL test_endless: did not end within 8 s" || return 1
    local apart i
    apart=$(cat "$work/apart") || return 1
    for ((i = 0; i < 100; i++)); do alive "$apart" && sleep 0.1 || return 0; done
    echo "process $apart still runs"
    return 1
}
no_result() { # a test without a directory is a failure; so is GNS_TEST_JOBS=0
    TMPDIR=$work/nowhere runs "0 passed, 2 failed, 0 skipped" 1 good.sh bad.sh || return 1
    ! GNS_TEST_JOBS=0 dev/test/run.sh "$work" > "$work/log" 2>&1 && grep -q '^GNS_TEST_JOBS is 0; set it to 1 or more' "$work/log"
}

for test in counts ends_what_never_ends no_result; do
    try $test
done
exit $failed
