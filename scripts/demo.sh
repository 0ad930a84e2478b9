#!/usr/bin/env bash
# The demo: trains a GPT-2 of one million parameters in one to four minutes. Its text is the first 8 MB of the C headers
# under /usr/include, in the order of their paths; every machine that can build gns.c has these headers. Training reads
# 2.3 MB. `make demo TEXT=path` trains on a file or a directory of your own instead. The demo writes to build/demo/,
# with one directory for each text. The same command resumes a stopped run.
set -euo pipefail
text=${1:-}
case $text in "" | /*) ;; *) text=$PWD/$text ;; esac
. "$(dirname "$0")/common.sh"
mkdir -p "$root/build/demo"
cd "$root/build/demo"
exec {lock}> lock
flock -n $lock || fail 64 "another demo is at work in $PWD" "Wait for it to end"
if [ -n "$text" ]; then
    echo "== the text: $text; its last tenth is for validation"
    input=(--val-fraction 0.1 "$text")
else
    echo "== the text: the C headers under /usr/include; one file in ten, by hash of its path, is for validation"
    find /usr/include -name '*.h' -type f | LC_ALL=C sort > headers.txt
    [ -s headers.txt ] || fail 65 "no headers under /usr/include" "Install libc6-dev, or use make demo TEXT=path"
    input=(--invalid bytes --val-every-file 10 --max-bytes 8000000 --files-from headers.txt)
fi
rm -rf next
"$root/data/tokenize" --tokenizer bytes --out next/corpus "${input[@]}"
directory=text-$(cksum next/corpus_*.bin | cksum | cut -d ' ' -f 1)
[ -e "$directory" ] || mv next "$directory"
cd "$directory"

options=(--train 'corpus_train_*.bin' --val 'corpus_val_*.bin' --out run --vocab-size 256
    --layers 2 --heads 6 --channels 192 --seq-len 64 --micro-batch 16 --train-tokens 2300000
    --optimizer muon --batch-tokens 1024 --lr 8e-3 --final-lr-frac 0.02 --warmup-tokens 50000 --beta2 0.99
    --ramp gns --batch-min 16 --batch-max 64 --ramp-step-rows 1e9 --ramp-waste 0.5 --ramp-kappa 1 --ramp-lr-power 0.5
    --gns-half-life 30000
    --val-every 250 --val-tokens 65536 --sample-every 1000000 --temperature 0.7)

echo "== training: the batch (B, in rows of 64 bytes) grows as the gradient noise scale (GNS) does"
"$root/train_gpt2" "${options[@]}"

# Draw the training loss in characters: one bar for the mean of each twentieth of the run.
sed -nE 's/.*"tokens": ([0-9]+),.* "loss": ([0-9.]+).*/\1 \2/p' run/metrics.jsonl | awk '
    { k = int(($1 - 1) / 115000); sum[k] += $2; count[k]++ }
    END {
        print "\ntraining loss (nats per token)"
        for (k = 0; k in count; k++) {
            bar = sprintf("%*s", 10 * sum[k] / count[k], "")
            gsub(/ /, "*", bar)
            printf "%5.2f million tokens %7.3f %s\n", 0.115 * (k + 1), sum[k] / count[k], bar
        }
    }'

# Compress the validation text with gzip. A shard has a header of 1024 bytes, then two bytes per token, the second 0.
for shard in corpus_val_*.bin; do tail -c +1025 "$shard" | tr -d '\000'; done > validation.txt
packed=$(gzip -9 -c validation.txt | wc -c)
loss=$(sed -nE 's/.*"val_loss": ([0-9.]+).*/\1/p' run/metrics.jsonl | tail -n 1)
[ -n "$loss" ] || fail 65 "$PWD/run/metrics.jsonl has no validation loss" "Move the run aside: make demo makes another"
awk -v loss="$loss" -v bytes="$(stat -c %s validation.txt)" -v packed="$packed" 'BEGIN {
    printf "\nbits per byte of the validation text: this model %.2f, gzip -9 %.2f\n", loss / log(2), 8 * packed / bytes }'
echo "the run is in $PWD/run; sample it again with"
printf "  ./train_gpt2 --sample-only --model %q --prompt '#define '\n" "$(newest_checkpoint "$PWD/run")"
