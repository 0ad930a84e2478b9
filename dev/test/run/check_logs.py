#!/usr/bin/env python3
"""metrics.csv, samples.jsonl, event files and run.json of runs made here: check_logs.py BUILD_DIRECTORY

The event files are read twice: by a reader below that shares nothing with the writer, and by the package tensorboard.
"""
import csv, glob, json, math, os, random, resource, shlex, shutil, signal, struct, subprocess, sys, tempfile, time

BUILD = os.path.abspath(sys.argv[1])
SEED = int(os.environ.get("SEED", time.time_ns() % 10**6))
WORK = tempfile.mkdtemp(prefix="gns_logs_")
STEPS = 60
TAGS = {"progress/tokens": "tokens", "progress/batch_rows": "batch", "loss/train": "loss", "optimizer/lr": "lr",
        "optimizer/grad_norm": "grad_norm", "speed/tok_per_s": "tok_per_s", "speed/mfu": "mfu", "gns/ln": "gns_ln",
        "gns/ln_standard_error": "gns_ln_se", "gns/ln_lower_bound": "gns_ln_lower", "gns/total": "gns_total",
        "gns/total_standard_error": "gns_total_se", "gns/total_lower_bound": "gns_total_lower",
        "gns/ratio_total_to_ln": "gns_ratio"}
failures = failed_tests = 0


def check(condition, message):
    global failures
    if not condition:
        failures += 1
        if failures <= 10:
            print("  " + message)


class Skip(Exception):
    pass


