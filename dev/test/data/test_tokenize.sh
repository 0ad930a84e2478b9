#!/usr/bin/env bash
# Compares what data/tokenize writes with a reimplementation in plain Python, and its tokens with the packages tiktoken
# and tokenizers if build/venv has them.
set -u
. "$(dirname "$0")/../checks.sh" test_tokenize
python=$(find_python) || skip_suite "no python3"
sanitized=$build-san/data/tokenize # make test builds it too
[ -x "$sanitized" ] || sanitized=
"$python" dev/test/data/test_tokenize.py "$tokenize" $sanitized
code=$?
"$python" dev/test/data/compare_tokenizers.py "$tokenize"
compared=$?
[ $compared = 77 ] || [ $code != 0 ] || code=$compared
exit $code
