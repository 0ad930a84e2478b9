#!/usr/bin/env python3
"""Compares data/tokenize with a plain reimplementation, on made-up inputs. Needs only the standard library.

    test_tokenize.py PATH_OF_TOKENIZE [PATH_OF_A_SANITIZED_ONE]
"""
import contextlib, itertools, json, os, random, resource, signal, struct, subprocess, sys, tempfile, threading, time

FAULT_SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "preload", "file_fault.c")
TOKENIZE = [os.path.abspath(path) for path in sys.argv[1:]]
SEED = int(os.environ.get("SEED", time.time_ns() % 10**9))
rng = random.Random(SEED)
MASK = (1 << 64) - 1
BYTES = ("--tokenizer", "bytes", "--out", "out")
checks = failures = 0


def check(condition, message):
    global checks, failures
    checks += 1
    if not condition:
        failures += 1
        print("  " + message)


def run(*args, stdin=None, program=0, expect=0, limit=None):
    """Returns the program's stderr, then its stdout; the exit code must be `expect`."""
    before = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))) if limit else None
    done = subprocess.run([TOKENIZE[program], *map(str, args)], input=stdin, capture_output=True, preexec_fn=before)
    error = done.stderr.decode(errors="replace")
    check(done.returncode == expect, f"{args}: exit code {done.returncode}, want {expect}: {error.strip()}")
    check(not os.path.exists("out.lock"), f"{args}: left its lock")
    return error + done.stdout.decode()


def refuse(text, *args, code=65, **more):
    error = run(*args, expect=code, **more)
    last = error.strip().splitlines()[-1] if error.strip() else ""
    check(text in last and last.startswith("error: ") and ". " in last, f"{args}: want '{text}' and a hint: {last}")
    check(not shards("out") and not leftovers(), f"{args}: left {shards('out')} {leftovers()}")


def expect(train, val, *args, **more):
    """Removes all shards, runs data/tokenize, checks that its shards hold these documents, and returns its output."""
    clean()
    said = run(*BYTES, *args, **more)
    for split, want in (("train", train), ("val", val)):
        check(read_bytes("out", split) == join(want), f"{args}: {split} is not what it must be")
    return said


def shards(prefix):
    return sorted(f for f in os.listdir(".") if f.startswith(prefix + "_") and f.endswith(".bin"))


def leftovers():
    return [f for f in os.listdir(".") if f.endswith(".partial")]


def contents(files):
    return {f: open(f, "rb").read() for f in files}


def clean():
    for f in os.listdir("."):
        if f.endswith((".bin", ".partial", ".lock")):
            os.unlink(f)


def read_shard(path):
    raw = open(path, "rb").read()
    header = struct.unpack("<256i", raw[:1024])
    check(header[:2] == (20240520, 1) and not any(header[3:]), f"{path}: header {header[:4]}")
    check(len(raw) == 1024 + 2 * header[2], f"{path}: {len(raw)} bytes for {header[2]} tokens")
    return list(struct.unpack(f"<{header[2]}H", raw[1024:]))


def read_raw(path):  # a fast way to read a byte shard
    return open(path, "rb").read()[1024::2]


def read_split(prefix, split):
    return list(itertools.chain.from_iterable(map(read_shard, shards(f"{prefix}_{split}"))))


def read_bytes(prefix, split):
    return bytes(read_split(prefix, split))


# The hash of bytes as llmc/base/hash.h defines it.
def fnv(data, h=0xCBF29CE484222325):
    for byte in data:
        h = ((h ^ byte) * 0x100000001B3) & MASK
    return h


def finish(z):
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return z ^ z >> 31


def is_val_document(file, document, fraction):
    return (finish(fnv(struct.pack("<QQ", file, document))) >> 11) < fraction * 2**53


def is_val_file(path, every):
    return finish(fnv(path.encode())) % every == 0


def join(documents):
    """Joins documents; adds a newline between two documents if the first does not end with a newline."""
    out = b""
    for d in documents:
        d = d.encode() if isinstance(d, str) else d
        if d:
            out += (b"\n" if out and not out.endswith(b"\n") else b"") + d
    return out


def random_text(characters):
    alphabet = 10 * "abcdefghij     \n\n.,'äößЖ中🙂"  # at least 256 characters
    return "".join(map(alphabet.__getitem__, rng.randbytes(characters)))


def write(path, data):
    with open(path, "wb") as f:
        f.write(data if isinstance(data, bytes) else data.encode())


