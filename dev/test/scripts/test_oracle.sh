#!/usr/bin/env bash
# The engine and its evaluation against the float64 oracle: test_oracle.sh, from the root, with the programs in $GNS_BUILD/dev/test (dev/test/run.sh sets it) and Python in build/venv (scripts/deps.sh
# makes it) or $PYTHON.
set -u
programs=${GNS_BUILD:?the build directory}/dev/test
python=${PYTHON:-build/venv/bin/python}

if ! why=$("$python" -c 'import jax, ml_dtypes, numpy, safetensors' 2>&1); then
    echo "SKIP oracle: no Python packages ($(tail -n 1 <<< "$why")); scripts/deps.sh venv installs them"
    exit 0
fi

# Compiling takes longer than running such small models: half the time without XLA's optimizations, and the same differences.
export XLA_FLAGS="--xla_backend_optimization_level=0 ${XLA_FLAGS:-}"
dumps=$(mktemp -d)
trap 'rm -rf "$dumps"' EXIT
failed=0
"$python" dev/oracle/test_gpt2.py || failed=1
if "$programs/run/dump_steps" "$dumps"; then
    "$python" dev/oracle/check_engine.py "$dumps" || failed=1
else
    echo "FAIL oracle/dump_steps: exit code $?"
    failed=1
fi
"$python" dev/oracle/check_evaluation.py "$GNS_BUILD" || failed=1
exit $failed
