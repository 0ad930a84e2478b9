# shellcheck shell=bash
# Sourced by scripts. Functions for the repository's root, errors, help, checkpoints and GPUs.
root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 70
[ . -ef "$root" ] && top='' || top=$root/ # the path to it from the caller's directory

fail() { # CODE MESSAGE HINT
    echo "error: $2. $3" >&2
    exit "$1"
}

# Prints the comment that a file begins with.
print_header() { sed -n '/^#!/d; /^# shellcheck/d; /^#/! q; s/^# \{0,1\}//; p' "$1"; } # FILE

# Prints a run's newest checkpoint, if any. archive_step_of in llmc/checkpoint/archive.c defines their names.
newest_checkpoint() { # RUN
    local path step newest=-1
    for path in "$1"/step_*; do
        step=${path##*/step_}
        [[ $step =~ ^([0-9]{8}|[1-9][0-9]{8,17})$ ]] && [ -e "$path/MANIFEST.json" ] || continue
        [ $((10#$step)) -le $newest ] || newest=$((10#$step))
    done
    [ $newest = -1 ] || printf '%s/step_%08d\n' "${1%/}" $newest
}

count_gpus() { nvidia-smi --list-gpus 2> /dev/null | grep -c '^GPU '; }
