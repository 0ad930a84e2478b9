#!/usr/bin/env python3
"""Prints the outliers of a run (train_gpt2 --outliers N) as text: outliers.py RUN

The kinds of rows are loud (the largest gradients of their step), rare (tokens that are rare in the text), strange (garbage: the
loss is large for the gradient) and uniform (repetitions of one token: the loss is small for the gradient). Rows that share 32
successive tokens form a group. Prints the text and the numbers of each group's row with the highest score.
"""

import glob
import os

from run_log import EXIT_INPUT, Fault, Parser, Run, run_main

SHARD_HEADER, SHARED = 1024, 2 * 32  # bytes


def outliers_text(run, most=None):
    """Returns two lines per group, for at most `most` groups of a kind, highest score first; "" without outliers."""
    kinds, group_of, T = {}, {}, run.info.get("options", {}).get("seq_len", 0)
    vocabulary, decode = max(glob.glob(os.path.join(glob.escape(run.path), "step_*", "vocab.json")), default=None), str
    if vocabulary:  # the newest checkpoint's; without a vocabulary tokens are printed as numbers
        from tokenizers import ByteLevelBPETokenizer

        try:
            tokenizer = ByteLevelBPETokenizer(vocabulary, os.path.join(os.path.dirname(vocabulary), "merges.txt"))
        except Exception as error:  # tokenizers has no class of its own for it
            raise Fault(EXIT_INPUT, f"{vocabulary} or merges.txt beside it: {error}; train_gpt2 --check {run.path}") from None
        decode = lambda tokens: repr(tokenizer.decode(tokens))[1:-1]
    for row in run.outliers:
        shard, kind = os.path.join((run.parts or [{}])[-1].get("directory", "."), row["shard"]), row["kind"]
        with open(shard if os.path.isfile(shard) else os.devnull, "rb") as file:  # no text if the shard is gone
            file.seek(SHARD_HEADER + 2 * row["offset"])
            tokens = (found := file.read(2 * T))[:len(found) & ~1]  # a cut shard may end within a token
        parts = {(kind, tokens[i:i + SHARED]) for i in range(0, len(tokens) - SHARED + 1, 2)}
        group = next((group_of[part] for part in parts if part in group_of), None)
        if group is None:
            text = decode(memoryview(tokens).cast("H").tolist()) if tokens else f"(no text: {shard} is gone or cut)"
            group = row | {"rows": 0, "text": text, "file": os.path.basename(row["shard"])}
            kinds.setdefault(kind, []).append(group)
        group["rows"] += 1
        group_of |= dict.fromkeys(parts - group_of.keys(), group)
    form = "{kind}  score {score:+.1f}  loss {loss:.2f}  norm {norm:.3g}  step {step}  rows {rows}  place {file}:{offset}\n    {text}\n"
    return "".join(form.format(**group) for groups in kinds.values() for group in groups[:most])


def main():
    parser = Parser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="a run's directory (run.json, outliers.jsonl)")
    if not (text := outliers_text(Run(parser.parse_args().run, live=True))):
        raise Fault(EXIT_INPUT, "no outliers in this run yet; train with --outliers N, until it saves a checkpoint")
    print(text, end="")


if __name__ == "__main__":
    run_main(main, "tokenizers")
