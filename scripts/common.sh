# shellcheck shell=bash
# Sourced by scripts: where the repository is, how they refuse, and how they say what they are for.
root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 70
[ . -ef "$root" ] && top='' || top=$root/ # what leads there from where the caller is

fail() { # CODE MESSAGE HINT
    echo "error: $2. $3" >&2
    exit "$1"
}

# The comment that a script begins with is what it says of itself.
print_header() { # FILE
    sed -n '2,$ { /^#/! q; s/^# \{0,1\}//; p; }' "$1"
}

# Prints a run's newest checkpoint, where there is one. What one is called: archive_step_of in llmc/checkpoint/archive.c.
newest_checkpoint() { # RUN
    local path step newest=-1
    for path in "$1"/step_*; do
        step=${path##*/step_}
        [[ $step =~ ^([0-9]{8}|[1-9][0-9]{8,17})$ ]] && [ -e "$path/MANIFEST.json" ] || continue
        [ $((10#$step)) -le $newest ] || newest=$((10#$step))
    done
    [ $newest = -1 ] || printf '%s/step_%08d\n' "${1%/}" $newest
}

# Of a script whose arguments are its stages: --help, or a word that is none of them, ends it.
check_stages() { # "STAGE..." ARGUMENTS...
    local stages=$1 word
    shift
    for word in "$@"; do
        [[ $word != --help && $word != -h ]] || { print_header "$0" && exit; }
        [[ " $stages " == *" $word "* ]] || fail 64 "no stage is called $word" "There are: $stages (--help says more)"
    done
}
