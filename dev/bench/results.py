#!/usr/bin/env python3
"""Collects the figures of dev/bench/results.sh: from logs to a JSON file (record), from JSON files to dev/RESULTS.md (draw).

    results.py record PART LOGS OUT.json VERSION_LINE MACHINE        LOGS/commands: "NAME<tab>COMMAND" per log
    results.py draw DIRECTORY PAGE.md
"""

import datetime
import json
import os
import re
import sys

PARTS = {"gpu": "One GPU", "ranks": "Several GPUs", "cpu": "CPU", "peers": "Other programs, for comparison"}

# (pattern, what, figure): a line of a log that matches `pattern` gives `what` and `figure`. {1} is the pattern's first group.
LINES = [
    # bench_engine
    (r"^(?:gns )?([\w-]+) +([\d.]+) ms a step .*?, +(\d+) tok/s, .*MFU ([\d.]+)%", "{log}, {1}", "{3} tok/s, MFU {4}%"),
    (r"^(?:gns )?([\w-]+) +([\d.]+) ms a step .*?, +(\d+) tok/s", "{log}, {1}", "{3} tok/s"),
    (r"^(?:gns )?([\w-]+) against (?:gns )?([\w-]+): (\S+% \+- \S+%) of a step's time", "{log}, {1} against {2}", "{3} of a step's time"),
    (r"^logits after (\d+) tokens: ([\d.]+) ms, with keys and values in memory ([\d.]+) ms: ([\d.]+) times",
     "{log}: a token after {1} others", "{3} ms, {4} times as fast as recomputed"),
    # bench_kernels
    (r"^(attention (?:forward|backward)\S*) +\d+ +([\d.]+) us .*?(\d+) TFLOP/s", "{log}: {1}", "{2} us, {3} TFLOP/s"),
    # --dry-run
    (r"^ +([\d.]+) ms, ([\d,]+) tok/s, MFU ([\d.]+)%", "{log}, predicted", "{2} tok/s, MFU {3}%"),
    # ranks_check.sh
    (r"^(?:PASS  |SLOW  |FIGURE)   (.{46}\S*) (.*)", "{1}", "{2}"),
    # bench_cpu.sh
    (r"^(.*) peak ([\d.]+) GFLOP/s$", "peak of {1}", "{2} GFLOP/s"),
    (r"^((?:124M|small), \w+): (\d+) tok/s, ([\d.]+)% of the peak", "{1}", "{2} tok/s, {3}% of the peak"),
    (r"^((?:124M|small), \w+), torch.compile ([01]): PyTorch (\S+): .* (\d+) tok/s", "{1}, PyTorch {3}, torch.compile {2}", "{4} tok/s"),
    (r"^(kernels .*); step: .* ([\d.]+)% of the peak, ([\d.]+)% of the roofline", "{section}", "{2}% of the peak, {3}% of the roofline"),
    # bench_save
    (r"^(\S.*?) {2,}([\d.]+ \S*) +\(quartiles ([\d.]+) to ([\d.]+)", "a checkpoint of 124M: {1}", "{2} ({3} to {4})"),
]


def figures_of(log, text):
    found, section = [], ""
    for line in text.replace("\r", "\n").split("\n"):
        if line.startswith("== "):
            section = line[3:].split(":")[0]
        for pattern, what, figure in LINES:
            match = re.search(pattern, line)
            if match:
                words = {"log": log.replace("-", " "), "section": section}
                groups = [group or "-" for group in (match[0], *match.groups())]
                figure = re.sub(r"\d{4,}(?= tok/s)", lambda n: f"{int(n[0]):,}", " ".join(figure.format(*groups, **words).split()))
                found.append({"what": what.format(*groups, **words).strip(), "figure": figure})
                break
    return [f for i, f in enumerate(found) if f not in found[:i]]


def record(part, logs, out, version, machine):
    runs = []
    with open(os.path.join(logs, "commands"), encoding="utf-8") as commands:
        for line in commands:
            name, command = line.rstrip("\n").split("\t")
            with open(os.path.join(logs, name + ".log"), encoding="utf-8", errors="replace") as log:
                figures = figures_of(name, log.read())
            if not figures:
                sys.exit(f"error: {logs}/{name}.log: no figure in it. See why that command printed none")
            runs.append({"command": command, "figures": figures})
    result = {"part": part, "build": version, "machine": machine, "date": datetime.date.today().isoformat(), "runs": runs}
    with open(out, "w", encoding="utf-8") as file:
        file.write(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def draw(directory, page):
    lines = ["# Results", "",
             "`make results` writes this page from `dev/results/*.json`, after it has measured what this machine can (`dev/bench/results.sh`).",
             "d12 is GPT-2 124M at 64 rows of 1024 tokens a micro-step, d24 350M at 32, d48 1558M at 16. off, ln and exact are modes of",
             "`--gns`. What was tried and did not help is in [the notes](docs/lab-notes.md)."]
    for part, title in PARTS.items():
        path = os.path.join(directory, part + ".json")
        if not os.path.exists(path):
            continue
        with open(path, encoding="utf-8") as file:
            result = json.load(file)
        lines += ["", f"## {title}", "", f"{result['machine']}; {result['build']}; {result['date']}. {result.get('note', '')}".strip(),
                  "", "| what | figure | command |", "| --- | --- | --- |"]
        for run in result["runs"]:
            for i, figure in enumerate(run["figures"]):
                lines.append(f"| {figure['what']} | {figure['figure']} | {'as above' if i else '`' + run['command'] + '`'} |")
    with open(page, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 7 and sys.argv[1] == "record":
        record(*sys.argv[2:])
    elif len(sys.argv) == 4 and sys.argv[1] == "draw":
        draw(*sys.argv[2:])
    else:
        sys.exit(__doc__)
