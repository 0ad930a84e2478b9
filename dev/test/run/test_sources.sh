#!/usr/bin/env bash
# Noise by source: the statistics of a mixture's sources equal those of runs on one source. Also tests a resume,
# micro-steps and several ranks.
set -u
. "$(dirname "$0")/../checks.sh" sources
python=$(find_python) || skip_suite "no python3"

"$python" - "$work" << 'END'
import os, random, sys
os.chdir(sys.argv[1])
draw = random.Random(1)
words = "the a cat dog bird sat ran on under mat tree house and then it was old new red blue very small big door".split()
open("plain", "w").write("".join(" ".join(draw.choice(words) for _ in range(9)) + ".\n" for _ in range(4000)))
open("noise", "wb").write(draw.randbytes(150000))
END
for name in plain noise; do "$tokenize" --tokenizer bytes --invalid bytes --out "$work/$name" "$work/$name" > "$work/log" 2>&1 || exit 70; done
plain=$work/plain_train_000000.bin noise=$work/noise_train_000000.bin
mixture="$plain:0.8 $noise:0.2"

shape=(--model d1 --vocab-size 256 --layers 1 --heads 2 --channels 48)
run() { # OUT TRAIN OPTIONS...
    $train --train "$2" --out "$work/$1" "${shape[@]}" --seq-len 32 --micro-batch "${rows:-8}" \
        --batch-tokens 1024 --beta2 0.99 --threads 1 --gns-half-life 1e9 "${@:3}" > "$work/log" 2>&1 || { cat "$work/log"; return 1; }
}
last() { tail -n 1 "$work/$1/metrics.jsonl"; } # RUN

# At learning rate 0 from one checkpoint, a source has the S and G2 of a run on this source only. With equal shares the
# mixture's G2 is a quarter of |G_0 + G_1|^2, from which the cosine follows without sums by source.
numbers_are_those_of_the_sources() {
    run start "$mixture" --steps 100 --lr 4e-3 || return
    local name shape=(--model "$work/start") halves="$plain:0.5 $noise:0.5"
    for name in plain noise halves mixture; do run "rate0_$name" "${!name}" --steps 150 --lr 0 || return; done
    "$python" - "$(last rate0_plain)" "$(last rate0_noise)" "$(last rate0_halves)" "$(last rate0_mixture)" << 'END'
import json, math, sys
plain, noise, halves, mixture = map(json.loads, sys.argv[1:])
for i, alone in enumerate((plain, noise)):
    for name in ("g2", "s", "scale"):
        x, se, want = mixture[f"gns_source_{i}_{name}"], mixture[f"gns_source_{i}_{name}_se"], alone["gns_ln" + f"_{name}" * (name != "scale")]
        print(i, name, x, se, want)
        assert se < 0.2 * want and abs(x - want) < 4 * se
a, b = plain["gns_ln_g2"], noise["gns_ln_g2"]
x, se, want = mixture["gns_cosine_0_1"], mixture["gns_cosine_0_1_se"], (4 * halves["gns_ln_g2"] - a - b) / 2 / math.sqrt(a * b)
print(x, se, want)
assert x < -0.2 and 0.01 < se < 0.05 and abs(x - want) < 4 * se
a, b = (share * (run["gns_ln_s"] + run["gns_ln_g2"]) for share, run in ((0.8, plain), (0.2, noise)))
for i, want in ((0, a / (a + b)), (1, b / (a + b))):
    share, se = mixture[f"gns_source_{i}"], mixture[f"gns_source_{i}_se"]
    print(i, share, se, want)
    assert se < 0.02 and abs(share - want) < 3 * se + 0.005
assert abs(mixture["gns_source_0"] + mixture["gns_source_1"] - 1) < 1e-9 and mixture["gns_source_1"] < 0.1
assert not any(name.startswith("gns_source") for name in plain)
END
}

resumes_exactly() {
    run whole "$mixture" --steps 60 --lr 4e-3 --checkpoint-every 20 && run part "$mixture" --steps 60 --lr 4e-3 --checkpoint-every 20 || return
    rm -r "$work/part/step_00000060" && run part "$mixture" --steps 60 --lr 4e-3 --checkpoint-every 20 && says "$work/log" "40 steps" &&
        cmp <(numbers "$work/whole") <(numbers "$work/part") && [[ $(last whole) =~ '"gns_cosine_0_1": '-?0\. ]]
}

micro_steps_add_up() {
    run steps4 "$mixture" --steps 20 --lr 0 && rows=32 run steps1 "$mixture" --steps 20 --lr 0 &&
        "$python" - "$(last steps4)" "$(last steps1)" << 'END'
import json, sys
a, b = map(json.loads, sys.argv[1:])
names = [name for name in a if name.startswith("gns_source") and a[name] is not None]
print({name: (a[name], b[name]) for name in names})
assert len(names) >= 18 and all(abs(a[name] - b[name]) <= 1e-4 * abs(a[name]) for name in names)
END
}

ranks_give_the_same() {
    has_mpi || skip "no MPI" || return
    mpi_here
    local train=$train
    run one "$mixture" --steps 20 --lr 0 || return
    train="timeout -k 10 300 mpirun -np 3 --oversubscribe --allow-run-as-root --bind-to none $train"
    run three "$mixture" --steps 20 --lr 0 && run zero2 "$mixture" --steps 20 --lr 0 --zero 2 --reduce micro-step &&
        [ "$(last three | grep -o '"gns_source.*"gns_cosine_0_1')" = "$(last zero2 | grep -o '"gns_source.*"gns_cosine_0_1')" ] &&
        train=${train/-np 3/-np 2} && rows=1 run cut "$mixture" --steps 20 --lr 0 --tensor 2 && # one rank owns all rows
        "$python" - "$(last one)" "$(last three)" "$(last cut)" << 'END'
import json, sys
a, b, cut = map(json.loads, sys.argv[1:])
for i in 0, 1:
    assert a[f"gns_source_{i}"] == b[f"gns_source_{i}"] and a[f"gns_source_{i}_se"] == b[f"gns_source_{i}_se"]
    for name in "g2", "s":
        x, y, se = (run[f"gns_source_{i}_{name}{end}"] for run, end in ((a, ""), (b, ""), (b, "_se")))
        print(i, name, x, y, se)
        assert x != y and abs(x - y) < 3 * se
        print(cut[f"gns_source_{i}_{name}"])
        assert abs(cut[f"gns_source_{i}_{name}"] - x) < 1e-4 * abs(x)
END
}

shows_in_the_report() {
    without_figures
    "$python" scripts/report.py "$work/whole" > /dev/null && says "$work/whole/report.html" "Noise by source" &&
        grep -qE '20.0%(</td><td class=n>-?[0-9.e-]+ \+- [0-9.e-]+){5}' "$work/whole/report.html"
}

try numbers_are_those_of_the_sources
try resumes_exactly
try micro_steps_add_up
try ranks_give_the_same
try shows_in_the_report
exit $failed
