"""Exchanges models with Hugging Face's transformers: check_transformers.py BUILD, with the compiled programs.

gns.c must load what transformers saves, and transformers must load what a run of gns.c saves. Both must compute the
same loss on the same rows, and the same tokens with a run's tokenizer.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # everything is on this disk

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, GPT2Tokenizer, logging

from harness import Mismatch, attempt, finish, run

TOLERANCE = 1e-5  # absolute error of a loss, fp32
LIVELY = 0.3  # least standard deviation of logits, since with equal logits every loss would agree
ROWS = 3
HEADER_BYTES = 1024  # header of a token shard; uint16 tokens follow
EOT = "<|endoftext|>"
CHAT_USER, CHAT_END = "<|user|>", "<|im_end|>"
TEXT = "The gradient noise scale, tr(Σ)/|G|² — \"naïve\" 🙂:\n\tint x = 1234;  don't\r\n"
CORPUS = 60 * TEXT + 200 * "while (n-- > 0) *to++ = *from++;\n"

# Odd sizes: vocabularies that are no round numbers, one head, one layer, and tensors larger than a kernel's block.
SHAPES = {
    "l2_c32_v61_t13": dict(n_layer=2, n_head=2, n_embd=32, vocab_size=61, n_positions=13),
    "l1_c24_v37_t7": dict(n_layer=1, n_head=1, n_embd=24, vocab_size=37, n_positions=7),
    "l3_c132_v389_t19": dict(n_layer=3, n_head=3, n_embd=132, vocab_size=389, n_positions=19),
}
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Programs:
    def __init__(self, build, work):
        self.build, self.work = Path(build).resolve(), Path(work)
        os.environ["TOKENIZE"] = str(self.build / "data/tokenize")  # for train_bpe.py

    def run(self, name, *arguments):
        return run(self.work, self.build / name, *arguments)

    def learn_vocabulary(self, size, directory):
        script = Path(__file__).resolve().parents[2] / "scripts/train_bpe.py"
        run(self.work, sys.executable, script, "--vocab-size", size, "--out", directory, "corpus.txt")

    def loss(self, directory, rows):
        """Returns our engine's loss of a directory's model on rows (N, T + 1). Each row must end with the next row's
        first token."""
        tokens = [*rows[:, :-1].flatten(), rows[-1, -1]]
        header = np.zeros(HEADER_BYTES // 4, "<i4")
        header[:3] = 20240520, 1, len(tokens)
        (self.work / "rows.bin").write_bytes(header.tobytes() + np.array(tokens, "<u2").tobytes())
        said = self.run("train_gpt2", "--eval-only", "--model", directory, "--val", "rows.bin", "--seq-len", rows.shape[1] - 1)
        return float(re.search(rb"loss +([0-9.]+)", said)[1])

    def encode(self, tokenizer, text):
        """Returns EOT, which begins a document in a shard, then a text's tokens by a directory's tokenizer."""
        (self.work / "text.txt").write_bytes(text.encode())
        self.run("data/tokenize", "--tokenizer", tokenizer, "--out", "encoded", "--force", "text.txt")
        shard = (self.work / "encoded_train_000000.bin").read_bytes()[HEADER_BYTES:]
        return [int.from_bytes(shard[i : i + 2], "little") for i in range(0, len(shard), 2)]

    def train(self, out, *options):
        """Trains a few steps; returns the checkpoint's directory."""
        self.run("train_gpt2", "--out", out, "--steps", 6, "--lr", "1e-2", "--micro-batch", 4, "--threads", 1, *options)
        (checkpoint,) = (self.work / out).glob("step_*")
        return checkpoint


def lively_model(shape, seed):
    """Returns a model in which every parameter matters: biases and LayerNorms differ from their initial values."""
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(**shape))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(0.2 * torch.randn_like(p))
            else:
                p.normal_(0, 0.3 if ".wte." in name or ".wpe." in name else p.shape[0] ** -0.5)
    return model


def load_here(directory):
    """Returns transformers' model of a directory, in fp32; every tensor must come from the file."""
    model, info = GPT2LMHeadModel.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    faults = {what: found for what, found in info.items() if found}
    if faults:
        raise Mismatch(f"transformers loads {directory.name} with {faults}")
    return model.eval()


