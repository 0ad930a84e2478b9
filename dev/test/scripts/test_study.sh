#!/usr/bin/env bash
# dev/bench/ramp_study.sh with the CPU trainer on a text made up here, its statistics, and dev/docs/plots.py on what it
# leaves. GNS_BUILD names the build directory. The figures are skipped where no Python has matplotlib.
set -u
. "$(dirname "$0")/../checks.sh" study
export TRAINER=$train TOKENIZE=$tokenize
text=$build/study_text # one name for all times: the files for validation are drawn by a hash of their paths
trap 'rm -rf "$work" "$text" "${text}_copy"' EXIT

# Sixty files, one a copy of another, and one that is too small to count.
rm -rf "$text" && mkdir -p "$text"
for i in $(seq 60); do seq "$i" 7 $((i + 500)) | sed "s/^/int name_$i = /" > "$text/$i.c"; done
cp "$text/1.c" "$text/copy.c" && echo small > "$text/small.c"

begin
PYTHONPATH=dev/bench returns 0 python3 - << 'END'
import math
from ramp_study import paired, reference_batch, window_loss
rows = [{"tokens": t, "loss": x} for t, x in ((40, 9), (70, 5), (90, 4), (110, 2))]
assert window_loss(rows, 60, 100) == (10 * 5 + 20 * 4 + 10 * 2) / 40 # steps that lie partly within
assert window_loss(rows, 0, 110) == (40 * 9 + 30 * 5 + 20 * 4 + 20 * 2) / 110
assert math.isnan(window_loss(rows, 110, 120))
# Losses differ between seeds by 100 times more than between the runs: only the pairs tell.
mean, error = paired({"1": 1.002, "2": 3.004, "3": 2.003, "4": 7}, {"3": 2.0, "1": 1.0, "2": 3.0})
assert abs(mean - 0.003) < 1e-12 and abs(error - 0.001 / math.sqrt(3)) < 1e-12, (mean, error)
assert math.isnan(paired({"1": 1.0}, {"1": 2.0})[1]) and math.isnan(paired({"1": 1.0}, {"2": 2.0})[0])
assert reference_batch({8: 0.7, 16: 0.7009, 32: 0.7011}) == 16 and reference_batch({8: 0.71, 16: 0.7}) == 16
assert reference_batch({8: 0.7, 16: 0.8}) == 8 and reference_batch({8: 0.7006, 16: 0.7, 32: 0.7004}) == 32
END
check "$(cat "$work/log")" [ ! -s "$work/log" ]
end statistics

