# shellcheck shell=bash
# Sourced by mpirun.sh and launch.sh: that a request to stop is heard, and that a lost rank is told.
[[ $0 == /* ]] && self=$0 || self=$PWD/$0 # before anyone goes elsewhere
usr1_bit=$((1 << ($(kill -l USR1) - 1))) term_bit=$((1 << ($(kill -l TERM) - 1)))

# A shell cannot trap what whoever started it ignores or blocks (a batch system, a service): then it is started again
# with these signals as they are by themselves. To be called with the script's arguments.
hear_signals() {
    local set deaf=0
    for set in $(sed -nE 's/^Sig(Blk|Ign):[[:space:]]*//p' "/proc/$$/status" 2> /dev/null); do deaf=$((deaf | 16#$set)); done
    ((deaf & (usr1_bit | term_bit))) && [ -z "${GNS_HEARS:-}" ] || return 0
    env --default-signal=TERM,USR1 true 2> /dev/null || return 0 # coreutils before 8.31 cannot
    GNS_HEARS=1 exec env --default-signal=TERM,USR1 "${BASH:-bash}" "$self" "$@"
}

# A request to stop that comes to this script is handed on once, to the `job` there is or as soon as there is one, by the
# script's own ask_to_stop; a second request is a second signal. A terminal that goes sends several. Nor are words that
# nobody reads any more a reason to end.
job='' asked=0 sent=0
hear_requests() {
    trap '' PIPE
    trap '[ $asked -gt 0 ] || { asked=1; hand_on; }' HUP
    trap 'asked=$((asked + 1)); hand_on' INT TERM USR1 # the last: who sees this one caught may send any
}
hand_on() {
    while [ -n "$job" ] && [ $sent -lt $asked ]; do
        sent=$((sent + 1))
        ask_to_stop "$job"
    done
}

# Waits for the job; the code is its own, whatever comes in between.
wait_for_job() {
    while :; do
        wait "$job"
        kill -0 "$job" 2> /dev/null || break # otherwise it was a trap that ended the wait
    done
    wait "$job" # again: a trap may have ended that one as well, and then its code is the trap's
}

# A process that is being started dies of SIGUSR1 until it has said what to do then.
listens() { # PID: does it catch USR1?
    local caught
    caught=$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$1/status" 2> /dev/null)
    ((16#${caught:-0} & usr1_bit))
}

# Returns the code that ranks ended with. Where one was killed, mpirun and srun say 128 and the signal's number, as the
# shell does of a single process: that becomes 78.
code_of_ranks() { # CODE
    [ "$1" -gt 128 ] || return "$1"
    echo "error: a rank was lost (exit code $1: signal $(($1 - 128))). Start the same command again" >&2
    return 78
}