def test_one_file():
    """The tokens are the file's bytes, in full shards; the last part becomes validation; --out creates directories."""
    text = random_text(50000).encode()
    write("a.txt", text)
    expect([text], [], "a.txt")
    expect([text], [], "--shard-tokens", 7001, "a.txt")
    files = shards("out_train")
    check(files == [f"out_train_{i:06d}.bin" for i in range(len(files))], f"{files}")
    check([len(read_shard(f)) for f in files[:-1]] == [7001] * (len(files) - 1), "shards are not full")
    for fraction in (0.1, 0.5, 0.015625, 0.25):
        clean()
        run(*BYTES, "--val-fraction", fraction, "a.txt")
        train, val = read_bytes("out", "train"), read_bytes("out", "val")
        check(train + val == text, "train and val are not the file")
        check(0 <= len(train) - int(len(text) * (1 - fraction)) <= 3, "split in the wrong place")
        train.decode(), val.decode()  # fails if the cut is inside a character
    for out in ("one/two/out", "one/two/more", "./three/out", os.path.abspath("four/out")):
        run("--tokenizer", "bytes", "--out", out, "a.txt")
        check(read_raw(out + "_train_000000.bin") == text, out)


def test_split():
    """Two runs, one per split, do not touch each other's shards."""
    write("a.txt", "first")
    write("b.txt", "second")
    run(*BYTES, "--split", "val", "b.txt")
    run(*BYTES, "a.txt", expect=64)
    run(*BYTES, "--split", "train", "a.txt")
    for force in ((), ("--force",)):
        run(*BYTES, "--split", "val", *force, "b.txt", expect=0 if force else 64)
        check(read_bytes("out", "train") == b"first" and read_bytes("out", "val") == b"second", "--split")


def test_threads_and_blocks():
    """Any number of threads gives the same bytes, from a file or a pipe, over many blocks."""
    documents = [random_text(rng.choice([0, 10, 3000, 200000])) for _ in range(30)]
    documents[next(i for i in range(30) if is_val_document(0, i + 1, 0.2))] = "text"  # not all of validation is empty
    write("a.jsonl", "".join(json.dumps({"text": d, "n": 1}) + "\n" for d in documents))
    want = {True: [], False: []}
    for i, d in enumerate(documents):
        want[is_val_document(0, i + 1, 0.2)].append(d)
    for threads in (1, 2, 5):
        for source in (["a.jsonl"], ["--format", "jsonl", "-"]):
            expect(want[False], want[True], "--val-fraction", 0.2, "--threads", threads, *source, stdin=open("a.jsonl", "rb").read())


def test_separator():
    """Cutting the text into blocks changes no document; Windows and Unix line ends give the same documents."""
    for separator in ("<|endoftext|>", "\n\n\n", "=== END ===", "x"):
        documents = [random_text(rng.choice([0, 5, 500, 90000])).replace(separator, " ").strip("\n") for _ in range(50)]
        text = ("\n" + separator + "\n").join(documents)
        write("a.txt", text)
        whole, mark = text.encode(), separator.encode()
        expected, at, more = [], 0, True
        while more:
            if expected and whole.startswith(b"\n", at):
                at += 1
            stop = whole.find(mark, at)
            more = stop >= 0
            part = whole[at:stop] if more else whole[at:]
            expected.append(part[:-1] if more and part.endswith(b"\n") else part)
            at = stop + len(mark)
        train = [d for i, d in enumerate(expected) if not is_val_document(0, i, 0.3)]
        val = [d for i, d in enumerate(expected) if is_val_document(0, i, 0.3)]
        for threads in (1, 3):
            expect(train, val, "--separator", separator, "--threads", threads, "--val-fraction", 0.3, "a.txt")
        if "\n" not in separator:
            write("windows.txt", whole.replace(b"\n", b"\r\n"))
            run("--tokenizer", "bytes", "--out", "windows", "--separator", separator, "--val-fraction", 0.3, "--force", "windows.txt")
            for split in ("train_000000.bin", "val_000000.bin"):
                unix, windows = read_raw("out_" + split), read_raw("windows_" + split)
                check(b"\r\n" in windows and windows.replace(b"\r\n", b"\n") == unix, f"{split}, {separator}, lines of Windows")
    said = run(*BYTES, "--force", "--separator", "||", "a.txt")
    check("note: --separator || is nowhere in the text" in said, said)
    write("a.txt", "one\n<|endoftext|>\ntwo")
    check("a.txt: <|endoftext|> is text there; --separator" in run(*BYTES, "--force", "a.txt"), "no note")


