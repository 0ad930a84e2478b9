#!/usr/bin/env python3
"""Runs two builds of the CPU trainer and compares their results bit for bit.

    dev/test/same_runs.py PROGRAM_BEFORE PROGRAM_AFTER [CASE...]

A case is one small run, or two if it resumes. Cases cover shapes, ranks, ZeRO stages, ramps, the noise scale,
recomputation, schedules, resume, models, samples and evaluation. Both builds must succeed. Compares the files of the
run directory, and the standard output of commands that do not train. Ignores manifests, options that only one build
has, and fields that differ from run to run (IGNORED below).

Prints one line per case, with the first difference, and "N passed, N failed". Exits with 1 if a case fails. Both builds
need the same compiler flags. Takes half a minute.
"""
import concurrent.futures
import glob
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time

IGNORED = {"tok_per_s", "slowest_rank", "wait_share", "mfu", "build", "seconds", "metrics_bytes", "program", "engine",
           "id", "started", "host", "process", "program_xxh3_128", "directory", "command"}  # fields of JSON files

# A case adds options NAME=VALUE to SMALL; !NAME removes an option; a name in capitals stands for a line of BASES.
# Further words: ranks=N; back_to=N (resume at the checkpoint of step N, with options again:NAME=VALUE); crossed=1
# (PROGRAM_BEFORE writes the checkpoint).
SMALL = """train=../../data/train_*.bin val=../../data/val.bin vocab_size=256 layers=2 heads=3 channels=36 seq_len=17
    micro_batch=3 batch_tokens=187 steps=12 lr=1e-3 threads=1 val_every=5 val_tokens=700 out=run"""
BASES = {
    "RAMP": "!steps train_tokens=30000 batch_tokens=204 batch_min=4 batch_max=24 val_every=20",
    "GNS_RAMP": "RAMP ramp=gns gns_half_life=700 ramp_kappa=4 ramp_waste=1 ramp_step_rows=1e9 batch_min=2 lr=3e-3",
    "REPLAY": "RAMP ramp=replay:../../data/batches.jsonl !batch_tokens !batch_min !batch_max",
    "RESUMED": "checkpoint_every=4 keep=0 sample_every=5 sample_tokens=9",
    "SKIPS": "batch_tokens=68 steps=170 skip_grad_z=1 val_every=0 !val_tokens",
    "MODEL": "!layers !heads !channels !vocab_size",
    "IDLE": "MODEL !train !micro_batch !batch_tokens !steps !lr !val_every !val_tokens !out",
}
CASES = """
fixed
one_head             heads=1 channels=20 layers=1 seq_len=16 micro_batch=4 batch_tokens=192 gns=exact
odd_head_size        heads=5 channels=35 layers=3 seq_len=31 micro_batch=2 batch_tokens=217 gns=exact
head_size_64         heads=2 channels=128 seq_len=65 batch_tokens=390 micro_batch=4 steps=6
long_row             seq_len=140 batch_tokens=560 heads=2 channels=24 micro_batch=2 steps=6 gns=exact
vocabulary_1003      train=../../data/wide.bin val=../../data/wide.bin vocab_size=1003 gns=exact
short_rows           seq_len=2 batch_tokens=46 micro_batch=10 gns=exact
micro_batch_1        micro_batch=1 batch_tokens=85 gns=exact
whole_batch          micro_batch=11
three_threads        threads=3 gns=exact layers=3
many_epochs          train=../../data/short.bin steps=30 seed=7
gns_off              gns=off
gns_exact_every      gns=ln gns_exact_every=3 steps=20 gns_half_life=400
batch_of_one         batch_tokens=17 gns=exact
constant             lr_schedule=constant warmup_tokens=500 weight_decay=0
linear_schedule      lr_schedule=linear final_lr_frac=0.2 warmup_tokens=700
inverse_sqrt         lr_schedule=inverse-sqrt warmup_tokens=300 beta1=0.8 beta2=0.99 eps=1e-6
wsd                  lr_schedule=wsd final_lr_frac=0 warmup_tokens=400 steps=20
grad_clip            grad_clip=0.05 weight_decay=0.3
muon                 optimizer=muon grad_clip=0 dropout=0.1
lamb                 optimizer=lamb lr=1e-2 label_smoothing=0.1
skipped_steps        SKIPS skip_loss_z=2
recompute_gelu       recompute=gelu gns=exact layers=3
recompute_block      recompute=block gns=exact layers=3
ramp_linear          RAMP ramp=linear
ramp_seesaw          RAMP ramp=seesaw lr_schedule=cosine
ramp_gns             GNS_RAMP
ramp_gns_exact       GNS_RAMP gns=exact gns_exact_every=3 ramp_lr_power=1
ramp_gns_ratio       GNS_RAMP gns_ratio=2.5 ramp_kappa=1 ramp_lr_power=0
ramp_replay          REPLAY
two_ranks            ranks=2 gns=exact
three_ranks          ranks=3 gns=exact recompute=block
two_ranks_zero_0     ranks=2 zero=0 layers=4
three_ranks_zero_2   ranks=3 zero=2 layers=4 micro_batch=20
whole_gradients      ranks=3 zero=2 gns=exact steps=8
reduce_micro_step    ranks=2 zero=2 reduce=micro-step
comm_bf16            ranks=2 comm_dtype=bf16 gns=exact
ramp_gns_ranks       GNS_RAMP ranks=3 batch_min=4
ramp_linear_ranks    RAMP ramp=linear ranks=2 zero=2 reduce=micro-step
resume               RESUMED back_to=8 gns=exact
resume_changed       RESUMED back_to=4 again:micro_batch=5 again:recompute=block
resume_more_ranks    RESUMED back_to=8 again:ranks=3 gns=exact
resume_fewer_ranks   RESUMED back_to=4 ranks=3 again:ranks=2 zero=2
resume_ramp_gns      GNS_RAMP back_to=60 checkpoint_every=30 keep=0
resume_ramp_replay   REPLAY back_to=60 checkpoint_every=30 keep=0
resume_skips         SKIPS back_to=150 checkpoint_every=50 keep=0
resume_from_before   RESUMED back_to=8 gns=exact crossed=1
keep_best            keep_best val_every=3 train=../../data/short.bin steps=24 lr=3e-2 checkpoint_every=10 keep=2
from_directory       MODEL model=../../data/hf gns=exact
from_run             MODEL model=../../data/run ranks=2
hellaswag            hellaswag=../../data/questions.jsonl hellaswag_every=4
samples_two_ranks    ranks=2 sample_every=4 sample_tokens=64 samples=2 prompt=a seed=3
eval_only            IDLE eval_only model=../../data/hf hellaswag=../../data/questions.jsonl
eval_only_two_ranks  IDLE ranks=2 eval_only model=../../data/run val_tokens=900 micro_batch=5
sample_only          IDLE !val sample_only model=../../data/run prompt=the samples=3 temperature=0.8 top_k=30 sample_tokens=40
sample_greedy        IDLE !val sample_only model=../../data/run temperature=0 sample_tokens=20
plan                 IDLE !val gns=ln seq_len=1024 dry_run model=gpt2-350M device=H200 zero=2 steps=100 recompute=block
check                IDLE !val !threads !seq_len check=../../data/run
"""


