#!/usr/bin/env bash
# scripts/from_nanogpt.py: the logits of what it writes (dev/oracle/check_nanogpt.py), by its functions where there are
# numpy and safetensors, and as a command where $PYTHON, build/venv or python3 has torch too (it is large, so
# scripts/deps.sh does not install it); and what it refuses.
set -u
. "$(dirname "$0")/../checks.sh" nanogpt
python=$(find_python numpy safetensors) || skip_suite "no python3 with numpy and safetensors"
"$python" dev/oracle/check_nanogpt.py "$build" || failed=1

begin
mkdir -p "$work/full" "$work/no_torch"
touch "$work/full/config.json"
echo 'raise ImportError("no torch here")' > "$work/no_torch/torch.py"
returns 64 "$python" scripts/from_nanogpt.py "$work/none.pt" "$work/full"
check "overwrites" says "$work/log" "holds a model"
returns 64 "$python" scripts/from_nanogpt.py "$work/none.pt" "$work/out" --vocab-size 0
GNS_IN_VENV=1 PYTHONPATH=$work/no_torch returns 65 "$python" scripts/from_nanogpt.py "$work/none.pt" "$work/out"
check "torch" says "$work/log" "the Python package torch"
check "more than a line" one_line "$work/log"
returns 1 "$python" -c '
import sys; sys.path.insert(0, "scripts")
import numpy as np, from_nanogpt
x = np.ones((3, 2), np.float32)
from_nanogpt.convert({"transformer.wte.weight": x, "lm_head.weight": 2 * x}, 3)'
check "an untied head" says "$work/log" "lm_head.weight is not wte.weight"
end refusals

begin
mkdir "$work/model" && echo precious > "$work/victim" && ln "$work/victim" "$work/model/model.safetensors"
returns 0 "$python" -c '
import sys; sys.path.insert(0, "scripts")
import numpy as np, from_nanogpt
from_nanogpt.write_model(sys.argv[1], {"x": np.ones(3, np.float32)}, {})' "$work/model"
check "a hard link: written through" [ "$(cat "$work/victim")" = precious ]
check "more than the model" [ "$(ls "$work/model" | tr '\n' ' ')" = "config.json model.safetensors " ]
end hard_link

if python=$(find_python torch numpy safetensors); then
    "$python" dev/oracle/check_nanogpt.py "$build" --ckpt || failed=1
    begin
    echo "no checkpoint" > "$work/bad.pt"
    for file in "$work/none.pt" "$work/bad.pt"; do
        returns 65 "$python" scripts/from_nanogpt.py "$file" "$work/out"
        check "no name" says "$work/log" "error: $file: "
        check "more than a line: $(cat "$work/log")" one_line "$work/log"
    done
    check "writes something" [ ! -e "$work/out" ]
    end bad_checkpoints
else
    echo "SKIP nanogpt/ckpt: no Python with torch, numpy and safetensors; pip install torch, and PYTHON=its python"
fi
exit $failed
