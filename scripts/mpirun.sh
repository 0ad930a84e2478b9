#!/usr/bin/env bash
# Open MPI's mpirun with a proper end: scripts/mpirun.sh -np 8 ./train_gpt2cu ... takes mpirun's arguments. Mended here,
# as found with 4.1.4:
#
#   - Ranks are not bound to cores unless the arguments or the environment ask for a binding: mpirun binds one or two to a
#     core each, and more to a socket, and whatever a rank does beside its computation has to share that.
#   - TERM, Ctrl-C and a terminal that goes make mpirun kill its ranks a second later. They become USR1, at which the
#     ranks finish their step, save and end with 75. It goes to the ranks themselves as soon as they would not die of
#     it: mpirun hands it on, but loses it, or kills with it, while it starts them. One rank is enough; they tell each
#     other.
#   - Where a rank was killed, mpirun returns 128 and the signal's number: MPI_Abort by the others comes too late. (With
#     --enable-recovery or --continuous it does not, and mpirun returns 0.) It becomes 78: a rank was lost.
#   - Where a rank died while it was joining the others, mpirun may wait for ever for a lock of its own, in
#     PMIx_server_finalize. It is killed when its ranks have been gone for 10 s, and that is 78 as well.
#   - Where nobody reads any more what it says, mpirun kills its ranks after some ten lines; and Ctrl-C of
#     `... | tee log` ends the tee first. So it speaks to a process that outlives the reader.
set -u
. "$(dirname "${BASH_SOURCE[0]}")/listens.sh"
hear_signals "$@"
hear_requests
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

# Says so when the ranks have come, in words: bash 5.2 may lose a request to stop that comes at the same time as another
# signal with a trap.
end_when_alone() {
    local alone=0 looks=0
    trap '' HUP INT QUIT # a terminal's end is not its own
    until has_ranks; do
        sleep $([ $((looks += 1)) -lt 100 ] && echo 0.1 || echo 1) > /dev/null 2>&1
    done
    echo "they have come"
    while [ $alone -lt $patience ]; do
        sleep 1 > /dev/null 2>&1
        if has_children; then alone=0; else alone=$((alone + 1)); fi
    done
    echo "mpirun has not ended $patience s after its ranks: it is killed" >&2
    kill -KILL "$job"
}

# Copies until nobody takes it any more, and then goes on reading.
pass_on() {
    trap '' INT HUP TERM USR1
    cat 2> /dev/null
    exec cat > /dev/null
}

asks_for_binding() { # ARGUMENTS...
    local word
    [ -z "${OMPI_MCA_hwloc_base_binding_policy:-}" ] || return 0
    for word in "$@"; do
        case $word in
        --bind-to* | -bind-to* | --cpus-per-* | -cpus-per-* | --cpu-set | -cpu-set | --cpu-list | -cpu-list) return 0 ;;
        --rankfile | -rankfile | --rf | -rf | *[:,][Pp][Ee]=* | hwloc_base_binding_policy) return 0 ;;
        esac
    done
    return 1
}
binding=()
asks_for_binding "$@" || binding=(--bind-to none)

exec {out}> >(pass_on)
readers=$!
if [ /proc/self/fd/1 -ef /proc/self/fd/2 ]; then # one reader, so that lines stay in their order
    exec {err}>&"$out"
else
    exec {err}> >(pass_on >&2)
    readers+=" $!"
fi
# Out of the terminal's reach, that is of its Ctrl-C.
(exec setsid mpirun "${binding[@]}" "$@" >&"$out" 2>&"$err" {out}>&- {err}>&-) &
job=$!
exec {out}>&- {err}>&-
hand_on
exec {news}< <(end_when_alone)
guard=$!
wait_for_job
code=$?
read -r -t 0.01 -u "$news" started || started=
kill $guard 2> /dev/null
# shellcheck disable=SC2086
for ((i = 0; i < 50; i++)); do # what was said last; a process that mpirun left behind may hold the other end
    kill -0 $readers 2> /dev/null || break
    sleep 0.02
done
[ "$code" -le 128 ] || [ -n "$started" ] || {
    echo "error: mpirun did not start the ranks (exit code $code): it says why" >&2
    exit 64
}
code_of_ranks "$code"
