#!/usr/bin/env bash
# What a run leaves behind of its course: metrics.csv, samples.jsonl, TensorBoard's events and run.json, against
# metrics.jsonl, a reader of our own and the package tensorboard, where build/venv has it. GNS_BUILD: build directory.
set -u
cd "$(dirname "$0")/../.."
build=${GNS_BUILD:-build/cpu}
python=build/venv/bin/python
[ -x $python ] || python=$(command -v python3) || { echo "SKIP logs: no python3"; exit 77; }
exec "$python" dev/test/check_logs.py "$build"
