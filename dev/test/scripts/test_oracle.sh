#!/usr/bin/env bash
# dev/oracle: compares the engine and its evaluation with float64, and exchanges models with Hugging Face's
# transformers. torch and transformers are large: scripts/deps.sh does not install them.
set -u
. "$(dirname "$0")/../checks.sh" oracle

if python=$(find_python jax ml_dtypes numpy safetensors); then
    "$python" dev/oracle/test_gpt2.py || failed=1
    "$build/dev/test/run/dump_steps" "$work" || { echo "FAIL oracle/dump_steps: exit code $?" && failed=1; }
    "$python" dev/oracle/check_engine.py "$work" || failed=1
    "$python" dev/oracle/check_evaluation.py "$build" || failed=1
    begin
    returns 0 "$python" dev/bench/metric_study.py check
    end metric_study
else
    echo "SKIP oracle: no Python with jax, numpy and safetensors; scripts/deps.sh venv installs them"
fi
if python=$(find_python torch transformers); then
    "$python" dev/oracle/check_transformers.py "$build" || failed=1
else
    echo "SKIP oracle/transformers: pip install torch transformers, and PYTHON=its python"
fi
exit $failed
