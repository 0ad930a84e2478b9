# shellcheck shell=bash
# Sourced by scripts: the repository's root, errors, help, checkpoints, and tables of verdicts.
root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 70
[ . -ef "$root" ] && top='' || top=$root/ # the path to it from the caller's directory

fail() { # CODE MESSAGE HINT
    echo "error: $2. $3" >&2
    exit "$1"
}

# Prints the comment that a script begins with.
print_header() { # FILE
    sed -n '2,$ { /^#/! q; s/^# \{0,1\}//; p; }' "$1"
}

# Prints a run's newest checkpoint, if it has one. Their names: archive_step_of in llmc/archive.c.
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

# For scripts whose arguments are stages: exits on --help, and on an unknown stage.
check_stages() { # "STAGE..." ARGUMENTS...
    local stages=$1 word
    shift
    for word in "$@"; do
        [[ $word != --help && $word != -h ]] || { print_header "$0" && exit; }
        [[ " $stages " == *" $word "* ]] || fail 64 "no stage is called $word" "There are: $stages (--help says more)"
    done
}

# A table of verdicts, printed as it grows and again at the end.
begin_table() { # DIRECTORY
    mkdir -p "$1" || exit 74
    table=$1/table.txt
    : > "$table"
}
row() { printf '%-8s %-46s %s\n' "$1" "$2" "$3" | tee -a "$table"; } # VERDICT NAME TEXT
show_table() { # fails where a row is FAIL
    echo
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2> /dev/null
    cat "$table"
    ! grep -q '^FAIL' "$table"
}
