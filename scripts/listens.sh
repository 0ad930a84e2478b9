# shellcheck shell=bash
# Sourced by mpirun.sh and launch.sh. A process that is being started dies of SIGUSR1 until it has said what to do then.
usr1_bit=$((1 << ($(kill -l USR1) - 1)))

listens() { # PID: does it catch USR1?
    local caught
    caught=$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$1/status" 2> /dev/null)
    ((16#${caught:-0} & usr1_bit))
}
