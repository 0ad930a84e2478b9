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
