#!/usr/bin/env bash
# What a run leaves behind of its course: metrics.csv, samples.jsonl, TensorBoard's events and run.json, against
# metrics.jsonl, a reader of our own and the package tensorboard, where build/venv has it. GNS_BUILD: build directory.
set -u
. "$(dirname "$0")/../checks.sh" logs
python=$(find_python) || skip_suite "no python3"
"$python" dev/test/run/check_logs.py "$build"
