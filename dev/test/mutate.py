#!/usr/bin/env python3
"""The mutation check: small changes to the CPU product code, each of which a test must notice.

    mutate.py list TREE [--count N] [--also OTHER_TREE] [--files PATTERN] [--except PATTERN] > mutants.json
    mutate.py run TREE mutants.json --results FILE [--first FILE] [--jobs 2]
    mutate.py compare BEFORE.json AFTER.json [--count 150]

A mutant is the tokens of one statement or condition, without comments and blanks, and the tokens that replace them.
Its place is not part of it: the same mutants are found in another tree, with files moved, functions renamed, lines
wrapped otherwise. `list` takes only texts that stand once in TREE. It chooses by a hash of the text and --seed, takes
turns among the files, and takes at most two of a function. --also takes only what stands in another tree too; without
it, list more than you need: some texts change.

`run` copies TREE, builds it with -O1, and asks gcov which C test executes which line. Then it applies one mutant at a
time in a scratch copy, rebuilds, and runs tests until one fails or exceeds its time limit: first those that execute the
mutant's line, the quickest first, then those that execute its function. If all pass, same_runs.py compares the results of
training runs with those of the unchanged program; that is counted apart, for it is no test. A mutant ends as
    killed          a test failed; `by` names it
    only same_runs  no test failed, but a training run has other results
    survived
    no build        the compiler refused it
    not found       the text is not in this tree, or more than once
TREE itself is never changed. As root, tests run as the user nobody, because a mutant may delete or kill anything. Scripts
and the slowest tests (--without) are left out. FILE is written after each mutant; what it holds is not run again, so an
interrupted run continues with the same command. --first FILE, results of another tree, says which test to try first.

To compare a tree with the one before it, with the mutants.json and before.json made there:
    nice dev/test/mutate.py run NEW_TREE mutants.json --results after.json --first before.json --count 155 --work /dev/shm
    dev/test/mutate.py compare before.json after.json
`compare` takes the first 150 mutants that ran in both trees. Its exit code is 1 if there are fewer, or if the tests kill
fewer after than before.
"""
import argparse
import bisect
import collections
import concurrent.futures
import fnmatch
import glob
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
PRODUCT = ["train_gpt2.c", "llmc/*.c", "llmc/*.h"]  # * also matches /
NOT_PRODUCT = ["*/cuda/*"]
SLOWEST = ["test_crash", "test_crash_ranks"]
CASES = ["fixed", "odd_*", "head_size_64", "long_row", "short_rows", "gns_*", "linear*", "inverse*", "wsd", "grad_clip",
         "recompute*", "ramp_linear", "ramp_seesaw", "ramp_gns*", "ramp_replay", "three_ranks", "resume*", "keep_best",
         "from_*", "eval_only", "hellaswag", "sample*", "batch_no*", "token_*", "check*"]  # of same_runs.py

# ----------------------------------------------------------------------------------------------------------------------
# Reading C

TOKEN = re.compile(r"""
    (?P<skip>\s+|//[^\n]*|/\*.*?\*/|^[ \t]*\#(?:[^\n\\]|\\.)*)
  | (?P<token>"(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*' | \.?\d(?:[eEpP][+-]|[\w.])* | \w+
  | <<=|>>=|\.\.\.|->|\+\+|--|<<|>>|[<>=!+\-*/%&|^]=|&&|\|\| | .)""", re.VERBOSE | re.DOTALL | re.MULTILINE)
Token = collections.namedtuple("Token", "text begin end line spaced function")
KEYWORDS = {"if", "for", "while", "switch", "return", "sizeof", "do", "else", "case"}


def read_tokens(path):
    """The tokens of a file, each with the function that it is in, or None. spaced: with a blank on both sides."""
    with open(path, encoding="utf-8") as f:
        text = f.read()
    tokens, function, depth, inside, line, counted = [], None, 0, 0, 1, 0
    for match in TOKEN.finditer(text):
        if match.lastgroup == "skip":
            continue
        word = match.group()
        line += text.count("\n", counted, match.start())
        counted = match.start()
        if word == "{":
            depth += 1
            if not function and tokens and tokens[-1].text == ")":
                function, inside = called_name(tokens), depth
        spaced = text[match.start() - 1:match.start()].isspace() and text[match.end():match.end() + 1].isspace()
        tokens.append(Token(word, match.start(), match.end(), line, spaced, function))
        if word == "}":
            if function and depth == inside:
                function = None
            depth -= 1
    return text, tokens


