#!/usr/bin/env bash
# dev/bench/ramp_study.sh with the CPU trainer on a text made up here, and dev/docs/plots.py on what it leaves.
# GNS_BUILD names the build directory. The figures are skipped where no Python has matplotlib.
set -u
. "$(dirname "$0")/../checks.sh" study
export TRAINER=$train TOKENIZE=$tokenize
text=$build/study_text # one name for all times: the files for validation are drawn by a hash of their paths
trap 'rm -rf "$work" "$text"' EXIT

# Sixty files, one a copy of another, and one that is too small to count.
rm -rf "$text" && mkdir -p "$text"
for i in $(seq 60); do seq "$i" 7 $((i + 500)) | sed "s/^/int name_$i = /" > "$text/$i.c"; done
cp "$text/1.c" "$text/copy.c" && echo small > "$text/small.c"

begin
export OUT=$work/study TEXTS=$text TOKENS=20000 BATCHES="4 16" SEQ_LEN=16 MICRO_BATCH=8 VAL_TOKENS=512 LRS=1e-2
export SHAPE="--layers 1 --heads 2 --channels 16" RAMP_VAL_EVERY=20 EXACT_EVERY=2
export WARMUP_STEPS=10
returns 0 dev/bench/ramp_study.sh
row() { awk -v name="$1-lr1e-2-seed1" -v column="$2" '$1 == name { print $column }' "$OUT/table.txt"; }
# 20,000 tokens are 1250 rows of 16: 313 steps of 4 rows, 79 of 16.
check "steps of 4 rows: $(row constant-4 2)" [ "$(row constant-4 2)" = 313 ]
check "steps of 16 rows: $(row constant-16 2)" [ "$(row constant-16 2)" = 79 ]
check "the ramp's batch: $(row ramp-kappa1 4)" [ "$(row ramp-kappa1 4)" -le 16 ]
for name in constant-4 constant-16 ramp-kappa1; do
    run=$OUT/$name-lr1e-2-seed1
    check "$name: tokens $(row $name 3)" [ "$(row $name 3)" = 20000 ]
    check "$name: val loss $(row $name 6)" says <(gzip -dc "$run/metrics.jsonl.gz" | tail -n 1) "\"val_loss\": $(row $name 6 | cut -c 1-5)"
    check "$name: no run.json" [ -s "$run/run.json" ]
done
# The learning rate of 16 rows is sqrt(16 / 4) times that of 4, and in one run more the same; 4 rows have one run.
check "lr at 16 rows" says "$OUT/constant-16-lr1e-2-seed1/run.json" '"lr": 0.02,'
check "lr at 16 rows, not scaled" says "$OUT/constant-16-lr0.005-seed1/run.json" '"lr": 0.01,'
check "lr at 4 rows" says "$OUT/constant-4-lr1e-2-seed1/run.json" '"lr": 0.01,'
check "runs: $(wc -l < "$OUT/table.txt") lines" [ "$(wc -l < "$OUT/table.txt")" = 5 ]
# A warm-up of 5% is 1000 tokens, 10 steps are 640 of them at 4 rows and 2560 at 16.
check "warm-up at 4 rows" says "$OUT/constant-4-lr1e-2-seed1/run.json" '"warmup_tokens": 1000,'
check "warm-up at 16 rows" says "$OUT/constant-16-lr1e-2-seed1/run.json" '"warmup_tokens": 2560,'
check "warm-up of the ramp" says "$OUT/ramp-kappa1-lr1e-2-seed1/run.json" '"warmup_tokens": 1000,'
check "checkpoints are left" [ -z "$(find "$OUT" -name '*.safetensors')" ]
end runs
[ $failed = 0 ] || exit 1

begin
TRAINER=$work/none returns 64 dev/bench/ramp_study.sh
TEXTS=$work/none OUT=$work/none returns 65 dev/bench/ramp_study.sh
check "no text: says $(tail -n 1 "$work/log")" says "$work/log" "error: no source text"
SHAPE="--layers 0" OUT=$work/bad returns 1 dev/bench/ramp_study.sh # a trainer that fails
check "a trainer that fails is not named" says "$work/log" "FAIL constant-4-lr1e-2-seed1: exit code 64"
end errors

python=$(find_python matplotlib) || { echo "SKIP study/figures: no Python with matplotlib" && exit $failed; }
begin
# Another rate whose last validation is better, on a machine that knows it by its time: it has to be the one shown.
better=$OUT/constant-4-lr5e-3-seed1
mkdir "$better" && cp "$OUT/constant-4-lr1e-2-seed1/run.json" "$better"
gzip -dc "$OUT/constant-4-lr1e-2-seed1/metrics.jsonl.gz" |
    sed 's/"val_loss": [0-9.]*/"val_loss": 0.125/; s/"tok_per_s": [0-9.e+]*/"tok_per_s": 2000/' > "$better/metrics.jsonl"
cp -r "$better" "$OUT/constant-4-lr5e-3-seed2"
returns 0 "$python" dev/docs/plots.py "$OUT" -o "$work"
check "the better rate: $(grep '4 rows' "$work/log")" says "$work/log" "| 313 | 10.0 seconds | 0.125 |"
check "a line a batch: $(grep -c '^|' "$work/log")" [ "$(grep -c '^|' "$work/log")" = 5 ]
check "a figure is missing, or no XML" "$python" -c 'import sys, xml.etree.ElementTree as tree
for name in sys.argv[2:]: tree.parse(f"{sys.argv[1]}/gns-{name}.svg")' "$work" ramp loss layers
for label in '4 rows' '16 rows' 'ramp, kappa 1'; do check "$label is not in the figure" says "$work/gns-loss.svg" "$label"; done
head -c 300 "$OUT/constant-16-lr1e-2-seed1/metrics.jsonl.gz" > "$work/cut" && mv "$work/cut" "$OUT/constant-16-lr1e-2-seed1/metrics.jsonl.gz"
returns 65 "$python" dev/docs/plots.py "$OUT" -o "$work/none"
check "a cut log: says $(cat "$work/log")" says "$work/log" "constant-16-lr1e-2-seed1/metrics.jsonl.gz: damaged"
returns 65 "$python" dev/docs/plots.py "$work" # no study
end figures
exit $failed
