#!/usr/bin/env bash
# --outliers finds planted rows and changes nothing else. Its file survives a kill. Three ranks write the same file.
set -u
. "$(dirname "$0")/../checks.sh" outliers
python=$(find_python tokenizers) || python=$(find_python) || skip_suite "no python3"

# The text has 9,600 rows of 32 bytes: sentences from 24 different words. Planted rows: 6 of random bytes and 6 of
# Russian (0.125% together), 6 that repeat one byte, and 150 copies of a document of two rows.
"$python" - "$work" << 'END'
import json, os, random, sys
os.chdir(sys.argv[1])
T, rows, draw = 32, 9600, random.Random(1)
words = "the a cat dog bird sat ran on under mat tree house and then it was old new red blue very small big door".split()
text = bytearray()
while len(text) < T * rows + 1:
    text += (" ".join(draw.choice(words) for _ in range(9)) + ".\n").encode()
document = bytes(draw.choice(b"abcdefghijklmnopqrstuvwxyz") for _ in range(2 * T))
russian = "птица летит над рекой и никто не знает куда ведёт эта старая дорога".encode()
plants = [("binary", None)] * 3 + [("russian", russian)] * 3 + [("byte", b"z" * 2 * T)] * 3 + [("copy", document)] * 150
places = draw.sample(range(0, rows - 2, 2), len(plants))
for (kind, plant), place in zip(plants, places):
    start = draw.randrange(16) * 2
    text[T * place:T * (place + 2)] = (plant or draw.randbytes(2 * T)) if kind != "russian" else plant[start:start + 2 * T]
open("text", "wb").write(text[:T * rows + 1])
json.dump({T * (place + i): kind for (kind, _), place in zip(plants, places) for i in (0, 1)}, open("plants.json", "w"))
END
"$tokenize" --tokenizer bytes --invalid bytes --out "$work/t" "$work/text" > "$work/log" 2>&1 || { cat "$work/log"; exit 70; }

rate=4e-3 steps=300
run() { # OUT OPTIONS...
    $train --train "$work/t_train_*.bin" --out "$work/$1" --vocab-size 256 --layers 1 --heads 2 --channels 48 --seq-len 32 \
        --micro-batch 8 --batch-tokens 1024 --steps $steps --lr $rate --warmup-tokens 20000 --beta2 0.99 --threads 1 "${@:2}"
}

finds_what_was_planted() {
    run whole --outliers 20 --checkpoint-every 50 > "$work/log" 2>&1 || { cat "$work/log"; return 1; }
    "$python" - "$work/whole/outliers.jsonl" "$work/plants.json" "$work/text" << 'END'
import collections, json, math, statistics, sys
rows, plants, text = [json.loads(line) for line in open(sys.argv[1])], json.load(open(sys.argv[2])), open(sys.argv[3], "rb").read()
counts = collections.Counter(text)
kinds = {kind: [plants.get(str(row["offset"]), "") for row in rows if row["kind"] == kind] for kind in ("loud", "rare", "strange", "uniform")}
print(kinds)
for kind, least in (("rare", 11), ("strange", 10)):
    garbage = [planted in ("binary", "russian") for planted in kinds[kind]]
    best = max(sum(garbage[:n]) for n in range(1, 21) if sum(garbage[:n]) >= 0.9 * n)
    assert best >= least, f"{kind}: {best} of 12 rows at a precision of 0.9"
assert "byte" in kinds["loud"] and kinds["loud"].count("copy") >= 8  # too few steps to learn the copies by heart
measures = {"rare": lambda row: -statistics.mean(math.log(counts[byte]) for byte in text[row["offset"]:row["offset"] + 32]),
            "strange": lambda row: row["loss"] - math.log(row["norm"]),
            "uniform": lambda row: math.log(row["norm"] / row["loss"])}
for kind, measure in measures.items():
    means = {other: statistics.mean(measure(row) for row in rows if row["kind"] == other) for other in measures}
    assert all(means[kind] > mean for other, mean in means.items() if other != kind), f"{kind}: {means}"
assert all(row["score"] > 0 and row["document"] is None and row["source"] == row["shard"].replace("000000", "*") for row in rows)
END
}