def called_name(tokens):
    """The name before the parentheses that close at the end of `tokens`."""
    depth = 0
    for i in range(len(tokens) - 1, 0, -1):
        depth += (tokens[i].text == ")") - (tokens[i].text == "(")
        if depth == 0:
            return tokens[i - 1].text
    return None


def product_files(tree, patterns, excluded):
    for directory, folders, names in os.walk(tree):
        folders[:] = sorted(f for f in folders if f not in ("build", ".git"))
        for name in sorted(names):
            path = os.path.relpath(os.path.join(directory, name), tree)
            if any(fnmatch.fnmatchcase(path, p) for p in patterns) and \
                    not any(fnmatch.fnmatchcase(path, p) for p in excluded):
                yield path


class Source:
    """All product files as one text of tokens with single blanks between, to find mutants in."""

    def __init__(self, tree, patterns=(), excluded=()):
        self.files = {path: read_tokens(os.path.join(tree, path))
                      for path in product_files(tree, patterns or PRODUCT, [*NOT_PRODUCT, *excluded])}
        self.joined, self.starts = {}, {}
        for path, (_, tokens) in self.files.items():
            self.joined[path] = " " + " ".join(t.text for t in tokens) + " "
            at, self.starts[path] = 0, []
            for t in tokens:
                self.starts[path].append(at)
                at += len(t.text) + 1

    def find(self, text, function=None):
        """[(path, first token, end)]; where there are several, only those in this function."""
        found, count = [], text.count(" ") + 1
        for path, joined in self.joined.items():
            at = joined.find(f" {text} ")
            while at >= 0:
                first = bisect.bisect_left(self.starts[path], at)
                found.append((path, first, first + count))
                at = joined.find(f" {text} ", at + 1)
        same = [f for f in found if self.files[f[0]][1][f[1]].function == function]
        return same if len(found) > 1 and same else found


# ----------------------------------------------------------------------------------------------------------------------
# Choosing mutants

SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&", "+": "-", "-": "+",
         "*": "/", "/": "*", "%": "/", "<<": ">>", ">>": "<<", "+=": "-=", "-=": "+=", "*=": "/=", "/=": "*=",
         "size_max": "size_min", "size_min": "size_max", "fmax": "fmin", "fmin": "fmax", "fmaxf": "fminf",
         "true": "false", "false": "true"}
# Messages, and code that a rewrite changes or that no result depends on.
UNSUITABLE = re.compile(r"\b(engine_\w+|\w*error\w*|FAIL|assert|\w*printf|fput\w|hint|omp_\w+|unlink|kill|rmdir|raise)\b"
                        r"|\"[^\"]* [^\"]*\"|\bthreads?\b")


def matching(words, open_at):
    depth = 0
    for i in range(open_at, len(words)):
        depth += (words[i] == "(") - (words[i] == ")")
        if depth == 0:
            return i
    return -1


def changes(words, spaced):
    """[(operator, changed words)] of one statement or condition."""
    for i, word in enumerate(words):
        if word in SWAPS and (word.isidentifier() or spaced[i]):
            yield word + " -> " + SWAPS[word], words[:i] + [SWAPS[word]] + words[i + 1:]
        elif re.fullmatch(r"\d{1,9}", word) and words[i - 1] not in ("case", "return", "{"):
            yield "constant + 1", words[:i] + [str(int(word) + 1)] + words[i + 1:]
        elif re.fullmatch(r"\d+\.\d*(e-?\d+)?f?|\d+e-?\d+f?", word):
            factor = "1.1f" if word.endswith("f") else "1.1"
            new = f"( {factor} * {word} )" if float(word.rstrip("f")) else "1.0"
            yield "constant * 1.1", words[:i] + [new] + words[i + 1:]
    if words[0] == "if":
        end = matching(words, 1)
        if end > 0:
            yield "negated", words[:1] + ["(", "!"] + words[1:end + 1] + [")"] + words[end + 1:]
            if words[end + 1:end + 2] in (["return"], ["break"], ["continue"]):
                yield "exit removed", words[:1] + ["(", "0", "&&"] + words[1:end + 1] + [")"] + words[end + 1:]
    called = words[1:2] == ["("] and matching(words, 1) == len(words) - 2
    assigned = re.match(r"(\w+|\* )\w*( (\.|->) \w+| \[ [^=]* \])* [+\-*/|&]?= ", " ".join(words) + " ")
    if words[-1] != ";" or words.count(";") > 1 or words[0] in KEYWORDS:
        return
    if called and words[0].endswith(("TRY", "TRY_GOTO")):
        yield "check removed", ["(", "void", ")", *words[1:]]
    elif called or assigned:
        yield "statement removed", [";"]


