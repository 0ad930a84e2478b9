# shellcheck shell=bash
# Sourced by mpirun.sh and launch.sh: signals that request a stop, and the exit codes of ranks.
[[ $0 == /* ]] && self=$0 || self=$PWD/$0 # before a cd
usr1_bit=$((1 << ($(kill -l USR1) - 1))) usr2_bit=$((1 << ($(kill -l USR2) - 1))) term_bit=$((1 << ($(kill -l TERM) - 1)))

# Starts the script again with the default action of signals that its parent (a batch system, a service) ignores or blocks:
# a shell cannot trap those.
unblock_signals() { # the script's arguments
    local set deaf=0
    for set in $(sed -nE 's/^Sig(Blk|Ign):[[:space:]]*//p' "/proc/$$/status" 2> /dev/null); do deaf=$((deaf | 16#$set)); done
    ((deaf & (usr1_bit | usr2_bit | term_bit))) && [ -z "${GNS_SIGNALS_UNBLOCKED:-}" ] || return 0
    env --default-signal=TERM,USR1,USR2 true 2> /dev/null || return 0 # coreutils before 8.31 cannot
    GNS_SIGNALS_UNBLOCKED=1 exec env --default-signal=TERM,USR1,USR2 "${BASH:-bash}" "$self" "$@"
}

# Forwards requests to stop to `job` by the script's own ask_to_stop, at once or when the job has started; a second request
# is a second signal. Requests count as one until the first has been passed on, and for 2 s after (llmc/base/signals.h:
# `timeout` sends two); so do all HUPs of a closing terminal. Closed output does not end the script.
job='' asked=0 sent=0 first=0
trap_stop_requests() {
    trap '' PIPE
    trap '[ $asked -gt 0 ] || on_stop_request' HUP
    trap on_stop_request INT TERM USR1 # last: once USR1 is caught, all are
}
uptime_now() { # sets `now`, in 1/100 s: no clock that is set, and there before bash 5
    read -r now _ < /proc/uptime
    now=$((10#${now/./}))
}
on_stop_request() {
    local now
    uptime_now
    [ $asked = 0 ] || [ $((now - first)) -ge 200 ] || return 0
    asked=$((asked + 1))
    [ $asked -gt 1 ] || first=$((now + 6000)) # while ask_to_stop looks for the ranks
    forward_requests
    uptime_now
    [ $asked -gt 1 ] || first=$now
}
forward_requests() {
    while [ -n "$job" ] && [ $sent -lt $asked ]; do
        sent=$((sent + 1))
        ask_to_stop "$job"
    done
}

# Waits for the job and returns its exit code.
wait_for_job() {
    while :; do
        wait "$job"
        kill -0 "$job" 2> /dev/null || break # else a trap has interrupted the wait
    done
    wait "$job" # again: if a trap interrupted the last wait, its code was the trap's
}

# SIGKILL ends a script without notice. So its ranks watch it: llmc/ranks/launcher.h.
announce_launcher() { # NAME [PID]; this script by default
    local place
    read -r place 2> /dev/null < /proc/sys/kernel/random/boot_id
    export GNS_LAUNCHERS="${GNS_LAUNCHERS:-} $1:${2:-$$}@$place/$(readlink /proc/self/ns/pid 2> /dev/null)"
}

# Until a starting process has installed its handler, SIGUSR1 kills it.
catches_usr1() { # PID
    local caught
    caught=$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$1/status" 2> /dev/null)
    ((16#${caught:-0} & usr1_bit))
}

# Returns the code that ranks ended with. If one was killed, mpirun and srun return 128 and the signal's number, as the
# shell does for a single process: that becomes 78.
code_of_ranks() { # CODE
    [ "$1" -gt 128 ] || return "$1"
    echo "error: a rank was lost (exit code $1: signal $(($1 - 128))). Start the same command again" >&2
    return 78
}
