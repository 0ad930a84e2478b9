#!/usr/bin/env bash
# Installs what is missing: scripts/deps.sh demo|test
#   demo  what the CPU trainer is built with: a C compiler, cJSON, xxHash
#   test  and what the tests need besides: PCRE2, OpenMPI, and Python packages in build/venv (dev/oracle/requirements.txt)
# As root on Debian or Ubuntu it installs packages; otherwise it prints the command to run. Says nothing when all is there.
set -eu
cd "$(dirname "$0")/.."
what=${1:-demo}
mkdir -p build

# header, package
demo_headers="cjson/cJSON.h libcjson-dev
xxhash.h libxxhash-dev"
test_headers="pcre2.h libpcre2-dev"

has_header() { echo "#include <$1>" | cc -E -DPCRE2_CODE_UNIT_WIDTH=8 - > /dev/null 2>&1; }

missing=()
command -v cc > /dev/null || missing+=(gcc libc6-dev)
command -v make > /dev/null || missing+=(make)
check_headers() {
    while read -r header package; do
        has_header "$header" || missing+=("$package")
    done <<< "$1"
}
check_headers "$demo_headers"
if [ "$what" = test ]; then
    check_headers "$test_headers"
    command -v mpicc > /dev/null || missing+=(libopenmpi-dev)
    command -v mpirun > /dev/null || missing+=(openmpi-bin)
    command -v pgrep > /dev/null || missing+=(procps)
    command -v python3 > /dev/null || missing+=(python3)
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

# The oracles' Python environment. Without a network the tests that need it are skipped, and say so.
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