def statements(tokens):
    """Of each line of a function that can stand for itself: its tokens, without braces and else."""
    by_line = collections.defaultdict(list)
    for t in tokens:
        if t.function:
            by_line[t.line].append(t)
    for line in by_line.values():
        while line and line[0].text in ("}", "else"):
            line = line[1:]
        while line and line[-1].text == "{":
            line = line[:-1]
        words = [t.text for t in line]
        balanced = all(words.count(a) == words.count(b) for a, b in ("()", "[]", "{}"))
        condition = words and words[0] in ("if", "while", "for") and matching(words, 1) == len(words) - 1
        whole = words and (words[-1] == ";" or condition)
        if balanced and whole and len(words) >= 6:
            yield line


def list_mutants(tree, count, also, seed, patterns, excluded):
    source = Source(tree, patterns, excluded)
    trees = [Source(t) for t in (tree, *also)]
    rank = lambda text: hashlib.sha256(f"{seed} {text}".encode()).hexdigest()
    queues = []
    for path, (_, tokens) in source.files.items():
        functions = collections.defaultdict(list)
        for line in statements(tokens):
            text = " ".join(t.text for t in line)
            if UNSUITABLE.search(text) or line[0].function == "main" or any(len(t.find(text)) != 1 for t in trees):
                continue
            options = list(changes([t.text for t in line], [t.spaced for t in line]))
            some = [o for o in options if o[0] != "statement removed"]
            if options and (some or rank(text) < "4"):  # removals would be the most
                options = some or options
                operator, words = min(options, key=lambda o: rank(text + o[0] + " ".join(o[1])))
                after = " ".join(words)
                functions[line[0].function].append({"id": rank(text + after)[:10], "function": line[0].function,
                                                    "operator": operator, "before": text, "after": after, "file": path})
        two = [sorted(f, key=lambda m: m["id"])[:2] for f in functions.values()]
        queues.append(sorted((m for f in two for m in f[:1]), key=lambda m: m["id"]) +
                      sorted((m for f in two for m in f[1:]), key=lambda m: m["id"]))
    chosen = []
    for turn in range(max(map(len, queues))):
        chosen += sorted((q[turn] for q in queues if turn < len(q)), key=lambda m: m["id"])
    return chosen[:count]


# ----------------------------------------------------------------------------------------------------------------------
# Building and running

NOBODY = 65534
PYTHON = "/usr/bin/python3" if os.geteuid() == 0 and os.path.exists("/usr/bin/python3") else sys.executable  # nobody's
EXTRA = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
ENVIRONMENT = {**{k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "GNS_LONG")},
               "GNS_SEED": "1", "GOMP_SPINCOUNT": "1000", "OMPI_MCA_mpi_yield_when_idle": "1",
               "OMPI_MCA_btl": "self,vader", "PYTHONDONTWRITEBYTECODE": "1"}


def build(tree, targets, flags="-O1", jobs=1, more=()):
    """True if make succeeds; its output is in TREE/make.log."""
    with open(os.path.join(tree, "make.log"), "wb") as log:
        return subprocess.run(["make", "-s", f"-j{jobs}", *more, f"CFLAGS={flags}", *targets], cwd=tree, stdout=log,
                              stderr=log, env=ENVIRONMENT).returncode == 0


def run_limited(command, tree, limit, temporary, build_directory):
    """(exit code, output, seconds) of a command that is killed, with all that it started, after `limit` seconds."""
    start = time.time()
    shutil.rmtree(temporary, ignore_errors=True)
    os.makedirs(temporary)
    os.chmod(temporary, 0o777)
    environment = {**ENVIRONMENT, "TMPDIR": temporary, "HOME": temporary, "GNS_BUILD": build_directory}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=tree, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment,
                                   start_new_session=True, **EXTRA)
        code = wait_for(process, limit)
        log.seek(0)
        output = log.read().decode(errors="replace")
    shutil.rmtree(temporary, ignore_errors=True)
    return code, output, time.time() - start


