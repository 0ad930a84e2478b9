#!/usr/bin/env python3
"""Runs two builds of the CPU trainer and compares their results bit for bit.

    dev/test/same_runs.py PROGRAM_BEFORE PROGRAM_AFTER [--only PATTERN] [--ignore PATTERN] [--keep DIR]

A case is one small run, or two where it resumes: shapes, ranks, ZeRO stages, ramps, noise scale, recomputation,
schedules, resume, models, samples, evaluation, refusals. It compares tensors (name, type, shape, bytes), every field of
JSON files and of metrics.jsonl, other files of a checkpoint byte for byte, the numbers on standard output, the exit code,
and which checkpoints and files there are. A checkpoint's own files and those in its folder training/ count as one folder.
It leaves out times, speeds, builds, hosts, paths and manifests (IGNORED below), and options that only one build knows.

Prints a line a case and "N passed, N failed"; a failure names the first difference. The exit code is 1 if a case fails.
Both builds need the same compiler flags. Takes half a minute.
"""
import argparse
import concurrent.futures
import fnmatch
import glob
import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time

# FILE:FIELD, with * and ?. Fields of an array have their index as name.
IGNORED = [
    "metrics.jsonl:*.tok_per_s", "metrics.jsonl:*.mfu",
    "state.json:build", "state.json:seconds", "state.json:metrics_bytes",  # the bytes count the digits of tok_per_s
    "run.json:program", "run.json:engine", "run.json:id", "run.json:parts.*.started", "run.json:parts.*.host",
    "run.json:parts.*.program_xxh3_128", "run.json:parts.*.directory", "run.json:parts.*.command*",
    "state.json:options.sample_tokens", "run.json:options.sample_tokens",  # whose default depends on the tokenizer
    "MANIFEST.json:*",
]

SMALL = dict(train="../../data/train_*.bin", val="../../data/val.bin", vocab_size=256, layers=2, heads=3, channels=36,
             seq_len=17, micro_batch=3, batch_tokens=187, steps=12, lr="1e-3", threads=1, val_every=5, val_tokens=700,
             out="run")
RAMP = dict(steps=None, train_tokens=30000, batch_tokens=17 * 12, batch_min=4, batch_max=24, val_every=20)
GNS_RAMP = dict(RAMP, ramp="gns", gns_half_life=700, ramp_kappa=4, ramp_waste=1, ramp_step_rows="1e9", batch_min=2, lr="3e-3")
RESUMED = dict(checkpoint_every=4, keep=0, sample_every=5, sample_tokens=9)
MODEL = dict(layers=None, heads=None, channels=None, vocab_size=None)
NO_TRAINING = {name: None for name in SMALL if name not in ("val", "threads", "seq_len")}
CASES = []


class Case:
    """Options on top of SMALL; None removes one. back_to: runs again from the checkpoint of this step, `again` holding
    what is different then."""

    def __init__(self, name, base={}, ranks=1, back_to=None, again={}, ranks_again=None, crossed=False, code=0,
                 **options):
        self.name, self.ranks, self.back_to, self.again, self.code = name, ranks, back_to, again, code
        self.ranks_again, self.crossed = ranks_again or ranks, crossed
        self.options = {**SMALL, **base, **options}
        CASES.append(self)