def test_separator_between_blocks():
    """A separator lies before, at and after the end of a block of 1 MiB, with and without newlines."""
    separator, block = "=== END ===", 1 << 20
    for newline in ("\n", "\r\n", ""):
        for place in range(block - 2 * len(separator) - 4, block + 3):
            first = random_text(500).replace(separator, "")
            first = (first * (block // len(first.encode()) + 1)).encode()[:place].decode(errors="ignore")
            first = first.rstrip("\n").ljust(place - len(newline) - (len(first.encode()) - len(first)), "x")
            write("a.txt", first + newline + separator + newline + "second")
            run(*BYTES, "--force", "--separator", separator, "a.txt")
            check(read_raw("out_train_000000.bin") == join([first, "second"]), f"separator at {place}")


def test_files():
    """Inputs are a directory or a list; a path's hash sends one file in N to validation; --max-bytes cuts the text."""
    os.makedirs("tree/b/c", exist_ok=True)
    text = {name: random_text(0 if "empty" in name else 1000).encode()
            for name in ("tree/a.TXT", "tree/b/1.Md", "tree/b/c/x.txt", "tree/b/empty.txt", "tree/z.txt")}
    for name in text:
        write(name, text[name])
    check("passed over" not in expect(text.values(), [], "tree"), "nothing was passed over")
    for name in ("tree/ignored.bin", "tree/.hidden.txt", "tree/.hidden.bin", "tree/b/c/program.py", "tree/b/README"):
        write(name, "no")
    said = expect([*text.values(), b"no"], [], "tree", "tree/b/README")
    check(said.count("passed over") == 1 and "3 files with other endings passed over" in said, f"passed over: {said}")
    parts = [part for part in text.values() if part]
    cuts = [int(len(part) * 0.75) for part in parts]
    for i, part in enumerate(parts):  # moves each cut to the beginning of a character
        while part[cuts[i]] & 0xC0 == 0x80:
            cuts[i] += 1
    expect([p[:c] for p, c in zip(parts, cuts)], [p[c:] for p, c in zip(parts, cuts)], "--val-fraction", 0.25, "tree")
    names = [f"tree/f{i}.h" for i in range(200)]
    rng.shuffle(names)
    for name in names:
        text[name] = random_text(rng.randrange(2000)).encode()
        write(name, text[name])
    write("list", "\n".join(names) + "\n")
    expect([text[n] for n in names if not is_val_file(n, 10)], [text[n] for n in names if is_val_file(n, 10)],
           "--files-from", "list", "--val-every-file", 10)
    for limit in (10, 1000, 54321, 10**9):
        left, want = limit, []
        for n in names:
            want.append(text[n][:left].decode(errors="ignore"))
            left -= len(text[n][:left])
        expect(want, [], "--files-from", "list", "--max-bytes", limit)


def test_lists():
    """--files-from reads pipes and Windows line ends, refuses zero bytes. Ctrl-C ends the wait for an empty pipe."""
    write("a.txt", "first")
    write("b.txt", "second")
    for text in (b"a.txt\nb.txt\n", b"a.txt\nb.txt", b"\xef\xbb\xbfa.txt\r\n\r\nb.txt\r\n"):
        expect(["first", "second"], [], "--files-from", "-", stdin=text)
    clean()
    refuse("standard input line 2: gone.txt: ", *BYTES, "--files-from", "-", stdin=b"a.txt\ngone.txt\n")
    for text, line in ((b"a.txt\0\nb.txt\n", 1), (b"a.txt\n\0gone.txt\nb.txt\n", 2), (b"a.txt\0b.txt\0", 1)):
        write("list", text)
        refuse(f"list line {line}: a zero byte", *BYTES, "--files-from", "list")
    os.mkfifo("fifo")
    for source in ("fifo", "-"):
        p = subprocess.Popen([TOKENIZE[0], *BYTES, source], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # run.sh's & ignores it
        time.sleep(0.3)
        p.send_signal(signal.SIGINT)
        check(p.wait(60) in (-signal.SIGINT, 75), f"{source}: Ctrl-C ended it with {p.returncode}")


def test_invalid_utf8():
    for raw in (b"\xc0\xaf", b"caf\xe9 ", b"\xf8\x88\x80\x80\x80"):  # test_words tests every kind of invalid UTF-8
        for place in (0, 100, 1 << 20, 3000000):
            line = b"some text and more\n"
            text = (line * (place // len(line) + 1))[:place] + raw + b"\nend\n"
            write("a.txt", text)
            at = place + (3 if raw.startswith(b"caf") else 0)
            clean()
            refuse(f"a.txt line {text[:at].count(10) + 1}: byte 0x{text[at]:02x} at offset {at} ", *BYTES, "a.txt")
            expect([text], [], "--invalid", "bytes", "a.txt")
    clean()
    write("a.jsonl", b'{"text": "ok"}\n\n{"text": "caf\xe9"}\n')
    refuse("a.jsonl line 3", *BYTES, "a.jsonl")
    write("a.jsonl", b'{"text": "ok"}\n{"text": "half \\ud83d of a pair"}\n')
    refuse("a.jsonl line 2", *BYTES, "a.jsonl")


def test_all_faults_at_once():
    """One run names every refused file, at most ten, and writes nothing."""
    os.makedirs("texts")
    for i in range(30):
        write(f"texts/{i:02d}.txt", b"good\n" * 100000 if i % 3 else b"good\n" * 50000 + b"\xff and \xfe\n" + b"good\n" * 300000)
    write("texts/30.jsonl", '{"text": "good"}\n{"n": bad}\n{"n": worse}\n')
    for threads in (1, 3):
        error = run(*BYTES, "--threads", threads, "texts", expect=65)
        named = [line for line in error.splitlines() if line.startswith("texts/")]
        check(len(named) == 10, f"{len(named)} lines named: {error}")
        check(all(f"texts/{i:02d}.txt line 50001: byte 0xff at offset 250000 " in error for i in range(0, 30, 3)), error)
        check("error: 12 faults; the first is texts/00.txt line 50001" in error.splitlines()[-1], error)
        check(not shards("out") and not leftovers(), "something is left")
    write("a.jsonl", '{"text": "good"}\n' + "".join(f'{{"text": {"null" if i % 2 else i}}}\n{{"text": "good"}}\n' for i in range(100000)))
    error = run(*BYTES, "a.jsonl", expect=65)
    named = [line for line in error.splitlines() if line.startswith("a.jsonl line ")]
    check(len(named) == 10 and named[9].startswith("a.jsonl line 20: has no string in the text field")
          and "error: 100000 faults; the first is a.jsonl line 2: " in error, error)
    said = expect(["good"] * 100001, [], "--invalid", "skip", "a.jsonl")
    check("left out: 100000 lines of jsonl" in said, said)


def test_bad_input_is_not_waited_for():
    """A fault is reported at once, without reading a pipe or a long file to the end."""
    def refuse_open(text, names, *args, files=("-",), code=65):
        p = subprocess.Popen([TOKENIZE[0], *map(str, args), *files], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        timer = threading.Timer(60, p.kill)
        timer.start()
        with contextlib.suppress(BrokenPipeError):
            p.stdin.write(text)
            p.stdin.flush()
        error = p.stderr.read().decode()  # stderr ends while the input stays open
        timer.cancel()
        check(p.wait() == code and all(name in error for name in names), f"{args} {files}: {p.returncode} {error}")
        with contextlib.suppress(BrokenPipeError):
            p.stdin.close()

    refuse_open(b"abc\xffdef\n" * 400000, ["standard input line 1: byte 0xff at offset 3 "], *BYTES)
    refuse_open(b"not json\n" + b'{"text": "good"}\n' * 200000, ["standard input line 1: is not a JSON object"], *BYTES, "--format", "jsonl")
    for text, form in ((b"", "text"), (b"text\n", "auto")):
        refuse_open(text, ["length of standard input is unknown"], *BYTES, "--format", form, "--val-fraction", 0.1, code=64)
    write("bad.txt", b"\xff\n")
    write("next.txt", b"a\nb\xfe\n")
    write("long.txt", b"\xfe\n\n\n")
    os.truncate("long.txt", 1 << 40)  # a hole, which needs no space on the disk
    for threads in (1, 3):
        refuse_open(b"", ["bad.txt line 1", "long.txt line 1", "next.txt line 2"], *BYTES, "--threads", threads,
                    files=("bad.txt", "-", "long.txt", "next.txt"))


def test_invalid_skip():
    """Text files that are not UTF-8 are left out as a whole, lines of jsonl one by one; the last lines of output count
    and list them."""
    os.makedirs("texts")
    good = {f"texts/{i:02d}.txt": f"{i} {random_text(100000 if i < 30 else 0)}" for i in [*range(30), *range(50, 70)]}
    bad = {f"texts/{i:02d}.txt" for i in range(0, 30, 7)}
    for name, text in good.items():  # more files than blocks
        write(name, text.encode() + b"\xff" * (name in bad))
    write("texts/40.txt", "end of a character ä".encode()[:-1])
    write("texts/41.jsonl", b'{"text": "one"}\n{"text": "caf\xe9"}\n{"text": "two"}\n{"text": "half \\ud83d"}\n')
    write("texts/42.txt", b"\x1f\x8b gzip")
    write("texts/43.jsonl", b"\x1f\x8b gzip")
    want = [text for name, text in good.items() if name not in bad]
    for threads in (1, 3):
        said = expect([*want[:-20], "one", "two", *want[-20:]], [], "--invalid", "skip", "--threads", threads, "texts")
        check("left out: 8 files that are not UTF-8" in said and "left out: 2 lines of jsonl" in said, said)
        named = [line.strip() for line in said.splitlines() if line.startswith("  texts/")]
        check(named == [*sorted(bad), "texts/40.txt", "texts/42.txt", "texts/43.jsonl"], f"{named}")
    clean()
    refuse("unknown until its end", *BYTES, "--invalid", "skip", "-", code=64, stdin=b"text")
    refuse("texts/40.txt: no text in it but what --invalid skip left out", *BYTES, "--invalid", "skip", "texts/40.txt", "texts/42.txt")


def test_other_kinds():
    """Errors name gzip, zstd and UTF-16. A byte order mark is text, except in jsonl."""
    for raw, text, hint in ((b"\x1f\x8b\x08 \n", "gzip, not text", "zcat FILE | "), (b"\x28\xb5\x2f\xfd", "zstd", "zstdcat FILE | "),
                            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer", "git lfs pull"), ("ab".encode("utf-16-le"), "UTF-16 or", "iconv -f UTF-16LE"),
                            (b"PAR1\x15", "parquet", "data/parquet_to_jsonl.py FILE | "), ("ä".encode("utf-16"), "UTF-16", "iconv -f UTF-16"), (b"\xfe\xff\0a", "UTF-16", "iconv -f UTF-16")):
        for name in ("a.txt", "a.jsonl"):
            write(name, raw)
            refuse(f"{name}: is {text}", *BYTES, name)
            check(hint in run(*BYTES, name, expect=65), f"no {hint}")
    expect([b"\xfe\xff\0a"], [], "--invalid", "bytes", "a.txt")
    write("a.txt", b"\xef\xbb\xbftext")
    write("b.txt", b"\xef\xbb\xbfmore")
    said = expect([b"\xef\xbb\xbftext", b"\xef\xbb\xbfmore"], [], "a.txt", "b.txt")
    check("note: 2 files, the first is a.txt: a byte order mark stays in the text" in said, said)
    write("a.jsonl", b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}\n')
    check("note" not in expect(["one", "two"], [], "a.jsonl"), "a note on jsonl")


def test_a_file_changes():
    """A file whose length changes before it is read is refused."""
    def change(length):
        with open("fifo", "wb") as file:  # waits for the reader, which knows the length of a.txt by then
            os.truncate("a.txt", length)
            file.write(b"text")

    os.mkfifo("fifo")
    for length in (5, 15):
        write("a.txt", b"0123456789")
        threading.Thread(target=change, args=(length,), daemon=True).start()
        refuse(f"a.txt: had 10 bytes, and now has {length}", *BYTES, "fifo", "a.txt")


def test_formats():
    """JSON Lines are recognised under any name and from a pipe; a note says so if the first line decided; --format
    silences the note."""
    text = "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(100))
    want = {val: [f"document {i}" for i in range(100) if is_val_document(0, i + 1, 0.2) == val] for val in (False, True)}
    os.makedirs("in")
    os.mkfifo("fifo")
    for name in ("b.json", "b.JSON", "b.jl", "b.JSONL", "b.Ndjson", "b", "b.txt.1", "-", "fifo", "in/b.json"):
        for given in ([], ["--format", "jsonl"]):
            if name == "fifo":
                threading.Thread(target=write, args=(name, text), daemon=True).start()
            elif name != "-":
                write(name, text)
            said = expect(want[False], want[True], "--val-fraction", 0.2, *given, "in" if name.startswith("in/") else name, stdin=text.encode())
            by_line = not given and not name.lower().endswith((".jl", ".jsonl", ".ndjson"))
            check(("by the first line, read as JSON Lines" in said) == by_line, f"{name} {given}: {said}")
    package = '{\n  "name": "a package"\n}\n'
    write("in/b.json", package)
    write("in/a.txt", "a")
    check("1 file with other endings passed over" in expect(["a"], [], "in"), "a .json file that is no JSON Lines")
    for given in ([], ["--format", "text"]):
        said = expect([package], [], *given, "in/b.json")
        check(("in/b.json: by the first line, read as text" in said) == (not given), f"{given}: {said}")
    for raw in (b"", b" \n", b"{", b"{ \n", b"plain {\n"):
        check("JSON" not in expect([raw + b"text"], [], "-", stdin=raw + b"text"), f"{raw}")
    clean()
    refuse("standard input line 1: is not a JSON object", *BYTES, "-", stdin=b'{"n": bad}\n')


def test_jsonl():
    strings = ["plain", "\u0000 nul", '"\\/\b\f\n\r\t', "🙂 ä ж 中", "\ud7ff\ue000\uffff", ""]
    lines, want = [], []
    for s in strings:
        for ascii_only in (True, False):
            lines.append(json.dumps({"a": [1, -2.5e+10, {"text": "no"}, []], "text": s, "z": None}, ensure_ascii=ascii_only))
            want.append(s)
    lines += ['{"text":"first","text":"second"}', ' { "te\\u0078t" : "escaped key" } \r', "", "  \t", '{"x":{},"text":"last"}']
    write("a.jsonl", "\n".join(lines))  # no newline at the end
    expect([*want, "second", "escaped key", "last"], [], "a.jsonl", program=len(TOKENIZE) - 1)
    lines = ['{"meta": {"text": "one"}, "text": 3}', '{"text": {"meta": 1}, "meta": {"id": [{"text": "no"}], "a": {"text": "no"}, "text": "two"}}',
             '{"meta.text": "three", "meta": null}']
    write("c.jsonl", "\n".join(lines))
    expect(["one", "two", "three"], [], "--field", "meta.text", "c.jsonl")
    write("a.jsonl", '{"text": "\\ud83d\\u0041 \\ude42 \\ud83d\\ude42"}')  # halves of surrogate pairs, and a whole pair
    expect([b"\xed\xa0\xbdA \xed\xb9\x82 \xf0\x9f\x99\x82"], [], "--invalid", "bytes", "a.jsonl")
    clean()
    write("c.jsonl", '{"meta": [{"text": "no"}], "x": {"meta": {"text": "no"}}, "text": "no"}')
    refuse("has no string in the text field", *BYTES, "--field", "meta.text", "c.jsonl")
    bad = ['{"text": "cut', '{"text": "a"', '{"text" "a"}', '{"text": "a"} x', '["text"]', '"text"', "{}", '{"text": 3}',
           '{"text": "\\x"}', '{"text": "\\u12g4"}', '{"text": "tab\there"}', '{"text": "a",}', '{"n": 01, "text": "a"}',
           '{"n": 1., "text": "a"}', '{"n": .5, "text": "a"}', '{"n": 1e, "text": "a"}', '{"n": tru, "text": "a"}',
           '{"n": [1,], "text": "a"}', "{'text': 'a'}", '{"other": "a"}', "[" * 600 + "]" * 600, '{"a":' * 600, "\x00",
           '{"text": "a"}{"text": "b"}', '{"text": null}', '{"text": "\\u12', "{", '{"']
    for line in bad:
        write("a.jsonl", '{"text": "good"}\n\n' + line + "\n")
        refuse("a.jsonl line 3: ", *BYTES, "a.jsonl", program=len(TOKENIZE) - 1)
    write("a.jsonl", '{"text": "good"}\n{"text": "truncated file')
    refuse("a.jsonl line 2: is not a JSON object", *BYTES, "a.jsonl")
    good = b'{"text": "' + "a \\u00e4 \\n b".encode() + b'", "n": [1, 2.5e3, true, {"x": null}]}'
    for _ in range(30):  # the sanitizers find no error, whether a mutated line is refused or accepted
        lines = []
        for _ in range(200):
            line = bytearray(good)
            for _ in range(rng.randrange(3)):
                line[rng.randrange(len(line))] = rng.randrange(256)
            lines.append(bytes(line).replace(b"\n", b" "))
        write("a.jsonl", b"\n".join(lines))
        code = subprocess.run([TOKENIZE[-1], *BYTES, "--force", "--invalid", "bytes", "a.jsonl"], capture_output=True)
        check(code.returncode in (0, 65), f"mutated jsonl: {code.returncode} {code.stderr[-500:]}")


def test_long_lines():
    for name, head in (("a.jsonl", b'{"text": "'), ("a.txt", b"")):
        with open(name, "wb") as f:  # 1 GB, sparse: NUL bytes are neither a space nor JSON
            f.write(b"first line\n" if name == "a.txt" else b'{"text": "first"}\n')
            f.write(head)
            f.truncate(1 << 30)
        # With byte tokens a text may be cut anywhere, so only a vocabulary with words refuses a long line of text.
        refuse(f"{name} line 2: ", "--tokenizer", make_bpe() if name == "a.txt" else "bytes", "--out", "out", name)
        os.unlink(name)


def make_bpe():
    """Writes GPT-2's files for a vocabulary of the 256 bytes, a few merges and <|endoftext|>."""
    os.makedirs("bpe", exist_ok=True)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, extra = {}, 0
    for b in range(256):
        letters[b] = chr(b) if b in printable else chr(256 + extra)
        extra += b not in printable
    vocab = {letters[b]: b for b in range(256)}
    merges = [("a", "b"), ("ab", "c"), ("\u0120", "a"), ("i", "j"), ("\u0120a", "b")]
    for a, b in merges:
        vocab[a + b] = len(vocab)
    vocab["<|endoftext|>"] = len(vocab)
    write("bpe/vocab.json", json.dumps(vocab))
    write("bpe/merges.txt", "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    return "bpe"


def test_documents_of_bpe():
    """Every document begins with <|endoftext|>; its other tokens decode to the text; blocks change nothing."""
    bpe = make_bpe()
    vocab = {i: s for s, i in json.load(open("bpe/vocab.json")).items()}
    back, eot = {vocab[b]: b for b in range(256)}, len(vocab) - 1
    documents = [random_text(rng.choice([1, 10, 3000, 200000])) for _ in range(40)]
    write("a.jsonl", "".join(json.dumps({"text": d}) + "\n" for d in documents))
    run("--tokenizer", bpe, "--out", "out", "a.jsonl")
    tokens, decoded = read_split("out", "train"), []
    for t in tokens:
        if t == eot:
            decoded.append(bytearray())
        else:
            decoded[-1] += bytes(back[c] for c in vocab[t])
    check(decoded == [d.encode() for d in documents], "decoding is not the text")
    check(any(vocab[t] == "abc" for t in tokens), "nothing was merged")
    text = "".join(d + " " for d in documents)
    write("a.txt", text)
    run("--tokenizer", bpe, "--out", "one", "a.txt")
    write("b.jsonl", json.dumps({"text": text}) + "\n")
    run("--tokenizer", bpe, "--out", "two", "b.jsonl")
    check(read_split("one", "train") == read_split("two", "train"), "cutting a text into blocks changes its tokens")


def test_end_token():
    """Documents begin with the token that tokenizer_config.json declares; if it declares none, a newline's token
    separates documents."""
    vocabulary = json.load(open(make_bpe() + "/vocab.json"))
    eot = vocabulary.pop("<|endoftext|>")
    write("a.jsonl", '{"text": "one </s>"}\n{"text": "two"}\n')
    write("bpe/vocab.json", json.dumps({**vocabulary, "</s>": eot}))
    for declared in ('"</s>"', '{"content": "</s>", "special": true}', None):
        clean()
        if declared:
            write("bpe/tokenizer_config.json", f'{{"eos_token": {declared}, "added_tokens_decoder": {{"{eot}": {{"content": "</s>"}}}}}}')
        else:
            os.unlink("bpe/tokenizer_config.json")
        said = run("--tokenizer", "bpe", "--out", "out", "a.jsonl")
        check(("declares no eos_token and has no <|endoftext|>: a newline separates" in said) == (not declared), said)
        mark = eot if declared else vocabulary["\u010a"]
        found = [i for i, t in enumerate(read_split("out", "train")) if t == mark]
        check(found == ([0, 9] if declared else [8]), f"{declared}: {found}")


def test_bad_input():
    write("a.txt", "some text\n")
    write("empty.txt", "")
    os.makedirs("void", exist_ok=True)
    for text, args in (("absent.txt: cannot open", ["absent.txt"]), ("no text", ["empty.txt"]), ("no text in void", ["void"]),
                       ("absent_list: cannot open", ["--files-from", "absent_list"]),
                       ("val split", ["--val-fraction", 0.001, "--separator", "zz", "a.txt"])):
        refuse(text, *BYTES, *args)
    if os.geteuid() != 0:
        write("secret.txt", "text")
        os.chmod("secret.txt", 0)
        refuse("secret.txt: cannot open", *BYTES, "--format", "jsonl", "a.txt", "secret.txt")  # at once
    refuse("a.txt: exists and is not a directory", "--tokenizer", "bytes", "--out", "a.txt/out", "a.txt", code=74)
    refuse("absent.txt", "--tokenizer", "bytes", "--out", "new/out", "absent.txt")
    check(not os.path.exists("new"), "a directory for nothing")
    for tokenizer in ("nowhere", "void"):
        refuse(tokenizer, "--tokenizer", tokenizer, "--out", "out", "a.txt")
    for out in (".", "void", "void/", "new/", "./void/."):
        refuse(f"--out {out}: ", "--tokenizer", "bytes", "--out", out, "a.txt", code=64)
    for text, args in (("--tokenizer and --out are missing", "a.txt"), ("--tokenizer is missing", "--out out a.txt"),
                       ("--out is missing", "--tokenizer bytes")):
        refuse(text, *args.split(), code=64)
    for text, words in (("no INPUT", ""), ("unknown option -v", "-v"), ("is unknown", "--val-fraction 0.1 -"),
                        ("did you mean --val-fraction?", "--val-fractoin=0.1 a.txt"), ("--threads '0': ", "--threads 0 a.txt"),
                        ("contradict", "--split val --val-fraction 0.1 a.txt"), ("contradict", "--val-fraction 0.1 --val-every-file 3 a.txt"),
                        ("--separator", "--separator x --format jsonl a.txt"), ("--separator is empty", "--separator= a.txt")):
        refuse(text, *BYTES, *words.split(), code=64, stdin=b"")


def test_options():
    """The parser is the trainer's: --name=value, names with "_", --version, --help of one option; after -- all words
    are inputs."""
    write("--force", "text")
    run("--tokenizer=bytes", "--out=out", "--shard_tokens=4e0", "--", "--force")
    check(read_bytes("out", "train") == b"text", "inputs after --")
    for args, said in ((("--version",), "gns.c "), (("--help", "field"), "--field NAME"), (("-h",), "--separator STRING"), (("--help",), ".jl and .json files"), (("--help",), "--help")):
        shown = run(*args)
        check(said in shown and ("--out" in shown) == (args[0] != "--version" and "field" not in args), f"{args}: {shown}")
    done = subprocess.run(["bash", "-c", '"$0" --help > /dev/full', TOKENIZE[0]], stderr=subprocess.DEVNULL)
    check(done.returncode == 74, f"a full standard output: exit code {done.returncode}")


def test_own_input():
    """No input is replaced or removed, under whatever name it is given, with --force or without."""
    os.makedirs("in")
    os.symlink("../out_train_000000.bin", "in/link.txt")
    for name in ("out_train_000000.bin", "out_train_000003.bin", "out_val_000001.bin.partial"):
        for given in (name, f"./in/../{name}", "-", "in", "list"):
            clean()
            write(name, "some text ")
            write("list", name)
            args = ("--files-from", "list") if given == "list" else (given,)
            with open(name, "rb") as file:
                done = subprocess.run([TOKENIZE[0], *BYTES, "--shard-tokens", "2", "--force", *args], stdin=file, capture_output=True)
            check(done.returncode == (65 if given == "in" and name != os.readlink("in/link.txt")[3:] else 64), f"{name}, {given}: {done}")
            check(open(name).read() == "some text ", f"{name}, given as {given}: it is lost")
    for name in ("out_train_part1.txt", "out_val_1", "out_trains_000000.bin"):
        clean()
        write(name, "some text ")
        run(*BYTES, "--force", name)


def test_two_at_once():
    """If two commands use one prefix, one writes the right shards, the other is refused."""
    texts = [random_text(20000).encode() for _ in range(2)]
    for i, text in enumerate(texts):
        write(f"{i}.txt", text)
    for i in range(25):
        clean()
        both = [subprocess.Popen([TOKENIZE[0], *BYTES, "--shard-tokens", "3000", f"{k}.txt"], stdout=subprocess.DEVNULL,
                                 stderr=subprocess.PIPE) for k in (0, 1)]
        said = [p.communicate()[1].decode() for p in both]
        codes = [p.returncode for p in both]
        check(sorted(codes) == [0, 64], f"exit codes {codes}: {said}")
        check(read_bytes("out", "train") == texts[codes.index(0)] and not leftovers(), f"{codes}: other shards, {leftovers()}")


def run_with_fault(args, **fault):
    environment = dict(os.environ, LD_PRELOAD=os.path.abspath("fault.so"), ASAN_OPTIONS="verify_asan_link_order=0")
    environment.update({f"FAULT_{name.upper()}": str(value) for name, value in fault.items()})
    return subprocess.run([TOKENIZE[0], *map(str, args)], capture_output=True, env=environment)


def test_fault_at_every_call():
    """After a kill or an EIO at any rename, unlink or fsync the same command gives the same bytes."""
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "fault.so", FAULT_SOURCE, "-ldl"], check=True)
    write("a.txt", random_text(3000))
    old = [f"out_{split}_{i:06d}.bin" for split in ("train", "val") for i in range(5)]
    most = 0  # number of calls in a whole run
    for force, action in (((), "kill"), ((), "fail"), (("--force",), "kill")):
        args = [*BYTES, "--shard-tokens", 1000, "--val-fraction", 0.4, *force, "a.txt"]
        clean()
        run(*args)
        want = contents(shards("out"))
        for at in range(1, 1000):
            clean()
            for f in old if force else ():
                write(f, b"old")
            code = run_with_fault(args, at=at, action=action).returncode
            if code or leftovers():
                check(code == -9 or (action == "fail" and code in (0, 74)), f"{action} at {at}: exit code {code}")
                again = run_with_fault(args)
                done = again.returncode == 64  # all shards had their names; only the lock or the last fsync was missing
                check(done or again.returncode == 0, f"{action} at {at}: then {again}")
            check(contents(shards("out")) == want and not leftovers(), f"{action} at {at}: {shards('out')}")
            most = at if code == -9 else most
            if at > most:  # the run made fewer calls
                break
        check(most > 15, f"{most} calls")


def test_existing_output_and_full_disk():
    text = random_text(3000000).encode()
    write("a.txt", text)
    write("b.txt", "new")
    refuse("cannot write", *BYTES, "a.txt", code=74, limit=1000000)
    run(*BYTES, "--shard-tokens", 1000000, "--val-fraction", 0.5, "a.txt")
    before = contents(shards("out"))
    for name, code in (("mine.lock", 74), ("yours_train_000002.bin", 64)):
        write(name, "theirs")
        error = run("--tokenizer", "bytes", "--out", name[:-5].split("_")[0], "--shard-tokens", 1, "b.txt", expect=code)
        check(f"error: {name}: " in error and contents([name]) == {name: b"theirs"}, error)
    error = run(*BYTES, "b.txt", expect=64)
    check("exists" in error and contents(shards("out")) == before, "an old shard was touched")
    run(*BYTES, "--force", "b.txt")
    check(shards("out") == ["out_train_000000.bin"] and read_bytes("out", "train") == b"new", f"left {shards('out')}")


def test_memory():
    """Streams 100 MB of text in little memory."""
    with open("big.txt", "wb") as f:
        piece = random_text(1000000).encode()
        for _ in range(100000000 // len(piece)):
            f.write(piece)
    p = subprocess.Popen([TOKENIZE[0], *BYTES, "--threads", "2", "big.txt"], stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL)
    peak = 0
    while p.poll() is None:  # read VmHWM: getrusage would count inherited memory
        lines = open(f"/proc/{p.pid}/status").read().splitlines()
        peak = max([peak] + [int(line.split()[1]) for line in lines if line.startswith("VmHWM")])
        time.sleep(0.01)
    check(p.returncode == 0 and 1000 < peak < 40000, f"exit code {p.returncode}, {peak} KiB")
    os.unlink("big.txt")


def main():
    global checks, failures
    total = 0
    only = os.environ.get("ONLY")
    print(f"  seed {SEED}")
    for name, test in list(globals().items()):
        if not name.startswith("test_") or (only and only != name):
            continue
        checks = failures = 0
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            os.chdir(directory)
            test()
            os.chdir("/")
        seconds = time.monotonic() - start
        word = "FAIL" if failures or not checks else "PASS"
        print(f"{word} test_tokenize/{name} {seconds:.2f}s" + (f": {failures} of {checks} checks" if failures else ""), flush=True)
        total += word == "FAIL"
    return 1 if total else 0


sys.exit(main())
