#!/usr/bin/env bash
# The examples of a run from several sources, against dev/bench/torch_twin.py, which has the order from its definition
# (llmc/math/mixture.h): weights, unions and a single pattern, at random seeds, at the beginning and far into the run.
set -u
. "$(dirname "$0")/../checks.sh" mixture
python=$(find_python numpy) || skip_suite "no python3 with numpy"
for name in a b c; do
    cat "$root"/llmc/text/*.c | head -c $((RANDOM % 2000 + 2000)) > "$work/$name.txt"
    "$tokenize" --tokenizer bytes --shard-tokens 1500 --out "$work/$name" "$work/$name.txt" > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
done
cd "$work" || exit 70

same_order() { # FILES
    local seed=$((RANDOM * 32768 + RANDOM)) first
    for first in 0 $((RANDOM % 9000)); do
        "$root/$build/dev/test/text/print_order" "$1" 13 $seed $first 300 > ours || return 1
        "$python" "$root/dev/bench/torch_twin.py" order --train "$1" --seq-len 13 --seed $seed --first $first --count 300 > twins || return 1
        cmp ours twins || { echo "$1, seed $seed, from example $first"; return 1; }
        [ "$(wc -l < ours)" = 300 ] || return 1
    done
}
one_pattern() { same_order 'a*.bin'; }
a_union() { same_order 'c*.bin a*.bin' && same_order 'b*.bin ?_*.bin'; }
weights() { same_order 'a*.bin:0.7 b*.bin:0.3' && same_order 'b*.bin:1 c*.bin:2.5 a*.bin:0.01' && same_order 'a*.bin:3'; }
for test in one_pattern a_union weights; do try $test; done
exit $failed
