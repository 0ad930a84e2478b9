#!/usr/bin/env bash
# Installs missing packages: scripts/deps.sh demo|test
#   demo  for building the CPU trainer: a C compiler, cJSON, xxHash
#   test  for the tests as well: PCRE2, OpenMPI, and Python packages in build/venv (dev/oracle/requirements.txt)
# As root on Debian or Ubuntu it installs them, else it prints the command to run. Silent if nothing is missing.
set -eu
cd "$(dirname "$0")/.."
what=${1:-demo}
mkdir -p build

missing=()
need() { command -v "$1" > /dev/null || missing+=("${@:2}"); } # PROGRAM PACKAGE...
need_header() { echo "#include <$1>" | cc -E -DPCRE2_CODE_UNIT_WIDTH=8 - > /dev/null 2>&1 || missing+=("$2"); } # HEADER PACKAGE
need cc gcc libc6-dev
need make make
need_header cjson/cJSON.h libcjson-dev
need_header xxhash.h libxxhash-dev
if [ "$what" = test ]; then
    need_header pcre2.h libpcre2-dev
    need mpicc libopenmpi-dev
    need mpirun openmpi-bin
    need pgrep procps
    need python3 python3
    python3 -c 'import ensurepip, venv' 2> /dev/null || missing+=(python3-venv)
fi

if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
        echo "installing ${missing[*]}"
        export DEBIAN_FRONTEND=noninteractive
        apt-get install -y -qq --no-install-recommends "${missing[@]}" > build/apt.log 2>&1 ||
            { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } > build/apt.log 2>&1 ||
            { tail -n 5 build/apt.log >&2; echo "error: apt-get could not install ${missing[*]}; see build/apt.log" >&2; exit 69; }
    else
        echo "error: missing ${missing[*]}. Run: sudo apt-get install ${missing[*]}" >&2
        exit 69
    fi
fi

# The Python environment of the tests. Without a network the tests that need it are skipped with a note.
if [ "$what" = test ]; then
    stamp=build/venv/installed
    if ! cmp -s dev/oracle/requirements.txt "$stamp"; then
        echo "setting up build/venv with $(grep -vcE '^ *(#|$)' dev/oracle/requirements.txt) pinned Python packages"
        if python3 -m venv build/venv > build/venv.log 2>&1 &&
            build/venv/bin/pip install -q --disable-pip-version-check -r dev/oracle/requirements.txt >> build/venv.log 2>&1; then
            cp dev/oracle/requirements.txt "$stamp"
        else
            echo "note: no Python environment ($(tail -n 1 build/venv.log)); tests against the oracles will be skipped" >&2
        fi
    fi
fi