def compare_losses(programs, directory):
    """Compares our loss of a directory's model with transformers', on random tokens."""
    model = load_here(directory)
    V, T = model.config.vocab_size, model.config.n_positions
    tokens = torch.randint(V, (ROWS * T + 1,))
    rows = tokens.unfold(0, T + 1, T)
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits.double()
    theirs = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))
    ours = programs.loss(directory, rows)
    if not logits.std() > LIVELY:
        raise Mismatch(f"logits spread by {logits.std():.2g} only: the check would not see a difference")
    if not abs(ours - theirs) <= TOLERANCE:  # fails for NaN, too
        raise Mismatch(f"a loss of {ours:.6f}, in transformers {theirs:.6f}")
    return f"a loss of {ours:.6f}, in transformers {theirs:.6f}"


def check_import(programs, shape, dtype):
    directory = programs.work / "saved"
    lively_model(shape, seed=1).to(dtype).save_pretrained(directory)
    with safe_open(directory / "model.safetensors", "pt") as f:
        found = {f.get_tensor(name).dtype for name in f.keys()}
    if found != {dtype}:
        raise Mismatch(f"transformers saved {found}")
    return compare_losses(programs, directory)


def check_import_sharded(programs):
    directory = programs.work / "saved_sharded"
    lively_model(SHAPES["l3_c132_v389_t19"], seed=2).save_pretrained(directory, max_shard_size="400KB")
    files = list(directory.glob("model-*.safetensors"))
    if len(files) < 3 or not (directory / "model.safetensors.index.json").exists():
        raise Mismatch(f"transformers saved {len(files)} files")
    return f"{len(files)} files, " + compare_losses(programs, directory)


def check_import_base(programs):
    """GPT2Model has no head. Its tensors' names lack "transformer.", as in OpenAI's repositories."""
    directory = programs.work / "saved_base"
    lively_model(SHAPES["l2_c32_v61_t13"], seed=3).transformer.save_pretrained(directory)
    with safe_open(directory / "model.safetensors", "pt") as f:
        if "wte.weight" not in f.keys():
            raise Mismatch("transformers saved other names")
    return compare_losses(programs, directory)


def byte_run(programs):
    (programs.work / "corpus.txt").write_bytes(CORPUS.encode())
    programs.run("data/tokenize", "--tokenizer", "bytes", "--out", "bytes", "corpus.txt")
    shape = ("--vocab-size", 256, "--layers", 2, "--heads", 3, "--channels", 48, "--seq-len", 29)
    return programs.train("run_bytes", "--train", "bytes_train_*.bin", *shape)


def bpe_run(programs):
    """Trains a model further with the tokenizer in its directory, as for a model from the Hub."""
    directory = programs.work / "bpe_start"
    programs.learn_vocabulary(301, directory)
    programs.run("data/tokenize", "--tokenizer", directory, "--out", "bpe", "corpus.txt")
    shape = dict(n_layer=2, n_head=2, n_embd=40, vocab_size=301, n_positions=23)
    lively_model(shape, seed=4).save_pretrained(directory)
    return programs.train("run_bpe", "--train", "bpe_train_*.bin", "--model", directory, "--seq-len", 23)


def chat_run(programs):
    """Trains a model further with tokens that transformers added."""
    plain, directory = programs.work / "chat_plain", programs.work / "chat_start"
    programs.learn_vocabulary(301, plain)
    tokenizer = AutoTokenizer.from_pretrained(plain)
    tokenizer.add_special_tokens({"additional_special_tokens": [CHAT_END]})
    tokenizer.add_tokens([CHAT_USER])
    tokenizer.save_pretrained(directory)
    programs.run("data/tokenize", "--tokenizer", directory, "--out", "chat", "corpus.txt")
    shape = dict(n_layer=2, n_head=2, n_embd=40, vocab_size=303, n_positions=23, eos_token_id=301)
    lively_model(shape, seed=6).save_pretrained(directory)
    return programs.train("run_chat", "--train", "chat_train_*.bin", "--model", directory, "--seq-len", 23)


def check_chat_tokenizer(programs, run):
    text = f"{CHAT_USER}{TEXT} {CHAT_USER}  {CHAT_END}{CHAT_END}\nwhile {CHAT_USER[:-1]}"
    for directory in (programs.work / "chat_start", run):
        tokens, ours = AutoTokenizer.from_pretrained(directory).encode(text), programs.encode(directory, text)[1:]
        if tokens != ours:
            raise Mismatch(f"{directory.name}: {tokens[:20]}..., ours {ours[:20]}...")
        if (tokens.count(301), tokens.count(302)) != (2, 2):
            raise Mismatch(f"{directory.name}: the added tokens are not found in {tokens}")
    if (end := GPT2Config.from_pretrained(run).eos_token_id) != 300:  # the tokenizer's, not the starting model's
        raise Mismatch(f"a text ends with {end}")
    return f"{len(tokens)} tokens, of them 4 added"


