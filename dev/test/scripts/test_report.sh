#!/usr/bin/env bash
# Tests scripts/report.py and scripts/critical_batch.py on made-up runs with known answers. Skipped if neither
# build/venv nor python3 has their packages.
set -u
. "$(dirname "$0")/../checks.sh" report
python=$(find_python matplotlib numpy scipy) || skip_suite "no Python with matplotlib, numpy and scipy"
report() { returns "$1" timeout 300 "$python" scripts/report.py "${@:2}"; } # CODE ARGUMENTS...
critical() { returns "$1" "$python" scripts/critical_batch.py "${@:2}"; }  # CODE ARGUMENTS...
bad() { check "$2" refuses "$1" "$2" timeout 300 "$python" scripts/"$3".py "${@:4}"; } # CODE TEXT report|critical_batch ARGUMENTS...

# make_run NAME BATCH STEPS makes a run's directory. The loss reaches 2 at S = 100 + 3200 / BATCH, by eq. 2.11 of
# McCandlish et al. 2018 with S_min = 100 and E_min = 3200. The noise scale is 4 in the first half and 64 in the second;
# its lower bound is infinite for some steps. b32 has label smoothing: the report shows its loss without smoothing.
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
            if (B < 32) printf "\"clipped\": %s, ", s % 16 ? "false" : "true" # others: logs of an older build
            printf "\"gns_ln_lower\": %s", (s > 50 && s < 60) ? "1e308" : 1
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

begin
odd=$work/$'b128\xff' && mv "$work/b128" "$odd" # the name is not valid text
report 0 "$work"/b8 "$work"/b32 "$odd" -o "$work/r.html"
mv "$odd" "$work/b128"
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
assert not open_tags and found.count("svg") == 4 and found.count("table") == 3, (open_tags, found.count("svg"))
for svg in re.findall("<svg.*?</svg>", text, re.S): tree.fromstring(svg.replace("xlink:", ""))
# An infinite bound's dotted line runs along the top without a gap.
noise = next(svg for svg in re.findall("<svg.*?</svg>", text, re.S) if 'aria-label="Gradient noise scale' in svg)
dotted = [re.findall("([ML]) ([0-9.]+) ([0-9.]+)", path) for path, style in
          re.findall('<path d="([^"]*)"[^>]*style="([^"]*)"', noise) if "stroke-dasharray: 0.8," in style]
dotted = [path for path in dotted if len(path) > 4]  # not the legend's line
assert len(dotted) == 3 and all([p[0] for p in path].count("M") == 1 for path in dotted), dotted
heights = [{round(float(y)) for _, _, y in path} for path in dotted]
assert all(len(ys) == 2 and max(ys) - min(ys) > 50 for ys in heights), heights
for part in ("cd &#x27;/a b&#x27;\n./train_gpt2 --prompt &#x27;&lt;i&gt;&#x27;</pre>", "steps 1 to 300, ", "steps 301 to 560, ", "on there, 4 ranks",
             "<p class=note>step 560, 286,720 tokens</p><pre>so &lt;u&gt;</pre>", "Coloured", "b128\ufffd",
             "<p class=note>With lr = 0.01, prompt = &lt;i&gt;.</p>", "<p class=note>Changed: lr = 0.008.</p>", "&lt;b&gt;&amp;amp;"):
    assert part in text, part