begin
export OUT=$work/study TEXTS=$text TOKENS=20000 BATCHES="4 16" SEQ_LEN=16 MICRO_BATCH=8 VAL_TOKENS=512 LRS="1e-2 2e-2 4e-2"
export BETA2S="0.9 0.95" DECAYS=0.1 FINALS=0.1 SEEDS="1 2" KAPPAS="0.65 0.65:8 0.65@16" BATCH_MAX=64 WARMUP_STEPS=10 JOBS=2
export SHAPE="--vocab-size 256 --layers 1 --heads 2 --channels 16 --threads 1"
returns 0 dev/bench/ramp_study.sh
row() { awk -v name="$1" -v column="$2" 'index($0, name) == 1 { print $(NF - column) }' "$OUT/table.txt"; }
# 20,000 tokens are 1250 rows of 16: 313 steps of 4 rows, 79 of 16.
check "steps of 4 rows: $(row '4 rows' 8)" [ "$(row '4 rows' 8)" = 313 ]
check "steps of 16 rows: $(row '16 rows' 8)" [ "$(row '16 rows' 8)" = 79 ]
check "no reference" says "$OUT/table.txt" "reference: 4 rows, the largest constant batch within 0.001 of the best; seeds: 2"
steps=$(row 'ramp from 4, kappa 0.65 ' 8) capped=$(row 'ramp from 4, kappa 0.65:8 ' 8)
check "the ramps' steps: $steps, $capped" [ "$steps" -lt "$capped" -a "$capped" -lt 313 ]
# Of 6 combinations 2 go on to half of the tokens, 1 to all of them, and that with both seeds.
for share in 0.25:6 0.5:2 1:2; do
    runs=$(find "$OUT" -name "constant-4-*-share${share%:*}-seed*" -type d | wc -l)
    check "share ${share%:*}: $runs runs" [ "$runs" = ${share#*:} ]
done
# The rate of 16 rows is sqrt(16 / 32) times that of 32; a warm-up of 10 steps at 16 rows is 2560 tokens, 5% are 1000.
one=$(find "$OUT" -name 'constant-16-lr2e-2-beta0.9-*-share0.25-seed1' -type d)
check "lr at 16 rows" says "$one/run.json" '"lr": 0.0141421,'
check "warm-up at 16 rows" says "$one/run.json" '"warmup_tokens": 2560,'
one=$(find "$OUT" -name 'ramp-kappa0.65-from4-*-share1-seed2' -type d)
check "warm-up of the ramp" says "$one/run.json" '"warmup_tokens": 1000,'
check "the ramp's range" says "$one/run.json" '"batch_min": 4,'
check "the other ramp's range" says "$(find "$OUT" -name 'ramp-kappa0.65:8-from4-*-share1-seed2' -type d)/run.json" '"batch_max": 8,'
check "checkpoints are left" [ -z "$(find "$OUT" -name '*.safetensors')" ]
# 16 rows are not the reference: the ramp from there is compared with that as well.
check "against the reference: $(row '  against' 6) of $(row '  against' 8) steps" awk -v fewer="$(row '  against' 6)" -v steps="$(row 'ramp from 16' 8)" \
    'BEGIN { off = fewer - 100 * (1 - steps / 313); exit !(off * off <= 0.25 ^ 2) }' # steps are shown as whole ones
# The last column but one of a ramp is its paired difference from where it starts, by the program's own numbers.
for first in 4 16; do
    difference=$(python3 - "$OUT" $first << 'END'
import glob, gzip, json, sys
def loss(pattern, seed):
    (path,) = glob.glob(f"{sys.argv[1]}/{pattern}-share1-seed{seed}/metrics.jsonl.gz")
    rows = [json.loads(line) for line in gzip.open(path) if b"val_loss" not in line]
    ends = [row["tokens"] for row in rows]
    parts = [max(0, end - max(begin, 18000)) for begin, end in zip([0, *ends], ends)]
    return sum(p * row["loss"] for p, row in zip(parts, rows)) / sum(parts)
first = sys.argv[2]
print(f"{sum(loss(f'ramp-kappa0.65-from{first}-*', seed) - loss(f'constant-{first}-*', seed) for seed in (1, 2)) / 2:+.4f}")
END
    )
    difference_row=$(row "ramp from $first, kappa 0.65 " 1)
    check "from $first: difference $difference_row, want $difference" [ "$difference_row" = "$difference" ]
done
before=$(ls -l --time-style=full-iso "$OUT"/*/metrics.jsonl.gz)
printf '#!/bin/sh\necho "$*" >> %s\nshift\nexec "$@"\n' "$work/launched" > "$work/launch" && chmod +x "$work/launch"
TRAIN_2="$OUT/text_train_*.bin" VAL_2="$OUT/text_val_*.bin" TOKENS_2=8000 SEQ_LEN_2=16 SHAPE_2=$SHAPE MICRO_BATCH_2=8 BATCHES_2=4 \
    KAPPAS_2=0.65 SEEDS_2=1 LRS_2=1e-2 LAUNCH="$work/launch two" returns 0 dev/bench/ramp_study.sh
check "a run was made twice" [ "$before" = "$(ls -l --time-style=full-iso $(find "$OUT"/* -maxdepth 1 -name metrics.jsonl.gz -not -path '*launched*' -not -path '*second*'))" ]
check "launched: $(wc -l < "$work/launched")" [ "$(grep -c "^two $TRAINER .*--batch-tokens 64 " "$work/launched")" = 4 ] # two sizes
check "launched: no ramp" [ "$(grep -c -- '--ramp gns' "$work/launched")" = 2 ]
check "wall clock: $(tail -n 1 "$OUT/table.txt")" grep -q "launch two: 4 rows [0-9.]* s.*; ramp from 4, kappa 0.65 .* times as fast" "$OUT/table.txt"
check "a short run of the second size" [ -z "$(find "$OUT/second" -name '*-share0*')" ]
check "no second size" says "$OUT/second/table.txt" "ramp from 4, kappa 0.65"
check "second size: other steps" grep -q '^4 rows .* 125 ' "$OUT/second/table.txt" # 500 rows
end runs
[ $failed = 0 ] || exit 1

begin
TRAINER=$work/none returns 64 dev/bench/ramp_study.sh
TEXTS=$work/none OUT=$work/none returns 65 dev/bench/ramp_study.sh
check "no text: says $(tail -n 1 "$work/log")" says "$work/log" "error: no source text"
SHARES="0.5 0.25 1" OUT=$work/bad returns 65 dev/bench/ramp_study.sh
check "shares: says $(tail -n 1 "$work/log")" says "$work/log" "error: SHARES: 0.5 0.25 1: shares of the tokens must grow"
# Of equal files it keeps the same one, in whatever order they are found.
cp -r "$text" "${text}_copy"
TRAINER=/bin/false TEXTS="$text ${text}_copy" OUT=$work/texts returns 1 dev/bench/ramp_study.sh
TRAINER=/bin/false TEXTS="${text}_copy $text" OUT=$work/again returns 1 dev/bench/ramp_study.sh
check "other texts" cmp "$work/texts/text_train_000000.bin" "$work/again/text_train_000000.bin"
KAPPAS=0.65@7 OUT=$work/bad returns 65 dev/bench/ramp_study.sh
check "no such start: says $(tail -n 1 "$work/log")" says "$work/log" "error: KAPPAS: a ramp from 7 rows, which are not in BATCHES"
JOBS=1 SHAPE="--layers 0" OUT=$work/bad returns 1 dev/bench/ramp_study.sh # a trainer that fails
check "a trainer that fails is not named: $(tail -n 1 "$work/log")" says "$work/log" "error: FAIL constant-4-lr1e-2-beta0.9-decay0.1-final0.1-share0.25-seed1: exit code 64"
end errors

python=$(find_python matplotlib) || { echo "SKIP study/figures: no Python with matplotlib" && exit $failed; }
begin
# Another tuning whose loss is better, on a machine that knows it by its time: it has to be the one shown.
one=$(find "$OUT" -maxdepth 1 -name 'constant-4-*-share1-seed1') better=$OUT/constant-4-lr9-share1-seed1
mkdir "$better" && cp "$one/run.json" "$better"
gzip -dc "$one/metrics.jsonl.gz" |
    sed 's/"val_loss": [0-9.]*/"val_loss": 0.125/; s/"loss": [0-9.]*/"loss": 0.5/; s/"tok_per_s": [0-9.e+]*/"tok_per_s": 2000/' > "$better/metrics.jsonl"
cp -r "$better" "$OUT/constant-4-lr9-share1-seed2"
for part in adamw muon adamw-short muon-short; do # exact at every step, from the LayerNorms' numbers
    mkdir -p "$work/muon/$part/constant-4-lr9-share1-seed1" && cp "$better/run.json" "$work/muon/$part/constant-4-lr9-share1-seed1"
    sed 's/"gns_ln/"gns_total/g' "$better/metrics.jsonl" > "$work/muon/$part/constant-4-lr9-share1-seed1/metrics.jsonl"
done
returns 0 "$python" dev/docs/plots.py "$OUT" --muon "$work/muon" -o "$work"
check "the better tuning: $(grep '4 rows' "$work/log")" says "$work/log" "| 2 | 313 | 10.0 seconds | 0.5 | 0.125 |"
check "a line a batch: $(grep -c '^|' "$work/log")" [ "$(grep -c '^|' "$work/log")" = 7 ]
check "a figure is missing, or no XML" "$python" -c 'import sys, xml.etree.ElementTree as tree
for name in sys.argv[2:]: tree.parse(f"{sys.argv[1]}/gns-{name}.svg")' "$work" ramp loss layers exact
for label in '4 rows' '16 rows' 'ramp from 4, kappa 0.65' 'ramp from 4 to 8, kappa 0.65' 'ramp from 16, kappa 0.65'; do check "$label is not in the figure" says "$work/gns-loss.svg" "$label"; done
check "no aim in the figure" says "$work/gns-ramp.svg" "aim: one standard error"
check "no figure of Muon" "$python" -c 'import sys, xml.etree.ElementTree as tree; tree.parse(sys.argv[1])' "$work/gns-muon.svg"
check "not in the figure of Muon" says "$work/gns-muon.svg" "Muon, 4 rows"
cp "$better/metrics.jsonl" "$work/muon/adamw/constant-4-lr9-share1-seed1"
returns 65 "$python" dev/docs/plots.py "$OUT" --muon "$work/muon" -o "$work/none"
check "no exact noise scale: says $(cat "$work/log")" says "$work/log" "no exact noise scale"
sixteen=$(find "$OUT" -maxdepth 1 -name 'constant-16-*-share1-seed1' -type d)
head -c 300 "$sixteen/metrics.jsonl.gz" > "$work/cut" && mv "$work/cut" "$sixteen/metrics.jsonl.gz"
returns 65 "$python" dev/docs/plots.py "$OUT" -o "$work/none"
check "a cut log: says $(cat "$work/log")" says "$work/log" "$(basename "$sixteen")/metrics.jsonl.gz: damaged"
returns 65 "$python" dev/docs/plots.py "$work" # no study
end figures
exit $failed