def check_bytes_tokenizer(_, run):
    for kind in (AutoTokenizer, GPT2Tokenizer):
        tokenizer = kind.from_pretrained(run)
        tokens = tokenizer.encode(TEXT)
        if tokens != list(TEXT.encode()):
            raise Mismatch(f"{kind.__name__}: {tokens[:20]}..., want the bytes {list(TEXT.encode())[:20]}...")
        if tokenizer.decode(tokens, clean_up_tokenization_spaces=False) != TEXT:
            raise Mismatch(f"{kind.__name__}: decodes to {tokenizer.decode(tokens)!r}")
        if len(tokenizer) != 256:
            raise Mismatch(f"{kind.__name__}: {len(tokenizer)} tokens, the model has 256")
    return f"{len(tokens)} bytes there and back"


def check_bpe_tokenizer(programs, run):
    want = programs.encode(run, TEXT)
    for kind in (AutoTokenizer, GPT2Tokenizer):
        tokenizer = kind.from_pretrained(run)
        tokens = tokenizer.encode(TEXT)
        if [tokenizer.eos_token_id, *tokens] != want:
            raise Mismatch(f"{kind.__name__}: eot {tokenizer.eos_token_id}, {tokens[:20]}..., want {want[:21]}...")
        if tokenizer.decode(tokens, clean_up_tokenization_spaces=False) != TEXT:
            raise Mismatch(f"{kind.__name__}: decodes to {tokenizer.decode(tokens)!r}")
        if tokenizer.eos_token != EOT or len(tokenizer) != 301:
            raise Mismatch(f"{kind.__name__}: ends with {tokenizer.eos_token!r}, {len(tokenizer)} tokens")
        if GPT2Config.from_pretrained(run).eos_token_id != tokenizer.eos_token_id:
            raise Mismatch("config.json has another end of text than the tokenizer")
    return f"{len(TEXT.encode())} bytes in {len(tokens)} tokens, there and back"


def check_generate(programs, run):
    """Compares generate()'s likeliest continuation of a prompt with the one that --sample-only prints."""
    prompt, count = "while (n", 12
    tokenizer, model = AutoTokenizer.from_pretrained(run), load_here(run)
    given = tokenizer(prompt, return_tensors="pt")
    made = model.generate(**given, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    text = tokenizer.decode(made[0], clean_up_tokenization_spaces=False)
    options = ("--prompt", prompt, "--sample-tokens", count, "--temperature", 0)
    ours = programs.run("train_gpt2", "--sample-only", "--model", run, *options).decode(errors="replace")
    if made.shape[1] != given["input_ids"].shape[1] + count:
        raise Mismatch(f"generate() made {made.shape[1]} tokens")
    if not ours.rstrip("\n").endswith(text.rstrip("\n")):
        raise Mismatch(f"generate() makes {text!r}, --sample-only prints {ours!r}")
    return repr(text)


def main(build):
    torch.set_num_threads(1)
    torch.manual_seed(5)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as work:
        programs = Programs(build, work)
        for name, shape in SHAPES.items():
            for kind, dtype in TYPES.items():
                attempt(f"transformers/import/{name}_{kind}", check_import, programs, shape, dtype)
        attempt("transformers/import/sharded", check_import_sharded, programs)
        attempt("transformers/import/base", check_import_base, programs)
        for make_run, check_tokenizer in ((byte_run, check_bytes_tokenizer), (bpe_run, check_bpe_tokenizer),
                                          (chat_run, check_chat_tokenizer)):
            kind = f"transformers/{make_run.__name__}"
            if checkpoint := attempt(kind, make_run, programs):
                attempt(f"{kind}/tokenizer", check_tokenizer, programs, checkpoint)
                attempt(f"{kind}/loss", compare_losses, programs, checkpoint)
                attempt(f"{kind}/generate", check_generate, programs, checkpoint)
    finish()


if __name__ == "__main__":
    main(sys.argv[1])
