# shellcheck shell=bash disable=SC2006
# Sourced by mpirun.sh and launch.sh. Functions for signals that request a stop, and for the exit codes of ranks.
# Once signals are trapped, code that may wait uses `COMMAND`: if a trap is due while bash 5.2 reads a $(COMMAND), as it is
# for the second one of a command, its action is a syntax error, the request is lost and the script ends with 0.
[[ $0 == /* ]] && self=$0 || self=$PWD/$0 # before a cd
hup_bit=$((1 << ($(kill -l HUP) - 1))) int_bit=$((1 << ($(kill -l INT) - 1)))
usr1_bit=$((1 << ($(kill -l USR1) - 1))) usr2_bit=$((1 << ($(kill -l USR2) - 1))) term_bit=$((1 << ($(kill -l TERM) - 1)))

# Starts the script again with the default action of signals that its parent (a batch system, a service) ignores or
# blocks: a shell cannot trap those.
unblock_signals() { # the script's arguments
    local set deaf=0
    for set in $(sed -nE 's/^Sig(Blk|Ign):[[:space:]]*//p' "/proc/$$/status" 2> /dev/null); do deaf=$((deaf | 16#$set)); done
    ((deaf & (usr1_bit | usr2_bit | term_bit))) && [ -z "${GNS_SIGNALS_UNBLOCKED:-}" ] || return 0
    env --default-signal=TERM,USR1,USR2 true 2> /dev/null || return 0 # coreutils before 8.31 cannot
    GNS_SIGNALS_UNBLOCKED=1 exec env --default-signal=TERM,USR1,USR2 "${BASH:-bash}" "$self" "$@"
}

# Forwards requests to stop to `job` by the script's own ask_to_stop, at once or when the job has started. A second
# request sends a second signal. Requests until 2 s after the first was forwarded count as one: `timeout` sends two
# (llmc/base/signals.h). All HUPs of a closing terminal count as one. Closed output does not end the script.
job='' asked=0 sent=0 first=0
trap_stop_requests() {
    trap '' PIPE
    trap '[ $asked -gt 0 ] || on_stop_request' HUP
    trap on_stop_request INT TERM USR1 # USR1 last: a script that catches it catches all
}
uptime_now() { # sets `now` in 1/100 s: a monotonic clock, without bash 5
    read -r now _ < /proc/uptime
    now=$((10#${now/./}))
}
on_stop_request() {
    local now
    uptime_now
    [ $asked = 0 ] || [ $((now - first)) -ge 200 ] || return 0
    asked=$((asked + 1))
    [ $asked -gt 1 ] || first=$((now + 6000)) # 60 s ahead, until ask_to_stop has found the ranks
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
        kill -0 "$job" 2> /dev/null || break # if it lives, a trap has interrupted the wait
    done
    wait "$job" # again: an interrupted wait returns the trap's code
}

# Lets the ranks watch the script (llmc/ranks/launcher.h): SIGKILL ends it without notice.
announce_launcher() { # NAME [PID]; this script by default
    local place
    read -r place 2> /dev/null < /proc/sys/kernel/random/boot_id
    export GNS_LAUNCHERS="${GNS_LAUNCHERS:-} $1:${2:-$$}@$place/`readlink /proc/self/ns/pid 2> /dev/null`"
}

# True if a process catches SIGUSR1. Before it has installed its handler, SIGUSR1 kills it.
catches_usr1() { # PID
    local caught
    caught=`sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$1/status" 2> /dev/null`
    ((16#${caught:-0} & usr1_bit))
}

# Returns the exit code of the ranks. If one was killed, mpirun, srun and the shell return 128 plus the signal's number:
# this returns 78.
code_of_ranks() { # CODE
    [ "$1" -gt 128 ] || return "$1"
    echo "error: a rank was lost (exit code $1: signal $(($1 - 128))). Start the same command again" >&2
    return 78
}
