#!/usr/bin/env bash
# Open MPI's mpirun with a proper end: scripts/mpirun.sh -np 8 ./train_gpt2cu ... takes mpirun's arguments. Mended here,
# as found with 4.1.4:
#
#   - TERM, Ctrl-C and a terminal that goes make mpirun kill its ranks a second later. They become USR1, at which the
#     ranks finish their step, save and end with 75. It goes to the ranks themselves as soon as they would not die of
#     it: mpirun hands it on, but loses it, or kills with it, while it starts them. One rank is enough; they tell each
#     other.
#   - Where a rank was killed, mpirun returns 128 and the signal's number: MPI_Abort by the others comes too late. (With
#     --enable-recovery or --continuous it does not, and mpirun returns 0.) It becomes 78: a rank was lost.
#   - Where a rank died while it was joining the others, mpirun may wait for ever for a lock of its own, in
#     PMIx_server_finalize. It is killed when its ranks have been gone for 10 s, and that is 78 as well.
set -u
. "$(dirname "${BASH_SOURCE[0]}")/listens.sh"
hear_signals "$@"
job='' asked=''
trap 'asked=1; [ -z "$job" ] || ask_to_stop' INT TERM USR1
trap '[ -n "$asked" ] || { asked=1; [ -z "$job" ] || ask_to_stop; }' HUP # of which a terminal sends several
patience=10 # seconds

# Of mpirun; /proc/PID/task/PID/children is not in every kernel.
children() {
    grep -lsE "^PPid:[[:space:]]+$job\$" /proc/[0-9]*/status | cut -d / -f 3
}

# Ranks on other machines are no children of mpirun's.
has_ranks() {
    local child
    for child in $(children); do
        grep -qz '^OMPI_COMM_WORLD_RANK=' "/proc/$child/environ" 2> /dev/null && return 0
    done
    return 1
}

listening_ranks() {
    local child
    for child in $(children); do
        grep -qz '^OMPI_COMM_WORLD_RANK=' "/proc/$child/environ" 2> /dev/null && listens "$child" && echo "$child"
    done
}

# Where nobody listens for so long, the ranks are on other machines, or are another program's.
ask_to_stop() {
    local end=$((SECONDS + 2 * patience)) ranks
    while kill -0 "$job" 2> /dev/null; do
        ranks=$(listening_ranks)
        # shellcheck disable=SC2086
        [ -z "$ranks" ] || { kill -USR1 $ranks 2> /dev/null && return; }
        [ $SECONDS -lt $end ] || { kill -USR1 "$job" 2> /dev/null; return; }
        sleep 0.1
    done
}

# Those that are dead, and that mpirun has not buried, do not count.
has_children() {
    local child state
    for child in $(children); do
        { read -r _ _ state _ < "/proc/$child/stat"; } 2> /dev/null && [ "$state" != Z ] && return 0
    done
    return 1
}

end_when_alone() {
    local alone=0
    trap '' HUP # a terminal's end is not its own
    until has_ranks; do sleep 1 > /dev/null 2>&1; done
    while [ $alone -lt $patience ]; do
        sleep 1 > /dev/null 2>&1
        if has_children; then alone=0; else alone=$((alone + 1)); fi
    done
    echo "mpirun has not ended $patience s after its ranks: it is killed" >&2
    kill -KILL "$job"
}

setsid mpirun "$@" & # out of the terminal's reach, that is of its Ctrl-C
job=$!
[ -z "$asked" ] || ask_to_stop
end_when_alone &
guard=$!
while :; do
    wait "$job"
    kill -0 "$job" 2> /dev/null || break # otherwise it was the trap that ended the wait
done
wait "$job" # again: the trap may have ended that one as well, and then its code is the trap's
code=$?
kill $guard 2> /dev/null
code_of_ranks $code
