#!/usr/bin/env bash
# scripts/to_wandb.py on a made-up run: what it sends, to a stand-in that logs its calls; and offline with the package, if
# $PYTHON, build/venv or python3 has it (it is large, so scripts/deps.sh does not install it).
set -u
. "$(dirname "$0")/../checks.sh" wandb
python=$(find_python) || skip_suite "no python3"

mkdir "$work/run" "$work/fake"
cat > "$work/run/run.json" << 'END'
{"program": "x", "model": {"layers": 2}, "options": {"lr": 0.001, "out": "run"},
 "parts": [{"first_step": 1, "directory": "/some where", "command": ["./train_gpt2", "--prompt", "a b"]}]}
END
cat > "$work/run/metrics.jsonl" << 'END'
{"step": 1, "tokens": 64, "examples": 1, "batch": 1, "loss": 4.5, "lr": 0.001, "tok_per_s": 32, "mfu": null, "gns_ln": null, "gns_ln_lower": 1e308}
{"step": 2, "tokens": 128, "examples": 2, "batch": 1, "loss": 4.25, "lr": 0.001, "tok_per_s": 64, "skipped": true, "gns_layer": [3, null]}
{"step": 2, "tokens": 128, "val_loss": 4.0}
{"step": 2, "tokens": 128, "hellaswag": 0.25, "hellaswag_norm": 0.5}
{"step": 3, "tokens": 192, "examples": 3, "batch": 1, "loss": 4.125, "lr": 0.001, "tok_per_s": 64}
END
echo '{"step": 2, "tokens": 128, "prompt": "", "text": "so\n"}' > "$work/run/samples.jsonl"
cat > "$work/fake/wandb.py" << 'END'
import json, os
calls = []
def note(*call): calls.append(call)
class Target:
    url = "https://example.invalid/run"
    def define_metric(self, name, **more): note("define", name, more)
    def log(self, numbers, step): note("log", step, numbers)
    def finish(self):
        with open(os.environ["CALLS"], "w") as file: json.dump(calls, file)
def Table(columns, data): return {"columns": columns, "data": data}
def init(**arguments):
    if os.environ.get("REFUSE"): raise RuntimeError("no\n  key")
    note("init", arguments)
    return Target()
END

begin
CALLS=$work/calls.json PYTHONPATH=$work/fake returns 0 "$python" scripts/to_wandb.py "$work/run" --project p --entity e --id 7
check "$(cat "$work/log")" grep -q "^uploaded to https://example.invalid/run$" "$work/log"
check "calls" "$python" - "$work/calls.json" << 'END'
import json, sys
calls = json.load(open(sys.argv[1]))
name, arguments = calls[0]
config = arguments.pop("config")
assert (name, config["lr"], config["run"]) == ("init", 0.001, {"program": "x", "model": {"layers": 2}}), config
assert config["commands"] == ["cd '/some where' && ./train_gpt2 --prompt 'a b'"], config
assert {n: arguments[n] for n in ("project", "entity", "id", "name", "resume", "mode")} == {
    "project": "p", "entity": "e", "id": "7", "name": "run", "resume": "allow", "mode": "online"}, arguments
logs = [call[1:] for call in calls if call[0] == "log"]
assert logs == [
    [1, {"tokens": 64, "examples": 1, "batch": 1, "loss": 4.5, "lr": 0.001, "tok_per_s": 32, "seconds": 2.0}],
    [2, {"tokens": 128, "examples": 2, "batch": 1, "loss": 4.25, "lr": 0.001, "tok_per_s": 64, "skipped": True,
         "gns_layer/00": 3, "val_loss": 4.0, "hellaswag": 0.25, "hellaswag_norm": 0.5, "seconds": 3.0}],
    [3, {"tokens": 192, "examples": 3, "batch": 1, "loss": 4.125, "lr": 0.001, "tok_per_s": 64, "seconds": 4.0}],
    [3, {"samples": {"columns": ["step", "tokens", "prompt", "text"], "data": [[2, 128, "", "so\n"]]}}]], logs
END
end calls

begin
fails() { # CODE TEXT ARGUMENTS...: in one line that has the text
    PYTHONPATH=$work/fake returns "$1" "$python" scripts/to_wandb.py "$work/run" "${@:3}"
    check "says: $(cat "$work/log")" says "$work/log" "$2"
    check "not one line: $(cat "$work/log")" one_line "$work/log"
}
REFUSE=1 fails 65 'error: wandb: no key (try `wandb login`, or --offline)'
echo 'raise ImportError("hidden")' > "$work/fake/wandb.py"
fails 65 "pip install wandb"
fails 64 "not allowed with" --offline --dry-run
PYTHONPATH=$work/fake returns 0 "$python" scripts/to_wandb.py "$work/run" --dry-run
check "dry run: $(cat "$work/log")" grep -q "3 steps to 3, 4 options, 1 samples" "$work/log"
echo '{"step": 2}' > "$work/run/samples.jsonl"
fails 65 "samples.jsonl line 1: no sample with its step and text" --dry-run
rm "$work/run/samples.jsonl"
end errors

python=$(find_python wandb) || { echo "SKIP wandb/package: no wandb here; pip install wandb, and PYTHON=its python" && exit $failed; }
begin
WANDB_SILENT=true HOME=$work returns 0 "$python" scripts/to_wandb.py "$work/run" --offline
check "history: see above" "$python" - "$work"/run/wandb/offline-run-*/run-*.wandb << 'END'
import json, struct, sys
from wandb.proto import wandb_internal_pb2
def records(data, at=7, block=32768):  # LevelDB's log format after a header: CRC, length, type; whole or in pieces
    whole = b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole, at = whole + data[at + 7:at + 7 + length], at + 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""
rows = []
for data in records(open(sys.argv[1], "rb").read()):
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    if record.WhichOneof("record_type") == "history":
        rows.append({(x.key or "/".join(x.nested_key)): json.loads(x.value_json) for x in record.history.item})
want = [(1, 4.5, None), (2, 4.25, 4.0), (3, 4.125, None)]
got = [(row["_step"], row["loss"], row.get("val_loss")) for row in rows]
assert got == want, got
END
end package
exit $failed
