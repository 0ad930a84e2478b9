#!/usr/bin/env bash
# Makes shards of Tiny Shakespeare, 1.1 MB. The last tenth goes to validation, as in nanoGPT. See --help.
NAME=shakespeare
. "$(dirname "$0")/recipe.sh"
input https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt \
    86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
need_tokenize
tokenize --val-fraction 0.1 "$INPUT"