# Shapes
Case("fixed")
Case("one_head", heads=1, channels=20, layers=1, seq_len=16, micro_batch=4, batch_tokens=192, gns="exact")
Case("odd_head_size", heads=5, channels=35, layers=3, seq_len=31, micro_batch=2, batch_tokens=31 * 7, gns="exact")
Case("head_size_64", heads=2, channels=128, layers=2, seq_len=65, batch_tokens=65 * 6, micro_batch=4, steps=6)
Case("long_row", seq_len=140, batch_tokens=140 * 4, heads=2, channels=24, micro_batch=2, steps=6, gns="exact")
Case("vocabulary_1003", train="../../data/wide.bin", val="../../data/wide.bin", vocab_size=1003, gns="exact")
Case("short_rows", seq_len=2, batch_tokens=2 * 23, micro_batch=10, gns="exact")
Case("micro_batch_1", micro_batch=1, batch_tokens=17 * 5, gns="exact")
Case("whole_batch", micro_batch=11)
Case("three_threads", threads=3, gns="exact", layers=3)
Case("many_epochs", train="../../data/short.bin", steps=30, seed=7)
# The noise scale
Case("gns_off", gns="off")
Case("gns_exact", gns="exact", micro_batch=4)
Case("gns_exact_every", gns="ln", gns_exact_every=3, steps=20, gns_half_life=400)
Case("batch_of_one", batch_tokens=17, gns="exact")
# Optimizer and schedules
Case("constant", lr_schedule="constant", warmup_tokens=500, weight_decay=0)
Case("linear_schedule", lr_schedule="linear", final_lr_frac=0.2, warmup_tokens=700)
Case("inverse_sqrt", lr_schedule="inverse-sqrt", warmup_tokens=300, beta1=0.8, beta2=0.99, eps="1e-6")
Case("wsd", lr_schedule="wsd", final_lr_frac=0, warmup_tokens=400, steps=20)
Case("grad_clip", grad_clip=0.05, weight_decay=0.3)
Case("no_clip", grad_clip=0, lr="1e-2")
Case("skipped_steps", batch_tokens=17 * 4, steps=170, skip_grad_z=1, skip_loss_z=2, val_every=0, val_tokens=None)
# Recomputation
Case("recompute_gelu", recompute="gelu", gns="exact", layers=3)
Case("recompute_block", recompute="block", gns="exact", layers=3)
# Ramps
Case("ramp_linear", RAMP, ramp="linear")
Case("ramp_seesaw", RAMP, ramp="seesaw", lr_schedule="cosine")
Case("ramp_gns", GNS_RAMP)
Case("ramp_gns_exact", GNS_RAMP, gns="exact", gns_exact_every=3, ramp_lr_power=1)
Case("ramp_gns_ratio", GNS_RAMP, gns_ratio=2.5, ramp_kappa=1, ramp_lr_power=0)
Case("ramp_replay", RAMP, ramp="replay:../../data/batches.jsonl", batch_tokens=None, batch_min=None, batch_max=None)
# Several ranks
Case("two_ranks", ranks=2, gns="exact")
Case("three_ranks", ranks=3, gns="exact", recompute="block")
Case("two_ranks_zero_0", ranks=2, zero=0, layers=4)
Case("three_ranks_zero_2", ranks=3, zero=2, layers=4, micro_batch=20)
Case("three_ranks_zero_2_whole", ranks=3, zero=2, gns="exact", steps=8)
Case("reduce_micro_step", ranks=2, zero=2, reduce="micro-step")
Case("comm_bf16", ranks=2, comm_dtype="bf16", gns="exact")
Case("comm_bf16_zero_2", ranks=3, comm_dtype="bf16", zero=2, micro_batch=20)
Case("ramp_gns_three_ranks", GNS_RAMP, ranks=3, batch_min=4)
Case("ramp_linear_two_ranks", RAMP, ramp="linear", ranks=2, zero=2, reduce="micro-step")
# Resume
Case("resume", RESUMED, back_to=8, gns="exact")
Case("resume_other_micro_batch", RESUMED, back_to=4, again=dict(micro_batch=5, recompute="block"))
Case("resume_more_ranks", RESUMED, back_to=8, ranks_again=3, gns="exact")
Case("resume_fewer_ranks", RESUMED, back_to=4, ranks=3, ranks_again=2, zero=2)
Case("resume_ramp_gns", GNS_RAMP, back_to=60, checkpoint_every=30, keep=0)
Case("resume_ramp_replay", RAMP, back_to=60, checkpoint_every=30, keep=0, ramp="replay:../../data/batches.jsonl",
     batch_tokens=None, batch_min=None, batch_max=None)
Case("resume_skips", back_to=150, checkpoint_every=50, keep=0, batch_tokens=17 * 4, steps=170, skip_grad_z=1, val_every=0,
     val_tokens=None)
