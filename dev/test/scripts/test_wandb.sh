#!/usr/bin/env bash
# scripts/to_wandb.py on a made-up run: what it sends, to a stand-in that logs its calls, also of a run that it follows.
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
CALLS=$work/calls.json PYTHONPATH=$work/fake returns 0 "$python" scripts/to_wandb.py "$work/one" --project p --entity e --id 7
check "$(cat "$work/log")" grep -q "^uploaded to https://example.invalid/run$" "$work/log"
check "calls" "$python" - "$work/calls.json" << 'END'
import json, sys
calls = [json.loads(line) for line in open(sys.argv[1])]
name, arguments = calls[0]
config = arguments.pop("config")
assert (name, config["lr"], config["run"]) == ("init", 0.001, {"program": "x", "model": {"layers": 2}}), config
assert config["commands"] == ["cd '/some where' && ./train_gpt2 --prompt 'a b'"], config
assert {n: arguments[n] for n in ("project", "entity", "id", "name", "resume", "mode")} == {
    "project": "p", "entity": "e", "id": "7", "name": "one", "resume": "allow", "mode": "online"}, arguments
logs = [call[1:] for call in calls if call[0] == "log"]
assert logs == [
    [1, {"tokens": 64, "examples": 1, "batch": 1, "loss": 4.5, "lr": 0.001, "tok_per_s": 32, "seconds": 2.0}],
    [2, {"tokens": 128, "examples": 2, "batch": 1, "loss": 4.25, "lr": 0.001, "tok_per_s": 64, "skipped": True,
         "gns_layer/00": 3, "val_loss": 4.0, "hellaswag": 0.25, "hellaswag_norm": 0.5, "seconds": 3.0}],
    [3, {"tokens": 192, "examples": 3, "batch": 1, "loss": 4.125, "lr": 0.001, "tok_per_s": 64, "seconds": 4.0}],
    [3, {"samples": {"columns": ["step", "tokens", "prompt", "text"], "data": [[2, 128, "", "so\n"]]}}]], logs
assert calls[-1] == ["finish"], calls[-1]
END
rm "$work/calls.json" # the run is in W&B until step 3: nothing is sent that it would ignore
STEP=3 CALLS=$work/calls.json PYTHONPATH=$work/fake returns 0 "$python" scripts/to_wandb.py "$work/one" --id 7
check "again: $(cat "$work/calls.json")" [ "$(grep -c '"log", 3, {"tokens": 192' "$work/calls.json")$(grep -cE '"log", [12],' "$work/calls.json")" = 10 ]
end calls

# A run that starts after the script, makes more steps, returns to step 2, and resumes.
begin
live=$work/live
line() { printf '{"step": %d, "tokens": %d, "loss": %s, "tok_per_s": 64}\n' "$1" $(($1 * 64)) "$2"; } # STEP LOSS
parts() { # FIRST_STEP...
    local part text=
    for part; do text+="${text:+, }{\"first_step\": $part, \"command\": [\"./train_gpt2\"]}"; done
    printf '{"options": {"lr": 0.001}, "parts": [%s]}' "$text" > "$live/run.tmp" && mv "$live/run.tmp" "$live/run.json"
}
waits_for() { # TEXT in the calls or the output: up to a minute
    for _ in {1..600}; do
        grep -qsF -- "$1" "$work/followed.json" "$work/follow.log" && return
        sleep 0.1
    done
    return 1
}
mkdir "$live"
CALLS=$work/followed.json PYTHONPATH=$work/fake PYTHONUNBUFFERED=1 "$python" -c 'import signal, sys, runpy
signal.signal(signal.SIGINT, signal.default_int_handler) # a job in the background ignores it
sys.argv = sys.argv[1:]
sys.path.insert(0, "scripts")
runpy.run_path(sys.argv[0], run_name="__main__")' scripts/to_wandb.py "$live" --follow --every 0.05 > "$work/follow.log" 2>&1 &
follower=$!
line 1 4.5 > "$live/metrics.jsonl"
parts 1
check "step 1: $(cat "$work/follow.log")" waits_for '"log", 1, {"tokens": 64, "loss": 4.5'
printf '{"step": 2, "tokens": 128, "lo' >> "$live/metrics.jsonl" # half a line
printf 'ss": 4.25, "tok_per_s": 64}\n' >> "$live/metrics.jsonl"
check "step 2" waits_for '"log", 2, {"tokens": 128, "loss": 4.25'
echo '{"step": 2, "tokens": 128, "val_loss": 4.0}' >> "$live/metrics.jsonl"
check "its validation, later" waits_for '"log", 2, {"tokens": 128, "val_loss": 4.0'
line 3 4.0 >> "$live/metrics.jsonl"
echo '{"step": 3, "tokens": 192, "prompt": "", "text": "so"}' > "$live/samples.jsonl"
check "a sample" waits_for '"data": [[3, 192, "", "so"]]'
{ head -n 3 "$live/metrics.jsonl" && line 3 4.0 && line 4 3.5; } > "$live/metrics.tmp" # as a resume leaves it, and a step more
: > "$live/samples.jsonl"
mv "$live/metrics.tmp" "$live/metrics.jsonl"
check "step 4" waits_for '"log", 4, {"tokens": 256, "loss": 3.5'
head -n 3 "$live/metrics.jsonl" > "$live/metrics.tmp" && mv "$live/metrics.tmp" "$live/metrics.jsonl"
check "back: $(cat "$work/follow.log")" waits_for "went back to an earlier step; W&B keeps its steps up to 4"
parts 1 3
check "the new part" waits_for '"config", {"lr": 0.001, "run": {}, "commands": ["cd . && ./train_gpt2", "cd . && ./train_gpt2"]}'
{ line 3 4.0 && line 4 3.5 && line 5 3.25; } >> "$live/metrics.jsonl"
check "step 5" waits_for '"log", 5, {"tokens": 320, "loss": 3.25'
kill -INT $follower
wait $follower
check "exit code $?, want 130" [ $? = 130 ]
check "not finished: $(tail -n 1 "$work/followed.json")" [ "$(tail -n 1 "$work/followed.json")" = '["finish"]' ]
check "steps go back" [ "$(grep -oE '"log", [0-9]+' "$work/followed.json" | sort -c -t ' ' -k 2n 2>&1)" = "" ]
end follow

begin
fails() { # CODE TEXT ARGUMENTS...: in one line that has the text
    PYTHONPATH=$work/fake returns "$1" "$python" scripts/to_wandb.py "$work/one" "${@:3}"
    check "says: $(cat "$work/log")" says "$work/log" "$2"
    check "not one line: $(cat "$work/log")" one_line "$work/log"
}
REFUSE=1 fails 65 'error: wandb: no key (try `wandb login`, or --offline)'
echo 'raise ImportError("hidden")' > "$work/fake/wandb.py"
fails 65 "pip install wandb"
fails 64 "not allowed with" --offline --dry-run
fails 64 "not allowed with" --follow --dry-run
PYTHONPATH=$work/fake returns 0 "$python" scripts/to_wandb.py "$work/one" --dry-run
check "dry run: $(cat "$work/log")" grep -q "3 steps to 3, 4 options, 1 samples" "$work/log"
echo '{"step": 2}' > "$work/one/samples.jsonl"
fails 65 "samples.jsonl line 1: \"text\" is not text" --dry-run
rm "$work/one/samples.jsonl"
end errors

exit $failed
