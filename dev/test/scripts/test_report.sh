#!/usr/bin/env bash
# scripts/report.py and scripts/critical_batch.py on made-up runs with known answers.
# Skipped if neither build/venv nor python3 has their packages.
set -u
. "$(dirname "$0")/../checks.sh" report

# A run's directory: make_run NAME BATCH STEPS. By eq. 2.11 with S_min = 100 and E_min = 3200 the loss reaches 2 at
# S = 100 + 3200 / BATCH. The noise scale is 4 in the first half and 64 in the second; its lower bound is infinite for some
# steps. b32 has label smoothing: the report is about its loss without it.
make_run() {
    mkdir -p "$work/$1"
    echo '{"program": "x", "options": {"out": "<b>&amp;", "lr": 0.00'"$2"'}}' > "$work/$1/run.json"
    awk -v B="$2" -v N="$3" 'BEGIN {
        S = 100 + 3200 / B
        for (s = 1; s <= N; s++) {
            loss = 4 - 2 * s / S; n = s <= N / 2 ? 4 : 64
            printf "{\"step\": %d, \"tokens\": %d, \"examples\": %d, \"batch\": %d, \"loss\": %.9f, \"lr\": 0.001, ", \
                s, 64 * s * B, s * B, B, B == 32 ? loss + 0.5 : loss
            if (B == 32) printf "\"loss_nll\": %.9f, ", loss
            printf "\"grad_norm\": 1, \"tok_per_s\": 640, \"mfu\": null, \"gns_ln\": %s, \"gns_ln_se\": %s, ", \
                s == 3 ? "null" : n, s < 2 ? "null" : 1
            printf "\"gns_ln_lower\": %s, \"gns_ln_g2\": 1, \"gns_ln_s\": %d", (s > 50 && s < 60) ? "1e308" : 1, n
            if (s % 8 == 1) printf ", \"gns_total\": 9, \"gns_ratio\": 1, \"gns_type_mlp\": 5, \"gns_layer\": [3, null]"
            print "}"
            if (s % 10 == 0) printf "{\"step\": %d, \"tokens\": %d, \"val_loss\": %.9f}\n", s, 64 * s * B, loss
        } }' > "$work/$1/metrics.jsonl"
}
make_run b8 8 560
make_run b32 32 240
make_run b128 128 160
echo '{"step": 560, "tokens": 286720, "hellaswag": 0.25, "hellaswag_norm": 0.3125}' >> "$work/b8/metrics.jsonl"
cat > "$work/b8/run.json" << 'END'
{"program": "x", "options": {"out": "<b>&amp;", "lr": 0.008}, "parts": [
  {"first_step": 1, "ranks": 1, "host": "here", "directory": "/a b", "options": {"lr": 0.01, "prompt": "<i>"}, "command": ["./train_gpt2", "--prompt", "<i>"]},
  {"first_step": 301, "ranks": 4, "host": "there", "directory": "/c", "options": {"lr": 0.008}, "command": ["./train_gpt2", "--steps", "560"]}]}
END
for step in 50 100 150 200 250 300 350 400 450 500 550; do
    echo "{\"step\": $step, \"tokens\": $((512 * step)), \"prompt\": \"a<b\", \"text\": \"a<b and <u>$step\"}"
done > "$work/b8/samples.jsonl"
echo '{"step": 560, "tokens": 286720, "prompt": "@a<b", "text": "so <u>"}' >> "$work/b8/samples.jsonl"

if ! python=$(find_python matplotlib); then
    printf 'SKIP report/%s no Python with matplotlib\n' page errors pairs wrong_fields no_package
else
    begin
    returns 0 "$python" scripts/report.py "$work"/b8 "$work"/b32 "$work"/b128 -o "$work/r.html"
    returns 0 "$python" - "$work/r.html" <<'END'
import re, sys, xml.etree.ElementTree as tree
from html.parser import HTMLParser
text, open_tags, found = open(sys.argv[1]).read(), [], []
class Page(HTMLParser):
    def handle_starttag(self, tag, attributes):
        found.append(tag)
        if tag not in ("meta", "br"): open_tags.append(tag)
        assert not any(n in ("src", "href") and not v.startswith("#") for n, v in attributes), (tag, attributes)
    def handle_endtag(self, tag):
        assert open_tags.pop() == tag, tag
