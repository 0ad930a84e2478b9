"""scripts/from_nanogpt.py: check_nanogpt.py BUILD [--ckpt], with the compiled programs.

A model in nanoGPT's names and layout, with random parameters, biases too: the converted directory must give, in our
engine, the logits of a forward pass written here over the original arrays, in float64 (vectors are multiplied as x W^T, as
torch's Linear does), and --sample-only must print characters of the meta.pkl beside it. Without --ckpt through the
script's functions, which takes numpy alone; with it through a ckpt.pt that torch writes and the command reads. Prints lines
as dev/test/test.h does.
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCRIPT = os.path.join(ROOT, "scripts", "from_nanogpt.py")
sys.path.insert(0, os.path.dirname(SCRIPT))
sys.dont_write_bytecode = True
import from_nanogpt

TOLERANCE, LIVELY = 1e-4, 0.3  # of a logit, fp32; least standard deviation of logits: at 0 everything agrees
ARGS = dict(n_layer=2, n_head=3, n_embd=24, block_size=11, vocab_size=64, dropout=0.0)
REAL = 61  # tokens; the rows after them are padding
CHARACTERS = sorted("\n !#\"\\" + "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW" + "\u00e9\u010d\u20ac\U0001f600" + "\x7f~")[:REAL]
seed = int(os.environ.get("SEED", time.time_ns() % 10**9))
rng = np.random.default_rng(seed)


def draw(*shape, scale=0.3):
    return rng.normal(0, scale, shape).astype(np.float32)


def nanogpt_state(bias, compiled, mask):
    C, V, T = ARGS["n_embd"], ARGS["vocab_size"], ARGS["block_size"]
    state = {"wte.weight": draw(V, C), "wpe.weight": draw(T, C)}
    for i in range(ARGS["n_layer"]):
        for name, out, of in (("attn.c_attn", 3 * C, C), ("attn.c_proj", C, C), ("mlp.c_fc", 4 * C, C), ("mlp.c_proj", C, 4 * C)):
            state[f"h.{i}.{name}.weight"] = draw(out, of)
            if bias:
                state[f"h.{i}.{name}.bias"] = draw(out)
        for name in ("ln_1", "ln_2"):
            state[f"h.{i}.{name}.weight"] = 1 + draw(C)
            if bias:
                state[f"h.{i}.{name}.bias"] = draw(C)
        if mask:
            state[f"h.{i}.attn.bias"] = np.tril(np.ones((1, 1, T, T), np.float32))
    state["ln_f.weight"] = 1 + draw(C)
    if bias:
        state["ln_f.bias"] = draw(C)
    state = {"transformer." + name: x for name, x in state.items()}
    state["lm_head.weight"] = state["transformer.wte.weight"]
    return {("_orig_mod." if compiled else "") + name: x for name, x in state.items()}


def logits_of(state, tokens):
    """(T) tokens to (T, V): the model as nanoGPT's README draws it, with the tanh GELU."""
    p = {name.removeprefix("_orig_mod.").removeprefix("transformer."): x.astype(np.float64) for name, x in state.items()}
    C, NH, T = ARGS["n_embd"], ARGS["n_head"], len(tokens)

    def linear(x, name):
        return x @ p[name + ".weight"].T + p.get(name + ".bias", 0)

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * p[name + ".weight"] + p.get(name + ".bias", 0)

    def heads(x):
        return x.reshape(T, NH, C // NH).swapaxes(0, 1)  # (NH, T, C/NH)

    x = p["wte.weight"][tokens] + p["wpe.weight"][:T]
    for i in range(ARGS["n_layer"]):
        q, k, v = map(heads, np.split(linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn"), 3, axis=-1))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(C // NH)
        scores[:, np.triu(np.ones((T, T), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = weights / weights.sum(-1, keepdims=True) @ v
        x = x + linear(mixed.swapaxes(0, 1).reshape(T, C), f"h.{i}.attn.c_proj")
        h = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x = x + linear(h, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ p["lm_head.weight"].T


def read_safetensors(path):
    raw = open(path, "rb").read()
    length = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    kinds = {"I32": "<i4", "F32": "<f4"}
    return {name: np.frombuffer(body[slice(*x["data_offsets"])], kinds[x["dtype"]]).reshape(x["shape"])
            for name, x in header.items() if name != "__metadata__"}


def ours(build, directory, work):
    path = os.path.join(work, "logits.safetensors")
    subprocess.run([os.path.join(build, "dev/test/scripts/print_logits"), directory, path], check=True)
    got = read_safetensors(path)
    return got["tokens"], got["logits"]


def compare(build, directory, state, work):
    subprocess.run([os.path.join(build, "train_gpt2"), "--check", directory], check=True, stdout=subprocess.DEVNULL)
    tokens, got = ours(build, directory, work)
    want = np.stack([logits_of(state, row)[:, :REAL] for row in tokens])
    if got.shape != want.shape or want.std() < LIVELY:
        return f"logits {got.shape} want {want.shape}, spread {want.std():.2g}"
    off = float(np.abs(got - want).max())
    return "" if off <= TOLERANCE else f"off by {off:.3g}"


def check_samples(build, directory):
    prompt = "".join(rng.choice([c for c in CHARACTERS if c >= " " and c != "\x7f"], 20)) + "\u00e9\u20ac"
    command = [os.path.join(build, "train_gpt2"), "--sample-only", "--model", directory, "--threads", "1", "--prompt"]
    text = subprocess.run(command + [prompt], check=True, stdout=subprocess.PIPE).stdout.decode()
    shown = {"?" if c == "\x7f" else c for c in CHARACTERS}  # a control character is not printed
    if not text.startswith(prompt) or len(text) != len(prompt) + 400 + 1 or not set(text) <= shown:
        return f"the text of {len(text)} characters is {text!r}"
    odd = subprocess.run(command + [prompt + "Z"], stderr=subprocess.PIPE, text=True)
    return "" if odd.returncode == 65 and "no token for 'Z'" in odd.stderr else f"an odd character: {odd}"


def write_meta(directory):
    path = os.path.join(os.path.dirname(directory), "data", "letters", "meta.pkl")
    os.makedirs(os.path.dirname(path))
    with open(path, "wb") as file:
        pickle.dump({"vocab_size": REAL, "itos": dict(enumerate(CHARACTERS)), "stoi": {c: i for i, c in enumerate(CHARACTERS)}}, file)
    return path


def convert_by_functions(state, directory):
    files = from_nanogpt.tokenizer_files(from_nanogpt.read_characters(write_meta(directory), REAL))
    from_nanogpt.write_model(directory, from_nanogpt.convert(state, REAL), from_nanogpt.config_of(ARGS, REAL), files)


def convert_by_command(state, directory):
    import torch

    write_meta(directory)
    path = os.path.join(os.path.dirname(directory), "out", "ckpt.pt")
    os.mkdir(os.path.dirname(path))
    model = {name: torch.from_numpy(x) for name, x in state.items()}
    torch.save({"model": model, "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}}, "model_args": ARGS, "iter_num": 5,
                "best_val_loss": torch.tensor(1.5), "config": {"out_dir": "out", "dataset": "letters"}}, path)
    subprocess.run([sys.executable, SCRIPT, path, directory, "--vocab-size", str(REAL)], check=True, stdout=subprocess.DEVNULL)


def main():
    build, by_command = sys.argv[1], "--ckpt" in sys.argv
    convert = convert_by_command if by_command else convert_by_functions
    failed = 0
    for name, bias, compiled, mask in (("biases", True, False, False), ("no_biases", False, True, False), ("masks", True, True, True)):
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as work:
            state, directory = nanogpt_state(bias, compiled, mask), os.path.join(work, "model")
            try:
                convert(state, directory)
                why = compare(build, directory, state, work) or check_samples(build, directory)
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
        failed |= why != ""
        print(f"{'FAIL' if why else 'PASS'} nanogpt/{'ckpt_' * by_command}{name} {time.monotonic() - start:.2f}s" +
              f": {why} (seed {seed})" * (why != ""), flush=True)
    return failed


sys.exit(main())
