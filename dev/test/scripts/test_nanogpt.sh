#!/usr/bin/env bash
# scripts/from_nanogpt.py: the logits of what it writes (dev/oracle/check_nanogpt.py), by its functions where there are
# numpy and safetensors, and as a command where $PYTHON, build/venv or python3 has torch too (it is large, so
# scripts/deps.sh does not install it); and what it refuses.
set -u
. "$(dirname "$0")/../checks.sh" nanogpt
python=$(find_python numpy safetensors) || skip_suite "no python3 with numpy and safetensors"
"$python" dev/oracle/check_nanogpt.py "$build" || failed=1

nano() { "$python" scripts/from_nanogpt.py "$@"; }
begin
mkdir -p "$work/full" "$work/no_torch"
echo 'raise ImportError("no torch here")' > "$work/no_torch/torch.py"
for name in config.json run.json metrics.jsonl model.safetensors; do
    rm -f "$work/full/"* && touch "$work/full/$name"
    check "writes beside $name" refuses 64 "holds a model or a run" nano "$work/none.pt" "$work/full"
done
check "no tokens" refuses 64 "must be above 0" nano "$work/none.pt" "$work/out" --vocab-size 0
GNS_IN_VENV=1 PYTHONPATH=$work/no_torch check "no torch" refuses 65 "the Python package torch" nano "$work/none.pt" "$work/out"
returns 1 "$python" -c '
import sys; sys.path.insert(0, "scripts")
import numpy as np, from_nanogpt
x = np.ones((3, 2), np.float32)
from_nanogpt.convert({"transformer.wte.weight": x, "lm_head.weight": 2 * x}, 3)'
check "an untied head" says "$work/log" "lm_head.weight is not wte.weight"
returns 0 "$python" - "$work/meta.pkl" << 'END'
import os, pickle, sys
sys.path.insert(0, "scripts")
import from_nanogpt
for content, says in (({"itos": {0: "a", 1: "b"}}, "(ValueError: itos is not 3 characters, one per token"),
                      ({"itos": {0: "a", 1: "b", 2: "ab"}}, "(ValueError: itos is not 3 characters"),
                      ({"stoi": {}}, "no meta.pkl of the model's data (KeyError"),
                      (os.system, "(UnpicklingError: it holds posix.system")):
    with open(sys.argv[1], "wb") as file:
        pickle.dump(content, file)
    try:
        raise SystemExit(f"taken: {from_nanogpt.read_characters(sys.argv[1], 3)}")
    except from_nanogpt.Fault as fault:
        assert fault.code == 65 and str(fault).startswith(sys.argv[1]) and says in str(fault), fault
END
end refusals

# The command finds the characters beside the checkpoint; with a stand-in for torch, which reads a pickle of arrays.
begin
mkdir -p "$work/stand_in" "$work/nano/out" "$work/nano/data/letters"
cat > "$work/stand_in/torch.py" << 'END'
import pickle
class Tensor:
    def __init__(self, x): self.x = x
    def float(self): return self
    def numpy(self): return self.x
def load(path, map_location, weights_only):
    with open(path, "rb") as file: checkpoint = pickle.load(file)
    checkpoint["model"] = {name: Tensor(x) for name, x in checkpoint["model"].items()}
    return checkpoint
END
returns 0 "$python" - "$work/nano" << 'END'
import pickle, sys
import numpy as np
C, V, T = 8, 3, 4
model = {"transformer.wte.weight": np.ones((V, C), "f"), "transformer.wpe.weight": np.ones((T, C), "f"), "transformer.ln_f.weight": np.ones(C, "f")}
for name, shape in (("ln_1", (C,)), ("attn.c_attn", (3 * C, C)), ("attn.c_proj", (C, C)), ("ln_2", (C,)), ("mlp.c_fc", (4 * C, C)), ("mlp.c_proj", (C, 4 * C))):
    model[f"transformer.h.0.{name}.weight"] = np.ones(shape, "f")
args = dict(n_layer=1, n_head=1, n_embd=C, block_size=T, vocab_size=V)
pickle.dump({"model": model, "model_args": args, "config": {"dataset": "letters"}}, open(f"{sys.argv[1]}/out/ckpt.pt", "wb"))
pickle.dump({"itos": {0: "a", 1: "b", 2: "\u20ac"}}, open(f"{sys.argv[1]}/data/letters/meta.pkl", "wb"))
END
PYTHONPATH=$work/stand_in returns 0 "$python" scripts/from_nanogpt.py "$work/nano/out/ckpt.pt" "$work/found"
check "$(cat "$work/log")" says "$work/log" "; characters of $work/nano/out/../data/letters/meta.pkl"
returns 0 "$train" --sample-only --model "$work/found" --prompt 'ab€'
check "$(cat "$work/log")" grep -qE '^ab€(a|b|€){400}$' "$work/log"
mv "$work/nano/data/letters/meta.pkl" "$work/moved.pkl"
PYTHONPATH=$work/stand_in returns 0 "$python" scripts/from_nanogpt.py "$work/nano/out/ckpt.pt" "$work/without"
check "$(cat "$work/log")" says "$work/log" "note: no tokenizer, which sampling needs: for a character model, give --meta"
check "a tokenizer" [ ! -e "$work/without/vocab.json" ]
PYTHONPATH=$work/stand_in returns 0 "$python" scripts/from_nanogpt.py "$work/nano/out/ckpt.pt" "$work/named" --meta "$work/moved.pkl"
check "another tokenizer" cmp "$work/found/vocab.json" "$work/named/vocab.json"
end characters

if python=$(find_python torch numpy safetensors); then
    "$python" dev/oracle/check_nanogpt.py "$build" --ckpt || failed=1
    begin
    echo "no checkpoint" > "$work/bad.pt"
    for file in "$work/none.pt" "$work/bad.pt"; do check "$file" refuses 65 "error: $file: " nano "$file" "$work/out"; done
    check "writes something" [ ! -e "$work/out" ]
    end bad_checkpoints
else
    echo "SKIP nanogpt/ckpt: no Python with torch, numpy and safetensors; pip install torch, and PYTHON=its python"
fi
exit $failed