Page().feed(text)
assert not open_tags and found.count("svg") == 6 and found.count("table") == 4, (open_tags, found.count("svg"))
for svg in re.findall("<svg.*?</svg>", text, re.S): tree.fromstring(svg.replace("xlink:", ""))
# The dotted line of an infinite bound runs along the top, without a gap.
noise = next(svg for svg in re.findall("<svg.*?</svg>", text, re.S) if 'aria-label="Gradient noise scale' in svg)
dotted = [re.findall("([ML]) ([0-9.]+) ([0-9.]+)", path) for path, style in
          re.findall('<path d="([^"]*)"[^>]*style="([^"]*)"', noise) if "stroke-dasharray: 0.8," in style]
dotted = [path for path in dotted if len(path) > 4]  # without the key's
assert len(dotted) == 3 and all([p[0] for p in path].count("M") == 1 for path in dotted), dotted
heights = [{round(float(y)) for _, _, y in path} for path in dotted]
assert all(len(ys) == 2 and max(ys) - min(ys) > 50 for ys in heights), heights
cells = [re.findall("<td[^>]*>(.*?)</td>", row) for row in re.findall("<tr.*?</tr>", text)]
assert "cd &#x27;/a b&#x27;\n./train_gpt2 --prompt &#x27;&lt;i&gt;&#x27;</pre>" in text and "steps 301 to 560, " in text
assert "<p class=note>step 560, 286,720 tokens, after @a&lt;b</p><pre>so &lt;u&gt;</pre>" in text and "Coloured" in text
assert "<p class=note>With lr = 0.01, prompt = &lt;i&gt;.</p>" in text and "<p class=note>Changed: lr = 0.008.</p>" in text
assert "steps 1 to 300, " in text and "on there, 4 ranks" in text
shown = [int(n) for n in re.findall("<b>a&lt;b</b> and &lt;u&gt;([0-9]+)</pre>", text)]
assert shown == [50, 100, 200, 250, 350, 400, 500], shown  # eight of twelve, evenly: these, and the last, above
assert next(c for c in cells if len(c) == 8 and c[0] == "b8")[7] == "31.2%"
assert ["options: out"] not in cells and "&lt;b&gt;&amp;amp;" in text
# Equal loss: the highest of the runs' lowest. b8 against b32: 200 / 500 of the steps, 1.6 of the tokens.
losses = next(c for c in cells if len(c) in (7, 8) and c[0] == "b32")[4:6] # training, validation
assert abs(float(losses[0]) - float(losses[1])) < 0.1, losses
saved = next(c for c in cells if len(c) == 7 and c[0] == "b32" and "%" in c[2])
assert saved[2] == "-60.0%" and saved[4] == "+60.0%" and saved[6] == "-60.0%", saved
END
    end page

    begin
    fails() { # WHAT TEXT: report.py on $work/bad exits 65 with one line that has the text, and leaves no page
        returns 65 timeout 60 "$python" scripts/report.py "$work/bad" -o "$work/bad.html"
        check "$1: not one line: $(head -n 2 "$work/log")" one_line "$work/log"
        check "$1: says $(cat "$work/log")" says "$work/log" "$2"
        check "$1: a page is left" [ ! -e "$work/bad.html" ]
    }
    fails "no run" "run.json: No such file or directory; name a run's directory"
    mkdir "$work/bad" && cp "$work/b8/run.json" "$work/bad"
    fails "no metrics" "metrics.jsonl: No such file"
    : > "$work/bad/metrics.jsonl"
    fails "empty" "no step"
    head -n 4 "$work/b8/metrics.jsonl" | head -c -20 > "$work/bad/metrics.jsonl" # the disk is full
    returns 0 "$python" -c 'import sys; sys.path.insert(0, "scripts"); import run_log; print(len(run_log.Run(sys.argv[1]).rows))' "$work/bad"
    check "an unfinished last line is no step: $(cat "$work/log")" [ "$(cat "$work/log")" = 3 ]
    head -n 4 "$work/b8/metrics.jsonl" | head -c -1 > "$work/bad/metrics.jsonl"
    returns 0 "$python" -c 'import sys; sys.path.insert(0, "scripts"); import run_log; print(len(run_log.Run(sys.argv[1]).rows))' "$work/bad"
    check "a whole last line without its end is a step: $(cat "$work/log")" [ "$(cat "$work/log")" = 4 ]
    head -n 4 "$work/b8/metrics.jsonl" | head -c -20 > "$work/bad/metrics.jsonl"
    echo >> "$work/bad/metrics.jsonl"
    fails "cut" "metrics.jsonl line 4: not JSON"
    cp "$work"/b8/* "$work/bad"
    returns 74 "$python" scripts/report.py "$work/b128" -o "$work/none/there.html"
    echo precious > "$work/victim" && ln -s victim "$work/link" && mkfifo "$work/fifo"
    for name in link fifo; do # before it draws
        returns 74 timeout 60 "$python" scripts/report.py "$work/b128" -o "$work/$name"
        check "$name: says $(cat "$work/log")" one_line "$work/log"
        check "$name: no remedy" says "$work/log" "move it away"
        check "$name: written through" [ "$(cat "$work/victim")" = precious ]
    done
    check "the link or the FIFO was replaced" [ -L "$work/link" -a -p "$work/fifo" ]
    if mknod "$work/device" c 1 7 2> /dev/null; then # one that is always full
        returns 74 "$python" scripts/report.py "$work/b128" -o "$work/device"
        check "a device was replaced" [ -c "$work/device" ]
    fi
    rm "$work/bad/"* && cp "$work"/b8/* "$work/bad" && truncate -s 8G "$work/bad/run.json"
    returns 71 bash -c 'ulimit -v 4000000; exec "$@"' - "$python" scripts/report.py "$work/bad" -o "$work/bad.html"
    check "more than fits into memory: not one line" one_line "$work/log"
    rm "$work/bad/"* && cp "$work"/b8/* "$work/bad" && rm "$work/bad/metrics.jsonl" && mkfifo "$work/bad/metrics.jsonl"
    fails "a FIFO" "metrics.jsonl: not a regular file"
    for unbuffered in 1 ''; do
        for words in "report.py --help" "to_wandb.py $work/b128 --dry-run"; do
            # shellcheck disable=SC2086
            PYTHONUNBUFFERED=$unbuffered "$python" scripts/$words > /dev/full 2> "$work/log"
            code=$?
            check "$words on a full disk: $code, $(cat "$work/log")" [ "$code $(cat "$work/log")" = "74 error: standard output: No space left on device" ]
        done
    done
    "$python" scripts/to_wandb.py "$work/b128" --dry-run <&- >&- 2> "$work/log"
    code=$?
    check "standard output is closed: $code, $(cat "$work/log")" [ $code = 74 -a "$(grep -c '^error: standard output: ' "$work/log")" = 1 ]
    "$python" scripts/report.py "$work/nosuch" <&- >&- 2>&-
    code=$?
    check "nothing is open: $code" [ $code = 65 ]
    returns 0 "$python" scripts/report.py "$work/b128"
    check "of one run: $(cat "$work/log")" [ "$(cat "$work/log")" = "$work/b128/report.html" -a -s "$work/b128/report.html" ]
    returns 64 "$python" scripts/report.py
    check "no run named: not one line" one_line "$work/log"
    end errors

    # Three pairs of runs by hand, ten steps of 100 tokens a second apart, validated at every fifth; and one that repeats b8.
    begin
    pair() { # NAME FIRST MIDDLE LAST: validation losses after steps 5, 10 and 15
        mkdir -p "$work/$1" && echo '{"options": {}}' > "$work/$1/run.json"
        awk -v first="$2" -v middle="$3" -v last="$4" 'BEGIN { for (s = 1; s <= 15; s++) {
            printf "{\"step\": %d, \"tokens\": %d, \"loss\": 5, \"tok_per_s\": 50}\n", s, 100 * s
            if (s % 5 == 0) printf "{\"step\": %d, \"tokens\": %d, \"val_loss\": %g}\n", s, 100 * s, s == 5 ? first : s == 10 ? middle : last } }' > "$work/$1/metrics.jsonl"
    }
    pair base 4 3 2 && pair fast 3.5 2.5 2 && pair below 1.9 1.5 1 && pair 'a$b_{$/run' 2 1.95 1.92
    returns 0 "$python" - "$work" <<'END'
import math, sys
sys.path.insert(0, "scripts"); sys.dont_write_bytecode = True
import report, report_plots as plots
from run_log import Run, common_kind, common_target
def pair(*names):
    runs = [Run(f"{sys.argv[1]}/{name}") for name in names]
    report.label(runs)
    return runs, report.page(runs, None, plots)
runs, page = pair("base", "fast")
# At 3, base crosses at step 10, fast half way from 5 to 10: at 7.5, a quarter less. At 2, both at 15.
losses, saved = plots.savings(runs, "val")
at = min(range(len(losses)), key=lambda i: abs(losses[i] - 3))
want = 100 * (1 - (5 + 5 * (3.5 - losses[at])) / (5 + 5 * (4 - losses[at])))
lines = [axes.lines[1].get_xydata() for axes in plots.draw_savings(runs, "val").axes]
assert len(lines) == 3 and all(abs(line[at][1] - want) < 1e-9 and abs(want - 25) < 1 for line in lines), (want, lines[0][at])
assert math.isnan(lines[0][0][1]) and losses[0] == 4 and abs(lines[0][-1][1]) < 1e-9 and losses[-1] == 2 # fast began below 4
assert "+0.0%" in page and "a validation loss of 2.0000" in page
# below has less than base's best at its first validation: nothing says when it passed it.
runs, page = pair("base", "below")
assert common_kind(runs) == "train" and "saved" in page and "%</td>" not in page, page[page.index("Saved"):][:900]
assert page.count("<svg") == 2 and plots.draw_savings(runs, "val") is None # without the figure
runs, page = pair("below", "a$b_{$/run") # no loss in common; a name that is no formula, and its parent's
assert runs[1].name == "a$b_{$" and "a$b_{$" in page and "<h1>below and a$b_{$" in page and plots.draw_savings(runs, "val") is None
END
    end pairs

    # Every field of every file, wrong in every way: a Fault of 65 in one line, or a page; never a traceback.
    begin
    returns 0 "$python" - "$work" <<'END'
import contextlib, io, json, os, sys, types
sys.path.insert(0, "scripts"); sys.dont_write_bytecode = True
import critical_batch, report, run_log, to_wandb
sys.modules["report_plots"] = types.SimpleNamespace(**{name: lambda *a, **k: "" for name in (
    "svg_of", "draw_loss", "draw_savings", "draw_tests", "gns_source", "draw_gns", "sampled", "draw_layers", "draw_rates")})
work, bad = sys.argv[1], sys.argv[1] + "/wrong"
os.makedirs(bad)
files = {name: [json.loads(line) for line in (open(f"{work}/b8/{name}") if name != "run.json" else [open(f"{work}/b8/{name}").read()])]
         for name in ("run.json", "metrics.jsonl", "samples.jsonl")}
files["run.json"][0] |= {"model": {"parameters": 1}, "train_data": {"tokens": 1}, "engine": "e"}
mains = [(report.main, ["@", "-o", f"{work}/wrong.html"]), (critical_batch.main, ["gain", "@"]), (to_wandb.main, ["@", "--dry-run"])]
with contextlib.suppress(ImportError):
    import to_tensorboard
    mains += [(to_tensorboard.main, ["@"])] if not to_tensorboard.missing else []
def places(value, path=()):
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, path + (key,))
def put(value, path, new):
    if not path: return new
    value = json.loads(json.dumps(value))
    at = value
    for key in path[:-1]: at = at[key]
    at[path[-1]] = new
    return value
refused = 0
for name, lines in files.items():
    lines = lines[:20]
    for path in places(lines[0]):
        for wrong in ("null", "true", '"x"', "[]", '[{"a": 1}]', "9" * 400, "NaN", "-1", "1e999", "1.5", '{"a":' * 5000):
            for of in files:
                with open(f"{bad}/{of}", "w") as file:
                    file.write("".join(json.dumps(line).replace('"@"', wrong) + "\n" for line in
                                       ([put(lines[0], path, "@"), *lines[1:]] if of == name else files[of][:20])))
            for main, arguments in mains:
                sys.argv = ["x", *(word.replace("@", bad) for word in arguments)]
                try:
                    with contextlib.redirect_stdout(io.StringIO()): main()
                except run_log.Fault as fault:
                    refused += 1
                    assert fault.code == 65 and "\n" not in str(fault), (name, path, wrong[:9], fault)
                except Exception as error:
                    raise AssertionError((name, path, wrong[:9], main.__module__)) from error
assert refused > 500, refused
END
    check "$(tail -n 3 "$work/log")" [ ! -s "$work/log" ]
    end wrong_fields

    # Text that is no UTF-8: half a surrogate pair, as an escape and as bytes, and the name of a file.
    begin
    odd=$work/$'odd\xff' && cp -r "$work/b128" "$odd"
    printf '{"step": 9, "text": "one \\ud800, \\ud83d\\ude00; \xed\xa0\x80 two"}\n' > "$odd/samples.jsonl"
    returns 0 "$python" scripts/report.py "$odd" -o "$odd.html"
    check "the sample: $(grep -a 'one .* two' "$odd.html")" says "$odd.html" $'one \xef\xbf\xbd, \xf0\x9f\x98\x80; \xef\xbf\xbd'
    check "its name is not printed" says "$work/log" odd
    end no_text

    begin
    mkdir "$work/hidden" && echo 'raise ImportError("hidden")' > "$work/hidden/matplotlib.py"
    PYTHONPATH=$work/hidden returns 65 "$python" scripts/report.py "$work/b8"
    check "not one line" one_line "$work/log"
    check "package not named" says "$work/log" "pip install matplotlib"
    end no_package
fi

if ! python=$(find_python numpy scipy); then
    printf 'SKIP report/%s no Python with numpy and scipy\n' fit gain venv
    exit $failed
fi

near() { awk -v x="$1" -v y="$2" -v e="$3" 'BEGIN { exit !(x != "" && x - y <= e && y - x <= e) }'; } # X WANTED ERROR
value_of() { awk -v name="$1" '$1 == name { print $3; exit }' "$work/log"; }

begin
returns 0 "$python" scripts/critical_batch.py fit "$work"/b8 "$work"/b32 "$work"/b128 --target 2
check "S_min $(value_of S_min)" near "$(value_of S_min)" 100 0.01
check "E_min $(value_of E_min)" near "$(value_of E_min)" 3200 0.3
check "B_crit $(value_of B_crit)" near "$(value_of B_crit)" 32 0.01
returns 65 "$python" scripts/critical_batch.py fit "$work"/b8 "$work"/b8                # one batch size
returns 65 "$python" scripts/critical_batch.py fit "$work"/b8 "$work"/b32 --target 0.1 # not reached
"$python" -c 'import matplotlib' 2> /dev/null && { # at B_crit, 32 rows, twice both minima
    returns 0 "$python" scripts/critical_batch.py fit "$work"/b8 "$work"/b32 "$work"/b128 --target 2 --plot "$work/knee.svg"
    check "no knee in the plot" says "$work/knee.svg" "B_crit = 32 rows"
}
check "a warning without a schedule" [ -z "$(grep warning "$work/log")" ]
for schedule in cosine wsd; do # at a decaying rate the runs cross the target at different points of the decay
    sed -i 's/"options": {\("lr_schedule": "[a-z]*", \)*"out"/"options": {"lr_schedule": "'$schedule'", "out"/' "$work/b32/run.json"
    returns 0 "$python" scripts/critical_batch.py fit "$work"/b8 "$work"/b32 "$work"/b128 --target 2
    check "$schedule: $(cat "$work/log")" [ "$(grep -cE "^(warning|note): $work/b32: --lr-schedule $schedule" "$work/log")" = 1 ]
done
mkdir "$work/ramp" && cp "$work/b8/run.json" "$work/ramp"
sed '1,9s/"batch": 8/"batch": 4/' "$work/b8/metrics.jsonl" > "$work/ramp/metrics.jsonl"
returns 65 "$python" scripts/critical_batch.py fit "$work"/ramp "$work"/b32
check "a ramp: not named" says "$work/log" "ramp: the batch is not constant"
end fit

# B = 8: a step makes 1 / (1 + 4 / 8) = 2/3, then 1 / (1 + 64 / 8) = 1/9 of an ideal one. With weights 6 and 1,
# gamma = (6 * 2 + 8)^2 / (7 (6 * 4 + 64)) = 400 / 616.
begin
returns 0 "$python" scripts/critical_batch.py gain "$work/b8"
check "gamma: $(grep '^gamma' "$work/log")" near "$(sed -n 's/^gamma.* = //p' "$work/log")" 0.64935 0.0002
# A noise scale that never moves, of LayerNorms and model: nothing to gain, also where c is known late.
mkdir "$work/known_late" && cp "$work/b128/run.json" "$work/known_late"
sed -E 's/"gns_ln_s": [0-9]+/"gns_ln_s": 4/; /"step": ([0-9]|[1-7][0-9]),/!s/"gns_ratio": 1/"gns_ratio": 2.5/' "$work/b128/metrics.jsonl" > "$work/known_late/metrics.jsonl"
returns 0 "$python" scripts/critical_batch.py gain "$work/known_late"
check "late c: $(grep '^gamma' "$work/log")" near "$(sed -n 's/^gamma.* = //p' "$work/log")" 1 0.00005
sed -i 's/gns_ln/gns_no/g' "$work/b32/metrics.jsonl"
returns 65 "$python" scripts/critical_batch.py gain "$work/b32" # no noise scale
end gain

# A copy of the scripts whose build/venv has the package that the calling Python lacks.
begin
mkdir -p "$work/hidden" "$work/copy" && cp -r scripts "$work/copy" && mkdir "$work/b 8" && cp "$work"/b8/* "$work/b 8"
echo 'raise ImportError("hidden")' > "$work/hidden/numpy.py"
without() { (cd "$work/copy" && PYTHONPATH=$work/hidden timeout 60 "$python" scripts/critical_batch.py "$@"); }
venv() { # COMMAND...: makes a build/venv with this Python
    mkdir -p "$work/copy/build/venv/bin" && printf '#!/bin/sh\nexec %s "$@"\n' "$*" > "$work/copy/build/venv/bin/python"
    chmod +x "$work/copy/build/venv/bin/python"
}
returns 65 without gain ../b8
check "no venv: $(cat "$work/log")" says "$work/log" "(hidden): python3 -m venv build/venv && build/venv/bin/pip install numpy"
venv env -u PYTHONPATH "$(command -v "$python")"
returns 0 without gain "../b 8"
check "no gamma: $(cat "$work/log")" grep -q '^gamma' "$work/log"
venv "$(command -v "$python")" # which lacks it too
returns 65 without gain ../b8
check "without pip: $(cat "$work/log")" says "$work/log" "(hidden): python3 -m venv build/venv && build/venv/bin/pip install numpy"
touch "$work/copy/build/venv/bin/pip"
returns 65 without gain ../b8
check "a venv: $(cat "$work/log")" says "$work/log" "(hidden): build/venv/bin/pip install numpy"
check "not one line" one_line "$work/log"
PYTHONPATH=$work/hidden returns 65 "$python" "$work/copy/scripts/critical_batch.py" gain "$work/b8"
check "from elsewhere: $(cat "$work/log")" says "$work/log" "(hidden): $work/copy/build/venv/bin/pip install numpy"
end venv
exit $failed
