# shellcheck shell=bash
# Sourced by mpirun.sh and launch.sh: that a request to stop is heard.

# A shell cannot trap what whoever started it ignores or blocks (a batch system, a service, nohup's relatives): start it
# again with the signals as they are by themselves. To be called with the script's arguments.
hear_signals() {
    [ "${GNS_HEARS:-}" != $$ ] || return 0
    env --default-signal=TERM,USR1 true 2> /dev/null || return 0 # coreutils before 8.31 cannot
    GNS_HEARS=$$ exec env --default-signal=TERM,USR1 "${BASH:-bash}" "$0" "$@"
}

# A process that is being started dies of SIGUSR1 until it has said what to do then.
usr1_bit=$((1 << ($(kill -l USR1) - 1)))

listens() { # PID: does it catch USR1?
    local caught
    caught=$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$1/status" 2> /dev/null)
    ((16#${caught:-0} & usr1_bit))
}
