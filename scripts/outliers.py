#!/usr/bin/env python3
"""Prints the outliers of a run (train_gpt2 --outliers N) as text: outliers.py RUN [--repeats SHARD...]

Loud rows have the largest gradients of their step, hard rows the largest losses, strange rows a large loss for their gradient,
as garbage has, uniform rows a small one, as one token again and again has. Rows that share 32 successive tokens are one group,
printed with the text and the numbers of its farthest row.

--repeats also prints the longest runs of one token in the shards, and the texts of 32 tokens or more that they repeat most.
"""

import glob
import os
import sys

from run_log import COUNT, EXIT_INPUT, NUMBER, TEXT, Fault, Parser, Run, check, read_lines, run_main

OUTLIER = {"kind!": TEXT, "step!": COUNT, "shard!": TEXT, "offset!": COUNT, "norm!": NUMBER, "loss!": NUMBER, "score!": NUMBER}
RUN = {"options!": {"seq_len!": COUNT}, "model!": {"context!": COUNT}, "parts!": dict}
HEAD = ["text", "score", "loss", "norm", "step", "rows", "place"]
SHARD_MAGIC, SHARD_HEADER, SHARED = 20240520, 1024, 2 * 32  # bytes
REPEATS, COPIES, WINDOWS = 20, 20, 1 << 24  # printed; the fewest copies of each; the most windows


def read_tokens(run, row):
    path = os.path.join(run.parts[-1].get("directory", "."), row["shard"])
    with open(path if os.path.exists(path) else os.devnull, "rb") as file:
        file.seek(SHARD_HEADER + 2 * row["offset"])
        return file.read(2 * min(run.info["options"]["seq_len"], run.info["model"]["context"]))  # b"" where the shard is gone


def decoder(run):
    """Returns a function from tokens to a line of text, by the newest checkpoint's tokenizer. Without one: their numbers."""
    path = max(glob.glob(os.path.join(glob.escape(run.path), "step_*", "vocab.json")), default=None)
    if not path:
        return str
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE.from_file(path, os.path.join(os.path.dirname(path), "merges.txt")))
    tokenizer.decoder = decoders.ByteLevel()
    return lambda tokens: repr(tokenizer.decode(tokens))[1:-1]


def outlier_lines(run):
    """Returns {kind: lines under HEAD}, a line for each group, farthest first."""
    path, kinds, group_of = os.path.join(run.path, "outliers.jsonl"), {}, {}
    if not os.path.exists(path):
        return {}
    check(run.info_path, run.info | {"parts": run.parts[-1] if run.parts else None}, RUN)
    decode = decoder(run)
    for _, row in read_lines(path, OUTLIER, {}):
        tokens, kind = read_tokens(run, row), row["kind"]
        parts = {(kind, tokens[i:i + SHARED]) for i in range(0, len(tokens) - SHARED + 1, 2)}
        group = next((group_of[part] for part in parts if part in group_of), None)
        if group is None:
            group = [decode(memoryview(tokens).cast("H").tolist()), f"{row['score']:+.1f}", f"{row['loss']:.2f}",
                     f"{row['norm']:.3g}", row["step"], 0, f"{os.path.basename(row['shard'])}:{row['offset']}"]
            kinds.setdefault(kind, []).append(group)
        group[HEAD.index("rows")] += 1
        group_of |= dict.fromkeys(parts - group_of.keys(), group)
    return kinds


def open_shard(path):
    import numpy as np

    try:
        magic, _, tokens = np.fromfile(path, np.int32, 3)
        if magic == SHARD_MAGIC:
            return np.memmap(path, np.uint16, "r", SHARD_HEADER, (tokens,))
    except OSError as error:
        raise Fault(EXIT_INPUT, f"{path}: {error.strerror}; name shards of the run") from None
    except ValueError:  # too short
        pass
    raise Fault(EXIT_INPUT, f"{path}: no shard of tokens, or cut short; name shards of the run")


def repeats(paths):
    """Yields (kind, tokens, copies, path, first token, tokens of the text): the longest runs of one token, and the texts whose
    copies fill the most tokens; all of 32 tokens or more. Compares windows of 32 tokens by a hash; in long shards only some, picked
    by the hash, so the same in every copy."""
    import numpy as np

    shards = [open_shard(path) for path in paths]
    firsts = np.cumsum([0] + [len(shard) for shard in shards])
    every, runs, hashes, places = 1 + int(firsts[-1]) // WINDOWS, [], [], []
    for shard, path, first in zip(shards, paths, firsts):
        begins = np.concatenate([[0], np.flatnonzero(np.diff(shard)) + 1])
        lengths = np.diff(np.append(begins, len(shard)))
        runs += [(int(lengths[i]), path, begins[i], shard[begins[i]]) for i in np.flatnonzero(lengths >= SHARED // 2)]
        windows, factor, length = shard.astype(np.uint64) + np.uint64(1), 0x9e3779b97f4a7c15, 1
        while length < SHARED // 2:  # doubles the windows
            windows = windows[:-length] * np.uint64(factor) + windows[length:]
            factor, length = factor * factor % 2**64, 2 * length
        windows ^= windows >> np.uint64(32)
        picked = np.flatnonzero(windows % np.uint64(every) == 0)
        hashes.append(windows[picked])
        places.append(first + picked)
    for length, path, begin, token in sorted(runs, reverse=True)[:REPEATS]:
        yield "run", length, length, path, begin, [int(token)]
    _, found, copies = np.unique(np.concatenate(hashes), return_index=True, return_counts=True)
    places, copies = np.concatenate(places)[found[copies >= COPIES]], copies[copies >= COPIES]
    order = np.argsort(places)
    texts = np.split(order, np.flatnonzero(np.diff(places[order]) > every * SHARED // 2) + 1)
    for text in sorted(texts, key=lambda text: -copies[text].sum())[:REPEATS if len(order) else 0]:
        i = np.searchsorted(firsts, places[text[0]], "right") - 1
        begin, end = places[text[0]] - firsts[i], places[text[-1]] - firsts[i] + SHARED // 2
        yield ("repeat", every * (copies[text] - 1).sum(), int(np.median(copies[text])), paths[i], begin,
               shards[i][begin:end].tolist())


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="a run's directory (run.json, outliers.jsonl)")
    parser.add_argument("--repeats", metavar="SHARD", nargs="+", default=[], help="shards to search for repeated text")
    args = parser.parse_args()
    run = Run(args.run, live=True)
    kinds, decode = outlier_lines(run), decoder(run)
    if not kinds:
        raise Fault(EXIT_INPUT, "no outliers in this run yet; train with --outliers N, until it saves a checkpoint")
    found = list(repeats(args.repeats)) if args.repeats else []
    for kind, lines in kinds.items():
        for text, *numbers in lines:
            print(kind, *(f"{name} {x}" for name, x in zip(HEAD[1:], numbers)), sep="  ", end=f"\n    {text}\n")
    for kind, tokens, copies, path, begin, text in found:
        print(kind, f"copies {copies}", f"tokens {tokens}", f"place {os.path.basename(path)}:{begin}", sep="  ",
              end=f"\n    {decode(text[:1000])}\n")


if __name__ == "__main__":
    run_main(main, "tokenizers numpy")
