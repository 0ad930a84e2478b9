# shellcheck shell=bash disable=SC2006,SC2034
# mpirun.sh and launch.sh source this file: functions for signals that request a stop, and for the ranks' exit codes.
# Once signals are trapped, use `COMMAND`, not $(COMMAND), <(COMMAND) or >(COMMAND), in code that may wait. bash 5.2 loses a
# signal that comes while it parses one of the latter: the trap ends with a syntax error, and the script may end with 0.

# Starts a command in a session of its own, which the terminal's Ctrl-C does not reach. The command gets USR1 when this
# script ends, also by KILL (not with util-linux before 2.33).
apart=(setsid setpriv --pdeathsig USR1)
"${apart[@]:1}" true 2> /dev/null || apart=(setsid)

# These functions forward stop requests as SIGUSR1 to the processes that the script's function `ranks` prints. If a request came
# before the script started `job`, the script calls ask_to_stop itself. A second request sends a second signal. A request within
# 3 s of a forwarded one is ignored, since `timeout` sends two (llmc/base/signals.h). A closing terminal's further HUPs are ignored.
job='' asked='' last=0 # asked: a request came
trap_stop_requests() {
    trap '' PIPE # closed output does not end the script
    trap '[ -n "$asked" ] || on_stop_request' HUP
    trap on_stop_request INT TERM USR1 # USR1 last: a script that catches USR1 catches all three
}
on_stop_request() {
    [ -z "$asked" ] || [ $((SECONDS - last)) -gt 2 ] || return 0
    asked=1 last=$((SECONDS + 60)) # ignores other requests until ask_to_stop has found the ranks
    [ -z "$job" ] || ask_to_stop
    last=$SECONDS
}

# Waits for the job and returns its exit code. If a trap interrupts `wait` while the job ends, bash 5.2 loses the job's code
# and returns 129 or 255, say. So `wait` begins when the job has ended, and without traps: a request in these microseconds
# is lost.
wait_for_job() {
    local code
    {
        while kill -0 "$job"; do sleep 0.1; done
        trap '' HUP INT TERM USR1 USR2
        wait "$job"
        code=$?
        trap_stop_requests
    } 2> /dev/null # hides what bash says of a killed `sleep` or job, and of a signal whose trap is gone
    return $code
}

# Sends USR1 to the ranks. If none catches it within 20 s (no rank runs here, or it is not the trainer), sends it to the job.
ask_to_stop() {
    local end=$((SECONDS + 20)) rank sent_to=''
    while kill -0 "$job" 2> /dev/null; do
        for rank in `ranks`; do # SIGUSR1 kills a rank that has no handler yet; with one, bit 9 of the mask SigCgt is set
            grep -qs '^SigCgt:.*[2367abef]..$' "/proc/$rank/status" && kill -USR1 "$rank" 2> /dev/null && sent_to=1
        done
        [ -z "$sent_to" ] || return
        [ $SECONDS -lt $end ] || { kill -USR1 "$job" 2> /dev/null; return; }
        sleep 0.1
    done
}

# CODE comes from mpirun, srun or the shell: above 128 it is 128 plus the number of the signal that killed a rank.
# Returns 78 for such a code, else CODE.
code_of_ranks() { # CODE
    [ "$1" -gt 128 ] || return "$1"
    echo "error: a rank was lost (exit code $1: signal $(($1 - 128))). Start the same command again" >&2
    return 78
}