def wait_for(process, limit):
    """Its exit code, None after `limit` seconds. Its group is killed before it is reaped: nobody else has its id yet."""
    end = time.time() + limit
    while not (over := os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and time.time() < end:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    code = process.wait()
    return code if over else None


def failed_by(code, output):
    """Why a test counts as failed, or None."""
    if code is None:
        return "time limit"
    match = re.search(r"^FAIL (\S+)", output, re.MULTILINE)
    if match:
        return match.group(1)
    return None if code in (0, 77) else f"exit code {code}"


class Laboratory:
    def __init__(self, tree, work, without, jobs):
        self.work, self.jobs, self.without = work, jobs, without
        self.plain, self.coverage = os.path.join(work, "plain"), os.path.join(work, "coverage")
        for copy in (self.plain, self.coverage):
            shutil.copytree(tree, copy, symlinks=True, ignore=shutil.ignore_patterns("build", ".git", "runs"))
        self.build_directory = None
        self.tests, self.seconds = [], {}  # paths in the tree without .c; of the unchanged tree
        self.lines = collections.defaultdict(set)  # (path, line): tests that execute it
        self.known_lines = collections.defaultdict(set)  # path: lines that make code
        self.function_tests = collections.defaultdict(set)

    def prepare(self):
        self.build_all(self.plain, "-O1")
        self.build_all(self.coverage, "-O1 --coverage")
        subprocess.run(["chmod", "-R", "a+rwX", self.coverage], check=True)
        for test in list(self.tests):
            self.measure(test)
        self.reference = os.path.join(self.work, "reference")
        subprocess.run(self.same_runs(self.plain, "--keep", self.reference), check=True, stdout=subprocess.DEVNULL,
                       env=ENVIRONMENT)
        subprocess.run(["chmod", "-R", "a+rwX", self.reference], check=True)
        for slot in range(self.jobs):
            subprocess.run(["cp", "-a", self.plain, os.path.join(self.work, f"slot{slot}")], check=True)

    def build_all(self, tree, flags):
        if not build(tree, ["train_gpt2", "data/tokenize"], flags, self.jobs):
            sys.exit(f"error: {tree} does not build, see make.log there")
        trainer = os.path.realpath(os.path.join(tree, "train_gpt2"))
        self.build_directory = os.path.relpath(os.path.dirname(trainer), os.path.realpath(tree))
        sources = glob.glob(os.path.join(tree, "dev", "test", "**", "*.c"), recursive=True)
        programs = sorted(os.path.relpath(s, tree)[:-2] for s in sources if not os.path.basename(s).startswith("fuzz_"))
        build(tree, [os.path.join(self.build_directory, p) for p in programs], flags, self.jobs, more=["-k"])
        self.tests = [p for p in programs if os.path.basename(p).startswith("test_")
                      and os.path.basename(p) not in self.without
                      and os.path.exists(os.path.join(tree, self.build_directory, p))]

    def run_test(self, tree, command, limit, slot):
        return run_limited(command, tree, limit, os.path.join(self.work, f"tmp_{slot}"), self.build_directory)

    def same_runs(self, tree, *options):
        """The command that compares this tree's program with itself, or with what --reuse names."""
        only = [word for case in CASES for word in ("--only", case)]
        return [PYTHON, os.path.join(HERE, "same_runs.py"), *[os.path.join(tree, "train_gpt2")] * 2, *only, *options]

    def measure(self, test):
        """How long a test takes, and which lines and functions it executes."""
        data = glob.glob(os.path.join(self.coverage, "build", "**", "*.gcda"), recursive=True)
        for path in data:
            os.remove(path)
        command = [os.path.join(self.build_directory, test)]
        code, output, self.seconds[test] = self.run_test(self.coverage, command, 600, "coverage")
        if failed_by(code, output) or code == 77:
            print(f"left out: {test}: {failed_by(code, output) or 'skipped'}", flush=True)
            self.tests.remove(test)
            return
        data = glob.glob(os.path.join(self.coverage, "build", "**", "*.gcda"), recursive=True)
        out = subprocess.run(["gcov", "--json-format", "--stdout", *data], cwd=self.coverage, stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL).stdout
        for report in out.splitlines():
            for file in json.loads(report)["files"]:
                path = os.path.normpath(file["file"])
                for line in file["lines"]:
                    self.known_lines[path].add(line["line_number"])
                    if line["count"]:
                        self.lines[path, line["line_number"]].add(test)
                        self.function_tests[path, line.get("function_name")].add(test)

    def tests_for(self, path, line, function):
        """Those that execute the line first, the quickest first."""
        known = sorted(self.known_lines[path])
        at = bisect.bisect_right(known, line) - 1
        direct = self.lines[path, known[at]] if at >= 0 else set()
        quick = lambda tests: sorted(tests, key=lambda t: self.seconds[t])
        return quick(direct) + quick(self.function_tests[path, function] - direct)

    def judge(self, mutant, place, source, slot, first):
        """Runs the tests on a mutant in a scratch copy. Returns (status, by)."""
        tree = os.path.join(self.work, f"slot{slot}")
        path, begin, end = place
        text, tokens = source.files[path]
        function = tokens[begin].function
        changed = text[:tokens[begin].begin] + mutant["after"] + text[tokens[end - 1].end:]
        full = os.path.join(tree, path)
        try:
            with open(full, "w", encoding="utf-8") as f:
                f.write(changed)
            if not build(tree, ["train_gpt2"]):
                return "no build", None
            tests = self.tests_for(path, tokens[begin].line, function)
            likely = [t for t in tests if os.path.basename(t) == first]
            tests = likely + [t for t in tests if t not in likely]
            for i, size in ((0, 1), (1, 3), (4, 100)):
                some = tests[i:i + size]
                if some and not build(tree, [os.path.join(self.build_directory, t) for t in some]):
                    return "no build", None
                for test in some:
                    why = self.why_failed(tree, test, slot)
                    if why:
                        return "killed", f"{os.path.basename(test)}: {why}"
            return self.compare_runs(tree, slot)
        finally:
            with open(full, "w", encoding="utf-8") as f:
                f.write(text)

    def why_failed(self, tree, test, slot):
        """A failure counts if it repeats: the machine may be busy."""
        for attempt in range(2):
            limit = 5 * self.seconds[test] + 10
            code, output, _ = self.run_test(tree, [os.path.join(self.build_directory, test)], limit, slot)
            why = failed_by(code, output)
            if not why or code is None:
                break
        return why

    def compare_runs(self, tree, slot):
        kept = os.path.join(self.work, f"after{slot}", "runs")
        shutil.rmtree(os.path.dirname(kept), ignore_errors=True)
        os.makedirs(os.path.dirname(kept))
        os.chmod(os.path.dirname(kept), 0o777)
        command = self.same_runs(tree, "--reuse", self.reference, "--keep", kept, "--stop")
        code, output, _ = self.run_test(tree, command, 300, slot)
        why = failed_by(code, output)
        return ("only same_runs", why) if why else ("survived", None)


class Results:
    """What became of each mutant, in a file that is replaced after each."""

    def __init__(self, path, mutants):
        self.path, self.mutants, self.lock = path, mutants, threading.Lock()
        self.by_id = {m["id"]: m for m in read_json(path)} if os.path.exists(path) else {}

    def note(self, mutant, status, by=None, seconds=0.0, path=None):
        with self.lock:
            self.by_id[mutant["id"]] = {**mutant, "status": status, "by": by, "seconds": round(seconds, 1), "file": path}
            with open(self.path + ".new", "w", encoding="utf-8") as f:
                json.dump(list(self.by_id.values()), f, indent=1)
            os.replace(self.path + ".new", self.path)
            done = sum(m["id"] in self.by_id for m in self.mutants)
            print(f"{done:4d}/{len(self.mutants)} {mutant['id']} {status}{': ' + by if by else ''}  "
                  f"{mutant['before']}  ({mutant['operator']})", flush=True)


def read_json(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def find_mutants(mutants, source, results, count):
    """{path: [(mutant, place)]} of those still to run. By file, because the next mutant of a file compiles one file."""
    found = collections.defaultdict(list)
    known = lambda m: results.by_id.get(m["id"], {}).get("status", "not found") != "not found"
    for mutant in mutants:
        if sum(map(len, found.values())) + sum(map(known, mutants)) >= (count or len(mutants)):
            break
        if mutant["id"] not in results.by_id:
            places = source.find(mutant["before"], mutant["function"])
            if len(places) == 1:
                found[places[0][0]].append((mutant, places[0]))
            else:
                results.note(mutant, "not found")
    return found


def run_mutants(laboratory, found, source, results, first):
    files = queue.Queue()
    for path in sorted(found, key=lambda p: -len(found[p])):
        files.put(path)

    def work_off(slot):
        while True:
            try:
                path = files.get_nowait()
            except queue.Empty:
                return
            for mutant, place in found[path]:
                start = time.time()
                status, by = laboratory.judge(mutant, place, source, slot, first.get(mutant["id"]))
                results.note(mutant, status, by, time.time() - start, path)

    with concurrent.futures.ThreadPoolExecutor(laboratory.jobs) as pool:
        list(pool.map(work_off, range(laboratory.jobs)))


def run(arguments):
    mutants = read_json(arguments.mutants)
    first = {m["id"]: (m["by"] or "").partition(":")[0] for m in read_json(arguments.first)} if arguments.first else {}
    results = Results(arguments.results, mutants)
    tree = os.path.abspath(arguments.tree)
    source = Source(tree)
    found = find_mutants(mutants, source, results, arguments.count)
    work = tempfile.mkdtemp(prefix="gns_mutate_", dir=arguments.work)
    os.chmod(work, 0o755)
    try:
        laboratory = Laboratory(tree, work, arguments.without or SLOWEST, arguments.jobs)
        start = time.time()
        laboratory.prepare()
        print(f"{len(laboratory.tests)} tests, prepared in {time.time() - start:.0f} s", flush=True)
        run_mutants(laboratory, found, source, results, first)
    finally:
        if not arguments.keep:
            shutil.rmtree(work, ignore_errors=True)
    count = collections.Counter(r["status"] for r in results.by_id.values())
    print(", ".join(f"{n} {status}" for status, n in count.most_common()))
    return 0


def compare(arguments):
    before, after = read_json(arguments.before), {m["id"]: m for m in read_json(arguments.after)}
    ran = lambda m: m and m["status"] not in ("not found", "no build")
    both = [(m, after[m["id"]]) for m in before if ran(m) and ran(after.get(m["id"]))][:arguments.count]
    killed = [sum(pair[side]["status"] == "killed" for pair in both) for side in (0, 1)]
    runs = [sum(pair[side]["status"] == "only same_runs" for pair in both) for side in (0, 1)]
    for old, new in both:
        if old["status"] != new["status"]:
            print(f"{old['id']} {old['status']} before, {new['status']} after: {new['file']}: {new['before']} "
                  f"({new['operator']}) {old['by'] or new['by']}")
    print(f"{len(both)} mutants in both trees; killed by tests: {killed[0]} before, {killed[1]} after; "
          f"noticed only by same_runs: {runs[0]} before, {runs[1]} after")
    return 0 if len(both) == arguments.count and killed[1] >= killed[0] else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    lister = commands.add_parser("list")
    lister.add_argument("tree")
    lister.add_argument("--count", type=int, default=150)
    lister.add_argument("--also", action="append", default=[], metavar="TREE", help="only what stands in this tree as well")
    lister.add_argument("--seed", default="1")
    lister.add_argument("--files", action="append", default=[], metavar="PATTERN", help="only of these files")
    lister.add_argument("--except", action="append", default=[], dest="excluded", metavar="PATTERN",
                        help="none of these files")
    runner = commands.add_parser("run")
    runner.add_argument("tree")
    runner.add_argument("mutants")
    runner.add_argument("--results", required=True, metavar="FILE")
    runner.add_argument("--count", type=int, help="stop when this many of the list have been found")
    runner.add_argument("--first", metavar="FILE", help="results of another tree")
    runner.add_argument("--jobs", type=int, default=2)
    runner.add_argument("--without", action="append", metavar="TEST", help=f"leave out this test [{' '.join(SLOWEST)}]")
    runner.add_argument("--work", metavar="DIR", help="where scratch copies lie, about 200 MB each [TMPDIR]")
    runner.add_argument("--keep", action="store_true", help="keep the scratch copies")
    comparer = commands.add_parser("compare")
    comparer.add_argument("before")
    comparer.add_argument("after")
    comparer.add_argument("--count", type=int, default=150)
    arguments = parser.parse_args()
    if arguments.command == "list":
        mutants = list_mutants(arguments.tree, arguments.count, arguments.also, arguments.seed, arguments.files,
                               arguments.excluded)
        print(json.dumps(mutants, indent=1))
        return 0
    return run(arguments) if arguments.command == "run" else compare(arguments)


if __name__ == "__main__":
    sys.exit(main())
