#!/usr/bin/env python3
"""Compares data/tokenize with the package `tiktoken`, and scripts/train_bpe.py with `tokenizers`, token for token:

    compare_tokenizers.py PATH_OF_TOKENIZE

Needs GNS_TEST_DATA (GPT-2's vocabulary in gpt2/, texts beside it) and the packages tiktoken, tokenizers and numpy.
Exits with 77 without them.
"""
import glob, json, os, random, subprocess, sys, tempfile, time, unicodedata

try:
    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # no cache of earlier runs
    import numpy as np, tiktoken, tokenizers
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    DATA = os.environ["GNS_TEST_DATA"]
    GPT2 = os.path.join(DATA, "gpt2")
    assert os.path.exists(os.path.join(GPT2, "encoder.json"))
except (ImportError, KeyError, AssertionError) as missing:
    print(f"SKIP compare_tokenizers 0.00s: missing: {missing!r}")
    sys.exit(77)

TOKENIZE = os.environ["TOKENIZE"] = os.path.abspath(sys.argv[1])
SEED = int(os.environ.get("SEED", time.time_ns() % 10**9))
rng = random.Random(SEED)
EOT = 50256
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def openai():
    ranks = data_gym_to_mergeable_bpe_ranks(os.path.join(GPT2, "vocab.bpe"), os.path.join(GPT2, "encoder.json"))
    return tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": EOT})


def shard_tokens(path):
    return np.fromfile(path, dtype=np.uint16, offset=1024)


