#!/usr/bin/env bash
# Models to and from Hugging Face's transformers: test_transformers.sh, from the root, with the programs in $GNS_BUILD
# (dev/test/run.sh sets it). transformers and torch are large, so scripts/deps.sh does not install them: this takes the
# first of $PYTHON, build/venv and python3 that has both.
set -u
: "${GNS_BUILD:?the build directory}"

for python in ${PYTHON:+"$PYTHON"} build/venv/bin/python python3; do
    if why=$("$python" -c 'import torch, transformers' 2>&1); then
        exec "$python" dev/oracle/check_transformers.py "$GNS_BUILD"
    fi
done
echo "SKIP transformers: $(tail -n 1 <<< "$why"); pip install torch transformers, and PYTHON=its python"
