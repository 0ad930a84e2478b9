#!/usr/bin/env bash
# data/tokenize: what it writes against a reimplementation (Python, standard library only), and its tokens against the
# packages tiktoken and tokenizers, where build/venv has them. GNS_BUILD names the build directory.
set -u
cd "$(dirname "$0")/../.."
build=${GNS_BUILD:-build/cpu}
command -v python3 > /dev/null || { echo "SKIP test_tokenize 0.00s: no python3"; exit 77; }
sanitized=build/cpu-san/data/tokenize
[ -x $sanitized ] || sanitized=
python3 dev/test/test_tokenize.py "$build/data/tokenize" $sanitized
code=$?
python=build/venv/bin/python
[ -x $python ] || python=python3
$python dev/test/compare_tokenizers.py "$build/data/tokenize"
compared=$?
[ $compared = 77 ] || [ $code != 0 ] || code=$compared
exit $code
