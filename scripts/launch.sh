# shellcheck shell=bash
# What the launchers share; sourced by them, with NAME and the array OPTIONS set. An option of the trainer that is given
# behind a launcher's name, as --name or as llm.c's, takes the place of the one in OPTIONS; what a --config says does not.
# From the environment:
#
#   TRAIN, VAL   shards; data/fineweb/fineweb_{train,val}_*.bin
#   TOKENIZER    what made them, so that checkpoints hold it; data/gpt2 where that is there
#   OUT          run directory; runs/NAME
#   RANKS        processes, one a GPU; as many as there are GPUs, or as CUDA_VISIBLE_DEVICES names
#   RUN          what starts RANKS processes instead of mpirun on this machine: scripts/slurm/ sets it
#   PROGRAM      ./train_gpt2cu; with ./train_gpt2 and RANKS the CPU trains, which is for trying things out
#
# Paths are the caller's; what nobody names lies below the root of this repository.
#
# The run starts itself again until it is done: after a stop that nobody here asked for (75), and after a rank was lost,
# as long as each start leaves a newer checkpoint than the last. --fresh is for the first start only, also where Slurm
# queues the job again. Ctrl-C, TERM, USR1 or HUP to the launcher let the run finish its step, save and end; the same
# command goes on from there.
set -uo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/listens.sh"
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
PROGRAM=${PROGRAM:-${top:-./}train_gpt2cu}
[[ $PROGRAM == */* ]] || PROGRAM=./$PROGRAM # or it would be looked for in PATH
TRAIN=${TRAIN:-${top}data/fineweb/fineweb_train_*.bin}
VAL=${VAL:-${top}data/fineweb/fineweb_val_*.bin}
TOKENIZER=${TOKENIZER-$([ ! -d "${top}data/gpt2" ] || echo "${top}data/gpt2")}
OUT=${OUT:-${top}runs/$NAME}

# llm.c's names of what the recipes say, or what decides about it; the trainer's --help has them all.
declare -A ALIASES=([-i]=--train [-j]=--val [-o]=--out [-e]=--model [-b]=--micro-batch [-t]=--seq-len [-d]=--batch-tokens
    [-x]=--steps [-z]=--zero [-l]=--lr [-k]=--lr-schedule [-u]=--warmup-tokens [-q]=--final-lr-frac [-c]=--weight-decay
    [-v]=--val-every [-m]=--val-tokens [-n]=--checkpoint-every [-h]=--hellaswag-every [-y]=--fresh)

# The options that the user gives, with their values: --name value, --name=value, --name or llm.c's -x value.
declare -A given=()
read_given() { # ARGUMENTS...
    local word name=''
    for word in "$@"; do
        if [[ $word =~ ^(--[a-z][a-z0-9-]*)(=(.*))?$ ]]; then
            name=${BASH_REMATCH[1]}
            given[$name]=${BASH_REMATCH[3]}
        elif [[ $word =~ ^-[a-z]+$ ]]; then
            name=${ALIASES[$word]:-}
            [ -z "$name" ] || given[$name]=''
        elif [ -n "$name" ]; then
            given[$name]=$word
        fi
    done
}

config_value() { # NAME: what the file of --config that is given says of it
    [ ! -f "${given[--config]:-}" ] ||
        sed -nE "s/^[[:space:]]*${1//-/[_-]}[[:space:]]*=[[:space:]]*\"?([^[:space:]\"]*).*/\1/p" "${given[--config]}"
}

# What the recipe says in vain because of what is given. The trainer refuses such options, and nobody typed these.
of_no_use() {
    case ${given[--lr-schedule]:-$(config_value lr-schedule)} in
    constant | inverse-sqrt) printf '%s ' --final-lr-frac ;;
    esac
    case ${given[--ramp]:-} in
    fixed | replay:*) printf '%s ' --batch-min --batch-max ;;
    esac
    [ "${given[--val-every]:-}" != 0 ] || printf '%s ' --val-tokens
}

