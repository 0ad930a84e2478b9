#!/usr/bin/env bash
# The logs of a run: metrics.jsonl, samples.jsonl, run.json, and the TensorBoard events that scripts/to_tensorboard.py
# makes of them.
set -u
. "$(dirname "$0")/../checks.sh" logs
python=$(find_python tensorboard || find_python) || skip_suite "no python3"
"$python" dev/test/run/check_logs.py "$build"
