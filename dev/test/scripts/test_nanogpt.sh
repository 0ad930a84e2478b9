#!/usr/bin/env bash
# scripts/from_nanogpt.py converts weights with nanoGPT's names and layout to GPT-2's, makes a tokenizer from meta.pkl,
# and refuses bad files. A stand-in that pickles arrays replaces torch, which scripts/deps.sh does not install. If
# $PYTHON, build/venv or python3 has torch, the test runs again with torch.
set -u
. "$(dirname "$0")/../checks.sh" nanogpt
python=$(find_python numpy safetensors) || skip_suite "no python3 with numpy and safetensors"

mkdir "$work/stand_in"
cat > "$work/stand_in/torch.py" << 'END'
import pickle
class Tensor:
    def __init__(self, x): self.x = x
    def float(self): return self
    def numpy(self): return self.x
from_numpy = Tensor
def save(checkpoint, path):
    with open(path, "wb") as file: pickle.dump(checkpoint, file)
def load(path, map_location, weights_only):
    with open(path, "rb") as file: return pickle.load(file)
END
cat > "$work/convert.py" << 'END'
import os, pickle, subprocess, sys
import numpy as np, torch
from safetensors.numpy import load_file
work = sys.argv[1]
C, T, L, characters = 8, 4, 2, ["\n", " ", '"', "\x7f", "a", "\u00e9", "\u20ac"]
V, draw = len(characters), lambda *shape: np.random.normal(size=shape).astype("f")
os.makedirs(f"{work}/out")
os.makedirs(f"{work}/data/letters")
pickle.dump({"itos": dict(enumerate(characters))}, open(f"{work}/data/letters/meta.pkl", "wb"))
for variant in ("plain", "bias", "bias_mask_compiled"):
    want = {"wte.weight": draw(V, C), "wpe.weight": draw(T, C)}
    shapes = {"ln_f": (C,)}
    for i in range(L):
        shapes |= {f"h.{i}.ln_1": (C,), f"h.{i}.attn.c_attn": (C, 3 * C), f"h.{i}.attn.c_proj": (C, C), f"h.{i}.ln_2": (C,),
                   f"h.{i}.mlp.c_fc": (C, 4 * C), f"h.{i}.mlp.c_proj": (4 * C, C)}
    for name, shape in shapes.items():
        want[name + ".weight"] = draw(*shape)
        want[name + ".bias"] = draw(shape[-1]) if "bias" in variant else np.zeros(shape[-1], "f")
    model = {name: x.T if name.startswith("h.") else x for name, x in want.items()
             if "bias" in variant or not name.endswith("bias")}
    model["wte.weight"] = np.concatenate([want["wte.weight"], draw(2, C)])  # nanoGPT pads
    if "mask" in variant:
        model |= {f"h.{i}.attn.bias": np.tril(np.ones((1, 1, T, T), "f")) for i in range(L)}
    model = {"transformer." + name: x for name, x in model.items()} | {"lm_head.weight": model["wte.weight"]}
    prefix = "_orig_mod." * ("compiled" in variant)
    model = {prefix + name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in model.items()}
    torch.save({"model": model, "model_args": dict(n_layer=L, n_head=2, n_embd=C, block_size=T, vocab_size=V + 2, dropout=0.0),
                "optimizer": {}, "iter_num": 5, "config": {"dataset": "letters"}}, f"{work}/out/ckpt.pt")
    command = [sys.executable, "scripts/from_nanogpt.py", f"{work}/out/ckpt.pt", f"{work}/{variant}", "--vocab-size", str(V)]
    subprocess.run(command, check=True)
    got = load_file(f"{work}/{variant}/model.safetensors")
    wrong = [name for name in set(got) | set(want) if not np.array_equal(got.get(name), want.get(name))]
    assert not wrong, (variant, wrong)
END
converts() { # NAME: converts with the torch that $python finds
    begin
    returns 0 "$python" "$work/convert.py" "$work/$1"
    check "$(tail -n 2 "$work/log")" says "$work/log" "; characters of $work/$1/out/../data/letters/meta.pkl"
    returns 0 "$train" --check "$work/$1/bias"
    returns 0 "$train" --sample-only --model "$work/$1/bias" --prompt 'a "é€'
    check "$(cat "$work/log")" grep -qE '^a "é€' "$work/log"
    end "$1"
}
export PYTHONPATH=$work/stand_in
converts stand_in

begin
nano() { "$python" scripts/from_nanogpt.py "$work/stand_in/out/ckpt.pt" "$@"; }
mv "$work/stand_in/data/letters/meta.pkl" "$work/moved.pkl"
returns 0 nano "$work/without" --vocab-size 7
check "$(cat "$work/log")" says "$work/log" "note: no tokenizer, which sampling needs: for a character model, give --meta"
check "a tokenizer" [ ! -e "$work/without/vocab.json" ]
returns 0 nano "$work/named" --vocab-size 7 --meta "$work/moved.pkl"
check "another tokenizer" cmp "$work/stand_in/bias/vocab.json" "$work/named/vocab.json"
end meta
unset PYTHONPATH

nano() { "$python" scripts/from_nanogpt.py "$@"; }
begin
mkdir -p "$work/full" "$work/no_torch"
echo 'raise ImportError("no torch here")' > "$work/no_torch/torch.py"
touch "$work/full/config.json"
check "writes beside a model" refuses 64 "full: is not empty" nano "$work/none.pt" "$work/full"
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
        raise SystemExit(f"taken: {from_nanogpt.character_tokenizer(sys.argv[1], 3)}")
    except from_nanogpt.Fault as fault:
        assert fault.code == 65 and str(fault).startswith(sys.argv[1]) and says in str(fault), fault
END
end refusals

if python=$(find_python torch numpy safetensors); then
    converts torch
    begin
    echo "no checkpoint" > "$work/bad.pt"
    for file in "$work/none.pt" "$work/bad.pt"; do check "$file" refuses 65 "error: $file: " nano "$file" "$work/out"; done
    check "writes something" [ ! -e "$work/out" ]
    end bad_checkpoints
else
    echo "SKIP nanogpt/torch: no Python with torch, numpy and safetensors; pip install torch, and PYTHON=its python"
fi
exit $failed
