#!/usr/bin/env bash
# shellcheck disable=SC2006,SC2046,SC2206
# The launchers run_gpt2_*.sh set NAME, then source this script, as a launcher of your own does. run_gpt2_124M.sh trains
# scripts/recipes/gpt2-124M.conf, a --config file. A launcher accepts all options of the trainer, also --config. They
# replace the recipe's options.
# Environment variables (the default follows the semicolon):
#
#   TRAIN, VAL   shards; data/fineweb/fineweb_{train,val}_*.bin
#   TOKENIZER    the shards' tokenizer, stored in checkpoints; data/gpt2 if it has one
#   OUT          run directory; runs/NAME
#   RANKS        number of processes, one per GPU; one for each GPU of this machine, or of CUDA_VISIBLE_DEVICES
#   RUN          command that starts RANKS processes; mpirun on this machine. scripts/slurm/ sets it
#   PROGRAM      the trainer; ./train_gpt2cu. For a trial on the CPU set ./train_gpt2, and RANKS
#
# Paths are relative to the caller's directory; the defaults are below the root of this repository.
#
# The launcher restarts the run until the run is done: after a stop that nobody asked for (75), and after a lost rank,
# as long as each start leaves a newer checkpoint. --fresh holds for the first start only, also if Slurm queues the job
# again. --max-hours counts from the launcher's start, and also ends the launcher. Ctrl-C, TERM, USR1, HUP or KILL to
# the launcher stops the run: the run finishes its step, saves and exits. The same command resumes it.
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/stop_requests.sh"
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ -n "${NAME:-}" ] || fail 64 "launch.sh has no NAME" "Run a launcher, such as scripts/run_gpt2_124M.sh"
PROGRAM=${PROGRAM:-${top:-./}train_gpt2cu}
[[ $PROGRAM == */* ]] || PROGRAM=./$PROGRAM # bash looks in PATH for a name without a slash
RECIPE=${RECIPE:-${top}scripts/recipes/$NAME.conf}

# Both functions read `options`: the trainer's NAME = VALUE lines, resolved from the recipe and the user's options.
value() { sed -nE "s/^$1 = \"?(.*[^\"])\"?\$/\1/p" <<< "$options"; } # NAME
given() { grep -q "^$1 = " <<< "$options"; }                          # NAME

# Adds --NAME VALUE to `command` if neither the user nor a file gives the option.
default() { # NAME VALUE
    given "$1" || { [ -n "$2" ] && command+=("--$1" "$2"); }
}

# Prints the job (mpirun.sh forwards SIGUSR1) once it runs its program. Before, it is a fork of this shell with the shell's handlers.
ranks() { grep -lszxF "GNS_JOB=$$" "/proc/$job/environ" | cut -d / -f 3; }

command=("$PROGRAM" --config "$RECIPE" "$@")
if [[ " $* " == *" --help "* ]]; then
    print_header "$RECIPE"
    echo "The recipe: $(sed -nE 's/^([a-z0-9-]+) = (.*)/--\1 \2/p' "$RECIPE" | paste -sd ' ')"$'\n'
    print_header "$root/scripts/launch.sh"
    echo $'\n'"All options: $PROGRAM --help"
    exit
fi
[ -x "$PROGRAM" ] || fail 64 "$PROGRAM: not there" "Build it: make ${top:+-C $root }${PROGRAM##*/}"
options=$("${command[@]}" --print-options) || exit # the trainer has printed why
! given max-hours || export GNS_END="${GNS_END:-$(awk -v h="$(value max-hours)" -v now="$(date +%s)" 'BEGIN { printf "%.0f", now + h * 3600 }')}"

given out && OUT=$(value out)
default out "${OUT:=${top}runs/$NAME}"
fineweb=${top}data/fineweb/fineweb
if [ "$(value dry-run)" = true ] && ! given train && [ -z "${TRAIN:-}" ] && ! compgen -G "${fineweb}_train_*.bin" > /dev/null; then
    echo "note: no shards at ${fineweb}_train_*.bin yet: the plan looks at no data" >&2
else
    default train "${TRAIN:-${fineweb}_train_*.bin}"
    default val "${VAL:-${fineweb}_val_*.bin}"
fi
default tokenizer "${TOKENIZER-$(! compgen -G "${top}data/gpt2/*.json" > /dev/null || echo "${top}data/gpt2")}"
[[ $(value hellaswag-every) == @(|0) ]] || default hellaswag "${top}data/hellaswag/hellaswag_val.jsonl"

if [[ -z ${RANKS:-} && $PROGRAM == *cu ]]; then # an invalid device ends the list of CUDA_VISIBLE_DEVICES
    RANKS=$(tr , '\n' <<< "${CUDA_VISIBLE_DEVICES-$(seq "$(count_gpus)")}" | sed '/^-/,$d' | grep -c .)
fi
[[ ${RANKS:-1} =~ ^[0-9]+$ ]] || fail 64 "RANKS is $RANKS" "Set it to the number of processes, one per GPU"
if [ -n "${RUN:-}" ]; then
    command=($RUN "${command[@]}")
elif [ "${RANKS:-1}" -gt 1 ]; then
    command=("$root/scripts/mpirun.sh" -np "$RANKS" "${command[@]}")
fi
# The command of a restart: without --fresh, and with llm.c's -y 1 (resume), which also overrides `fresh` in a --config file.
mapfile -t -d '' resume < <(printf '%s\0' "${command[@]}" | sed -z '/^--fresh\(=.*\)\?$/d; /^-y$/ { N; d }')
resume+=(-y 1)
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || command=("${resume[@]}") # Slurm has queued this job again
trap_stop_requests

# Run `command`, then `resume`, until the run is done. A request to stop reaches the command as SIGUSR1.
while :; do
    before=`newest_checkpoint "$OUT"`
    GNS_JOB=$$ "${apart[@]}" "${command[@]}" &
    job=$! early=$asked # as in mpirun.sh
    [ -z "$early" ] || ask_to_stop
    wait_for_job
    code_of_ranks $?
    code=$? job=''
    [[ $code != @(0|64|65|69|71|74|76) ]] || break # done, or a restart does not help
    [ -z "$asked" ] || break
    [ $code != 75 ] || [ -z "${RUN:-}${GNS_END:-}" ] || break # the time of the batch system or of --max-hours is over
    newest=`newest_checkpoint "$OUT"`
    [ -n "$newest" ] && [ "$newest" != "$before" ] || break
    echo "exit code $code: starting again from $newest" >&2
    command=("${resume[@]}")
done
(exit $code) # not `exit`: a launcher of your own may go on
