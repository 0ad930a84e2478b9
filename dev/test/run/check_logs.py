#!/usr/bin/env python3
"""Makes runs and checks metrics.jsonl, samples.jsonl and run.json. Reads the events of scripts/to_tensorboard.py by the
package tensorboard. Usage: check_logs.py BUILD_DIRECTORY
"""
import glob, json, logging, os, random, resource, shlex, shutil, signal, struct, subprocess, sys, tempfile, time

BUILD = os.path.abspath(sys.argv[1])
TO_TENSORBOARD = os.path.abspath("scripts/to_tensorboard.py")
SEED = int(os.environ.get("SEED", time.time_ns() % 10**6))
WORK = tempfile.mkdtemp(prefix="gns_logs_")
STEPS = 60
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
    except Exception as error:  # an exception of a reader is a failure
        word, why = "FAIL", f" {type(error).__name__}: {error}"
    failed_tests += word == "FAIL"
    print(f"{word} logs/{function.__name__} {time.time() - start:.2f}s{why}", flush=True)


# ---- Runs -----------------------------------------------------------------------------------------------------------

PROMPT = '''say "it's"\t'''
LARGEST_FILE = 1 << 20  # bytes; a checkpoint's files are smaller


def limit_files():
    """Simulates a full disk for this process only: no file grows beyond LARGEST_FILE."""
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


# ---- TensorBoard ----------------------------------------------------------------------------------------------------

def to_tensorboard(*arguments, code=0, most=resource.RLIM_INFINITY, **environment):
    """Runs scripts/to_tensorboard.py. most: bytes that a file may have."""
    done = subprocess.run([sys.executable, TO_TENSORBOARD, *arguments], capture_output=True, text=True, check=False,
                          env={**os.environ, **environment},
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)))
    check(done.returncode == code, f"to_tensorboard.py {arguments}: exit code {done.returncode}: {done.stderr[-300:]}")
    return done.stdout + done.stderr


