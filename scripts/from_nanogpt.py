#!/usr/bin/env python3
"""Converts a nanoGPT checkpoint to a Hugging Face directory: from_nanogpt.py CKPT.pt DIRECTORY [--meta META.pkl]

nanoGPT pads the vocabulary, and stores matrices as (out, in); GPT-2 stores them as (in, out). Missing biases become zeros.
Writes model.safetensors and config.json. For a character model also writes its tokenizer, from the meta.pkl of the model's
data (default: the one in nanoGPT's data/DATASET/ next to the checkpoint's directory). Needs the Python packages torch and
safetensors.
"""

import json
import os
import pickle
import re

from run_log import EXIT_INPUT, EXIT_USAGE, EXIT_WRITE, Fault, Parser, run_main, write_whole

GPT2_VOCAB, GPT2_PADDED = 50257, 50304  # nanoGPT pads to the next multiple of 64


def convert(state, vocab):
    """Converts nanoGPT's {name: array} to float32, GPT-2's names and GPT-2's layout, with `vocab` rows of wte."""
    import numpy as np

    model = {}
    for name, x in state.items():
        name = name.removeprefix("_orig_mod.").removeprefix("transformer.")  # prefixes of torch.compile and the model
        if re.fullmatch(r"h\.\d+\.attn\.bias", name):  # the causal mask; c_attn.bias is a parameter
            continue
        model[name] = np.asarray(x, "<f4")
    if "wte.weight" not in model:
        raise Fault(EXIT_INPUT, "no wte.weight: is this a checkpoint of nanoGPT's train.py?")
    head = model.pop("lm_head.weight", model["wte.weight"])
    if not np.array_equal(head, model["wte.weight"], equal_nan=True):
        raise Fault(EXIT_INPUT, "lm_head.weight is not wte.weight: GPT-2 ties them")
    if not 1 <= vocab <= len(head):
        raise Fault(EXIT_USAGE, f"--vocab-size {vocab}: the checkpoint has {len(head)} tokens")
    model["wte.weight"] = head[:vocab]
    for name, x in list(model.items()):
        if name.startswith(("h.", "ln_f.")) and name.endswith(".weight"):
            model.setdefault(name.removesuffix("weight") + "bias", np.zeros(x.shape[0], "<f4"))
            if x.ndim == 2:
                model[name] = np.ascontiguousarray(x.T)  # safetensors 0.8 ignores strides
    return model


class PlainUnpickler(pickle.Unpickler):
    def find_class(self, module, name):  # refuses all names, since a pickle could call any function
        raise pickle.UnpicklingError(f"it holds {module}.{name}, not only numbers and characters")


def character_tokenizer(path, vocab):
    """Returns the files of a tokenizer with the characters in nanoGPT's meta.pkl, as {name: text}, in GPT2Tokenizer's form
    (llmc/text/tokenizer.h, "chars")."""
    try:
        with open(path, "rb") as file:
            itos = PlainUnpickler(file).load()["itos"]
        characters = [itos[token] for token in range(len(itos))]
        if len({c for c in characters if isinstance(c, str) and len(c) == 1}) != vocab or len(characters) != vocab:
            raise ValueError(f"itos is not {vocab} characters, one per token of the model: another data set's?")
    except Exception as error:  # a damaged pickle raises almost anything
        raise Fault(EXIT_INPUT, f"{path}: no meta.pkl of the model's data ({type(error).__name__}: {error})") from None
    ascii_name = [chr(0x100 + b) if b <= 0x20 else chr(0x121) if b == 0x7F else chr(b) for b in range(0x80)]
    tokens = {ascii_name[ord(c)]: token for token, c in enumerate(characters) if c.isascii()}
    added = {str(token): {"content": c, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                          "special": False} for token, c in enumerate(characters) if not c.isascii()}
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "bos_token": None, "eos_token": None,
              "unk_token": None, "added_tokens_decoder": added}
    return {"vocab.json": json.dumps(tokens) + "\n", "merges.txt": "#version: 0.2\n",
            "tokenizer_config.json": json.dumps(config) + "\n"}


def read_checkpoint(path):
    """Returns model_args, the parameters as numpy arrays, and the path of nanoGPT's meta.pkl for the data ("": unknown)."""
    import numpy, safetensors  # torch may be installed without them
    import torch

    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        args, state = checkpoint["model_args"], checkpoint["model"]
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size"):
            args[name] = int(args[name])
        dataset = checkpoint.get("config", {}).get("dataset", "")
        meta = dataset and os.path.join(os.path.dirname(path) or ".", "..", "data", dataset, "meta.pkl")
        return args, {name: x.float().numpy() for name, x in state.items()}, meta
    except Exception as error:  # torch's errors for other files have no common base class
        reason = (str(error).splitlines() or [""])[0].strip(". ")
        raise Fault(EXIT_INPUT, f"{path}: no checkpoint of nanoGPT's train.py ({type(error).__name__}: {reason})") from None


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("checkpoint", metavar="CKPT.pt", help="out_dir/ckpt.pt of nanoGPT's train.py")
    parser.add_argument("directory", metavar="DIRECTORY", help="to write the model into")
    parser.add_argument("--vocab-size", type=int, metavar="V", help="tokens without padding (default: the "
                        f"checkpoint's tokens, but {GPT2_VOCAB} if it has {GPT2_PADDED})")
    parser.add_argument("--meta", metavar="META.pkl", help="the characters of a character model's tokens")
    options = parser.parse_args()
    if os.path.isdir(options.directory) and os.listdir(options.directory):
        raise Fault(EXIT_USAGE, f"{options.directory}: is not empty. Name another directory")
    args, state, meta = read_checkpoint(options.checkpoint)
    vocab = options.vocab_size or (GPT2_VOCAB if args["vocab_size"] == GPT2_PADDED else args["vocab_size"])
    model = convert(state, vocab)
    meta = options.meta or (meta if vocab != GPT2_VOCAB and os.path.isfile(meta) else None)
    eot = GPT2_VOCAB - 1 if vocab == GPT2_VOCAB else None
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": args["n_layer"],
              "n_head": args["n_head"], "n_embd": args["n_embd"], "n_positions": args["block_size"],
              "vocab_size": vocab, "activation_function": "gelu_new", "tie_word_embeddings": True,
              "bos_token_id": eot, "eos_token_id": eot}
    files = character_tokenizer(meta, vocab) if meta else {}
    files["config.json"] = json.dumps(config, indent=2) + "\n"  # the last: without it the directory is no model
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        os.makedirs(options.directory, exist_ok=True)
        save_file(model, os.path.join(options.directory, "model.safetensors"), {"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise Fault(EXIT_WRITE, f"{options.directory}: cannot write: {error}; choose another place") from None
    for name, text in files.items():
        write_whole(os.path.join(options.directory, name), text)
    print(f"{options.directory}: {args['n_layer']} layers, {args['n_head']} heads, {args['n_embd']} channels, "
          f"vocabulary {vocab}, {sum(x.size for x in model.values())} parameters" + (f"; characters of {meta}" if meta else ""))
    if not meta and vocab != GPT2_VOCAB:
        print("note: no tokenizer, which sampling needs: for a character model, give --meta data/DATASET/meta.pkl")


if __name__ == "__main__":
    run_main(main, "torch numpy safetensors")
