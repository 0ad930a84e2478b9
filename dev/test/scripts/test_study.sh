#!/usr/bin/env bash
# Tests dev/bench/ramp_study.py with the CPU trainer, its statistics, and dev/docs/plots.py on its results. Skips the
# figures if no Python has matplotlib.
set -u
. "$(dirname "$0")/../checks.sh" study
export TRAINER=$train JOBS=2
cat llmc/*/*.c > "$work/text"
"$tokenize" --tokenizer bytes --out "$work/t" --val-fraction 0.1 "$work/text" > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }

begin
PYTHONPATH=dev/bench:dev/docs returns 0 python3 - << 'END'
import math
from ramp_study import paired, window_loss
from plots import reference_batch
rows = [{"tokens": t, "loss": x} for t, x in ((40, 9), (70, 5), (90, 4), (110, 2))]
assert window_loss(rows, 60, 100) == (10 * 5 + 20 * 4 + 10 * 2) / 40 # steps may lie partly in [60, 100)
assert window_loss(rows, 0, 110) == (40 * 9 + 30 * 5 + 20 * 4 + 20 * 2) / 110
assert math.isnan(window_loss(rows, 110, 120))
# Losses differ 100 times more between seeds than between runs: only pairs show the difference.
mean, error = paired({"1": 1.002, "2": 3.004, "3": 2.003, "4": 7}, {"3": 2.0, "1": 1.0, "2": 3.0})
assert abs(mean - 0.003) < 1e-12 and abs(error - 0.001 / math.sqrt(3)) < 1e-12, (mean, error)
assert math.isnan(paired({"1": 1.0}, {"1": 2.0})[1]) and math.isnan(paired({"1": 1.0}, {"2": 2.0})[0])
assert reference_batch({8: 0.7, 16: 0.7009, 32: 0.7011}) == 16 and reference_batch({8: 0.71, 16: 0.7}) == 16
END
check "$(cat "$work/log")" [ ! -s "$work/log" ]
end statistics

# 20,000 tokens are 1250 rows of 16: 313 steps of 4 rows, 79 of 16. late4 equals rows4 until its batch grows.
begin
out=$work/study
study() { returns "$1" dev/bench/ramp_study.py "$work/queue" --out "$out" "${@:2}"; } # CODE ARGUMENTS...
row() { awk -v name="$1" -v column="$2" '$1 == name { print $column }' "$work/log"; }
cat > "$work/queue" << END
late4  --batch-tokens 64 --ramp gns --batch-min 4 --batch-max 8 --ramp-step-rows 1e9 --ramp-waste 1 --ramp-kappa 0.65
all    --vocab-size 256 --layers 1 --heads 2 --channels 16 --seq-len 16 --micro-batch 4 --threads 1 --lr 1e-2 --val-tokens 512
all    --train $work/t_train_*.bin --val $work/t_val_*.bin --train-tokens 20000
rows4  --batch-tokens 64  # the reference
rows16 --batch-tokens=256 --lr 2e-2
END
study 0 --seeds 1,2 --against rows4
check "steps: $(row rows4 3), $(row rows16 3)" [ "$(row rows4 3) $(row rows16 3)" = "313 79" ]
check "fewer: $(row rows16 4)" [ "$(row rows16 4)" = 74.8% ]
check "equal: $(row rows4 15), $(row late4 15), $(row rows16 15)" [ "$(row rows4 15)" = 313 -a "$(row late4 15)" -gt 0 -a "$(row late4 15)" -lt 313 -a "$(row rows16 15)" = 0 ]
check "its own rate" says "$out/rows16-seed1/run.json" '"lr": 0.02,'
check "weights are left" [ -z "$(find "$out" -name '*.safetensors' -o -name '*.work')" ]
# Recompute results from the logs: the sum of step times, the loss over the last tenth, the paired difference.
check "results" python3 - "$out" "$(row rows16 13)" << 'END'
import json, sys
out, shown = sys.argv[1:]
results = {(r["name"], r["seed"]): r for r in map(json.loads, open(f"{out}/results.jsonl"))}
assert set(results) == {(n, s) for n in ("late4", "rows4", "rows16") for s in (1, 2)}, results.keys()
for (name, seed), r in results.items():
    rows = [json.loads(line) for line in open(f"{out}/{name}-seed{seed}/metrics.jsonl")]
    steps = [row for row in rows if "loss" in row]
    ends = [0] + [row["tokens"] for row in steps]
    parts = [max(0, end - max(begin, 18000)) for begin, end in zip(ends, ends[1:])]
    loss = sum(p * row["loss"] for p, row in zip(parts, steps)) / sum(parts)
    seconds = sum((end - begin) / row["tok_per_s"] for begin, end, row in zip(ends, ends[1:], steps))
    assert abs(r["train_loss"] - loss) < 1e-9 and abs(r["gpu_seconds"] - seconds) < 1e-3, (r, loss, seconds)
    assert (r["tokens"], r["val_loss"]) == (20000, rows[-1]["val_loss"]) and "CPU" in r["card"] and "gns.c" in r["build"], r
want = sum(results["rows16", s]["train_loss"] - results["rows4", s]["train_loss"] for s in (1, 2)) / 2
assert shown == f"{want:+.4f}", (shown, want)
END
before=$(cat "$out/results.jsonl" && ls -l --time-style=full-iso "$out"/*/run.json)
echo 'rows8 --batch-tokens 128' >> "$work/queue"
study 0 --seeds 1 --against rows4
check "a new line: $(row rows8 3)" [ "$(row rows8 3)" = 157 ]
check "a run was made twice" [ "$before" = "$(head -n 6 "$out/results.jsonl" && ls -l --time-style=full-iso "$out"/*{4,16}-seed?/run.json)" ]
end runs

