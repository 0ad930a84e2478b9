#!/usr/bin/env bash
# Runs Open MPI's mpirun with mpirun's arguments: scripts/mpirun.sh -np 8 ./train_gpt2cu ... Fixes what 4.1.4 does:
#
#   - mpirun binds a rank and all its threads to a core or a socket. Here ranks are not bound unless the arguments or
#     the environment ask for it.
#   - At TERM, Ctrl-C and the end of the terminal mpirun kills its ranks a second later. Here the ranks get USR1
#     instead, once they have a handler for it: they finish their step, save and exit with 75. (mpirun forwards USR1,
#     but while it starts the ranks it loses the signal or kills them.) A signal to mpirun itself stays pending, and
#     counts as a request to this script.
#   - If a rank was killed, mpirun returns 128 plus the signal's number; this script returns 78.
#   - If a rank dies while it joins the others, mpirun may wait forever, in PMIx_server_finalize, for a lock that it
#     holds itself. Here mpirun is killed 10 s after the end of its ranks, and this script returns 78.
#   - If this script is killed with KILL, the ranks are asked to stop. If mpirun is killed, the ranks detect this
#     (llmc/ranks/comm.c), save and exit, and this script removes the files that mpirun leaves in /dev/shm and TMPDIR.
#   - If the reader of its output ends, mpirun kills its ranks ten lines later. (Ctrl-C ends tee first in `... | tee
#     log`.) Here mpirun writes to a process that outlives the reader.
#   - mpirun refuses more ranks than cores. Here only ranks of train_gpt2cu may not share cores.
#   - mpirun refuses to run as root, the user of most containers. Here it runs.
#   - If the disk of TMPDIR is full or not writable, mpirun prints pages, and may hang. This script returns 74 instead.
# shellcheck disable=SC2006,SC2086
set -u
. "$(dirname "${BASH_SOURCE[0]}")/stop_requests.sh"
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Copies its input as long as a process reads the copy, then drops the rest.
copy_output() {
    trap '' INT HUP TERM USR1
    exec tee -p /dev/null 2> /dev/null
}

# Open all pipes before signals are trapped: see stop_requests.sh on >(COMMAND).
exec {out}> >(copy_output)
readers=$!
if [ /proc/self/fd/1 -ef /proc/self/fd/2 ]; then # a single copy_output keeps the lines in order
    exec {err}>&"$out"
else
    exec {err}> >(copy_output >&2)
    readers+=" $!"
fi
exec {news}<> <(:) # kill_hung_mpirun writes it, this script reads it
trap_stop_requests
trap '[ -n "$asked" ] || on_stop_request' USR2 # kill_hung_mpirun sends USR2
export GNS_MPIRUN=$$ # marks the ranks
timeout=10 # seconds

# Prints the ranks on this machine, also after mpirun has ended.
ranks() {
    grep -lszxF "GNS_MPIRUN=$$" /proc/[0-9]*/environ | xargs -r grep -lsz '^OMPI_COMM_WORLD_RANK=' | cut -d / -f 3
}