def open_events(out):
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise Skip(f"the package tensorboard does not load: {error}") from None
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = EventAccumulator(out, size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def read_events(out):
    """Returns ({tag: {step: number}}, {tag: {step: text}}); a repeated step is an error."""
    events = open_events(out)
    scalars = {tag: [(x.step, x.value) for x in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    texts = {tag: [(x.step, x.tensor_proto.string_val[0].decode()) for x in events.Tensors(tag)] for tag in events.Tags()["tensors"]}
    for kind in (scalars, texts):
        for tag, points in kind.items():
            assert len(dict(points)) == len(points), f"{tag}: a step is there twice"
            kind[tag] = dict(points)
    return scalars, texts


def as_float32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0] if x < 1e308 else float("inf")  # metrics.jsonl's infinity


def check_scalars(out, scalars):
    """Checks that each number of metrics.jsonl has its tag: NAME, gns/NAME or ramp/NAME; elements of lists: NAME/INDEX."""
    want, seconds, before = {}, 0, 0
    for row in lines_of(f"{out}/metrics.jsonl"):
        if "loss" in row:
            seconds, before = seconds + (row["tokens"] - before) / row["tok_per_s"], row["tokens"]
            row["seconds"] = seconds
        for name, value in row.items():
            tag = name.replace("_", "/", 1) if name.startswith(("gns_", "ramp_")) else name
            for i, x in enumerate(value if isinstance(value, list) else [value]):
                if x is not None and name != "step" and ("loss" in row or name != "tokens"):
                    want.setdefault(f"{tag}/{i:02d}" if isinstance(value, list) else tag, {})[row["step"]] = as_float32(x)
    check(set(scalars) == set(want) and {"val_loss", "gns/layer/01", "gns/ln_se"} < set(want), f"tags {set(scalars) ^ set(want)}")
    for tag, points in want.items():
        got = scalars.get(tag, {})
        check(got == points, f"{tag}: {len(got)} points, want {len(points)}: {sorted(got)[-3:]}")


def verbatim(text):
    return "".join(f"    {line}\n" for line in text.removesuffix("\n").split("\n"))


def check_texts(out, texts, first_steps):
    samples = {row["step"]: verbatim(row["text"]) for row in lines_of(f"{out}/samples.jsonl")}
    check(texts["sample"] == samples, f"samples of steps {sorted(texts['sample'])}, want {sorted(samples)}")
    check(sorted(texts["command"]) == first_steps, f"commands at {sorted(texts['command'])}, want {first_steps}")
    for part in json.load(open(f"{out}/run.json"))["parts"]:
        text = texts["command"].get(part["first_step"], "\n\n")
        check(shlex.split(text.splitlines()[1]) == part["command"], f"the command of step {part['first_step']}: {text}")


def check_events(out, first_steps):
    scalars, texts = read_events(out)
    check_scalars(out, scalars)
    check_texts(out, texts, first_steps)


# ---- What the files must say ----------------------------------------------------------------------------------------

def check_steps(out, last):
    rows, vals = steps_and_vals(out)
    check([row["step"] for row in rows] == list(range(1, last + 1)), "not every step once and in order")
    check(sorted(vals) == sorted({*range(7, last, 7), last}), f"validations of steps {sorted(vals)}")


def check_samples(out, *ends):
    rows = lines_of(f"{out}/samples.jsonl")
    check([row["step"] for row in rows] == sorted({*range(8, ends[-1], 8), *ends}),
          f"samples of {[row['step'] for row in rows]}")
    tokens = {row["step"]: row["tokens"] for row in steps_and_vals(out)[0]}
    for row in rows:
        check(row["prompt"] == PROMPT and row["text"].startswith(PROMPT), f"sample of step {row['step']}: {row}")
        check(row["tokens"] == tokens[row["step"]], f"sample of step {row['step']}: {row['tokens']} tokens")


# ---- The tests ------------------------------------------------------------------------------------------------------

def one_run():
    command = train("whole")
    check_steps("whole", STEPS)
    check_samples("whole", STEPS)
    exact = [row["step"] for row in steps_and_vals("whole")[0] if "gns_total" in row]
    check(exact == list(range(1, STEPS + 1, 3)), f"exact norms of steps {exact}")
    part, *others = json.load(open("whole/run.json"))["parts"]
    want = {"command": command, "directory": os.path.realpath(WORK), "ranks": 1, "host": os.uname().nodename}
    check(not others and want.items() <= part.items(), f"run.json: {part}")


def tensorboard():
    """A second call replaces the first call's file and no other file."""
    shutil.copytree("whole", "shown")
    open("shown/events.out.tfevents.0.notes", "w").close()
    open_events("shown")  # may raise Skip
    viewer = None
    for _ in range(2):
        check("60 steps" in to_tensorboard("shown"), "not 60 steps")
        sizes = sorted(map(os.path.getsize, glob.glob("shown/events.*.gns")))
        check(len(sizes) <= 2 and sizes[-1] > 0 and sizes[:-1] == [0] * (len(sizes) - 1), f"event files of {sizes} bytes")
        viewer = viewer or open_events("shown")  # a live viewer; viewer.Reload() reads again below
    check(os.path.exists("shown/events.out.tfevents.0.notes"), "another program's file was removed")
    check_events("shown", [1])
    with open("shown/metrics.jsonl", "a") as file:
        file.write('{"step": 61, "tokens": 1e9, "loss": 1, "tok_per_s": 1, "gns_ln_lower": 1e308, "hellaswag": 0.5')
    check("60 steps" in to_tensorboard("shown"), "a line without its end counts")
    with open("shown/metrics.jsonl", "a") as file:
        file.write("}\n")
    os.symlink("shown", "sh\u00f6wn")
    to_tensorboard("sh\u00f6wn", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", LC_ALL="C")  # file names are not UTF-8 for Python
    viewer.Reload()
    check(viewer.Scalars("loss")[-1].step == 61, f"the viewer stays at step {viewer.Scalars('loss')[-1].step}")
    scalars, _ = read_events("shown")
    check(scalars["gns/ln_lower"][61] == float("inf"), "an infinite bound is not infinite")
    check(scalars["hellaswag"] == {61: 0.5}, f"{scalars.get('hellaswag')}")
    said = to_tensorboard("shown", code=74, most=512)
    check(said == "error: shown: cannot write: File too large; free some space\n", said)
    os.makedirs("empty")
    said = to_tensorboard("empty", code=65)
    check("empty/run.json: No such file" in said and said.count("\n") == 1, said)
    check(os.listdir("empty") == [], "something is written where no run is")
    os.makedirs("hidden/tensorboard")
    with open("hidden/tensorboard/__init__.py", "w") as file:
        file.write('raise ImportError("hidden")')
    check("pip install tensorboard" in to_tensorboard("whole", code=65, PYTHONPATH="hidden", GNS_IN_VENV="1"), "no remedy")


def without_clock(out):
    return [{name: x for name, x in row.items() if name not in ("tok_per_s", "mfu")}
            for row in lines_of(f"{out}/metrics.jsonl")]


def go_back_to(out, step):
    """Removes later checkpoints, as if the machine had failed before saving them."""
    for path in glob.glob(f"{out}/step_*"):
        if int(path[-8:]) > step:
            shutil.rmtree(path)


def followed():
    """A follower starts before the run, a viewer stays open across its three parts: the first ends at step 60 and is cut
    back to step 30, the second is killed, the third ends."""
    open_events("whole")  # may raise Skip
    viewer = None

    def look():
        nonlocal viewer
        deadline, want, shown = time.time() + 60, steps_and_vals("followed")[0][-1], []
        while shown[-1:] != [(want["step"], as_float32(want["grad_norm"]))] and time.time() < deadline:
            time.sleep(0.05)
            events = open_events("followed")
            shown = events.Tags()["scalars"] and [(x.step, x.value) for x in events.Scalars("grad_norm")]
        check(time.time() < deadline, f"step {want['step']} is never shown: {open('follow.log').read()}")
        viewer = viewer or open_events("followed")
        viewer.Reload()

    with open("follow.log", "w") as log:
        follower = subprocess.Popen([sys.executable, TO_TENSORBOARD, "followed", "--follow", "--every", "0.05"],
                                    stdout=log, stderr=log)
    try:
        time.sleep(0.5)
        shutil.copytree("whole", "copy")
        os.rename("copy", "followed")  # at once: a follower reads no half copy
        look()
        go_back_to("followed", 30)
        child = train("followed", steps=100000, wait=False)
        deadline = time.time() + 60
        while not os.path.exists("followed/step_00000060") and time.time() < deadline and child.poll() is None:
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        look()
        go_back_to("followed", 50)
        train("followed")
        look()
        follower.send_signal(signal.SIGINT)
        check(follower.wait(60) == 130, f"exit code {follower.returncode}")
    finally:
        follower.kill()
    check_steps("followed", STEPS)
    check_samples("followed", STEPS)
    check_events("followed", [1, 31, 51])
    live = {x.step: x.value for x in viewer.Scalars("loss")}
    check(live == read_events("followed")[0]["loss"], f"the viewer shows {sorted(live.items())[-3:]}")
    said = open("follow.log").read()
    check(said.count("went back to an earlier step") >= 2, f"resumes: {said}")


def torn_ends():
    """A machine that failed may leave half a line. A resume moves a malformed line and all lines after it; so does a
    command that finds the run complete at its last checkpoint."""
    shutil.copytree("whole", "torn")
    for path, end in (("samples.jsonl", b'{"step": 5, "tok'), ("metrics.jsonl", b'{"st\n{"step": 2}\n')):
        with open(f"torn/{path}", "ab") as file:
            file.write(end)
    train("torn", steps=70)
    check(open("torn/metrics.rolled_back.jsonl").read() == '{"st\n{"step": 2}\n{"step": 5, "tok\n', "cut lines are lost")
    rows, vals = steps_and_vals("torn")
    check([row["step"] for row in rows] == list(range(1, 71)), "not every step once and in order")
    check(sorted(vals) == [*range(7, 60, 7), 60, 63, 70], f"validations of steps {sorted(vals)}")
    check_samples("torn", STEPS, 70)
    go_back_to("torn", 50)
    train("torn", steps=50)
    check([row["step"] for row in steps_and_vals("torn")[0]] == [*range(1, 51)], "the complete run has later steps")
    check('{"step": 51,' in open("torn/metrics.rolled_back.jsonl").read(), "these steps are lost")


def equal_to_the_uninterrupted():
    """If a run goes back to the same step twice, no line of the part in between is left."""
    shutil.copytree("whole", "again")
    for _ in range(2):
        go_back_to("again", 40)
        train("again")
    check(without_clock("again") == without_clock("whole"), "metrics.jsonl differs")
    check(open("again/samples.jsonl").read() == open("whole/samples.jsonl").read(), "samples.jsonl differs")
    check([part["first_step"] for part in json.load(open("again/run.json"))["parts"]] == [1, 41], "run.json: parts")


def cannot_write():
    """A run whose last sample finds the disk full still saves the model."""
    train("full", steps=6)
    with open("full/samples.jsonl", "w") as file:
        file.write(f'{{"step": 6{" " * (LARGEST_FILE - 12)}}}\n')
    output = train("full", steps=7, code=74, preexec_fn=limit_files)[-1]
    check("error: full/samples.jsonl" in output, f"what failed is not said: {output[-200:]}")
    check(sorted(glob.glob("full/step_*"))[1:] == ["full/step_00000007"], f"checkpoints {glob.glob('full/step_*')}")
    done = subprocess.run([f"{BUILD}/train_gpt2", "--check", "full/step_00000007"], capture_output=True, check=False)
    check(done.returncode == 0, f"the checkpoint is not whole: {done.stderr}")


def not_ours():
    """A new run moves another run's log aside, and ends at another file that it would change."""
    for name in ("samples.jsonl", "outliers.jsonl", "metrics.rolled_back.jsonl", "metrics.jsonl"):
        os.makedirs(out := f"with_{name}")
        with open(f"{out}/{name}", "w") as file:
            file.write("theirs\n")
        moves = name == "metrics.jsonl"
        said = train(out, "--outliers", "1", steps=10, code=0 if moves else 74)[-1]
        check(open(f"{out}{'.1' * moves}/{name}").read() == "theirs\n", f"{name} is not as it was")
        check(moves or f"error: {out}/{name}: another program's" in said, f"{name}: {said}")


def main():
    os.chdir(WORK)
    with open("text.txt", "w", encoding="utf-8") as file:
        rng = random.Random(SEED)
        words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 6))) for _ in range(50)]
        file.write(" ".join(rng.choices(words, k=20000)))
    subprocess.run([f"{BUILD}/data/tokenize", "--tokenizer", "bytes", "--out", "code", "--val-fraction", "0.1",
                    "text.txt"], check=True, capture_output=True)
    for function in (one_run, tensorboard, followed, torn_ends, equal_to_the_uninterrupted, cannot_write, not_ours):
        test(function)


try:
    main()
finally:
    shutil.rmtree(WORK, ignore_errors=True)
if failed_tests:
    print(f"  SEED={SEED}")
sys.exit(1 if failed_tests else 0)
