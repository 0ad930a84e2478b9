#!/usr/bin/env bash
# Installs missing packages: scripts/deps.sh demo|test|venv|arm|test-arm
#   demo      for building the CPU trainer: a C compiler, cJSON, xxHash
#   test      for the tests as well: PCRE2, OpenMPI, Python
#   venv      Python packages in build/venv (dev/oracle/requirements.txt); make test installs them while it compiles
#   arm       for make ARM=1: make, the cross compiler and, unpacked in build/arm64, the libraries for Arm
#   test-arm  for make test-arm: what demo and arm install, and qemu
# As root on Debian or Ubuntu it installs the packages; otherwise it prints the command. Silent if none is missing.
set -eu
cd "$(dirname "$0")/.."
what=${1:-demo}
mkdir -p build

missing=()
need() { command -v "$1" > /dev/null || missing+=("${@:2}"); } # PROGRAM PACKAGE...
need_header() { echo "#include <$1>" | cc -E -DPCRE2_CODE_UNIT_WIDTH=8 - > /dev/null 2>&1 || missing+=("$2"); } # HEADER PACKAGE
need make make
if [ "$what" != arm ]; then
    need cc gcc libc6-dev
    need_header cjson/cJSON.h libcjson-dev
    need_header xxhash.h libxxhash-dev
fi
[[ $what != *arm ]] || need aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross
[ "$what" != test-arm ] || need qemu-aarch64 qemu-user
if [ "$what" = test ]; then
    need_header pcre2.h libpcre2-dev
    need mpicc libopenmpi-dev
    need mpirun openmpi-bin
    need pgrep procps
    need python3 python3
    python3 -c 'import ensurepip, venv' 2> /dev/null || missing+=(python3-venv)
fi

if [ ${#missing[@]} -gt 0 ]; then
    [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null ||
        { echo "error: missing ${missing[*]}. Run: sudo apt-get install ${missing[*]}" >&2; exit 69; }
    echo "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -qq --no-install-recommends "${missing[@]}" > build/apt.log 2>&1 ||
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}"; } > build/apt.log 2>&1 ||
        { tail -n 5 build/apt.log >&2; echo "error: apt-get could not install ${missing[*]}; see build/apt.log" >&2; exit 69; }
fi

# Make the Python environment of the tests. If that fails (no network), a note says that tests will be skipped.
if [ "$what" = venv ] && ! cmp -s dev/oracle/requirements.txt build/venv/installed; then
    echo "setting up build/venv with $(grep -vcE '^ *(#|$)' dev/oracle/requirements.txt) pinned Python packages"
    # Without --no-compile pip compiles every file to bytecode.
    if { python3 -m venv build/venv &&
        build/venv/bin/pip install -q --no-compile --disable-pip-version-check -r dev/oracle/requirements.txt; } > build/venv.log 2>&1; then
        cp dev/oracle/requirements.txt build/venv/installed
        # Cache the bytecode of what the tests import: each of a hundred starts is then a second shorter.
        env -u PYTHONDONTWRITEBYTECODE build/venv/bin/python -c "import jax, matplotlib.backends.backend_svg, matplotlib.pyplot, pyarrow.parquet
import safetensors.numpy, scipy.optimize, tensorboard.summary.writer.event_file_writer, tiktoken.load, tokenizers
jax.jit(abs)(1.0)" >> build/venv.log 2>&1 || true
    else
        echo "note: no Python environment ($(tail -n 1 build/venv.log)); tests against the oracles will be skipped" >&2
    fi
fi

# Unpacks Arm's packages with separate package lists, so the system's lists do not change. Ubuntu keeps Arm's packages
# on another server.
unpack_arm() {
    local apt=$PWD/build/arm64/apt package
    mkdir -p "$apt"/{lists/partial,archives/partial,sources.list.d}
    cp -r /etc/apt/sources.list* "$apt"
    find "$apt"/sources.list* -type f -exec sed -i -E 's#[a-z+]+:[^ ]*\.ubuntu\.com/ubuntu/?( |$)#http://ports.ubuntu.com/ubuntu-ports\1#' {} +
    arm_apt() {
        apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root -o Acquire::Languages=none \
            -o Dir::State="$apt" -o Dir::State::status=/dev/null -o Dir::Cache="$apt" -o Dir::Etc::SourceList="$apt/sources.list" \
            -o Dir::Etc::SourceParts="$apt/sources.list.d" "$@"
    }
    arm_apt update # may fail: a source may have no packages for Arm
    (cd "$apt" && arm_apt download libcjson1 libcjson-dev libxxhash-dev libpcre2-8-0 libpcre2-dev) || return 1
    for package in "$apt"/*.deb; do dpkg -x "$package" build/arm64 || return 1; done
    rm -rf "$apt" && touch build/arm64/unpacked
}
if [[ $what == *arm && ! -e build/arm64/unpacked ]]; then
    echo "unpacking libraries for Arm in build/arm64"
    rm -rf build/arm64
    unpack_arm > build/arm64.log 2>&1 ||
        { echo "error: no libraries for Arm ($(tail -n 1 build/arm64.log)); see build/arm64.log" >&2; exit 69; }
fi