shown = [int(n) for n in re.findall("<b>a&lt;b</b> and &lt;u&gt;([0-9]+)</pre>", text)]
assert shown == [50, 100, 200, 250, 350, 400, 500], shown  # eight of twelve, evenly: these seven and the last
# Runs are compared at the highest of their lowest losses. b32 needs 200 steps, b8 500; b32 needs 1.6 times the tokens.
cells = [re.findall("<td[^>]*>(.*?)</td>", row) for row in re.findall("<tr.*?</tr>", text)]
assert next(c for c in cells if len(c) == 9 and c[0] == "b8")[7:] == ["6.25%", "31.2%"] and ["options: out"] not in cells
totals = next(c for c in cells if len(c) in (8, 9) and c[0] == "b32")
assert abs(float(totals[4]) - float(totals[5])) < 0.1 and totals[7] == "-", totals # training, validation, clipped steps
saved = next(c for c in cells if len(c) == 7 and c[0] == "b32" and "%" in c[2])
assert saved[2] == "-60.0%" and saved[4] == "+60.0%" and saved[6] == "-60.0%", saved
END
returns 0 env PYTHONPATH=scripts "$python" -B - "$work" <<'END'
import sys, report_plots, run_log
work = sys.argv[1]
tests = report_plots.draw_rates([run_log.Run(work + "/b8")]).axes[-1]
assert "HellaSwag" in tests.get_title("left") and tests.lines[0].get_marker() == "o", tests.lines[0]  # one measurement
END
end page

without_figures # pages from here to the test `fit`, except one, have no figures

begin
report 0 "$work/b128" && report 0 "$work/b128" # replaces its own page
check "of one run: $(cat "$work/log")" [ "$(cat "$work/log")" = "$work/b128/report.html" -a -s "$work/b128/report.html" ]
end default_place

# Refused input leaves no page.
begin
bad=$work/bad/metrics.jsonl
broken() { bad "$1" "$2" report "$work/bad" -o "$work/bad.html"; } # CODE TEXT
broken 65 "run.json: No such file or directory; name a run's directory"
mkdir "$work/bad" && cp "$work/b8/run.json" "$work/bad"
broken 65 "metrics.jsonl: No such file"
: > "$bad" && broken 65 "no step"
head -n 4 "$work/b8/metrics.jsonl" | head -c -20 > "$bad" && echo >> "$bad" && broken 65 "metrics.jsonl line 4: not JSON"
for want in "3 -20" "3 -1" "4 -0"; do # STEPS CUT: the last line is unfinished (a full disk), or lacks only its newline
    head -n 4 "$work/b8/metrics.jsonl" | head -c "${want#* }" > "$bad"
    returns 0 env PYTHONPATH=scripts "$python" -B -c 'import sys, run_log; print(len(run_log.Run(sys.argv[1]).rows))' "$work/bad"
    check "$want: $(cat "$work/log")" [ "$(cat "$work/log")" = "${want% *}" ]
done
for line in '{"step": 1}' '[1]'; do
    echo "$line" > "$bad" && broken 65 "metrics.jsonl line 1: not an object with step, tokens"
done
check "a page is left" [ ! -e "$work/bad.html" ]
bad 74 "No such file or directory; choose another" report "$work/b128" -o "$work/none/there.html"
bad 64 "arguments are required" report
bad 64 "argument --target: invalid number value: 'nan'" report "$work/b128" --target nan
echo precious > "$work/victim" && ln -s victim "$work/link" && mkfifo "$work/fifo"
for name in victim link fifo; do bad 74 "choose another place" report "$work/b128" -o "$work/$name"; done # /dev/stdout is a link
check "a file of others, the link or the FIFO was replaced" [ -L "$work/link" -a -p "$work/fifo" -a "$(cat "$work/victim")" = precious ]
"$python" scripts/to_wandb.py "$work/b128" --dry-run > /dev/full 2> "$work/log"
code=$?
check "on a full disk: $code, $(cat "$work/log")" [ "$code $(grep -c "^error: standard output: No space.*; choose another" "$work/log")" = "74 1" ]
mkdir "$work/hidden" && echo 'raise ImportError("hidden")' | tee "$work/hidden/matplotlib.py" > "$work/hidden/numpy.py"
PYTHONPATH=$work/hidden bad 65 "-m pip install matplotlib" report "$work/b8"
end errors