begin
echo 'long --batch-tokens 64 --train-tokens 100000' >> "$work/queue"
cc -shared -fPIC -o "$work/fault.so" dev/test/preload/fault.c -lpthread -ldl
env OMPI_COMM_WORLD_RANK=0 FAULT_RANK=0 FAULT_ACTION=stop FAULT_AFTER=#9000 LD_PRELOAD="$work/fault.so" ASAN_OPTIONS=verify_asan_link_order=0 \
    dev/bench/ramp_study.py "$work/queue" --out "$out" > "$work/log" 2>&1 &
job=$!
trainer_has() { grep -qs "^$1" "/proc/$(pgrep -P $job train_gpt2)/status" || ! kill -0 $job; }
until trainer_has 'State:.T'; do sleep 0.02; done # it stops, with SIGSTOP, in a step
kill -TERM $job
until trainer_has 'ShdPnd:.*[4-7c-f]...$'; do sleep 0.02; done # the study has sent it TERM
kill -CONT "$(pgrep -P $job train_gpt2)"
wait $job
code=$?
check "a stopped study: $code, $(cat "$work/log")" [ $code = 75 ]
study 0
check "goes on: $(cat "$work/log")" says "$out/long-seed1.log" 'resuming from'
echo "blind --vocab-size 256 --layers 1 --heads 2 --channels 16 --seq-len 16 --threads 1 --train $work/t_train_*.bin --train-tokens 2000" > "$work/one"
returns 0 dev/bench/ramp_study.py "$work/one" --out "$work/blind"
check "without validation: $(cat "$work/blind/results.jsonl")" says "$work/blind/results.jsonl" '"val_loss": null'
check "twice in results" [ "$(grep -c '"long"' "$out/results.jsonl")" = 1 ]
end stopped

begin
refused() { study "$1" "${@:3}" && check "says $(tail -n 1 "$work/log")" says "$work/log" "$2"; } # CODE TEXT ARGUMENTS...
cp "$work/queue" "$work/good"
JOBS=0 refused 64 "JOBS is 0"
refused 64 "none: no finished run" --against none
refused 64 "argument --seeds: invalid seeds value" --seeds 1,x
rm "$work/queue" && refused 65 "queue: No such file or directory; write a QUEUE"
while IFS='|' read -r code text line; do
    echo "$line" > "$work/queue"
    refused "$code" "$text"
done << END
65|line 1: 3: no option|word 3
65|line 1: --out is the study's own|one --out x
65|line 1: No closing|one '
END
{ cat "$work/good" && echo rows4; } > "$work/queue" && refused 65 "queue line 8: rows4: a second run"
sed 's/--lr 2e-2/--lr 3e-2/' "$work/good" > "$work/queue" && refused 64 "rows16: has run with other options"
sed '$d; s/^rows8.*/bad --batch-tokens 63\nrows32 --batch-tokens 512/' "$work/good" > "$work/queue" # a trainer that refuses: the others still run
refused 64 "bad, seed 1: exit code 64: see $out/bad-seed1.log"
check "the others did not run" says "$out/results.jsonl" '"rows32"'
cp "$work/one" "$work/queue" && mkdir -p "$work/theirs/blind-seed1" && echo theirs > "$work/theirs/blind-seed1/metrics.jsonl"
refused 74 "blind-seed1: not a run of " --out "$work/theirs"
echo theirs > "$work/theirs/quiet.conf" && refused 74 "quiet.conf: not written" --out "$work/theirs"
check "lost" [ "$(cat "$work"/theirs/blind-seed1/metrics.jsonl "$work/theirs/quiet.conf")" = $'theirs\ntheirs' ]
cp -r "$out" "$work/damaged" && sed -i '2s/"seed": .*/"se/' "$work/damaged/results.jsonl"
returns 65 dev/bench/ramp_study.py "$work/good" --out "$work/damaged" --table
end errors

python=$(find_python matplotlib) || { echo "SKIP study/figures: no Python with matplotlib" && exit $failed; }
begin
# "better" is rows4's configuration with a second tuning, a better loss and other step times. The table must show it.
better=$out/better-seed1
mkdir "$better" && cp "$out/rows4-seed1/run.json" "$better"
sed 's/"val_loss": [0-9.]*/"val_loss": 0.125/; s/"loss": [0-9.]*/"loss": 0.5/; s/"tok_per_s": [0-9.e+]*/"tok_per_s": 2000/' \
    "$out/rows4-seed1/metrics.jsonl" > "$better/metrics.jsonl"
cp -r "$better" "$out/better-seed2"
for part in adamw muon adamw-short muon-short; do # every step gets exact estimates: copies of the LayerNorms'
    mkdir -p "$work/muon/$part/rows4-seed1" && cp "$better/run.json" "$work/muon/$part/rows4-seed1"
    sed 's/"gns_ln/"gns_total/g' "$better/metrics.jsonl" > "$work/muon/$part/rows4-seed1/metrics.jsonl"
done
returns 0 "$python" dev/docs/plots.py "$out" --muon "$work/muon" -o "$work"
check "the better tuning: $(grep '4 rows' "$work/log")" says "$work/log" "| 2 | 313 | 10.0 seconds | 0.5 | 0.125 |"
check "a figure is missing, or no XML" "$python" -c 'import sys, xml.etree.ElementTree as tree
for name in sys.argv[2:]: tree.parse(f"{sys.argv[1]}/gns-{name}.svg")' "$work" ramp loss layers exact muon
for label in '4 rows' '16 rows' 'ramp from 4 to 8, kappa 0.65'; do check "$label is not in the figure" says "$work/gns-loss.svg" "$label"; done
returns 65 "$python" dev/docs/plots.py "$work" # no study
end figures
exit $failed
