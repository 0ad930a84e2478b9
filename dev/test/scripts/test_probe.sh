#!/usr/bin/env bash
# Tests critical_batch.py probe: verdicts on made-up losses, and real branches of a small run.
set -u
. "$(dirname "$0")/../checks.sh" probe
python=$(find_python) || skip_suite "no python3"
script=$root/scripts/critical_batch.py
probe() { returns "$1" "$python" "$script" probe "${@:2}"; } # CODE ARGUMENTS...

begin
check "verdicts" "$python" - <<'END'
import math, sys
sys.path.insert(0, "scripts")
from critical_batch import critical_batch
cases = [
    ([8, 16, 32, 64], [2.0, 2.004, 2.002, 2.009], (64, None, None)),
    ([8, 16, 32, 64], [2.0, 1.98, 2.0, 2.02], (32, 64, 32 * 2 ** 0.5)),   # 0.01 is half-way from 0 to 0.02
    ([8, 16, 32, 64], [2.0, 2.0, 2.04, 2.0], (16, 32, 16 * 2 ** 0.25)),   # batches above the first harmful one do not count
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

# A run of 60 steps at a constant learning rate. The branch with the same batch repeats the run's steps from 20 on.
"$python" -c 'import random, sys; r = random.Random(int(sys.argv[1])); w = ["".join(r.choices("abcdefgh", k=4)) for _ in range(40)]
print(" ".join(r.choices(w, k=20000)))' "${SEED:-$RANDOM}" > "$work/text.txt"
cd "$work" || exit 70
run() { # OUT STEPS OPTIONS...
    "$train" --train 't_train_*.bin' --vocab-size 256 --layers 1 --heads 2 --channels 16 --seq-len 16 --threads 1 --micro-batch 4 \
        --batch-tokens 64 --lr 3e-3 --out "$1" --steps "$2" "${@:3}" >> log 2>&1 || { cat log; echo "FAIL probe/run"; exit 1; }
}
"$tokenize" --tokenizer bytes --out t --val-fraction 0.1 text.txt > log 2>&1
run run 60 --val 't_val_*.bin' --lr-schedule constant --optimizer muon --dropout 0.1 --val-every 8 --val-tokens 512 --checkpoint-every 20 --keep 0
run blind 20
run early 20 --val 't_val_*.bin' --val-every 8 --val-tokens 512 --keep-best --patience 1 --stop-at-loss 9 --max-hours 1
sed -i 's/"max_hours": 1,/"max_hours": 1e-9,/' early/run.json
sums() { cat run/step_00000020/*.* run/step_00000020/training/* run/metrics.jsonl run/run.json | cksum; }
before=$(sums)

begin
probe 0 run/step_00000020 --factors 1,2,4 --tokens 2048 --tolerance 100
check "no verdict: $(cat log)" says log "the critical batch here is 16 rows or more"
check "the run was touched" [ "$(sums)" = "$before" ]
check "weights of branches are left" [ -z "$(ls -d run/probe_00000020/*/step_* 2> /dev/null)" ]
check "branches" "$python" - <<'END'
import json, math, sys
def rows(path): return [json.loads(line) for line in open(f"{path}/metrics.jsonl")]
def steps(lines): return [r for r in lines if "loss" in r]
def expect(what, got, want):
    if got != want: sys.exit(f"{what}: {got}, want {want}")
base = rows("run")
end = next(r for r in base if r["step"] == 20)["tokens"] + 2048
table = {int(line.split()[0]): line.split() for line in open("log") if line.strip()[:1].isdigit()}
for k, batch in ((1, 4), (2, 8), (4, 16)):
    log = rows(f"run/probe_00000020/batch_{batch}-2048")
    mine = [r for r in steps(log) if r["step"] > 20]
    val = [r for r in log if "val_loss" in r][-1]
    expect("tokens", (mine[-1]["tokens"], val["tokens"]), (end, end))
    expect("steps", len(mine), 2048 // (batch * 16))
    expect("batch", {r["batch"] for r in mine}, {batch})
    expect("lr", {round(r["lr"], 12) for r in mine}, {round(3e-3 * math.sqrt(k), 12)})
    expect("reported", table[batch][1:5], [str(k), f"{3e-3 * math.sqrt(k):.3g}", str(len(mine)), f"{val['val_loss']:.4f}"])
    if k == 1:  # the branch repeats the run's bits
        expect("k = 1", [r["loss"] for r in mine], [r["loss"] for r in steps(base)[20:20 + len(mine)]])
END
end branches

begin
touch stamp && sleep 0.01
probe 0 run/step_00000020 --factors 1,2,4 --tokens 2048 --tolerance 1e-9
check "trained again" [ -z "$(find run/probe_00000020 -newer stamp)" ]
check "not said" says log "batch 8: already trained"
probe 0 run --factors 0.5,1 --tokens 512
check "from the newest, downwards: $(tail -n 1 log)" [ -d run/probe_00000060/batch_2-512 ]
branch=run/probe_00000020/batch_8-2048 # simulates a kill: the branch's first checkpoint expects a longer log
numbers $branch > whole
cp -r run/step_00000020 $branch && rm $branch/loss
truncate -s $(($(stat -c %s $branch/metrics.jsonl) * 2 / 3)) $branch/metrics.jsonl # cuts a line
probe 0 run/step_00000020 --factors 1,2,4 --tokens 2048 --tolerance 100
numbers $branch > again
check "not as it was: $(diff whole again | head -n 3)" cmp -s whole again
probe 0 blind --factors 1,2 --tokens 512 # no validation: training losses are compared
check "branches: $(tail -n 1 log)" says log "Recommendation: "
probe 0 early --factors 1,2 --tokens 1024 # its own reason to end ends no branch
check "a branch ended early, or --keep-best" [ "$(grep -hoE '"tokens": 1536, "val_loss"|"keep_best": false' early/probe_00000008/batch_4-1024/{metrics.jsonl,run.json} | sort -u | wc -l)" = 2 ]
end again

begin
bad() { check "$2" fails "$1" "$2" "$python" "$script" probe "${@:3}"; } # CODE TEXT ARGUMENTS...
bad 64 "unrecognized arguments" run --lr 3
bad 65 "no checkpoint" .
bad 65 "run/step_00000001: no checkpoint there; name a run" run/step_00000001
bad 64 "two batches" run --factors 1
bad 64 "invalid factors" run --factors 1,x
bad 64 "argument --launch" run --launch "'mpirun"
bad 64 "no small common multiple" run --factors 1,1.25,1.75,2.75 --tokens 64
echo inf > run/probe_00000020/batch_4-2048/loss
bad 65 "batch_4-2048: the smallest batch has diverged" run/step_00000020 --factors 1,2 --tokens 2048
: > run/probe_00000020/batch_4-2048/loss
bad 65 "batch_4-2048/loss: not a number" run/step_00000020 --factors 1,2 --tokens 2048
mv t_train_000000.bin hidden.bin
bad 65 "t_train_" run/step_00000040 --factors 1,2 --tokens 64
mv hidden.bin t_train_000000.bin
bad 65 "No such file" run/step_00000040 --factors 1,2 --tokens 64 --program no_trainer
sed -i 's/"batch": 4, //' blind/metrics.jsonl
bad 65 "a step without its batch and lr" blind --factors 1,2
end errors
exit $failed
