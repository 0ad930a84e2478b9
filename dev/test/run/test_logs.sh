#!/usr/bin/env bash
# A run's logs: metrics.jsonl, samples.jsonl, run.json, and the TensorBoard events of scripts/to_tensorboard.py.
set -u
. "$(dirname "$0")/../checks.sh" logs
python=$(find_python tensorboard || find_python) || skip_suite "no python3"
"$python" dev/test/run/check_logs.py "$build"
