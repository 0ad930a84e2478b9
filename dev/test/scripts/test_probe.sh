#!/usr/bin/env bash
# critical_batch.py probe: its verdict on made-up losses, and real branches of a small run. GNS_BUILD: build directory.
set -u
. "$(dirname "$0")/../checks.sh" probe
python=$(find_python) || skip_suite "no python3"
probe() { returns "$1" "$python" scripts/critical_batch.py probe "${@:2}"; } # CODE ARGUMENTS...

begin
check "verdicts" "$python" - <<'END'
import math, sys
sys.path.insert(0, "scripts")
sys.dont_write_bytecode = True
from branched_probe import critical_batch
cases = [
    ([8, 16, 32, 64], [2.0, 2.004, 2.002, 2.009], (64, None, None)),
    ([8, 16, 32, 64], [2.0, 1.98, 2.0, 2.02], (32, 64, 32 * 2 ** 0.5)),   # half way between 0 and 0.02
    ([8, 16, 32, 64], [2.0, 2.0, 2.04, 2.0], (16, 32, 16 * 2 ** 0.25)),   # a batch above one that does harm does not count
    ([8, 32], [2.0, 2.5], (8, 32, 8 * 4 ** 0.02)),
    ([8, 16, 32], [2.0, 2.005, math.inf], (16, 32, 16.0)),                # diverged
    ([8, 16, 32], [2.0, math.nan, 2.0], (8, 16, 8.0)),
]
for batches, losses, want in cases:
    got = critical_batch(batches, losses, 0.01)
    same = all(a == b or (a and b and abs(a - b) < 1e-9 * b) for a, b in zip(got, want))
    if not same: sys.exit(f"{losses}: {got}, want {want}")
END
end verdict

# A run of 60 steps at a constant learning rate, of which the branch at the same batch from step 20 is a piece.
"$python" -c 'import random, sys; r = random.Random(int(sys.argv[1])); w = ["".join(r.choices("abcdefgh", k=4)) for _ in range(40)]
print(" ".join(r.choices(w, k=20000)))' "${SEED:-$RANDOM}" > "$work/text.txt"
(cd "$work" && "$tokenize" --tokenizer bytes --out t --val-fraction 0.1 text.txt) > "$work/log" 2>&1
(cd "$work" && "$train" --train 't_train_*.bin' --val 't_val_*.bin' --vocab-size 256 --layers 1 --heads 2 --channels 16 \
    --seq-len 16 --threads 1 --micro-batch 4 --batch-tokens 64 --lr 3e-3 --lr-schedule constant --val-every 8 --val-tokens 512 \
    --checkpoint-every 20 --keep 0 --steps 60 --out run) > "$work/log" 2>&1 || { cat "$work/log"; echo "FAIL probe/run"; exit 1; }
before=$(cd "$work/run" && cat step_00000020/*.* step_00000020/training/* metrics.jsonl run.json | cksum)

begin
probe 0 "$work/run/step_00000020" --factors 1,2,4 --tokens 2048 --tolerance 100 --json "$work/result.json"
check "no verdict: $(cat "$work/log")" says "$work/log" "the critical batch here is 16 rows or more"
check "the run was touched" [ "$(cd "$work/run" && cat step_00000020/*.* step_00000020/training/* metrics.jsonl run.json | cksum)" = "$before" ]
check "weights of branches are left" [ -z "$(ls -d "$work"/run/probe_00000020/*/step_* 2> /dev/null)" ]
check "branches" "$python" - "$work" <<'END'
import json, math, sys
here = sys.argv[1]
def rows(path): return [json.loads(line) for line in open(f"{here}/{path}/metrics.jsonl")]
def steps(lines): return [r for r in lines if "loss" in r]
def expect(what, got, want):
    if got != want: sys.exit(f"{what}: {got}, want {want}")