# Kills mpirun if it still runs $timeout s after its ranks have ended. Writes a line with the job's name when the ranks
# have started. (A line, not a signal: bash 5.2 may lose a request to stop that arrives with another trapped signal.)
kill_hung_mpirun() {
    local found pending started='' looks=0 alone=0 messages
    exec {messages}>&2 2> /dev/null # hides complaints about closed pipes, by commands that outlive this function
    trap '' HUP INT QUIT TERM      # the terminal, `timeout` and services send these to every process
    while [ $alone -lt $timeout ]; do
        kill -0 "$job" || return # mpirun has ended
        [ -n "$started" ] || found=$(ranks)
        if [ -z "$started" ] && [ -n "$found" ]; then
            sed -zn 's/^PMIX_NAMESPACE=//p' "/proc/${found%%$'\n'*}/environ" | tr -d '\0'
            echo # the ranks have started
            started=1 looks=0
        fi
        # If this script was killed before the ranks run: ask them to stop. Later mpirun forwards USR1 (see `apart`).
        [ -n "$started" ] && [ $looks -gt 1 ] || kill -0 $$ || { ask_to_stop; return; }
        # A signal that is pending for mpirun is a request to stop, unless one came before.
        pending=$(sed -n 's/^ShdPnd:[[:space:]]*//p' "/proc/$job/status")
        ((16#${pending:-0} & blocked)) && kill -USR2 $$ && blocked=0
        looks=$((looks + 1))
        # Look for mpirun's children that are no zombies: `ranks` misses a rank that is freeing its memory at its end.
        # (Not every kernel has /proc/PID/task/PID/children.)
        if [ -z "$started" ] || grep -lsE "^PPid:[[:space:]]+$job\$" /proc/[0-9]*/status |
            xargs -r grep -LsE '^State:[[:space:]]+Z' | grep -q .; then alone=0; else alone=$((alone + 1)); fi
        if [ -z "$started" ] && [ $looks -lt 100 ]; then sleep 0.1; else sleep 1; fi > /dev/null {messages}>&-
    done
    echo "mpirun has not ended $timeout s after its ranks: it is killed" >&"$messages"
    kill -KILL "$job"
}

command -v mpirun > /dev/null || fail 64 "no mpirun here" "Install Open MPI (openmpi-bin libopenmpi-dev) and build again; one process needs none"
temporary=${OMPI_MCA_orte_tmpdir_base:-${TMPDIR:-/tmp}}
{ [ -d "$temporary" ] || mkdir -p "$temporary" 2> /dev/null; } && [ -w "$temporary" ] || # mpirun would make the directory, too
    fail 74 "$temporary: cannot write there, where Open MPI keeps its files" "Set TMPDIR to another directory"
free=`df -Pk "$temporary" 2> /dev/null | awk 'NR == 2 { print $4 }'` # 12 MiB are enough for four ranks
[ "${free:-16384}" -ge 16384 ] ||
    fail 74 "$temporary: $free KiB are free, and Open MPI needs 16 MiB" "Free some space, or set TMPDIR to another directory"

# Unbind the ranks. Options that bind override this variable, except those that give a rank several cores.
[[ "$*" =~ [:,][Pp][Ee]=|-cpus-per- ]] ||
    export OMPI_MCA_hwloc_base_binding_policy="${OMPI_MCA_hwloc_base_binding_policy:-none}"
[[ "${*,,} `env | grep -o '^OMPI_MCA_rmaps_base'`" =~ oversubscribe|train_gpt2cu( |$)|OMPI ]] ||
    export OMPI_MCA_rmaps_base_oversubscribe=1

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# Block these signals in mpirun, which unblocks them for its ranks.
block=(env) blocked=0
if env --block-signal=HUP,INT,TERM true 2> /dev/null; then # coreutils 8.31 or later
    block+=("--block-signal=HUP,INT,TERM")
    blocked=$((1 << 0 | 1 << 1 | 1 << 14)) # the mask of these signals in /proc/PID/status
fi
"${block[@]}" "${apart[@]}" mpirun "$@" >&"$out" 2>&"$err" {out}>&- {err}>&- {news}>&- &
job=$! early=$asked # a trap runs before or after these two, so that a request is forwarded once
exec {out}>&- {err}>&-
[ -z "$early" ] || ask_to_stop
kill_hung_mpirun >&"$news" &
guard=$!
wait_for_job
code=$?
{ kill -KILL $guard; wait $guard; } 2> /dev/null
read -r -t 0.1 -u "$news" name && started=1 || started='' # the line is in the pipe, or never comes
if [ $code = 137 ]; then
    [ -z "`ranks`" ] || echo "error: mpirun was killed: its ranks save and end" >&2
    while [ -n "`ranks`" ]; do sleep 0.2; done
    # Remove what mpirun leaves: its ranks' shared memory (named by user and job), and its directory.
    [[ $name != +([0-9]) ]] || rm -f /dev/shm/vader_segment.*."$UID.$(printf %x "$name")".*
    rm -rf "$temporary"/ompi.*."$UID/pid.$job"
fi
for ((i = 0; i < 50; i++)); do # await the last lines, 1 s at most: a process that outlives mpirun may hold the pipe
    kill -0 $readers 2> /dev/null || break
    sleep 0.02
done
# Exit with 75 if a request to stop ended mpirun: its signal came before mpirun blocked that signal.
[[ $code != @(129|130|143) ]] || [ -n "$started" ] || [ -z "$asked" ] ||
    fail 75 "asked to stop before the ranks began" "Start the same command again"
# Fail if mpirun could not start the ranks. Its code is then 131, 132, 134, 255, or 1: a rank's if mpirun maps them.
# Other codes above 128 come from a rank that a signal ended, perhaps before the guard looked for ranks.
maps() { mpirun --do-not-launch "$@" 2> /dev/null | grep 'JOB MAP' > /dev/null; }
[ -n "$started" ] || [[ $code != @(1|13[124]|255) ]] || { [ $code = 1 ] && maps "$@"; } ||
    fail 64 "mpirun did not start the ranks (exit code $code): its message is above" \
        "Use mpirun.sh -np RANKS PROGRAM OPTIONS; with more ranks of train_gpt2cu than cores add --oversubscribe"
code_of_ranks "$code"
