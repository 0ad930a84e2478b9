# shellcheck shell=bash
# Helpers of gpu_check.sh, ranks_check.sh and results.sh: arguments and the table of verdicts.
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh"

# Exits on --help, and on an unknown stage.
check_stages() { # "STAGE..." ARGUMENTS...
    local stages=$1 word
    shift
    for word in "$@"; do
        [[ $word != --help && $word != -h ]] || { print_header "$0" && exit; }
        [[ " $stages " == *" $word "* ]] || fail 64 "no stage is called $word" "There are: $stages (--help says more)"
    done
}

begin_table() { # DIRECTORY: begins a table of verdicts; row prints each row, show_table the whole table
    mkdir -p "$1" || exit 74
    table=$1/table.txt
    : > "$table"
}
row() { printf '%-8s %-46s %s\n' "$1" "$2" "$3" | tee -a "$table"; } # VERDICT NAME TEXT
show_table() { # fails if a row is FAIL
    echo
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2> /dev/null
    cat "$table"
    ! grep -q '^FAIL' "$table"
}