# Takes out of OPTIONS what is given, and what is of no use then; --steps and --train-tokens both say how long the run is.
drop_given() {
    local word drop='' kept=() length=${given[--steps]+1}${given[--train-tokens]+1} useless
    useless=" $(of_no_use)"
    for word in "${OPTIONS[@]}"; do
        case $word in
        --steps | --train-tokens) drop=$length ;;
        --*)
            drop=${given[$word]+1}
            [[ $useless != *" $word "* ]] || drop=1
            ;;
        esac
        [ -n "$drop" ] || kept+=("$word")
    done
    OPTIONS=("${kept[@]}")
}

print_help() {
    print_header "$self"
    echo "The recipe, beside what the environment says: ${OPTIONS[*]}"
    echo
    print_header "$root/scripts/launch.sh"
    echo
    echo "All options: $PROGRAM --help"
}

need_program() {
    [ -x "$PROGRAM" ] || fail 64 "$PROGRAM: not there" "Build it: make ${top:+-C $root }${PROGRAM##*/}"
}

need_data() {
    compgen -G "$TRAIN" > /dev/null || fail 65 "no training shards at $TRAIN" "Make them with data/fineweb.sh, or set TRAIN and VAL"
    compgen -G "$VAL" > /dev/null || fail 65 "no validation shards at $VAL" "Make them with data/fineweb.sh, or set TRAIN and VAL"
}

# Those that CUDA_VISIBLE_DEVICES, which is set, leaves: names or numbers, up to the first that is none.
visible_gpus() {
    local device count=0
    for device in ${CUDA_VISIBLE_DEVICES//,/ }; do
        [[ $device != -* ]] || break
        count=$((count + 1))
    done
    echo $count
}

# RANKS, where it is not given, is the number of GPUs.
need_gpus() {
    local gpus where=''
    if [[ $PROGRAM != *cu ]] || [ -n "${RUN:-}" ]; then
        RANKS=${RANKS:-1}
        return
    fi
    gpus=$(nvidia-smi --list-gpus 2> /dev/null | grep -c '^GPU ')
    [ "$gpus" -gt 0 ] || fail 69 "no NVIDIA GPU here (nvidia-smi lists none)" "Run this where there is one"
    if [ -n "${CUDA_VISIBLE_DEVICES+1}" ]; then
        gpus=$(visible_gpus)
        where=" in CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES"
        [ "$gpus" -gt 0 ] || fail 69 "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES leaves no GPU" "Unset it, or name some of those that are here"
    fi
    RANKS=${RANKS:-$gpus}
    [ "$RANKS" -le "$gpus" ] || fail 69 "RANKS=$RANKS, and $gpus GPU$([ "$gpus" = 1 ] || echo s)$where" "Use RANKS=$gpus, or several machines: scripts/slurm/"
}

need_mpi() {
    [ "$RANKS" = 1 ] && return
    grep -q MPI_Init_thread "$PROGRAM" || fail 64 "$PROGRAM was built without MPI" "Install Open MPI and build it again"
    [ -z "${RUN:-}" ] || return
    command -v mpirun > /dev/null || fail 64 "no mpirun" "Install Open MPI (openmpi-bin libopenmpi-dev) and build again, or use RANKS=1"
    [[ $(mpirun --version 2> /dev/null) == *"Open MPI"* ]] || fail 64 "$(command -v mpirun) is not Open MPI's" "Put Open MPI's first in PATH"
}

ask_to_stop() { # PID: as soon as it listens
    local end=$((SECONDS + 10))
    until listens "$1" || [ $SECONDS -ge $end ] || ! kill -0 "$1" 2> /dev/null; do sleep 0.1; done
    kill -USR1 "$1" 2> /dev/null
}

# Runs a command to its end; a request to stop, given to this script, is handed on to it as SIGUSR1.
run_and_listen() {
    local code
    [ $asked = 0 ] || fail 75 "asked to stop before it began" "Run the same command again to go on"
    setsid "$@" & # out of the terminal's reach: Ctrl-C would have mpirun kill its ranks
    job=$!
    hand_on
    wait_for_job
    code=$?
    job=''
    code_of_ranks $code
}

# The same for a start that goes on from another: --fresh and llm.c's -y are left out, and -y 1 (do resume) overrules a
# `fresh` in a --config file.
command_to_go_on() { # COMMAND...: into the array `command`
    command=()
    while [ $# -gt 0 ]; do
        case $1 in
        --fresh) ;;
        -y) shift ;;
        *) command+=("$1") ;;
        esac
        shift
    done
    command+=(-y 1)
}