def test(function):
    global failures, failed_tests
    failures, start, why = 0, time.time(), ""
    try:
        function()
        word = "FAIL" if failures else "PASS"
    except Skip as skip:
        word, why = "SKIP", f" {skip}"
    except Exception as error:  # a reader that chokes is a failure too
        word, why = "FAIL", f" {type(error).__name__}: {error}"
    failed_tests += word == "FAIL"
    print(f"{word} logs/{function.__name__} {time.time() - start:.2f}s{why}", flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# Runs

PROMPT = '''say "it's"\t'''


LARGEST_FILE = 1 << 20  # bytes, more than a checkpoint's


def limit_files():
    """Stands for a full disk, in the program alone: no file grows beyond LARGEST_FILE."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))


def train(out, *more, steps=STEPS, code=0, wait=True, preexec_fn=None):
    command = [f"{BUILD}/train_gpt2", "--train", "code_train_*.bin", "--val", "code_val_*.bin", "--vocab-size", "256",
               "--layers", "2", "--heads", "2", "--channels", "32", "--seq-len", "32", "--val-every", "7",
               "--val-tokens", "512", "--micro-batch", "8", "--batch-tokens", "256", "--lr", "3e-3", "--gns", "exact",
               "--gns-exact-every", "3", "--sample-every", "8", "--sample-tokens", "20", "--prompt", PROMPT,
               "--threads", "1", "--seed", str(SEED), "--checkpoint-every", "10", "--keep", "0", "--steps", str(steps),
               "--out", out, *more]
    if not wait:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
                          preexec_fn=preexec_fn)
    check(done.returncode == code, f"{shlex.join(command[-4:])}: exit code {done.returncode}: {done.stdout[-200:]}")
    return command if code == 0 else [done.stdout]


def lines_of(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def steps_and_vals(out):
    rows = lines_of(f"{out}/metrics.jsonl")
    return [row for row in rows if "loss" in row], {row["step"]: row for row in rows if "val_loss" in row}


# ----------------------------------------------------------------------------------------------------------------------
# The reader

def crc_table():
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ 0x82F63B78 * (byte & 1)
        table.append(byte)
    return table


CRC_TABLE = crc_table()


def masked_crc(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(path):
    data, at = open(path, "rb").read(), 0
    while at < len(data):
        length, length_crc = struct.unpack_from("<QI", data, at)
        assert length_crc == masked_crc(data[at:at + 8]), f"{path} byte {at}: CRC of the length"
        body = data[at + 12:at + 12 + length]
        assert len(body) == length, f"{path} byte {at}: cut short"
        assert struct.unpack_from("<I", data, at + 12 + length)[0] == masked_crc(body), f"{path} byte {at}: CRC"
        at += length + 16
        yield body


def fields(data):
    """{number: [values]} of a message; varints as numbers, the rest as bytes."""
    out, at = {}, 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
    while at < len(data):
        key = varint()
        if key & 7 == 0:
            value = varint()
        else:
            size = {1: 8, 5: 4}.get(key & 7) or varint()
            value, at = data[at:at + size], at + size
            assert len(value) == size, "a field is cut short"
        out.setdefault(key >> 3, []).append(value)
    return out


def own_reader(out):
    """({tag: {step: float}}, {tag: {step: text}}, steps of session starts) of all files; twice the same is an error."""
    scalars, texts, starts = {}, {}, []
    for path in sorted(glob.glob(f"{out}/events.out.tfevents.*")):
        for number, body in enumerate(records(path)):
            event = fields(body)
            step, age = event.get(2, [0])[0], time.time() - struct.unpack("<d", event[1][0])[0]
            assert 0 <= age < 600, f"{path}: wall time is {age} s ago"
            assert (3 in event) == (number == 0) and event.get(3, [b"brain.Event:2"]) == [b"brain.Event:2"]
            if 7 in event:
                assert fields(event[7][0]) == {1: [1]}
                starts.append(step)
            for value in fields(event[5][0]).get(1, []) if 5 in event else []:
                value = fields(value)
                tag = value[1][0].decode()
                kind = scalars if 2 in value else texts
                content = struct.unpack("<f", value[2][0])[0] if 2 in value else fields(value[8][0])[8][0].decode()
                assert step not in kind.setdefault(tag, {}), f"{tag} of step {step} is there twice"
                kind[tag][step] = content
    return scalars, texts, starts


def package_reader(out):
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise Skip(f"the package tensorboard does not load: {error}") from None
    events = EventAccumulator(out, size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    scalars = {tag: [(x.step, x.value) for x in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    texts = {}
    for tag in events.Tags()["tensors"]:
        assert events.SummaryMetadata(tag).plugin_data.plugin_name == "text"
        texts[tag] = [(x.step, x.tensor_proto.string_val[0].decode()) for x in events.Tensors(tag)]
    for kind in (scalars, texts):
        for tag, points in kind.items():
            assert len({step for step, _ in points}) == len(points), f"{tag}: a step is there twice"
            kind[tag] = dict(points)
    return scalars, texts


# ----------------------------------------------------------------------------------------------------------------------
# What the files must say

def wanted_scalars(out):
    rows, vals = steps_and_vals(out)
    want = {tag: {row["step"]: row[name] for row in rows if row.get(name) is not None} for tag, name in TAGS.items()}
    want["loss/val"] = {step: row["val_loss"] for step, row in vals.items()}
    for row in rows:
        for name in row:
            if name.startswith("gns_type_") and row[name] is not None:
                want.setdefault(f"gns_by_type/{name[9:]}", {})[row["step"]] = row[name]
        for layer, scale in enumerate(row.get("gns_layer", [])):
            if scale is not None:
                want.setdefault(f"gns_by_layer/{layer:02d}", {})[row["step"]] = scale
    return {tag: points for tag, points in want.items() if points}


def as_float32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def check_scalars(out, scalars):
    want = wanted_scalars(out)
    check(set(scalars) == set(want), f"tags {set(scalars) ^ set(want)}")
    for tag in want:
        got = scalars.get(tag, {})
        check(got == {step: as_float32(x) for step, x in want[tag].items()},
              f"{tag}: {len(got)} points, want {len(want[tag])}: {sorted(got)[-3:]}")


def verbatim(text):
    return "".join(f"    {line}\n" for line in text.removesuffix("\n").split("\n"))


def check_texts(out, texts, first_steps):
    samples = {row["step"]: verbatim(row["text"]) for row in lines_of(f"{out}/samples.jsonl")}
    check(texts["sample"] == samples, f"samples of steps {sorted(texts['sample'])}, want {sorted(samples)}")
    check(sorted(texts["command"]) == first_steps, f"commands at {sorted(texts['command'])}, want {first_steps}")
    for part in json.load(open(f"{out}/run.json"))["parts"]:
        text = texts["command"].get(part["first_step"], "\n\n")
        check(shlex.split(text.splitlines()[1]) == part["command"], f"the command of step {part['first_step']}: {text}")


CSV_HEADER = ("step,tokens,examples,batch,loss,lr,grad_norm,tok_per_s,mfu,skipped,gns_ln,gns_ln_se,gns_ln_lower,"
              "gns_ln_g2,gns_ln_s,gns_ranks,gns_ranks_se,gns_ranks_lower,gns_ranks_g2,gns_ranks_s,gns_total,"
              "gns_total_se,gns_total_lower,gns_total_g2,gns_total_s,gns_ratio,val_loss,hellaswag,hellaswag_norm,"
              "gns_type_embedding,gns_type_attention,gns_type_mlp,gns_type_ln")


def check_csv(out):
    with open(f"{out}/metrics.csv", newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    rows, vals = steps_and_vals(out)
    check(",".join(table[0]) == CSV_HEADER, f"header {','.join(table[0])}")
    check([int(line["step"]) for line in table] == list(range(1, len(rows) + 1)), "not every step once and in order")
    for line, row in zip(table, rows):
        row = {**row, **vals.get(row["step"], {}), "skipped": row.get("skipped", False)}
        for name, text in line.items():
            want = row.get(name)
            check(text == "" if want is None else text != "" and float(text) == float(want),
                  f"step {row['step']}: {name} is '{text}', want {want}")


def check_samples(out, *ends):
    rows = lines_of(f"{out}/samples.jsonl")
    check([row["step"] for row in rows] == sorted({*range(8, ends[-1], 8), *ends}),
          f"samples of {[row['step'] for row in rows]}")
    tokens = {row["step"]: row["tokens"] for row in steps_and_vals(out)[0]}
    for row in rows:
        check(row["prompt"] == PROMPT and row["text"].startswith(PROMPT), f"sample of step {row['step']}: {row}")
        check(row["tokens"] == tokens[row["step"]], f"sample of step {row['step']}: {row['tokens']} tokens")


# ----------------------------------------------------------------------------------------------------------------------
# The tests

def one_run():
    command = train("whole", "--tensorboard")
    scalars, texts, starts = own_reader("whole")
    check_scalars("whole", scalars)
    check_texts("whole", texts, [1])
    check(starts == [1], f"sessions begin at {starts}")
    check_csv("whole")
    check_samples("whole", STEPS)
    exact = [row["step"] for row in steps_and_vals("whole")[0] if "gns_total" in row]
    check(exact == list(range(1, STEPS + 1, 3)), f"exact norms of steps {exact}")
    info = json.load(open("whole/run.json"))
    check(len(info["parts"]) == 1 and info["parts"][0]["command"] == command, f"run.json: {info['parts']}")
    check(info["parts"][0]["directory"] == os.path.realpath(WORK) and info["parts"][0]["ranks"] == 1, "run.json: where")
    check(info["parts"][0]["host"] == os.uname().nodename, f"run.json: host {info['parts'][0]['host']}")


def the_tensorboard_package():
    scalars, texts = package_reader("whole")
    check_scalars("whole", scalars)
    check_texts("whole", texts, [1])


def without_clock(path):
    with open(path, newline="", encoding="utf-8") as file:
        return [{name: x for name, x in row.items() if name not in ("tok_per_s", "mfu")}
                for row in csv.DictReader(file)]


def go_back_to(out, step):
    """As if the machine had failed before any later checkpoint was saved."""
    for path in glob.glob(f"{out}/step_*"):
        if int(path[-8:]) > step:
            shutil.rmtree(path)


def interrupted():
    """Three parts: one ends at step 60 and is taken back to 30; the next is killed; the last ends."""
    shutil.copytree("whole", "parts")
    go_back_to("parts", 30)
    child = train("parts", "--tensorboard", steps=100000, wait=False)
    deadline = time.time() + 60
    while not os.path.exists("parts/step_00000050") and time.time() < deadline and child.poll() is None:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    go_back_to("parts", 50)
    check(len(glob.glob("parts/events.*")) == 2, f"{glob.glob('parts/events.*')}")
    train("parts", "--tensorboard")
    scalars, texts, starts = own_reader("parts")
    check_scalars("parts", scalars)
    check_texts("parts", texts, [1, 31, 51])
    check(starts == [1, 31, 51], f"sessions begin at {starts}")
    check_csv("parts")
    check_samples("parts", STEPS)
    parts = json.load(open("parts/run.json"))["parts"]
    check([part["first_step"] for part in parts] == [1, 31, 51], f"run.json: {parts}")
    # The learning rate of the middle part is another, since its horizon was: steps 31 to 50 and what came of them.
    check(without_clock("parts/metrics.csv")[:30] == without_clock("whole/metrics.csv")[:30], "steps 1 to 30 differ")


def interrupted_by_the_package():
    scalars, texts = package_reader("parts")
    check_scalars("parts", scalars)
    check_texts("parts", texts, [1, 31, 51])


def torn_ends():
    """A machine that failed may leave half a line, or a record whose data did not reach the disk."""
    shutil.copytree("whole", "torn")
    length = struct.pack("<Q", 2)
    bad_record = length + struct.pack("<I", masked_crc(length)) + b"\x10\x05" + b"bad!"  # of step 5
    for path, end in (("samples.jsonl", b'{"step": 5, "tok'), ("metrics.csv", b"5,1"), ("metrics.jsonl", b'{"st'),
                      (os.path.basename(glob.glob("torn/events.*")[0]), bad_record)):
        with open(f"torn/{path}", "ab") as file:
            file.write(end)
    train("torn", "--tensorboard", steps=70)
    scalars, texts, starts = own_reader("torn")
    check_scalars("torn", scalars)
    check_texts("torn", texts, [1, 61])
    check_csv("torn")
    check_samples("torn", STEPS, 70)


def equal_to_the_uninterrupted():
    """Taken back twice to the same step: nothing is left of the part in between; and no --tensorboard at the end."""
    shutil.copytree("whole", "again")
    for more in (["--tensorboard"], []):
        go_back_to("again", 40)
        train("again", *more)
    check(without_clock("again/metrics.csv") == without_clock("whole/metrics.csv"), "metrics.csv differs")
    check(open("again/samples.jsonl").read() == open("whole/samples.jsonl").read(), "samples.jsonl differs")
    scalars, texts, starts = own_reader("again")
    check(starts == [1] and max(scalars["loss/train"]) == 40, f"events: parts {starts}")
    check([part["first_step"] for part in json.load(open("again/run.json"))["parts"]] == [1, 41], "run.json: parts")
    # Without metrics.csv, which an older run may lack, and with a run.json that is no longer whole.
    os.unlink("again/metrics.csv")
    with open("again/run.json", "w") as file:
        file.write('{"parts": [{"first_st')
    go_back_to("again", 50)
    train("again")
    check(without_clock("again/metrics.csv") == without_clock("whole/metrics.csv"), "metrics.csv made anew differs")


def cannot_write():
    for name in ("samples.jsonl", "metrics.csv"):
        out = "blocked-" + name[:3]
        os.makedirs(f"{out}/{name}/inside")
        output = train(out, steps=10, code=74)[-1]
        check(f"error: {out}/{name}" in output and output.count("\n") == 1, f"{name} is a directory: {output}")


def failed_sample_at_the_end():
    """The run's last sample cannot be written down: that is said, and the model is safe all the same."""
    os.makedirs("full")
    with open("full/samples.jsonl", "w") as file:
        file.truncate(LARGEST_FILE)  # a new run leaves it as it is
    output = train("full", steps=7, code=74, preexec_fn=limit_files)[-1]
    check("error: full/samples.jsonl" in output, f"what failed is not said: {output[-200:]}")
    check(glob.glob("full/step_*") == ["full/step_00000007"], f"checkpoints {glob.glob('full/step_*')}")
    done = subprocess.run([f"{BUILD}/train_gpt2", "--check", "full/step_00000007"], capture_output=True, check=False)
    check(done.returncode == 0, f"the checkpoint is not whole: {done.stderr}")


def not_ours():
    """A new run cuts nothing that lies in its directory, and moves another one's log aside."""
    os.makedirs("shared")
    foreign = {"events.out.tfevents.notes": "my notes", "samples.jsonl": '{"id": 7}\n', "metrics.jsonl": "a\nb\n"}
    for name, text in foreign.items():
        with open(f"shared/{name}", "w") as file:
            file.write(text)
    train("shared", "--tensorboard", steps=10)
    for name, text in foreign.items():
        check(open(f"shared.1/{name}").read() == text, f"{name} is not as it was")
    os.makedirs("lent")
    del foreign["metrics.jsonl"]
    for name, text in foreign.items():
        with open(f"lent/{name}", "w") as file:
            file.write(text)
    train("lent", "--tensorboard", steps=10)
    for name, text in foreign.items():
        check(open(f"lent/{name}").read().startswith(text), f"{name} is not as it was")


def main():
    os.chdir(WORK)
    with open("text.txt", "w", encoding="utf-8") as file:
        rng = random.Random(SEED)
        words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 6))) for _ in range(50)]
        file.write(" ".join(rng.choices(words, k=20000)))
    subprocess.run([f"{BUILD}/data/tokenize", "--tokenizer", "bytes", "--out", "code", "--val-fraction", "0.1",
                    "text.txt"], check=True, capture_output=True)
    assert masked_crc(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF  # RFC 3720
    for function in (one_run, the_tensorboard_package, interrupted, interrupted_by_the_package, torn_ends,
                     equal_to_the_uninterrupted, cannot_write, failed_sample_at_the_end, not_ours):
        test(function)


try:
    main()
finally:
    shutil.rmtree(WORK, ignore_errors=True)
if failed_tests:
    print(f"  SEED={SEED}")
sys.exit(1 if failed_tests else 0)