# Fifteen steps of 100 tokens, two seconds apart, validated at every fifth step. Run `below` starts below the best loss
# of run `base`. A run in a directory run/ gets its parent's name, here a name with characters of formulas.
begin
pair() { # NAME FIRST MIDDLE LAST: validation losses after steps 5, 10 and 15
    mkdir -p "$work/$1" && echo '{"options": {}}' > "$work/$1/run.json"
    awk -v first="$2" -v middle="$3" -v last="$4" 'BEGIN { for (s = 1; s <= 15; s++) {
        printf "{\"step\": %d, \"tokens\": %d, \"loss\": 5, \"tok_per_s\": 50}\n", s, 100 * s
        if (s % 5 == 0) printf "{\"step\": %d, \"tokens\": %d, \"val_loss\": %g}\n", s, 100 * s, s == 5 ? first : s == 10 ? middle : last } }' > "$work/$1/metrics.jsonl"
}
pair base 4 3 2 && pair fast 3.5 2.5 2 && pair below 1.9 1.5 1 && pair 'a$b_{$/run' 2 1.95 1.92
report 0 "$work/base" "$work/fast" -o "$work/pair.html"
check "both at 15" says "$work/pair.html" "+0.0%"
check "target" says "$work/pair.html" "a validation loss of 2.0000"
report 0 "$work/base" "$work/below" -o "$work/pair.html"
check "nothing says when it passed the loss" grep -q "smoothed training loss" "$work/pair.html"
check "saved" [ "$(grep -c '[-+][0-9.]*%</td>' "$work/pair.html")" = 0 ]
PYTHONPATH='' report 0 "$work/below" "$work/"'a$b_{$/run' -o "$work/pair.html"
check "its name" says "$work/pair.html" '<h1>below and a$b_{$'
end pairs

unset PYTHONPATH

near() { awk -v x="$1" -v y="$2" -v e="$3" 'BEGIN { exit !(x != "" && x - y <= e && y - x <= e) }'; } # X WANTED ERROR
value_is() { check "$1" near "$(awk -v name="$1" '$1 == name { print $3; exit }' "$work/log")" "$2" "$3"; } # NAME WANTED ERROR

begin
critical 0 fit "$work"/b8 "$work"/b32 "$work"/b128 --target 2
value_is S_min 100 0.01 && value_is E_min 3200 0.3 && value_is B_crit 32 0.01
check "a warning without a schedule" [ -z "$(grep warning "$work/log")" ]
bad 65 "two batch sizes" critical_batch fit "$work"/b8 "$work"/b8
bad 65 "does not fall to" critical_batch fit "$work"/b8 "$work"/b32 --target 0.1
sed -i 's/"options": {"out"/"options": {"lr_schedule": "cosine", "out"/' "$work/b32/run.json"
critical 0 fit "$work"/b8 "$work"/b32 "$work"/b128 --target 2
check "at a decaying rate: $(cat "$work/log")" [ "$(grep -c "^warning: $work/b32: --lr-schedule cosine" "$work/log")" = 1 ]
mkdir "$work/ramp" && cp "$work/b8/run.json" "$work/ramp"
sed '1,9s/"batch": 8/"batch": 4/' "$work/b8/metrics.jsonl" > "$work/ramp/metrics.jsonl"
bad 65 "ramp: the batch is not constant" critical_batch fit "$work"/ramp "$work"/b32
end fit

# A copy of the scripts; its build/venv has the package that the calling Python lacks.
begin
mkdir -p "$work/copy/build/venv/bin" && cp -r scripts "$work/copy" && mkdir "$work/b 8" && cp "$work"/b8/* "$work/b 8"
without() { PYTHONPATH=$work/hidden timeout 300 "$python" "$work/copy/scripts/critical_batch.py" fit "$work/b 8" "$work/b128"; }
for how in "env" "env -u PYTHONPATH"; do # first build/venv lacks the package too, then it has the package
    printf '#!/bin/sh\nexec %s %s "$@"\n' "$how" "$(command -v "$python")" > "$work/copy/build/venv/bin/python"
    chmod +x "$work/copy/build/venv/bin/python"
    [ "$how" = env ] && returns 65 without || returns 0 without
    check "$how: $(cat "$work/log")" grep -q '^S_min\|^error: .*(hidden): python3 -m venv .*-m pip install numpy' "$work/log"
done
end venv
exit $failed
