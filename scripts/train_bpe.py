#!/usr/bin/env python3
"""Learns a byte-level BPE vocabulary, as GPT-2's was learnt: train_bpe.py --vocab-size N --out DIR INPUT...

An INPUT is a text file or JSON Lines. Writes vocab.json, merges.txt and tokenizer_config.json for data/tokenize, the
trainer (--tokenizer DIR) and transformers. The last token is <|endoftext|>.
"""
import io
import json
import os
import re
import sys

sys.dont_write_bytecode = True
from run_log import EXIT_INPUT, EXIT_USAGE, EXIT_WRITE, Fault, Parser, run_main, write_whole

EOT = "<|endoftext|>"
BYTES, TOKENS_MAX = 256, 65536
PIECE = 1 << 20  # characters
KINDS = {b"\x1f\x8b": "is gzip, not text. unpack it with gunzip", b"\x28\xb5\x2f\xfd": "is zstd, not text. unpack it with unzstd",
         b"\xff\xfe": "is UTF-16, not UTF-8. convert it with iconv -f UTF-16 -t UTF-8",
         b"\xfe\xff": "is UTF-16, not UTF-8. convert it with iconv -f UTF-16 -t UTF-8",
         b"version https://git-lfs": "is a Git LFS pointer, not the text. git lfs pull fetches it"}


def find(value, field):
    """Returns the value of a field; "a.b" may also be b in the object a."""
    if field in value:
        return value[field]
    first, _, rest = field.partition(".")
    return find(value[first], rest)


def lines_of(path, file, field):
    """Yields the texts of JSON Lines. Ignores a byte order mark, as data/tokenize does."""
    for number, line in enumerate(file, 1):
        line = line.removeprefix("\ufeff") if number == 1 else line
        try:
            text = find(json.loads(line), field) if line.strip() else ""
            text.encode()  # fails for half a surrogate pair and for other types
            yield text
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Fault(EXIT_INPUT, f"{path} line {number}: not a JSON object with valid text in '{field}'. "
                        "repair it, or name its field with --field") from None


def is_jsonl(path, head, form):
    """True for JSON Lines, as in data/tokenize: by --format, else the name, else the first line (with a note)."""
    name = path.lower()
    if form != "auto" or name.endswith((".jsonl", ".ndjson", ".jl", ".txt", ".md")):
        return form == "jsonl" or (form == "auto" and not name.endswith((".txt", ".md")))
    jsonl = bool(re.match(rb'(\xef\xbb\xbf)?\s*\{[ \t]*"', head))
    if jsonl or name.endswith(".json"):
        print(f"note: {path}: by the first line, read as {'JSON Lines' if jsonl else 'text, braces and all'}; "
              "--format text or jsonl decides", file=sys.stderr)
    return jsonl


def texts(path, field, form):
    """Yields the texts of JSON Lines, or pieces of whole lines of a text file."""
    try:
        with open(path, "rb") as raw:
            head = raw.peek(4096)
            for begin, what in KINDS.items():
                if head.startswith(begin):
                    raise Fault(EXIT_INPUT, f"{path}: {what}")
            file = io.TextIOWrapper(raw, encoding="utf-8", newline="\n")
            if is_jsonl(path, head, form):
                yield from lines_of(path, file, field)
            else:
                while piece := file.read(PIECE):
                    yield piece + file.readline()
    except OSError as error:
        raise Fault(EXIT_INPUT, f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Fault(EXIT_INPUT, f"{path}: not UTF-8: {error}. repair it, for example with iconv -c -f UTF-8 -t UTF-8") from None


def learn(paths, size, field, form):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=size - 1, min_frequency=2, show_progress=sys.stderr.isatty(),
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    trained.train_from_iterator((text for path in paths for text in texts(path, field, form)), trainer)
    return trained


def save(trained, out):
    vocab = trained.get_vocab(with_added_tokens=False)
    vocab[EOT] = len(vocab)
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "bos_token": EOT, "eos_token": EOT, "unk_token": EOT}
    pairs = json.loads(trained.to_str())["model"]["merges"]  # ["left", "right"]; older versions: "left right"
    merges = "".join(f"{pair if isinstance(pair, str) else ' '.join(pair)}\n" for pair in ["#version: 0.2", *pairs])
    try:
        os.makedirs(out, exist_ok=True)
    except OSError as error:
        raise Fault(EXIT_WRITE, f"{error.filename}: {error.strerror}") from None
    for name, content in (("merges.txt", merges), ("vocab.json", json.dumps(vocab, ensure_ascii=False)),
                          ("tokenizer_config.json", json.dumps(config, ensure_ascii=False))):
        write_whole(os.path.join(out, name), content)
    return len(vocab)


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("inputs", nargs="+", metavar="INPUT")
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N")
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--field", default="text", help="the field of a jsonl line that holds the text (default: %(default)s)")
    parser.add_argument("--format", choices=("auto", "text", "jsonl"), default="auto", help="of the inputs (default: by name and first line)")
    parser.add_argument("--force", action="store_true", help="replace the vocabulary in DIR")
    args = parser.parse_args()
    if not BYTES < args.vocab_size <= TOKENS_MAX:
        raise Fault(EXIT_USAGE, f"--vocab-size {args.vocab_size}: not a whole number from {BYTES + 1} to {TOKENS_MAX}")
    if not args.force and os.path.exists(os.path.join(args.out, "vocab.json")):
        raise Fault(EXIT_USAGE, f"{args.out}: has a vocabulary. Choose another --out, or --force to replace it")
    size = save(learn(args.inputs, args.vocab_size, args.field, args.format), args.out)
    print(f"{args.out}: {size} tokens" + (", no other pair occurs twice" if size < args.vocab_size else ""))


if __name__ == "__main__":
    run_main(main, "tokenizers")
