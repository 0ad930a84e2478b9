# shellcheck shell=bash disable=SC2034
# checks: helpers of the tests in shell. Each test sources this file with the name of its suite:
#
#     . "$(dirname "$0")/../checks.sh" ranks
#
# This changes to the root of the repository and makes a directory $work, which is removed at the end. The programs
# under test are in the build directory $GNS_BUILD (dev/test/run.sh sets it). A test is either a function,
#
#     it_works() { ...; }               fails with a non-zero code, and prints the reason; 77 skips it
#     try it_works                      prints "PASS ranks/it_works 0.12s", or FAIL or SKIP and the reason
#
# or a sequence of checks, which all run:
#
#     begin
#     returns 65 scripts/report.py nowhere
#     check "no run named" says "$work/log" "nowhere"
#     end it_works
#
# and the last line is `exit $failed`.
suite=$1 failed=0
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/common.sh" # $root, newest_checkpoint
cd "$root" || exit 70
build=${GNS_BUILD:-build/cpu}
train=$root/$build/train_gpt2
tokenize=$root/$build/data/tokenize
work=$(mktemp -d) || exit 70
trap 'rm -rf "$work"' EXIT

verdict() { # PASS|FAIL|SKIP NAME START [WHY]: prints the line of a test that started at START ($EPOCHREALTIME)
    local us=$((${EPOCHREALTIME//[.,]/} - ${3//[.,]/}))
    printf '%s %s/%s %d.%02ds%s\n' "$1" "$suite" "$2" $((us / 1000000)) $((us % 1000000 / 10000)) "${4:+: $4}"
    [ "$1" != FAIL ] || failed=1
}

try() { # FUNCTION ARGUMENTS...
    local start=$EPOCHREALTIME name out
    name=$(IFS=_ && echo "$*")
    out=$("$@" 2>&1)
    case $? in
    0) verdict PASS "$name" "$start" ;;
    77) verdict SKIP "$name" "$start" "$out" ;;
    *) verdict FAIL "$name" "$start" && tail -n 8 <<< "$out" | sed 's/^/  /' ;;
    esac
}
skip() { echo "$1" && return 77; } # WHY: a test function ends with `skip WHY || return`

begin() { start=$EPOCHREALTIME wrong=0; }
check() { "${@:2}" || { wrong=1 && echo "  $1"; }; } # WHAT COMMAND...: prints WHAT if the command fails
returns() { # CODE COMMAND...: checks the exit code; leaves the output in $work/log
    "${@:2}" > "$work/log" 2>&1
    local code=$?
    check "exit code $code, want $1, of ${*:2}: $(tail -n 1 "$work/log")" [ $code = "$1" ]
}
end() { [ $wrong = 0 ] && verdict PASS "$1" "$start" || verdict FAIL "$1" "$start"; }

# CODE TEXT COMMAND...: checks that the command exits with CODE and prints "error: " and TEXT; leaves the output in
# $work/log.
fails() {
    "${@:3}" > "$work/log" 2>&1
    local code=$?
    [ $code = "$1" ] && says "$work/log" "error: " && says "$work/log" "$2" || { echo "exit code $code, want $1 and '$2', of ${*:3}: $(tail -n 4 "$work/log")"; return 1; }
}
# CODE TEXT COMMAND...: like fails; checks also that the output is one line.
refuses() { fails "$@" && { one_line "$work/log" || { echo "more than a line: $(cat "$work/log")"; return 1; }; }; }

skip_suite() { echo "SKIP $suite: $1" && exit 77; } # WHY

says() { grep -qF -- "$2" "$1"; }           # FILE TEXT
one_line() { [ "$(wc -l < "$1")" = 1 ]; }   # FILE
# RUN: prints the run's metrics without the fields that depend on a clock.
numbers() { sed -E 's/, "(tok_per_s|slowest_rank|wait_share|mfu)": [^,}]*//g' "$1/metrics.jsonl"; }

find_python() { # [PACKAGE...]: prints the first of $PYTHON, build/venv's and python3 that has these packages
    local venv=$root/build/venv python load
    for python in ${PYTHON:+"$PYTHON"} "$venv/bin/python3" python3; do
        load="import_module(m).__file__"
        # find_spec is faster than an import, and suffices if build/venv holds all of requirements.txt.
        [ "$python" != "$venv/bin/python3" ] || ! cmp -s "$root/dev/oracle/requirements.txt" "$venv/installed" ||
            load="util.find_spec(m).origin"
        "$python" -c "import importlib.util, sys; sys.exit(not all(importlib.$load for m in sys.argv[1:]))" "$@" \
            > /dev/null 2>&1 && echo "$python" && return
    done
    return 1
}

# Makes scripts/report.py omit all figures, since matplotlib takes two seconds of a core to start.
without_figures() {
    mkdir "$work/plain" && cat > "$work/plain/sitecustomize.py" <<'END'
import sys, types
sys.modules["report_plots"] = types.SimpleNamespace(RATES=(), **{name: lambda *a, **k: "" for name in (
    "svg_of", "draw_loss", "draw_tests", "has_noise_scale", "draw_gns", "sampled", "draw_layers", "known", "draw_rates")})
END
    export PYTHONPATH=$work/plain
}

learn_vocabulary() { # SIZE DIRECTORY TEXT; returns 77 if no Python has the package tokenizers
    local python
    python=$(find_python tokenizers) || skip "no Python package tokenizers" || return
    TOKENIZE=$tokenize "$python" "$root/scripts/train_bpe.py" --vocab-size "$1" --out "$2" "$3"
}

has_mpi() { command -v mpirun > /dev/null && grep -q MPI_Init_thread "$train"; }
mpi_here() { # configures MPI for ranks that share this machine's cores
    cc -shared -fPIC -o "$work/yield.so" "$root/dev/test/preload/yield.c" && export LD_PRELOAD=$work/yield.so || exit 70
    export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader # ob1 skips the search for networks
    export ASAN_OPTIONS=detect_leaks=0 # Open MPI leaks
}
