#!/usr/bin/env python3
"""Learns a byte-level BPE vocabulary, as GPT-2's was learnt: train_bpe.py --vocab-size N --out DIR [options] INPUT...

data/tokenize reads the INPUTs (text files, JSON Lines, directories, or - for standard input), with its options, such as
--field and --invalid. Meanwhile DIR needs room for twice the text. Writes vocab.json, merges.txt and
tokenizer_config.json for data/tokenize, the trainer (--tokenizer DIR) and transformers. The last token is <|endoftext|>.
"""
import glob
import json
import os
import subprocess
import sys
import tempfile

from run_log import EXIT_INPUT, EXIT_USAGE, Fault, Parser, run_main, write_whole

EOT = "<|endoftext|>"
BYTES, TOKENS_MAX = 256, 65536
HEADER_BYTES, PIECE_BYTES = 1024, 1 << 21  # bytes of a shard's header; bytes read at a time
TOKENIZE = os.environ.get("TOKENIZE") or os.path.join(os.path.dirname(os.path.abspath(__file__)), "../data/tokenize")


def texts(prefix):
    """Yields the text of the shards, in pieces of whole lines."""
    rest = b""
    for path in sorted(glob.glob(glob.escape(prefix) + "*.bin")):
        with open(path, "rb") as file:
            file.seek(HEADER_BYTES)
            while piece := file.read(PIECE_BYTES):
                lines, newline, rest = (rest + piece[::2]).rpartition(b"\n")
                yield (lines + newline).decode(errors="replace")
    yield rest.decode(errors="replace")


def main():
    parser = Parser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N")
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--force", action="store_true", help="replace the vocabulary in DIR")
    args, words = parser.parse_known_args()  # words: data/tokenize's options and inputs
    if not BYTES < args.vocab_size <= TOKENS_MAX:
        raise Fault(EXIT_USAGE, f"--vocab-size {args.vocab_size}: not a whole number from {BYTES + 1} to {TOKENS_MAX}")
    files = [os.path.join(args.out, name) for name in ("merges.txt", "vocab.json", "tokenizer_config.json")]
    if not args.force and any(map(os.path.lexists, files)):
        raise Fault(EXIT_USAGE, f"{args.out}: has a vocabulary, or a part of one. Choose another --out, or --force to replace it")

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=args.vocab_size - 1, min_frequency=2, show_progress=sys.stderr.isatty(),
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    os.makedirs(args.out, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".train_bpe_", dir=args.out) as directory:
        prefix = os.path.join(directory, "text")
        # Turn the inputs into shards of bytes, with a newline between documents.
        try:
            code = subprocess.run([TOKENIZE, "--tokenizer=bytes", f"--out={prefix}", *words], stdout=subprocess.DEVNULL).returncode
        except OSError as error:
            raise Fault(EXIT_INPUT, f"{TOKENIZE}: {error.strerror}. make data/tokenize") from None
        if code:
            sys.exit(code)  # data/tokenize has printed the error
        trained.train_from_iterator(texts(prefix), trainer)

    vocab = trained.get_vocab(with_added_tokens=False)
    vocab[EOT] = len(vocab)
    config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "bos_token": EOT, "eos_token": EOT, "unk_token": EOT}
    pairs = json.loads(trained.to_str())["model"]["merges"]  # each ["left", "right"]; before tokenizers 0.20 "left right"
    merges = "".join(f"{pair if isinstance(pair, str) else ' '.join(pair)}\n" for pair in ["#version: 0.2", *pairs])
    for path, content in zip(files, (merges, json.dumps(vocab, ensure_ascii=False), json.dumps(config, ensure_ascii=False))):
        write_whole(path, content)
    print(f"{args.out}: {len(vocab)} tokens" + (", no other pair occurs twice" if len(vocab) < args.vocab_size else ""))


if __name__ == "__main__":
    run_main(main, "tokenizers")
