#!/usr/bin/env bash
# Tests scripts/to_wandb.py on a made-up run, whole or followed. A stand-in for wandb logs the calls.
set -u
. "$(dirname "$0")/../checks.sh" wandb
python=$(find_python) || skip_suite "no python3"

mkdir "$work/one" "$work/fake"
cat > "$work/one/run.json" << 'END'
{"program": "x", "model": {"layers": 2}, "options": {"lr": 0.001, "out": "run"},
 "parts": [{"first_step": 1, "directory": "/some where", "command": ["./train_gpt2", "--prompt", "a b"]}]}
END
cat > "$work/one/metrics.jsonl" << 'END'
{"step": 1, "tokens": 64, "examples": 1, "batch": 1, "loss": 4.5, "lr": 0.001, "tok_per_s": 32, "mfu": null, "gns_ln": null, "gns_ln_lower": 1e308}
{"step": 2, "tokens": 128, "examples": 2, "batch": 1, "loss": 4.25, "lr": 0.001, "tok_per_s": 64, "skipped": true, "gns_layer": [3, null]}
{"step": 2, "tokens": 128, "val_loss": 4.0}
{"step": 2, "tokens": 128, "hellaswag": 0.25, "hellaswag_norm": 0.5}
{"step": 3, "tokens": 192, "examples": 3, "batch": 1, "loss": 4.125, "lr": 0.001, "tok_per_s": 64}
END
echo '{"step": 2, "tokens": 128, "prompt": "", "text": "so\n"}' > "$work/one/samples.jsonl"
cat > "$work/fake/wandb.py" << 'END'
import json, os
def note(*call):
    with open(os.environ["CALLS"], "a") as file: print(json.dumps(call), file=file)
class Config:
    def update(self, values, allow_val_change): note("config", values)
class Target:
    url, step, config = "https://example.invalid/run", int(os.environ.get("STEP", 0)), Config()
    def define_metric(self, name, **more): note("define", name, more)
    def log(self, numbers, step): note("log", step, numbers)
    def finish(self): note("finish")
def Table(columns, data): return {"columns": columns, "data": data}
def init(**arguments):
    if os.environ.get("REFUSE"): raise RuntimeError("no\n  key")
    note("init", arguments)
    return Target()
END

begin
CALLS=$work/calls.json PYTHONPATH=$work/fake returns 0 "$python" scripts/to_wandb.py "$work/one" --project p --id 7
check "$(cat "$work/log")" grep -q "^uploaded to https://example.invalid/run$" "$work/log"
check "calls" "$python" - "$work/calls.json" << 'END'
import json, sys
calls = [json.loads(line) for line in open(sys.argv[1])]
name, arguments = calls[0]
config = arguments.pop("config")
assert (name, config["lr"], config["run"]) == ("init", 0.001, {"program": "x", "model": {"layers": 2}}), config
assert config["commands"] == ["cd '/some where' && ./train_gpt2 --prompt 'a b'"], config
assert arguments.pop("dir").endswith("/one") and arguments == {"project": "p", "id": "7", "name": "one", "resume": "allow"}, arguments
logs = [call[1:] for call in calls if call[0] == "log"]
assert logs == [
    [1, {"tokens": 64, "examples": 1, "batch": 1, "loss": 4.5, "lr": 0.001, "tok_per_s": 32, "seconds": 2.0}],
    [2, {"tokens": 128, "examples": 2, "batch": 1, "loss": 4.25, "lr": 0.001, "tok_per_s": 64, "skipped": True,
         "gns_layer/00": 3, "seconds": 3.0}],
    [2, {"tokens": 128, "val_loss": 4.0, "seconds": 3.0}],
    [2, {"tokens": 128, "hellaswag": 0.25, "hellaswag_norm": 0.5, "seconds": 3.0}],
    [3, {"tokens": 192, "examples": 3, "batch": 1, "loss": 4.125, "lr": 0.001, "tok_per_s": 64, "seconds": 4.0}],
    [3, {"samples": {"columns": ["step", "tokens", "prompt", "text"], "data": [[2, 128, "", "so\n"]]}}]], logs
assert calls[-1] == ["finish"], calls[-1]
END
rm "$work/calls.json" # W&B has the run up to step 3: earlier steps are not sent again
STEP=3 CALLS=$work/calls.json PYTHONPATH=$work/fake returns 0 "$python" scripts/to_wandb.py "$work/one" --id 7
check "again: $(cat "$work/calls.json")" [ "$(grep -c '"log", 3, {"tokens": 192' "$work/calls.json")$(grep -cE '"log", [12],' "$work/calls.json")" = 10 ]
end calls

# Follow a run: steps, a resume that removes lines and writes them again, Ctrl-C. test_logs.sh follows a real run.
begin
cat > "$work/follow.py" << 'END'
import json, os, run_log, sys, to_wandb
live, looks = sys.argv[1], iter([(1,), (1, 2, 3), (1, 2), (1, 2, 4), (1, 2, 4)])
def next_look(_):
    steps = next(looks, None) or sys.exit(130)
    parts = [{"first_step": s, "command": ["./train_gpt2"]} for s in ([1] if 4 not in steps else [1, 3])]
    open(f"{live}/run.json", "w").write(json.dumps({"options": {}, "parts": parts}))
    open(f"{live}/metrics.jsonl", "w").write("".join(f'{{"step": {s}, "tokens": {64 * s}, "loss": 4}}\n' for s in steps))
    open(f"{live}/samples.jsonl", "w").write('{"step": 3, "tokens": 192, "text": "so"}\n' * (3 in steps))
os.mkdir(live)
run_log.time.sleep = next_look
run_log.run_main(to_wandb.main)
END
PYTHONPATH=scripts returns 130 "$python" "$work/follow.py" "$work/dry" --follow --dry-run
check "prints nothing new: $(cat "$work/log")" [ "$(grep -c '^numbers: ' "$work/log")" = 4 ]
CALLS=$work/followed.json PYTHONPATH=scripts:$work/fake returns 130 "$python" "$work/follow.py" "$work/live" --follow
check "$(cat "$work/log")" says "$work/log" "went back to an earlier step; W&B keeps its steps up to 3"
check "calls: $(cat "$work/followed.json")" "$python" - "$work/followed.json" << 'END'
import json, sys
calls = [json.loads(line) for line in open(sys.argv[1])]
logs = [(call[1], "samples" if "samples" in call[2] else "step") for call in calls if call[0] == "log"]
assert logs == [(1, "step"), (2, "step"), (3, "step"), (3, "samples"), (4, "step")], logs
assert [len(call[1]["commands"]) for call in calls if call[0] == "config"] == [1, 1, 2] and calls[-1] == ["finish"], calls
END
end follow

begin
wandb() { PYTHONPATH=$work/fake "$python" scripts/to_wandb.py "$work/one" "$@"; }
bad() { check "$2" refuses "$1" "$2" wandb "${@:3}"; } # CODE TEXT ARGUMENTS...
REFUSE=1 bad 65 'error: wandb: no key (try `wandb login`, or WANDB_MODE=offline)'
echo 'raise ImportError("hidden")' > "$work/fake/wandb.py"
bad 65 "pip install wandb"
PYTHONPATH=$work/fake returns 0 "$python" scripts/to_wandb.py "$work/one" --dry-run
check "dry run: $(cat "$work/log")" grep -q "3 steps, 4 options, 1 samples" "$work/log"
echo '{"step": 2}' > "$work/one/samples.jsonl"
bad 65 "samples.jsonl line 1: not an object with step, text" --dry-run
end errors

exit $failed