Case("resume_from_before", RESUMED, back_to=8, gns="exact", crossed=True)  # the build before writes, this one resumes
Case("keep_best", keep_best=True, val_every=3, train="../../data/short.bin", steps=24, lr="3e-2", checkpoint_every=10, keep=2)
# Models from elsewhere; llm.c's options
Case("from_directory", MODEL, model="../../data/hf", gns="exact")
Case("from_run", MODEL, model="../../data/run", ranks=2)
Case("longer_rows_than_half", MODEL, model="../../data/hf", seq_len=9, batch_tokens=99)
Case("llmc_options", {name: None for name in SMALL if name not in ("vocab_size", "layers", "heads", "channels", "threads")},
     i="../../data/train_0.bin", j="../../data/val.bin", o="run", b=3, t=17, d=187, x=9, l="1e-3", u=3, q=0.2, c=0.05, v=4,
     m=2, s=0, n=5, sl=4, sg=4)
# Without training
Case("eval_only", NO_TRAINING, eval_only=True, model="../../data/hf", hellaswag="../../data/questions.jsonl")
Case("eval_only_two_ranks", NO_TRAINING, ranks=2, eval_only=True, model="../../data/run", val_tokens=900, micro_batch=5)
Case("hellaswag", hellaswag="../../data/questions.jsonl", hellaswag_every=4)
Case("sample_only", NO_TRAINING, val=None, sample_only=True, model="../../data/run", prompt="the ", samples=3,
     temperature=0.8, top_k=30, sample_tokens=40)
Case("sample_greedy", NO_TRAINING, val=None, sample_only=True, model="../../data/run", temperature=0, sample_tokens=20)
Case("samples_two_ranks", ranks=2, sample_every=4, sample_tokens=64, samples=2, prompt="a", seed=3)
Case("plan", NO_TRAINING, val=None, gns="ln", seq_len=1024, dry_run=True, model="gpt2-350M", device="H200", ranks_planned=4, zero=2,
     micro_batch=16, batch_tokens=524288, steps=100, recompute="block")
Case("check", NO_TRAINING, val=None, threads=None, seq_len=None, check="../../data/run")
# Refused
Case("unknown_option", code=64, no_such_option=1)
Case("batch_no_multiple", code=64, batch_tokens=188)
Case("no_such_file", code=65, train="nothing.bin")
Case("token_out_of_range", code=65, train="../../data/wide.bin")
Case("check_damaged", NO_TRAINING, val=None, threads=None, seq_len=None, check="../../data/damaged", code=65)


# ----------------------------------------------------------------------------------------------------------------------
# Data

def tokens(count, vocabulary, seed):
    """Tokens that follow one another by a rule three times of four, so that there is something to learn."""
    state, token = seed, 0
    for _ in range(count):
        state = (state * 1103515245 + 12345) % 2**31
        token = (state >> 8) % vocabulary if (state >> 16) % 4 == 0 else (token * 3 + (state >> 19) % 2) % vocabulary
        yield token


def write_shard(path, count, vocabulary=256, seed=1):
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", 20240520, 1, count, *[0] * 253))
        f.write(struct.pack(f"<{count}H", *tokens(count, vocabulary, seed)))


def read_safetensors(path):
    """{name: (dtype, shape, bytes)}"""
    with open(path, "rb") as f:
        data = f.read()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {name: (t["dtype"], t["shape"], data[start + t["data_offsets"][0]:start + t["data_offsets"][1]])
            for name, t in header.items()}