def ours(texts, threads=2, vocabulary=GPT2):
    """Returns the tokens of each text, through a jsonl file and a shard."""
    with tempfile.TemporaryDirectory() as d:
        with open(f"{d}/a.jsonl", "w") as f:
            for text in texts:
                f.write(json.dumps({"text": text}) + "\n")
        subprocess.run([TOKENIZE, "--tokenizer", vocabulary, "--out", f"{d}/out", "--threads", str(threads), f"{d}/a.jsonl"],
                       check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        tokens = np.concatenate([shard_tokens(p) for p in sorted(glob.glob(f"{d}/out_*.bin"))])
    starts = np.flatnonzero(tokens == EOT)
    parts = [part[1:].tolist() for part in np.split(tokens, starts[1:])]
    filled = iter(parts)
    return [next(filled) if text else [] for text in texts]


def compare(name, texts, encode, vocabulary=GPT2):
    start, wrong = time.monotonic(), 0
    got = ours(texts, vocabulary=vocabulary)
    want = [encode(t) for t in texts]
    for i, text in enumerate(texts):
        if got[i] != want[i]:
            wrong += 1
            if wrong <= 3:
                print(f"  {text[:60]!r}\n    ours {got[i][:20]}\n    want {want[i][:20]}")
    count = sum(map(len, want))
    print(f"{'FAIL' if wrong else 'PASS'} compare_tokenizers/{name} {time.monotonic() - start:.2f}s: {len(texts)} texts, "
          f"{count} tokens, {wrong} differ", flush=True)
    return wrong


def random_texts(count):
    assigned = [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
    common = list(" \n\t'.,!?abcdefghijklmnopqrstuvwxyzABCDEFGHIJ0123456789") + ["'s", "'ll", "'re", " the", "  ", "\n\n"]
    texts = []
    for _ in range(count):
        p = rng.random()
        texts.append("".join(rng.choice(assigned) if rng.random() < p else rng.choice(common)
                             for _ in range(rng.randrange(1, 60))))
    return texts


def files():
    texts = []
    for path in [*glob.glob(os.path.join(DATA, "*.txt")), *glob.glob("llmc/*/*.[ch]"), "/usr/include/stdio.h"]:
        texts.append(open(path, encoding="utf-8", errors="replace").read())
    return texts


def long_words():
    return [c * n for c in ("a", " ", "\n", "ab", "!", "0", "é", "=-", "the") for n in (63, 64, 65, 100, 1000, 5000)]


def added():
    """Tests added tokens, also where several match, with a file by the package `tokenizers`."""
    t = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(f"{GPT2}/encoder.json", f"{GPT2}/vocab.bpe"))
    t.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = {"<|endoftext|>": False, "<|u|>": False, "<|u|>x": False, "b<|": True, "ca<": True, "\u0436\u4e2d": True, " <s>": False, "ab<": True, '"\\': True}
    t.add_tokens([tokenizers.AddedToken(name, normalized=normalized) for name, normalized in names.items()])
    pieces = ["<|u|>", "x", "b", "<|", "<s>", " ", "  ", "c", " a", "ab", "\u0436\u4e2d", "\n", '"', "\\", "<"]
    texts = ["".join(rng.choices(pieces, k=rng.randrange(24))) for _ in range(20000)]
    with tempfile.TemporaryDirectory() as d:
        t.save(f"{d}/tokenizer.json")
        return compare("added", texts, lambda text: t.encode(text).ids, d)


def train():
    """scripts/train_bpe.py finds the same merges as the package `tokenizers`, and writes a tokenizer's files."""
    start, size, wrong = time.monotonic(), 1500, 0
    text = open(os.path.join(DATA, "tinyshakespeare.txt"), newline="").read(150000)
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    t.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    t.train_from_iterator([text], tokenizers.trainers.BpeTrainer(
        vocab_size=size - 1, min_frequency=2, initial_alphabet=alphabet, special_tokens=[], show_progress=False))
    want = [tuple(m.split(" ") if isinstance(m, str) else m) for m in json.loads(t.to_str())["model"]["merges"]]

    def learn(*args, code=0):
        done = subprocess.run([sys.executable, "scripts/train_bpe.py", "--vocab-size", str(size), *args], capture_output=True, text=True)
        one_line = not done.stderr if code == 0 else done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        if done.returncode != code or not one_line:
            print(f"  train_bpe.py {args}: exit code {done.returncode}, want {code}: {done.stderr}")
        return done.returncode != code or not one_line

    with tempfile.TemporaryDirectory() as d:
        source, lines = f"{d}/source.txt", text.splitlines(keepends=True)
        open(source, "w", newline="").write(text)
        open(f"{d}/a.txt", "w", newline="").writelines(lines[:5000])
        open(f"{d}/b.jsonl", "w").write(json.dumps({"meta": {"body": "".join(lines[5000:])}}) + "\n")
        open(f"{d}/bad.txt", "wb").write(b"ok\n\xff")
        wrong += learn("--out", f"{d}/whole", source) + learn("--out", f"{d}/parts", "--field", "meta.body", f"{d}/a.txt", f"{d}/b.jsonl")
        wrong += learn("--out", f"{d}/skip", "--invalid", "skip", f"{d}/bad.txt", source)
        for out in ("whole", "parts", "skip"):
            merges = [tuple(line.split(" ")) for line in open(f"{d}/{out}/merges.txt").read().split("\n")[1:-1]]
            vocabulary = json.load(open(f"{d}/{out}/vocab.json"))
            wrong += merges != want or sorted(vocabulary.values()) != [*range(size)] or vocabulary["<|endoftext|>"] != size - 1
            wrong += sorted(os.listdir(f"{d}/{out}")) != ["merges.txt", "tokenizer_config.json", "vocab.json"]
        subprocess.run([TOKENIZE, "--tokenizer", f"{d}/whole", "--out", f"{d}/out", source], check=True, capture_output=True)
        wrong += shard_tokens(f"{d}/out_train_000000.bin")[1:].tolist() != t.encode(text).ids
        os.unlink(f"{d}/whole/vocab.json")  # the other files may be another tokenizer's
        wrong += learn("--out", f"{d}/whole", source, code=64) + learn("--out", f"{d}/whole", "--force", source)
        wrong += learn("--out", f"{d}/x", f"{d}/bad.txt", code=65) + learn("--out", f"{d}/x", f"{d}/absent.txt", code=65)
        wrong += learn("--out", f"{d}/bad.txt/x", source, code=74) + learn("--vocab-size", "256", "--out", f"{d}/x", source, code=64)
        open(f"{d}/tokenizers.py", "w").write('raise ImportError("hidden")')
        os.environ.update(PYTHONPATH=d, GNS_IN_VENV="1")
        wrong += learn("--out", f"{d}/hidden", source, code=65) + os.path.exists(f"{d}/hidden")
        del os.environ["PYTHONPATH"], os.environ["GNS_IN_VENV"]
    print(f"{'FAIL' if wrong else 'PASS'} compare_tokenizers/train {time.monotonic() - start:.2f}s: {len(want)} merges")
    return wrong


def main():
    print(f"  seed {SEED}")
    reference = openai().encode_ordinary
    wrong = compare("files", files(), reference)
    wrong += compare("random_texts", random_texts(25000), reference)
    wrong += compare("long_words", long_words(), reference)
    wrong += added() + train()
    return 1 if wrong else 0


sys.exit(main())
