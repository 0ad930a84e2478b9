# shellcheck shell=bash
# Scripts source this file. It defines the repository's root, and functions for errors, help, checkpoints and GPUs.
root=$(CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 70
[ . -ef "$root" ] && top='' || top=$root/ # prefix of paths below the root, seen from the caller's directory

fail() { # CODE MESSAGE HINT
    echo "error: $2. $3" >&2
    exit "$1"
}

# Prints the comment that a file begins with.
print_header() { sed -n '/^#!/d; /^# shellcheck/d; /^#/! q; s/^# \{0,1\}//; p' "$1"; } # FILE

# Prints a run's newest whole checkpoint, if any. archive_step_of in llmc/checkpoint/archive.c defines the names.
newest_checkpoint() { # RUN
    printf '%s\n' "${1%/}"/step_*/MANIFEST.json | sed -nE 's:(/step_([0-9]{8}|[1-9][0-9]{8,}))/MANIFEST.json$:\1:p' | sort -V | tail -n 1
}

count_gpus() { nvidia-smi --list-gpus 2> /dev/null | grep -c '^GPU '; }