base, result = rows("run"), json.load(open(f"{here}/result.json"))
start = next(r for r in base if r["step"] == 20)
end = start["tokens"] + 2048
for k, batch in ((1, 4), (2, 8), (4, 16)):
    log = rows(f"run/probe_00000020/batch_{batch}")
    mine = [r for r in steps(log) if r["step"] > 20]
    expect("tokens", mine[-1]["tokens"], end)
    expect("steps", len(mine), 2048 // (batch * 16))
    expect("batch", {r["batch"] for r in mine}, {batch})
    expect("lr", {round(r["lr"], 12) for r in mine}, {round(3e-3 * math.sqrt(k), 12)})
    loss = [r for r in log if "val_loss" in r][-1]
    expect("val at the end", loss["tokens"], end)
    branch = next(b for b in result["branches"] if b["batch"] == batch)
    expect("reported", (branch["loss"], branch["factor"], branch["steps"]), (loss["val_loss"], k, len(mine)))
    if k == 1:  # as the run itself: the same bits
        expect("k = 1", [r["loss"] for r in mine], [r["loss"] for r in steps(base)[20:20 + len(mine)]])
expect("verdict", (result["no_harm_up_to"], result["harm_from"], result["step"]), (16, None, 20))
END
end branches

begin
touch "$work/stamp" && sleep 0.01
probe 0 "$work/run/step_00000020" --factors 1,2,4 --tokens 2048 --tolerance 1e-9
check "trained again" [ -z "$(find "$work/run/probe_00000020" -newer "$work/stamp")" ]
check "not said" says "$work/log" "batch 8: already trained"
probe 64 "$work/run/step_00000020" --factors 1,2,4 --tokens 4096
check "other branches in the same place: $(cat "$work/log")" says "$work/log" "holds a branch with another --train-tokens"
probe 0 "$work/run" --factors 0.5,1 --tokens 512
check "from the newest, downwards: $(tail -n 1 "$work/log")" [ -d "$work/run/probe_00000060/batch_2" ]
probe 64 "$work/run/step_00000020" --factors 1,400 --lr 3 --tokens 64 # unknown option
end again

# A killed branch starts again at the run's checkpoint, whose log was longer than the branch's.
begin
branch=$work/run/probe_00000020/batch_8
numbers "$branch" > "$work/whole"
cp -r "$work/run/step_00000020" "$branch" && rm "$branch/done"
truncate -s $(($(stat -c %s "$branch/metrics.jsonl") * 2 / 3)) "$branch/metrics.jsonl" # within a line
probe 0 "$work/run/step_00000020" --factors 1,2,4 --tokens 2048 --tolerance 100
numbers "$branch" > "$work/again"
check "not as it was: $(diff "$work/whole" "$work/again" | head -n 3)" cmp -s "$work/whole" "$work/again"
end killed

# A run without validation: its branches have none either, and their training losses are compared.
begin
(cd "$work" && "$train" --train 't_train_*.bin' --vocab-size 256 --layers 1 --heads 2 --channels 16 --seq-len 16 --threads 1 \
    --micro-batch 4 --batch-tokens 64 --lr 3e-3 --steps 20 --out blind) > "$work/log" 2>&1
check "run: $(tail -n 1 "$work/log")" [ $? = 0 ]
probe 0 "$work/blind" --factors 1,2 --tokens 512
check "branches: $(tail -n 1 "$work/log")" says "$work/log" "Recommendation: "
end without_validation

begin
fails() { # CODE TEXT ARGUMENTS...
    probe "$1" "${@:3}"
    check "$2: $(cat "$work/log")" says "$work/log" "$2"
    check "$2: no error line" grep -q '^error: ' "$work/log"
}
fails 65 "no checkpoint" "$work"
fails 65 "No such file" "$work/none/step_00000001"
fails 64 "two batches" "$work/run" --factors 1
fails 64 "invalid factors" "$work/run" --factors 1,x
fails 64 "no small common multiple" "$work/run" --factors 1,1.25,1.75,2.75 --tokens 64
mv "$work/t_train_000000.bin" "$work/hidden.bin"
fails 65 "t_train_" "$work/run/step_00000040" --factors 1,2 --tokens 64
mv "$work/hidden.bin" "$work/t_train_000000.bin"
fails 65 "No such file" "$work/run/step_00000040" --factors 1,2 --tokens 64 --program "$work/no_trainer"
sed -i 's/"batch": 4, //' "$work/blind/metrics.jsonl"
fails 65 "a step without its batch and lr" "$work/blind" --factors 1,2
echo '{"step": "x"}' > "$work/blind/step_00000020/training/state.json"
fails 65 'state.json: "step" is not a whole number' "$work/blind" --factors 1,2
end errors
exit $failed