def make_data(directory, program):
    """Shards, questions, and models that the build before has trained."""
    os.mkdir(directory)
    at = lambda name: os.path.join(directory, name)
    write_shard(at("train_0.bin"), 9001, seed=1)
    write_shard(at("train_1.bin"), 6005, seed=2)
    write_shard(at("val.bin"), 3000, seed=3)
    write_shard(at("short.bin"), 1500, seed=4)
    write_shard(at("wide.bin"), 8000, vocabulary=1003, seed=5)
    with open(at("questions.jsonl"), "w") as f:
        for i in range(12):
            endings = [bytes(97 + t % 26 for t in tokens(3 + i % 4, 256, 5 * i + j)).decode() for j in range(4)]
            f.write(json.dumps({"ctx": "abc " * (1 + i % 5), "endings": endings, "label": i % 4}) + "\n")
    with open(at("batches.jsonl"), "w") as f:
        done = 0
        for step in range(1, 400):
            batch = 4 + step // 11
            done += batch
            f.write(json.dumps({"step": step, "tokens": 17 * done, "examples": done, "batch": batch, "loss": 5}) + "\n")
    options = {**SMALL, "train": at("train_0.bin"), "val": at("val.bin"), "out": at("run"), "steps": 20, "sample_every": 0}
    subprocess.run([program, *flags(options)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoint = newest(at("run"))
    shutil.copytree(checkpoint, at("hf"))
    for name in ("state.json", "optimizer.safetensors", "MANIFEST.json"):
        for path in glob.glob(os.path.join(at("hf"), "**", name), recursive=True):
            os.remove(path)
    shutil.copytree(checkpoint, at("damaged"))
    with open(glob.glob(os.path.join(at("damaged"), "**", "optimizer.safetensors"), recursive=True)[0], "r+b") as f:
        f.seek(5000)
        f.write(b"\x55\xaa\x55\xaa")


# ----------------------------------------------------------------------------------------------------------------------
# Running

def flags(options):
    words = []
    for name, value in options.items():
        name = "ranks" if name == "ranks_planned" else name
        if value is not None:
            words.append(("-" if len(name) == 1 or name in ("sl", "sg") else "--") + name.replace("_", "-"))
            words += [] if value is True else [str(value)]
    return words


def launch(program, ranks, options, directory, log):
    command = [program, *flags(options)]
    if ranks > 1:
        command = ["mpirun", "-np", str(ranks), "--oversubscribe", "--allow-run-as-root", "--bind-to", "none", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000", "OMPI_MCA_mpi_yield_when_idle": "1",
                   "OMPI_MCA_btl": "self,vader", "TMPDIR": os.path.dirname(directory)}  # two mpiruns in one TMPDIR collide
    with open(os.path.join(directory, log), "wb") as out, open(os.path.join(directory, log + ".err"), "wb") as err:
        out.write((shlex.join(command) + "\n").encode())
        out.flush()
        return subprocess.run(command, cwd=directory, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment,
                              timeout=120).returncode


def checkpoints(run):
    return sorted(glob.glob(os.path.join(run, "step_*")))


def newest(run):
    return checkpoints(run)[-1]


def run_case(case, program, program_before, directory):
    """Returns the exit code of the last run."""
    os.makedirs(directory)
    first = program_before if case.crossed else program
    code = launch(first, case.ranks, case.options, directory, "log")
    if case.back_to is None or code:
        return code
    run = os.path.join(directory, "run")
    if not os.path.isdir(os.path.join(run, f"step_{case.back_to:08d}")):
        raise RuntimeError(f"no checkpoint of step {case.back_to}")
    for checkpoint in checkpoints(run):
        if int(checkpoint[-8:]) > case.back_to:
            shutil.rmtree(checkpoint)
    return launch(program, case.ranks_again, {**case.options, **case.again}, directory, "log2")


# ----------------------------------------------------------------------------------------------------------------------
# Comparing

def flat(value, name=""):
    """[(name of a field, its value)]; fields of an array have their index as name."""
    if not isinstance(value, (dict, list)):
        return [(name, value)]
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    return [("count of " + name, len(value))] * isinstance(value, list) + \
        [pair for key, part in inner for pair in flat(part, f"{name}.{key}" if name else str(key))]


def contents(path):
    """{field: value} of a file."""
    if path.endswith(".safetensors"):
        tensors = read_safetensors(path)
        return {"tensors": list(tensors), **tensors}
    with open(path, "rb") as f:
        data = f.read()
    if path.endswith(".jsonl"):
        return dict(flat([json.loads(line) for line in data.splitlines()], "line"))
    return dict(flat(json.loads(data))) if path.endswith(".json") else {"bytes": data}


def differ_file(name, a, b, more):
    """The first difference, or None."""
    before, after = contents(a), contents(b)
    for field in [*before, *after]:
        one, other = before.get(field), after.get(field)
        only = (field in before) != (field in after) and "options." in field  # an option that one build does not know
        unknown = any(fnmatch.fnmatchcase(f"{os.path.basename(name)}:{field}", pattern) for pattern in IGNORED + more)
        if (type(one), one) != (type(other), other) and not only and not unknown:
            if isinstance(one, tuple) and isinstance(other, tuple) and one[:2] == other[:2]:
                at = next(i for i in range(len(one[2]) // 4) if one[2][4 * i:4 * i + 4] != other[2][4 * i:4 * i + 4])
                one, other = (struct.unpack_from("<f", data, 4 * at)[0] for data in (one[2], other[2]))
                field += f", element {at}"
            return f"{name}: {field}: {str(one)[:80]} before, {str(other)[:80]} after"
    return None


def run_files(run):
    """{name: path}: files that a user relies on, those first that tell most."""
    names = ["metrics.jsonl", *(os.path.relpath(path, run) for c in checkpoints(run) for path in
                                sorted(glob.glob(c + "/**", recursive=True), reverse=True)), "samples.jsonl", "run.json"]
    return {name.replace("/training/", "/"): os.path.join(run, name) for name in names if os.path.isfile(os.path.join(run, name))}


def said(case, path):
    """What standard output says beside words."""
    if not os.path.exists(path):
        return []
    with open(path, "rb") as f:
        text = f.read().partition(b"\n")[2]
    if case.options.get("sample_only"):
        return text.splitlines()
    text = text.decode(errors="replace")
    if case.options.get("eval_only"):
        return re.findall(r"\d+\.\d{4,}", text)
    if case.options.get("dry_run"):
        return re.findall(r"[\d.,]+ MiB$", text, re.MULTILINE)
    if case.options.get("check"):
        return re.findall(r"(\w+\.safetensors) +(\d+) bytes|: (undamaged)$", text, re.MULTILINE)
    return []


def differ(case, codes, directories, more):
    if codes != [case.code] * 2:
        return f"exit code {codes[0]} before, {codes[1]} after, want {case.code}"
    for log in ("log", "log2"):
        lines = [said(case, os.path.join(d, log)) for d in directories]
        for a, b in zip(*lines):
            if a != b:
                return f"standard output: {a!r} before, {b!r} after"
        if len(lines[0]) != len(lines[1]):
            return f"standard output: {len(lines[0])} values before, {len(lines[1])} after"
    files = [run_files(os.path.join(d, "run")) for d in directories]
    if not any(files):
        return None if case.code or any(said(case, os.path.join(d, "log")) for d in directories) else "nothing to compare"
    for name in files[0]:
        found = differ_file(name, files[0][name], files[1][name], more) if name in files[1] else None
        if found:
            return found
    only = sorted(set(files[0]) ^ set(files[1]))
    if only:
        return f"{only[0]} is only in the run {'before' if only[0] in files[0] else 'after'}"
    return None if case.code or "metrics.jsonl" in files[0] else "no metrics.jsonl"


# ----------------------------------------------------------------------------------------------------------------------

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="cases by name, with * and ?")
    parser.add_argument("--ignore", action="append", default=[], metavar="PATTERN",
                        help="FILE:FIELD not to compare, with * and ?, for example 'state.json:ramp.*'")
    parser.add_argument("--keep", metavar="DIR", help="keep the runs in this new directory")
    parser.add_argument("--list", action="store_true", help="print the cases' names, and end")
    arguments = parser.parse_args()
    cases = [c for c in CASES if not arguments.only or any(fnmatch.fnmatchcase(c.name, p) for p in arguments.only)]
    if arguments.list or not cases:
        print("\n".join(c.name for c in cases) or "no such case")
        return 0 if cases else 64
    programs = [os.path.realpath(arguments.before), os.path.realpath(arguments.after)]
    work = os.path.abspath(arguments.keep) if arguments.keep else tempfile.mkdtemp(prefix="gns_same_runs_")
    os.makedirs(work, exist_ok=not arguments.keep)
    done = failed = 0
    try:
        make_data(os.path.join(work, "data"), programs[0])
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for case in cases:
                start = time.time()
                directories = [os.path.join(work, "before", case.name), os.path.join(work, "after", case.name)]
                try:
                    codes = list(pool.map(lambda p, d: run_case(case, p, programs[0], d), programs, directories))
                    why = differ(case, codes, directories, arguments.ignore)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    why = str(error)
                done += 1
                failed += why is not None
                print(f"{'FAIL' if why else 'PASS'} same_runs/{case.name} {time.time() - start:.2f}s"
                      f"{': ' + why if why else ''}", flush=True)
    finally:
        if not arguments.keep:
            shutil.rmtree(work)
    print(f"{done - failed} passed, {failed} failed")
    return 1 if failed else 0


sys.exit(main())