def options_of(words, options):
    for word in words.split():
        name, _, value = word.partition("=")
        if name in BASES:
            options_of(BASES[name], options)
        elif name.startswith("!"):
            del options[name[1:]]
        else:
            options[name] = value
    return options


# ---- Data -----------------------------------------------------------------------------------------------------------

def tokens(count, vocabulary, seed):
    """Draws tokens; three of four follow from the previous token, so that a model can learn them."""
    state, token = seed, 0
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        token = (state >> 8) % vocabulary if (state >> 16) % 4 == 0 else (token * 3 + (state >> 19) % 2) % vocabulary
        yield token


def make_data(program):
    """Writes shards and questions; PROGRAM_BEFORE trains the models."""
    for name, count, vocabulary, seed in (("train_0", 9001, 256, 1), ("train_1", 6005, 256, 2), ("val", 3000, 256, 3),
                                          ("short", 1500, 256, 4), ("wide", 8000, 1003, 5)):
        with open(f"data/{name}.bin", "wb") as f:
            f.write(struct.pack("<256i", 20240520, 1, count, *[0] * 253))
            f.write(struct.pack(f"<{count}H", *tokens(count, vocabulary, seed)))
    with open("data/questions.jsonl", "w") as f:
        for i in range(12):
            endings = [bytes(97 + t % 26 for t in tokens(3 + i % 4, 256, 5 * i + j)).decode() for j in range(4)]
            f.write(json.dumps({"ctx": "abc " * (1 + i % 5), "endings": endings, "label": i % 4}) + "\n")
    with open("data/batches.jsonl", "w") as f:
        f.writelines(json.dumps({"step": step, "batch": 4 + step // 11}) + "\n" for step in range(1, 400))
    launch(program, options_of("steps=20", options_of(SMALL.replace("../../data/", ""), {})), "data", "log")
    shutil.copytree("data/run/step_00000020", "data/hf", ignore=lambda *_: ("training", "MANIFEST.json"))


# ---- Running and comparing ------------------------------------------------------------------------------------------

def launch(program, options, directory, log):
    command, ranks = [program], options.get("ranks", "1")
    for name, value in options.items():
        if name not in ("ranks", "back_to", "crossed") and not name.startswith("again:"):
            command += ["--" + name.replace("_", "-")] + [value] * (value != "")
    if ranks != "1":
        command[:0] = ["mpirun", "-np", ranks, "--oversubscribe", "--allow-run-as-root", "--bind-to", "none"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000", "OMPI_MCA_mpi_yield_when_idle": "1",
                   "OMPI_MCA_btl": "self,vader", "TMPDIR": os.path.abspath(directory)}  # two mpiruns in one TMPDIR collide
    with open(f"{directory}/{log}", "wb") as out, open(f"{directory}/{log}.err", "wb") as err:
        return subprocess.run(command, cwd=directory, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment,
                              timeout=120).returncode


def run_case(options, program, program_before, directory):
    """Runs a case; returns the exit code of its last run."""
    os.makedirs(directory)
    code = launch(program_before if "crossed" in options else program, options, directory, "log")
    if "back_to" not in options or code:
        return code
    for checkpoint in glob.glob(f"{directory}/run/step_*"):
        if int(checkpoint[-8:]) > int(options["back_to"]):
            shutil.rmtree(checkpoint)
    again = {name[6:]: value for name, value in options.items() if name.startswith("again:")}
    return launch(program, {**options, **again}, directory, "log2")


def without_ignored(value):
    if isinstance(value, list):
        return [without_ignored(x) for x in value]
    return {k: without_ignored(x) for k, x in value.items() if k not in IGNORED} if isinstance(value, dict) else value


def contents(path):
    """Returns those fields or lines of a file that are compared."""
    with open(path, "rb") as f:
        data = f.read()
    if path.endswith(".jsonl"):
        return [str(without_ignored(json.loads(line))) for line in data.splitlines()]
    return without_ignored(json.loads(data)) if path.endswith(".json") else data.split(b"\n")


def lines_of_both(paths):
    """Returns the lines of two files, without options that only one build has."""
    both = [contents(path) for path in paths]
    if isinstance(both[0], list):
        return both
    known = [set(x.get("options", {})) for x in both]
    for x in both:
        x["options"] = {name: x["options"][name] for name in x.get("options", {}) if name in known[0] & known[1]}
    return [json.dumps(x, indent=1).split("\n") for x in both]


def files(options, directory):
    """Returns {name: path} of the files to compare."""
    names = glob.glob("**", root_dir=f"{directory}/run", recursive=True) if "out" in options else []
    found = {name: f"{directory}/run/{name}" for name in sorted(names)}
    unlike = ("MANIFEST.json", "written_by")  # older builds wrote written_by
    return {name: path for name, path in found.items() if os.path.isfile(path) and not name.endswith(unlike)} or {"log": f"{directory}/log"}


def differ(options, codes, directories):
    """Returns the first difference, or None."""
    if codes != [0, 0]:
        return f"exit code {codes[0]} before, {codes[1]} after"
    before, after = (files(options, directory) for directory in directories)
    for name in sorted({*before, *after}):
        if name not in before or name not in after:
            return f"{name} is only in one run"
        lines = lines_of_both([before[name], after[name]])
        for a, b in zip(*lines):
            if a != b:
                return f"{name}: {str(a)[:300]} before, {str(b)[:300]} after"
        if len(lines[0]) != len(lines[1]):
            return f"{name}: {len(lines[0])} lines before, {len(lines[1])} after"
    return None


def main():
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 64
    programs, only = [os.path.realpath(program) for program in sys.argv[1:3]], sys.argv[3:]
    done = failed = 0
    with tempfile.TemporaryDirectory(prefix="gns_same_runs_") as work, concurrent.futures.ThreadPoolExecutor(2) as pool:
        os.chdir(work)
        os.mkdir("data")
        make_data(programs[0])
        for line in CASES.strip().splitlines():
            name, _, words = line.partition(" ")
            if only and name not in only:
                continue
            start, options = time.time(), options_of(words, options_of(SMALL, {}))
            directories = [f"before/{name}", f"after/{name}"]
            codes = list(pool.map(lambda p, d: run_case(options, p, programs[0], d), programs, directories))
            why = differ(options, codes, directories)
            done += 1
            failed += why is not None
            print(f"{'FAIL' if why else 'PASS'} same_runs/{name} {time.time() - start:.2f}s{': ' + why if why else ''}",
                  flush=True)
        os.chdir("/")
    print(f"{done - failed} passed, {failed} failed")
    return 1 if failed else 0


sys.exit(main())