# A job that Slurm queues again may have ended before it came to do what --fresh asks for. So it is noted beside OUT what
# lay there before the first start: once something else does, the run is this job's own. `note` is the note's path; a file
# of --config may say fresh as well.
what_is_there() { echo "$(stat -Lc %i "$OUT" 2> /dev/null) $(newest_checkpoint "$OUT")"; }
has_begun() { [ -s "$note" ] && [ "$(cat "$note")" != "$(what_is_there)" ]; }

fresh_once() { # COMMAND...: into the array `command`, without its --fresh where the job has begun before
    command=("$@")
    [ -n "${SLURM_JOB_ID:-}" ] && [ -n "${given[--fresh]+1}${given[--config]+1}" ] || return 0
    note=${OUT%/}.fresh.$SLURM_JOB_ID
    if [ "${SLURM_RESTART_COUNT:-0}" != 0 ] && has_begun; then
        command_to_go_on "${command[@]}"
    else
        mkdir -p "$(dirname "$note")" && what_is_there > "$note"
    fi
}

forget_start() { # CODE: of the run's end; a job that has begun and is not done may be queued again
    [ -z "$note" ] || { [ "$1" != 0 ] && has_begun; } || rm -f "$note"
}

train_until_done() { # COMMAND...
    local command=("$@") code before newest restarted=''
    while :; do
        before=$(newest_checkpoint "$OUT")
        run_and_listen "${command[@]}"
        code=$?
        # A command that was good before is refused where the start before still has the run: it may be slow to die.
        if [ $code = 64 ] && [ -n "$restarted" ] && [ $((SECONDS - restarted)) -lt 120 ]; then
            sleep 10
            continue
        fi
        case $code in
        0 | 64 | 65 | 69 | 71 | 74 | 76) return $code ;; # done, or what starting again does not mend
        esac
        [ $asked = 0 ] || return $code
        [ $code != 75 ] || [ -z "${RUN:-}" ] || return $code # the batch system's time is up
        newest=$(newest_checkpoint "$OUT")
        [ -n "$newest" ] && [ "$newest" != "$before" ] || return $code
        echo "exit code $code: starting again from $newest" >&2
        command_to_go_on "${command[@]}"
        restarted=$SECONDS
    done
}

launch() { # more options, which go behind OPTIONS
    read_given "$@"
    [ -z "${given[--help]+1}" ] || { print_help && exit; }
    hear_signals "$@"
    hear_requests
    TRAIN=${given[--train]:-$TRAIN} VAL=${given[--val]:-$VAL} OUT=${given[--out]:-$OUT}
    need_program
    need_data
    need_gpus
    need_mpi
    OPTIONS=(--train "$TRAIN" --val "$VAL" --out "$OUT" "${OPTIONS[@]}")
    [ -z "$TOKENIZER" ] || OPTIONS+=(--tokenizer "$TOKENIZER")
    [ "${given[--hellaswag-every]:-0}" = 0 ] || OPTIONS+=(--hellaswag "${top}data/hellaswag/hellaswag_val.jsonl")
    drop_given
    local note='' code command=("$PROGRAM" "${OPTIONS[@]}" "$@")
    if [ -n "${RUN:-}" ]; then
        # shellcheck disable=SC2206
        command=($RUN "${command[@]}")
    elif [ "$RANKS" -gt 1 ]; then
        local mpirun=("$root/scripts/mpirun.sh" -np "$RANKS")
        [ "$(id -u)" != 0 ] || mpirun+=(--allow-run-as-root)
        [[ $PROGRAM == *cu ]] || mpirun+=(--oversubscribe)
        command=("${mpirun[@]}" "${command[@]}")
    fi
    fresh_once "${command[@]}"
    train_until_done "${command[@]}"
    code=$?
    forget_start $code
    exit $code
}
