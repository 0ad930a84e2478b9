"""Exchanges files with dev/test/checkpoint/test_safetensors.c: check_safetensors.py TEST_SAFETENSORS, the compiled program.

What C wrote, Hugging Face's own package must read, and the other way round. Prints lines as dev/test/test.h does.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

ROWS, COLUMNS = 3, 37
TYPES = dict(F64=np.float64, I64=np.int64, U64=np.uint64, F32=np.float32, I32=np.int32, U32=np.uint32, I16=np.int16)
TYPES |= dict(U16=np.uint16, I8=np.int8, U8=np.uint8, BOOL=np.bool_, BF16=ml_dtypes.bfloat16, F16=np.float16)
METADATA = {"format": "pt", 'quo"ted\\\n': "\x01\té € 🙂"}


def sample():
    """The tensors of test_safetensors.c's sample file: element i is (7 i mod 31), less 15 where the type has a sign."""
    i = np.arange(ROWS * COLUMNS)
    tensors = {}
    for name, dtype in TYPES.items():
        values = i % 2 if name == "BOOL" else 7 * i % 31 - (0 if name.startswith("U") else 15)
        tensors[name] = values.astype(dtype).reshape(ROWS, COLUMNS)
    return tensors | {"scalar": np.float32(0.5).reshape(()), "empty": np.zeros(0, dtype=np.float32)}


def check_c_to_python(program, path):
    if subprocess.run([program, "--write", path]).returncode:
        return "the program failed"
    with safe_open(path, "numpy") as f:
        if f.metadata() != METADATA:
            return f"metadata is {f.metadata()}"
    got = load_file(path)
    for name, want in sample().items():
        if name not in got or got[name].dtype != want.dtype or got[name].shape != want.shape:
            return f"{name} is missing, or of another type or shape"
        if got[name].tobytes() != want.tobytes():
            return f"{name} has other values"
    return "" if len(got) == len(sample()) else "there are more tensors"


def check_python_to_c(program, path):
    save_file(sample(), path, METADATA)
    run = subprocess.run([program, "--read", path], capture_output=True, text=True)
    return "" if run.returncode == 0 else run.stdout


def main(program):
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        for check in (check_c_to_python, check_python_to_c):
            start = time.perf_counter()
            why = check(program, str(Path(directory) / "sample.safetensors"))
            failed |= bool(why)
            what = f"safetensors/{check.__name__.removeprefix('check_')} {time.perf_counter() - start:.2f}s"
            print(f"FAIL {what}: {why}" if why else f"PASS {what}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