resumes_with_the_same_file() { # killed in a computation of step 137 or so
    cc -shared -fPIC -o "$work/fault.so" dev/test/preload/fault.c -lpthread -ldl || return 1
    OMPI_COMM_WORLD_RANK=0 FAULT_RANK=0 FAULT_ACTION=kill FAULT_AFTER=#20000 LD_PRELOAD=$work/fault.so \
        ASAN_OPTIONS=verify_asan_link_order=0 run killed --outliers 20 --checkpoint-every 50 > "$work/log" 2>&1
    [ $? = 137 ] || { cat "$work/log"; return 1; }
    run killed --outliers 20 --checkpoint-every 50 > "$work/log" 2>&1 || { cat "$work/log"; return 1; }
    says "$work/log" "resuming from" && ! says "$work/log" "complete" && cmp "$work/whole/outliers.jsonl" "$work/killed/outliers.jsonl"
}

# The learning rate is 0: ranks sum gradients in another order, so trained weights would differ in the last bits.
ranks_keep_the_same_rows() {
    has_mpi || skip "no MPI" || return
    mpi_here
    local rate=0 steps=60 train=$train
    run one --outliers 20 > "$work/log" 2>&1 || { cat "$work/log"; return 1; }
    train="timeout -k 10 300 mpirun -np 3 --oversubscribe --allow-run-as-root --bind-to none $train"
    run three --outliers 20 > "$work/log" 2>&1 || { cat "$work/log"; return 1; }
    says "$work/log" "ranks   3" && cmp "$work/one/outliers.jsonl" "$work/three/outliers.jsonl"
}

changes_nothing_else() {
    run without > "$work/log" 2>&1 || { cat "$work/log"; return 1; }
    [ ! -e "$work/without/outliers.jsonl" ] && ! grep -q '"spread"' "$work"/without/step_*/training/state.json &&
        cmp <(numbers "$work/whole") <(numbers "$work/without") && cmp "$work"/{whole,without}/step_00000300/model.safetensors
}

judges_from_step_33() {
    local steps=33
    run early --outliers 20 > "$work/log" 2>&1 || { cat "$work/log"; return 1; }
    [ "$(grep -c '"step":33,' "$work/early/outliers.jsonl")" = "$(wc -l < "$work/early/outliers.jsonl")" ]
}

prints_and_groups() {
    "$python" -c 'import tokenizers' 2> /dev/null || skip "no Python package tokenizers" || return
    "$python" scripts/outliers.py "$work/whole" > "$work/text.log" || return
    grep -A 1 '^loud' "$work/text.log" | paste -d ' ' - - | awk '
        { rows += $11; copies += $11 > 3 && length($14) == 32; bytes += $14 ~ /^z+$/ }
        END { exit !(rows == 20 && copies && bytes) }' || { cat "$work/text.log"; return 1; }
    without_figures
    "$python" scripts/report.py "$work/whole" > /dev/null && says "$work/whole/report.html" zzzzzzzzzzzz || return
    refuses 65 "no outliers" "$python" scripts/outliers.py "$work/without" && rm "$work"/t_train_*.bin &&
        "$python" scripts/outliers.py "$work/whole" | grep -qF "(no text: $work/t_train_000000.bin is gone" || return
    head -c 1027 /dev/zero > "$work/odd" # a shard that is cut within a token
    sed -i 's|"shard":"[^"]*"|"shard":"'"$work"'/odd"|; s/"offset":[0-9]*/"offset":0/' "$work/whole/outliers.jsonl"
    "$python" scripts/outliers.py "$work/whole" > /dev/null || return
    echo '{' > "$(newest_checkpoint "$work/whole")/vocab.json" && refuses 65 "vocab.json" "$python" scripts/outliers.py "$work/whole"
}

try finds_what_was_planted
try resumes_with_the_same_file
try ranks_keep_the_same_rows
try changes_nothing_else
try judges_from_step_33
try prints_and_groups
exit $failed
