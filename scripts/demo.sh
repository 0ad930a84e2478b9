#!/usr/bin/env bash
# The demo: a GPT-2 of one million parameters, trained for about a minute on text that every machine that can build it
# has: the C headers under /usr/include. `make demo TEXT=path` takes a file or a directory of your own instead.
# Everything it writes is under build/demo/.
set -eu
cd "$(dirname "$0")/.."
root=$PWD
text=${1:-}
case $text in "" | /*) ;; *) text=$PWD/$text ;; esac
mkdir -p build/demo
cd build/demo
rm -f corpus_*.bin* corpus.state

if [ -n "$text" ]; then
    [ -e "$text" ] || { echo "error: TEXT=$text: no such file or directory" >&2; exit 65; }
    echo "== the text: $text; its last tenth is for validation"
    "$root/data/tokenize" --tokenizer bytes --invalid bytes --out corpus --val-fraction 0.1 "$text"
else
    echo "== the text: the C headers under /usr/include; one file in ten, by hash of its path, is for validation"
    find /usr/include -name '*.h' -type f | LC_ALL=C sort > headers.txt
    [ -s headers.txt ] || { echo "error: no headers under /usr/include. Install libc6-dev, or use make demo TEXT=path" >&2; exit 65; }
    "$root/data/tokenize" --tokenizer bytes --invalid bytes --out corpus --val-every-file 10 --max-bytes 20000000 \
        --files-from headers.txt
fi

echo "== training: the batch (B, in rows of 128 bytes) grows as the gradient noise scale (GNS) does"
"$root/train_gpt2" --train 'corpus_train_*.bin' --val 'corpus_val_*.bin' --out run --vocab-size 256 \
    --layers 5 --heads 4 --channels 128 --seq-len 128 --micro-batch 16 --train-tokens 1200000 \
    --ramp gns --batch-min 8 --batch-max 64 --gns exact --gns-exact-every 16 --gns-half-life 20000 \
    --lr 3e-3 --warmup-tokens 50000 --weight-decay 0.1 --beta2 0.99 \
    --val-every 100 --val-tokens 65536 --sample-every 1000000 --sample-tokens 400 --temperature 0.7

# What gzip makes of the same validation text. A token is two bytes of the shard, behind its header of 1024; the second
# is zero.
for shard in corpus_val_*.bin; do tail -c +1025 "$shard" | tr -d '\000'; done | head -c 65536 > validation.txt
awk -v bytes="$(wc -c < validation.txt)" -v packed="$(gzip -9 -c validation.txt | wc -c)" '
    { if (match($0, /"val_loss": [0-9.]+/)) loss = substr($0, RSTART + 12, RLENGTH - 12) }
    END { printf "\nbits a byte of the validation text: this model %.2f, gzip -9 %.2f\n", loss / log(2), 8 * packed / bytes }
' run/metrics.jsonl
echo "the run lies in $PWD/run; sample it again with"
echo "  ./train_gpt2 --sample-only --model $(ls -d "$PWD"/run/step_* | tail -n 1) --seq-len 128 --prompt '#define '"
