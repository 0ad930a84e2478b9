#!/usr/bin/env bash
# Several ranks train like one process. mpirun starts 1 to 6 ranks on this machine (GNS_LONG: up to 8), each with one
# thread. Runs are small enough for any number of cores.
# shellcheck disable=SC2086
set -u
. "$(dirname "$0")/../checks.sh" ranks
has_mpi || skip_suite "no Open MPI here, or a build without it"
mpi_here
cd "$work" || exit 70

# Writes the same text in every run: words that tend to follow one another.
awk 'BEGIN {
    n = split("to be or not that is the question whether it nobler in mind suffer slings and arrows of outrageous fortune", w)
    for (i = 0; i < 16000; i++) {
        x = (x * 1103515245 + 12345) % 2147483648
        k = int(x / 65536) % 4 == 0 ? int(x / 262144) % n : (k * 3 + int(x / 524288) % 2) % n
        printf "%s%s", w[k + 1], i % 12 == 11 ? ".\n" : " "
    } }' > text.txt
"$tokenize" --tokenizer bytes --out code --val-fraction 0.1 text.txt > tokenize.log 2>&1 || { cat tokenize.log; exit 1; }

small="--train code_train_*.bin --val code_val_*.bin --vocab-size 256 --heads 2 --channels 32 --seq-len 16
    --val-every 10 --val-tokens 1040 --warmup-tokens 4000 --threads 1"

mpi() { # RANKS COMMAND...
    local ranks=$1
    shift
    mpirun -np "$ranks" --oversubscribe --allow-run-as-root --bind-to none "$@"
}

run() { # RANKS OUT OPTIONS...; RANKS 0: without mpirun
    local launcher=(mpi "$1") out=$2 code
    [ "$1" != 0 ] || launcher=()
    shift 2
    GLOBIGNORE='*' "${launcher[@]}" $train $small --lr "${lr:-1e-3}" --layers "${layers:-2}" --micro-batch "${micro:-3}" --out "$out" "$@" > "$out.log" 2>&1
    code=$?
    [ $code = "${wanted:-0}" ] || { echo "exit code $code, not ${wanted:-0}:"; cat "$out.log"; return 1; }
}

# close A B NAME TOLERANCE [OTHER]: compares field NAME of run A with field NAME, or OTHER, of run B, step by step. A
# null equals only a null.
close() {
    paste <(grep -oE "\"$3\": [^,}]*" "$1/metrics.jsonl") <(grep -oE "\"${5-$3}\": [^,}]*" "$2/metrics.jsonl") |
        awk -v what="$1 and $2: $3" -v tolerance="$4" '
            { n++; d = $2 - $4; if (d < 0) d = -d; m = $2 < 0 ? -$2 : $2; if (m < 1e-6) m = 1e-6 }
            NF != 4 || ($2 == "null") != ($4 == "null") || !(d <= tolerance * m) {
                print what ", value " n ": " $2 " and " $4; bad = 1; exit 1 }
            END { if (!bad && !n) { print what ": no values"; exit 1 } }'
}

exact_run="--gns exact --steps 30"
short="--gns exact --steps 16 --batch-tokens 176"
# kappa is large because gns_ratio stays 1: the run is too short to measure it.
ramp_run="--ramp gns --batch-min 5 --batch-max 40 --train-tokens 16000 --gns-half-life 3000 --ramp-kappa 128 --ramp-waste 1 --ramp-step-rows 1e9"

agree() { # A B
    close "$1" "$2" batch 0 && close "$1" "$2" examples 0 && close "$1" "$2" loss 1e-5 && close "$1" "$2" val_loss 1e-5 &&
        close "$1" "$2" grad_norm 1e-4 && close "$1" "$2" gns_ln_s 1e-4 && close "$1" "$2" gns_ln_g2 1e-4
}
same_weights() { cmp "$(newest_checkpoint "$1")/model.safetensors" "$(newest_checkpoint "$2")/model.safetensors"; }
same_moments() { cmp "$(newest_checkpoint "$1")/training/optimizer.safetensors" "$(newest_checkpoint "$2")/training/optimizer.safetensors"; }
same() { same_weights "$1" "$2" && cmp <(numbers "$1") <(numbers "$2"); }
same_run() { same "$1" "$2" && same_moments "$1" "$2"; }
resumes() { run "$@" && grep -q "^resuming from $2/step_" "$2.log"; } # RANKS OUT OPTIONS...
forget_newest() { rm -r "$(newest_checkpoint "$1")"; }
close_total() { close "$1" "$2" gns_total_s 1e-4 && close "$1" "$2" gns_total_g2 1e-4; }
wide() { micro=20 layers=4 run "$@"; } # one micro-step per step; blocks share slots of memory

one_rank() { run 1 e1_192 $exact_run --batch-tokens 192 && run 1 e1_176 $exact_run --batch-tokens 176 && run 1 r1 $ramp_run; }
exact_agrees() { # RANKS BATCH_TOKENS: 176 are 11 rows; ranks cannot divide them evenly
    run "$1" "e$1_$2" $exact_run --batch-tokens "$2" && agree "e1_$2" "e$1_$2" && close_total "e1_$2" "e$1_$2" && close "e1_$2" "e$1_$2" gns_ratio 1e-4
}
ramp_agrees() { run "$1" "r$1" $ramp_run && agree r1 "r$1"; } # RANKS
the_ramp_grew() { [ "$(grep -o '"batch": [0-9]*' r1/metrics.jsonl | sort -u | wc -l)" -ge 3 ] || { echo "fewer than 3 batch sizes"; return 1; }; }
measures_a_step() { # a run that measures --ramp-step-rows equals a run with this number as an option
    local mode x measured=${ramp_run/--ramp-step-rows 1e9/}
    for mode in "--zero 1 --optimizer muon" "--zero 3 --recompute block"; do
        rm -rf measured told
        run 3 measured $measured $mode && x=$(sed -nE 's/^ *"ramp_step_rows": ([0-9.e+]+),.*/\1/p' measured/run.json) &&
            run 3 told $measured $mode --ramp-step-rows "$x" && same measured told || { echo "$mode: $x"; return 1; }
    done
    rm -rf told # not at the measured x: 1 and 3 ranks round differently, so at some x a batch differs by a row
    run 3 told $measured $mode --ramp-step-rows 7.1 && run 1 told1 $measured --ramp-step-rows 7.1 && agree told1 told
}
# ZeRO 0, 2 and 3 equal ZeRO 1, the default, bit for bit. In the first runs steps have 5 to 40 rows: a rank makes 1 to 5
# micro-steps of 3 rows, some ranks one micro-step less. In later runs a step is one micro-step of up to 20 rows, for
# which ZeRO-2 and 3 keep no whole gradient. Of three ranks the last has the longest part of a bucket.
zero_agrees() {
    local zero
    for zero in 0 2 3; do
        run 3 z3_$zero $ramp_run --zero $zero && same r3 z3_$zero || return 1
    done
    for zero in 0 2 3; do
        wide 3 w3_$zero $ramp_run --zero $zero && same w3_0 w3_$zero || return 1
    done
    for zero in 0 2; do micro=2 layers=4 run 3 two$zero $short --zero $zero || return 1; done # two micro-steps at most
    same two0 two2
}
zero_in_bf16() { # ranks exchange rounded weights, and keep fp32 master weights
    "$train" --dry-run --dtype bf16 --model d1 > bf16.log 2>&1
    [ $? != 69 ] || skip "no instructions for bf16" || return
    run 2 h0 $ramp_run --dtype bf16 --zero 0 && ! same_weights h0 r2 > /dev/null || return 1
    for zero in 1 3; do
        run 2 h$zero $ramp_run --dtype bf16 --zero $zero && same h0 h$zero || return 1
    done
    # Five heads over two ranks: the local models differ in length, but not in bucket 0 and its masters.
    for zero in 0 3; do steps=2 cut 4 2 hc$zero --dtype bf16 --zero $zero || return 1; done
    same_run hc0 hc3
}
zero_in_fp8() { # also in steps that saturate: the largest value of all ranks counts. No warm-up: bf16 would compute it
    local zero ranks small=${small/4000/0} few="--dtype fp8-dw --fp8-head --gns exact --batch-tokens 176 --grad-clip 0"
    for zero in 0 1 2 3; do lr=30 wide 3 f$zero $few --steps 8 --zero $zero && same_run f0 f$zero || return 1; done
    grep -q "fp8 overflows" f3.log || return 1
    for ranks in 1 3; do micro=2 run $ranks k$ranks $few --steps 3 --zero 3 --recompute block || return 1; done
    cmp <(exponents k1) <(exponents k3) || return 1
    few=${few/fp8-dw/fp8} # all ranks have rank 0's channels, so a resumed run has the same bits
    run 3 low0 $few --steps 8 --checkpoint-every 4 --keep 0 && cp -r low0 low1 && forget_newest low1 && resumes 3 low1 $few --steps 8 && same_run low0 low1
}
exponents() { grep fp8_exponents "$(newest_checkpoint "$1")/training/state.json"; }
a_smoothed_loss() { # the loss without smoothing is summed over ranks like a step's other sums
    run 1 s1 $exact_run --batch-tokens 176 --label-smoothing 0.2 && run 3 s3 $exact_run --batch-tokens 176 --label-smoothing 0.2 --zero 2 \
        --reduce micro-step --recompute block && agree s1 s3 && close s1 s3 loss_nll 1e-5 && close s1 s3 gns_total_s 1e-4 && ! close s1 s3 loss 1e-3 loss_nll > /dev/null
}
# Several ranks agree with one rank, and every stage has the same bits. Muon keeps matrices whole: one of five ranks
# owns no block.
optimizer_agrees() { # OPTIMIZER RANKS
    local all="o_$1_$2" zero
    layers=4 run 1 "o_$1" $short --optimizer "$1" || return 1
    for zero in 0 1 2 3; do
        layers=4 run "$2" "${all}_$zero" $short --optimizer "$1" --zero $zero --checkpoint-every 8 --keep 0 || return 1
    done
    agree "o_$1" "${all}_1" && close_total "o_$1" "${all}_1" && same_run "${all}_0" "${all}_1" && same_run "${all}_1" "${all}_2" &&
        same_run "${all}_2" "${all}_3"
}
another_optimizer_resumes() { # with another --zero; a second pair of runs shards gradients, so that blocks share memory
    forget_newest o_muon_5_0 && forget_newest o_lamb_3_1
    layers=4 resumes 5 o_muon_5_0 $short --optimizer muon --zero 2 && same_run o_muon_5_0 o_muon_5_1 &&
        layers=4 resumes 3 o_lamb_3_1 $short --optimizer lamb --zero 0 && same_run o_lamb_3_1 o_lamb_3_0 || return 1
    for zero in 0 2; do wide 2 ow_$zero $short --optimizer muon --zero $zero || return 1; done
    same_run ow_0 ow_2 && agree ow_0 o_muon
}
goes_on_from_the_moments() { # --with-optimizer: all rows are alike, so two runs have the bits of one longer run
    local optimizer ranks=0 small="--seq-len 16 --threads 1 --batch-tokens 96 --lr-schedule constant --gns off --train same_*.bin" from="--with-optimizer"
    printf 'to be or not to %.0s' {1..300} > same.txt && "$tokenize" --tokenizer bytes --out same same.txt > /dev/null || return 1
    moved() { mpi "$1" "$train" $small --lr 1e-3 --micro-batch 3 $from --model "${@:2}"; } # RANKS MODEL OPTIONS...
    for optimizer in adamw muon; do
        ranks=$((ranks + 1))
        run $ranks on_$optimizer --vocab-size 256 --heads 2 --channels 32 --optimizer $optimizer --zero 3 --steps 20 --checkpoint-every 10 --keep 0 &&
            moved $ranks on_$optimizer:10 --optimizer $optimizer --steps 4 --out new_$optimizer &&
            moved $ranks on_$optimizer:10 --optimizer $optimizer --steps 6 --out new_$optimizer &&
            moved $ranks new_$optimizer --optimizer $optimizer --steps 4 --out newer_$optimizer &&
            same_weights on_$optimizer newer_$optimizer && same_moments on_$optimizer newer_$optimizer || return 1
    done > on.log 2>&1 || { cat on.log; return 1; }
    refuses() { # CODE TEXT MODEL OPTIONS...
        moved 1 "${@:3}" --steps 4 > on.log 2>&1
        [ $? = "$1" ] && grep -q -- "$2" on.log && [ ! -e refused ] || { cat on.log; return 1; }
    }
    refuses 64 'its moments are of --optimizer adamw. use that' on_adamw --optimizer muon --out refused &&
        small=${small/same_/code_train_} refuses 65 '--model new_adamw --with-optimizer --out NEW' on_adamw:10 --out new_adamw || return 1
    printf x | dd of=on_adamw/step_00000010/training/optimizer.safetensors bs=1 seek=2000 conv=notrunc status=none
    refuses 65 'optimizer.safetensors' on_adamw/step_00000010 --out refused
}
fills_its_hours() { # --train-hours: a run decides length and step_rows once; a resumed run keeps both
    local begun took tokens hours base="--ramp gns --batch-min 5 --batch-max 40 --ramp-kappa 128 --checkpoint-every 5 --keep 0"
    for hours in 0.001 0.002 0.004 0.008 0; do # a stall of the timed steps makes a run short: then a longer one counts
        [ $hours != 0 ] || { echo "$took ms of 28800"; tail -n 3 t2.log; return 1; }
        rm -rf t2 u2 && begun=$(date +%s%N)
        run 2 t2 $base --train-hours $hours && took=$((($(date +%s%N) - begun) / 1000000)) && cp -r t2 u2 && forget_newest u2 || return 1
        awk "BEGIN { exit !($took > 1e6 * $hours && $took < 4e7 * $hours) }" && # of 3.6e6 ms per hour
            grep -qs '"horizon"' "$(newest_checkpoint u2)/training/state.json" && break # saved after the decision
    done
    tokens=$(grep -oE '"tokens": [0-9]+' t2/metrics.jsonl | tail -n 1 | grep -oE '[0-9]+')
    [ "$(grep -c "^length  $tokens tokens fill" t2.log)" = 1 ] && grep -q "\"horizon_tokens\": $tokens," t2/run.json &&
        [ "$(grep -c first_step t2/run.json)" = 1 ] || { echo "$tokens"; grep horizon t2/run.json; return 1; }
    resumes 2 u2 $base --train-hours $hours && ! grep '^length' u2.log && same_run t2 u2 || { tail -n 3 u2.log; return 1; }
    wanted=64 run 2 t2 $base --train-hours 0.1 &&
        grep -q "this run has $hours, and its length is decided. use --train-tokens; its length is" t2.log
}
reduced_at_every_micro_step() { # sums in another order: equal up to rounding
    run 3 m3 $ramp_run --zero 2 --reduce micro-step && agree r1 m3 &&
        run 3 m_weights $ramp_run --zero 3 --reduce micro-step --recompute block && same_weights m3 m_weights || return 1
    # one micro-step is the whole step
    wide 3 m_one $ramp_run --zero 2 --reduce micro-step && same w3_0 m_one
}
resumes_in_another_mode() { # from a checkpoint of three ranks that owned parts of the state, with the same bits
    run 3 z2 $ramp_run --zero 1 --checkpoint-every 20 --keep 0 && same_weights r3 z2 && forget_newest z2 && cp -r z2 z3 &&
        resumes 3 z3 $ramp_run --zero 0 && same r3 z3 || return 1
    # with sharded gradients and weights
    wide 3 z_3_2 $ramp_run --zero 3 --checkpoint-every 50 --keep 0 && forget_newest z_3_2 &&
        micro=20 layers=4 resumes 3 z_3_2 $ramp_run --zero 2 && same w3_0 z_3_2
}
resumes_with_other_ranks() { resumes 2 z2 $ramp_run --zero 1 && agree r3 z2; }
peak_memory() { # OPTIONS...: prints each rank's peak memory, MiB
    mpi 4 "$root/$build/dev/test/run/peak_memory" "$train" --train code_train_000000.bin --vocab-size 256 --heads 2 --seq-len 16 \
        --micro-batch 1 --batch-tokens 64 --steps 1 --gns ln --threads 1 --out "peak${*//[^0-9]/}" "$@" 2> peak.log
}
# Compares each rank's peak memory with the plan plus the program's own memory, which a small model measures.
ranks_take_the_planned_memory() {
    case $build in *-san*) skip "AddressSanitizer's shadow memory counts" || return ;; esac
    local plan zero deep="--layers 40 --channels 128"
    # One run after the other: two mpiruns that start in one TMPDIR may fail.
    peak_memory --layers 1 --channels 16 | sort -n > base.txt || return 1
    for zero in "0" "1" "1 --tensor 2" "3"; do
        plan=$("$train" --dry-run --vocab-size 256 --heads 2 --seq-len 16 --threads 1 --gns ln --micro-batch 1 --batch-tokens 64 --ranks 4 \
            $deep --zero $zero | awk '/memory in all/ { print $4 }') && peak_memory $deep --zero $zero | sort -n > deep.txt || return 1
        paste base.txt deep.txt | awk -v plan="$plan" -v zero="$zero" '
            { n++; base += $1; peak[n] = $2; all = all " " $2 }
            END { want = plan + base / n
                if (n != 4 || !(plan > 0) || peak[1] / want < 0.92 || peak[4] / want > 1.08) {
                    print "--zero " zero ": planned " plan " MiB and " base / n " of the program, took" all; exit 1 } }' || return 1
    done
}
bf16_on_the_wire() { # gradients keep 8 significant bits: losses differ by at most 2%, the first gradient's norm by 0.1%
    local zero
    for zero in 1 3; do micro=4 run 3 bf16_$zero $exact_run --batch-tokens 192 --comm-dtype bf16 --zero $zero || return 1; done
    same_weights bf16_1 bf16_3 && ! same_weights e3_192 bf16_1 > /dev/null && close e3_192 bf16_1 loss 0.02 || return 1
    for run in e3_192 bf16_1; do mkdir -p first_$run && head -n 1 $run/metrics.jsonl > first_$run/metrics.jsonl; done
    close first_e3_192 first_bf16_1 grad_norm 1e-3
}
masks_agree() { # dropout and document masks do not depend on ranks or micro-batch; a line is a document
    local few="--gns exact --steps 12 --batch-tokens 176 --tokenizer lines" from zero
    from=$(newest_checkpoint e1_192) && mkdir lines && cp "$from/merges.txt" lines || return 1
    sed 's/"Ċ": 10/"<|endoftext|>": 10/' "$from/vocab.json" > lines/vocab.json
    run 1 d_none $few && run 1 d_drop $few --dropout 0.2 && ! close d_none d_drop loss 1e-3 > /dev/null || return 1
    few="$few --dropout 0.2 --document-mask"
    run 1 d1 $few && ! close d_drop d1 loss 3e-5 > /dev/null && micro=2 run 1 d_two $few && agree d1 d_two || return 1
    for zero in 0 3; do run 3 d3_$zero $few --zero $zero --recompute block && agree d1 d3_$zero || return 1; done
    same_weights d3_0 d3_3 && close_total d1 d3_3
}
samples_between_steps() { # all weights are gathered at once, not during the next step; ZeRO-3 gathers for each token
    layers=4 run 3 silent $short --zero 1 || return 1
    for zero in 1 3; do
        layers=4 run 3 sampled$zero $short --zero $zero --sample-every 5 --sample-tokens 3 --deadline 15 && same_weights sampled$zero silent || return 1
    done
    cmp sampled1/samples.jsonl sampled3/samples.jsonl || return 1
    lr=0 steps=2 cut 1 1 samples1 --sample-every 1 --sample-tokens 20 --temperature 0 &&
        lr=0 steps=2 cut 4 2 samples4 --sample-every 1 --sample-tokens 20 --temperature 0 --deadline 15 --zero 3 &&
        cmp samples1/samples.jsonl samples4/samples.jsonl
}
one_rank_samples() { # --sample-only and --check are for one rank: others would wait until a deadline
    local from
    from=$(newest_checkpoint r2)
    answers() { # CODE TEXT RANKS OPTIONS...
        mpi "$3" "$train" "${@:4}" > sample.log 2>&1
        local code=$?
        [ $code = "$1" ] && [ "$(grep -c "$2" sample.log)" -ge 1 ] && [ "$(grep -c '^error' sample.log)" -le 1 ] || { echo "exit code $code"; cat sample.log; return 1; }
    }
    answers 64 '^error.*: --sample-only.* not 2' 2 --sample-only --model "$from" --sample-tokens 3 &&
        answers 64 '^error.*: --check.* not 2' 2 --check "$from" && answers 0 . 1 --check "$from" &&
        answers 0 . 1 --sample-only --model "$from" --sample-tokens 3
}
not_finite_while_weights_travel() { # MPI must not touch freed weights
    local small="--train code_train_*.bin --vocab-size 256 --heads 2 --channels 512 --seq-len 16 --batch-tokens 192 --threads 1"
    wanted=76 lr=100 run 3 infinite --steps 50 --warmup-tokens 0 --grad-clip 0 --zero 1
}
cut() { # RANKS TENSOR OUT OPTIONS...: a model of five heads over TENSOR ranks
    local small=${small/--heads 2 --channels 32/--heads 5 --channels 40}
    run "$1" "$3" --gns exact --batch-tokens 176 --steps "${steps:-8}" --tensor "$2" "${@:4}"
}
a_cut_model_agrees() { # with one rank, on 11 rows in micro-steps of 3; groups have 2 to 4 ranks, some ranks no rows
    local mesh masks="--dropout 0.2 --label-smoothing 0.1 --recompute block --optimizer lamb"
    cut 1 1 c1 && cut 1 1 cm1 $masks || return 1
    for mesh in "4 2" "6 3" "4 4" ${GNS_LONG:+"2 2" "8 2" "6 2"}; do
        set -- $mesh
        cut "$1" "$2" "c$1_$2" && agree c1 "c$1_$2" && close_total c1 "c$1_$2" && close c1 "c$1_$2" gns_ratio 1e-4 || return 1
    done
    cmp <(grep '^validation loss .* = ' c1.log) <(grep '^validation loss' c4_2.log) || return 1 # each row counts once
    cut 4 2 cm4 $masks --zero 3 --reduce micro-step && agree cm1 cm4 && close_total cm1 cm4
}
a_cut_model_has_one_order_of_sums() { # the same bits with every --zero and --recompute
    local zero
    cut 4 2 cz0 --zero 0 && same_run c4_2 cz0 || return 1
    for zero in 1 3 ${GNS_LONG:+2}; do
        micro=20 cut 4 2 cw$zero --zero $zero --recompute block && same_run cw1 cw$zero || return 1
    done
}
a_cut_model_resumes_on_any_mesh() { # 2 x 2, 4 x 1, 1 x 3, 1 x 1 (groups x ranks per group) continue like one rank
    local mesh at=0 constant="--lr-schedule constant"
    for mesh in "4 2 0" "4 1 1" "3 3 3" "1 1 1"; do
        set -- $mesh
        at=$((at + 2))
        steps=$at cut "$1" "$2" cr --zero "$3" $constant || return 1
        [ $at = 2 ] || grep -q "^resuming from cr/step_0000000$((at - 2))" cr.log || return 1
    done
    cut 1 1 cr1 $constant && close cr1 cr loss 1e-5 && close cr1 cr grad_norm 1e-4 && close cr1 cr gns_ln_s 1e-4 || return 1
    # The same initial weights, also if a rank still clears the memory of its copy when the save begins.
    LD_PRELOAD=$LD_PRELOAD:$work/fault.so FAULT_ZERO=0.5 lr=0 steps=1 cut 4 2 ci && lr=0 steps=1 cut 1 1 ci1 && same_weights ci ci1
}
a_cut_model_rounds_what_travels() { # a single group reduces no blocks: a bf16 wire changes few of the moments' bytes
    local wire
    for wire in fp32 bf16; do steps=1 cut 2 2 wire_$wire --comm-dtype $wire --grad-clip 0 || return 1; done
    [ "$(cmp -l wire_{fp32,bf16}/step_00000001/training/optimizer.safetensors | tee changed.txt | wc -l)" -gt 10000 ] &&
        [ "$(wc -l < changed.txt)" -lt 100000 ] || { wc -l changed.txt; return 1; }
}
a_cut_model_is_refused() {
    refuses() { wanted=64 cut "$2" "$3" refused "${@:4}" && grep -q "^error.*--tensor $3$1" refused.log || { cat refused.log; return 1; }; }
    refuses ': there are 3 ranks. use mpirun -np 4, ' 3 2 && refuses ': there are 9 ranks. use --ranks 12, ' 0 4 --dry-run --ranks 9 &&
        refuses ': the model has 5 heads. use at most 5, ' 0 6 --dry-run --ranks 6 &&
        refuses ' cannot train with --optimizer muon. use --zero 3 instead of --tensor, or leave the other option out' 0 2 --optimizer muon &&
        refuses ' cannot train with --tune. use --zero 3' 0 2 --tune || return 1
    local small=${small/--heads 2 --channels 32/--heads 5 --channels 40}
    wanted=64 run 6 refused --steps 1 --batch-tokens 32 --tensor 2 &&
        grep -q '^error.*a batch of 2 rows is too small for 3 groups of ranks (--tensor). use mpirun -np 4, ' refused.log
}
# `on G COMMAND` runs COMMAND with --shard machine, as if each machine had G ranks.
cc -shared -fPIC -o fault.so "$root/dev/test/preload/fault.c" -lpthread -ldl || exit 1
cat > machine.sh << 'EOF'
#!/bin/sh
export OMPI_COMM_WORLD_LOCAL_SIZE=$1 FAULT_HOST=node$((OMPI_COMM_WORLD_RANK / $1)) LD_PRELOAD=$LD_PRELOAD:$2/fault.so
shift 2
exec "$@"
EOF
chmod +x machine.sh
on() { local train="$work/machine.sh $1 $work $train" && "${@:2}" --shard machine; }
replicas_agree() { # 2 replicas of 2 ranks, and 3 of 1 rank, agree with one rank; --zero changes no bit
    local zero
    on 2 run 4 p2 $exact_run --batch-tokens 176 && agree e1_176 p2 && close_total e1_176 p2 && close e1_176 p2 gns_ratio 1e-4 &&
        grep -q '^ranks   4, each with such an engine, 2 replicas on 2 ranks each$' p2.log && on 1 run 3 p1 $ramp_run --zero 2 && agree r1 p1 || return 1
    for zero in 0 1 2 3; do on 2 wide 4 pw$zero $short --zero $zero || return 1; done
    agree two0 pw0 || return 1
    for zero in 1 2 3; do same_run pw0 pw$zero || return 1; done
}
replicas_agree_in_any_mode() { # with other optimizers, fp8, bf16 on the wire, --tensor
    local zero masks="--dropout 0.2 --label-smoothing 0.1 --recompute block --optimizer lamb"
    layers=4 on 2 run 4 p_lamb $short --optimizer lamb && agree o_lamb p_lamb && close_total o_lamb p_lamb &&
        layers=4 on 3 run 6 p_muon $short --optimizer muon --zero 3 && agree o_muon p_muon && close_total o_muon p_muon || return 1
    for zero in 1 3; do # a sum of two has one order; rank 1 saturates in steps in which rank 0 does not
        lr=30 $([ $zero = 1 ] || echo on 1) wide 2 p_fp8_$zero --dtype fp8-dw --gns exact --batch-tokens 176 --grad-clip 0 --steps 24 --seed 3 --zero $zero || return 1
    done
    same_weights p_fp8_1 p_fp8_3 && same_moments p_fp8_1 p_fp8_3 || return 1
    for zero in 1 3; do micro=4 on 1 run 3 p_bf16_$zero $exact_run --batch-tokens 192 --comm-dtype bf16 --zero $zero || return 1; done
    same_run p_bf16_1 p_bf16_3 && ! same_weights e3_192 p_bf16_1 > /dev/null && close e3_192 p_bf16_1 loss 0.02 || return 1
    on 2 cut 4 2 pc && agree c1 pc && close_total c1 pc && on 2 cut 6 2 pm $masks --zero 3 --reduce micro-step && agree cm1 pm && close_total cm1 pm
}
replicas_resume_on_any_mesh() { # also from and to --shard all; on the same mesh with the same bits
    local at=0 mesh constant="--lr-schedule constant"
    for mesh in "2 4 1 1" "2 6 2 3" "1 3 1 0" "4 4 2 2"; do # ranks of a machine, ranks, --tensor, --zero
        set -- $mesh
        at=$((at + 2))
        steps=$at on "$1" cut "$2" "$3" pr --zero "$4" $constant || return 1
        [ $at = 2 ] || grep -q "^resuming from pr/step_000000$(printf %02d $((at - 2)))" pr.log || return 1
    done
    steps=10 cut 3 1 pr $constant && grep -q '^ *--shard \"machine\" is now \"all\"$' pr.log && steps=10 cut 1 1 pr1 $constant && close pr1 pr loss 1e-5 && close pr1 pr grad_norm 1e-4 || { cat pr.log; return 1; }
    on 2 wide 4 pz $short --zero 1 --checkpoint-every 8 --keep 0 && forget_newest pz &&
        micro=20 layers=4 on 2 resumes 4 pz $short --zero 3 && same_run pw0 pz
}
replicas_are_refused() {
    wanted=64 on 2 run 3 refused --steps 1 && grep -q '^error (rank 2 on node1): this rank has another number or order of ranks on its machine (--shard machine) than rank 0. start equally many' refused.log &&
        wanted=64 on 3 cut 6 2 refused && grep -q '^error.*--tensor 2: there are 3 ranks a machine (--shard machine). use a --tensor that divides them' refused.log || { cat refused.log; return 1; }
}
a_group_ends_with_a_rank_that_cannot_read() { # RANK FILES: other ranks of the group exchange with RANK until RANK ends
    rm -rf elsewhere unread && mkdir elsewhere && cp code_*.bin elsewhere &&
        printf '#!/bin/sh\n[ $OMPI_COMM_WORLD_RANK != %s ] || cd elsewhere\nexec "$@"\n' "$1" > apart.sh && chmod +x apart.sh || return 1
    local train="$PWD/apart.sh $train" job
    wanted=65 steps=100000 cut 4 2 "$PWD/unread" --deadline 15 &
    job=$!
    until grep -qs '"step": 3,' unread/metrics.jsonl || ! kill -0 $job 2> /dev/null; do sleep 0.05; done
    head -c 16384 /dev/zero | tr '\0' '\377' | dd of="elsewhere/code_$2_000000.bin" bs=1024 seek=1 conv=notrunc status=none # tokens beyond the vocabulary
    wait $job && grep -q "^error (rank $1): .*code_$2_000000.bin" unread.log || { tail -n 3 unread.log; return 1; }
}
too_small_a_batch() { wanted=64 run 4 tiny --steps 1 --batch-tokens 48 && grep -q '^error.*a batch of 3 rows is too small for 4 ranks' tiny.log; }
replays() { # CODE ROWS...: 4 ranks replay steps of ROWS rows, whatever the other options say
    local code=$1 step=0 rows=0 batch
    shift
    for batch in "$@"; do
        echo "{\"step\": $((++step)), \"batch\": $batch}"
        rows=$((rows + batch))
    done > replayed.jsonl
    rm -rf replay
    wanted=$code lr=${lr:-0} micro=2 run 4 replay --ramp replay:replayed.jsonl --train-tokens $((16 * rows)) ${replay_more-} || return 1
    [ "$code" != 0 ] || [ "$(grep -c '"batch"' replay/metrics.jsonl)" = $# ]
}
a_last_step_of_fewer_rows_than_ranks() { # a rank without rows starts the same transfers
    lr=1e-3 replays 0 8 8 1 && rm -rf whole && mv replay whole &&
        lr=1e-3 replay_more="--zero 3 --deadline 15" replays 0 8 8 1 && same whole replay &&
        lr=1e-3 replay_more="--zero 3 --deadline 15 --tensor 2" replays 0 8 8 1 && agree whole replay
}
too_small_a_batch_to_replay() { # every step of the file counts, except a last step that the horizon cut
    replay_more="--batch-tokens 128" replays 64 8 3 8 && grep -q '^error.*a batch of 3 rows is too small for 4 ranks.*-np 3, or larger' replay.log &&
        replay_more="--batch-tokens 128" replays 64 3
}
alone_without_mpirun() { run 0 alone $exact_run --batch-tokens 192 && same_weights e1_192 alone; } # like mpirun -np 1

while read -r -a test; do try "${test[@]}" < /dev/null; done << 'EOF'
one_rank
exact_agrees 3 192
exact_agrees 2 176
exact_agrees 4 176
ramp_agrees 2
ramp_agrees 3
the_ramp_grew
measures_a_step
zero_in_bf16
zero_in_fp8
a_smoothed_loss
optimizer_agrees lamb 3
optimizer_agrees muon 5
another_optimizer_resumes
goes_on_from_the_moments
fills_its_hours
zero_agrees
masks_agree
reduced_at_every_micro_step
resumes_in_another_mode
resumes_with_other_ranks
ranks_take_the_planned_memory
bf16_on_the_wire
samples_between_steps
a_cut_model_agrees
a_cut_model_has_one_order_of_sums
a_cut_model_resumes_on_any_mesh
a_cut_model_rounds_what_travels
a_cut_model_is_refused
replicas_agree
replicas_agree_in_any_mode
replicas_resume_on_any_mesh
replicas_are_refused
a_group_ends_with_a_rank_that_cannot_read 3 train
a_group_ends_with_a_rank_that_cannot_read 2 val
one_rank_samples
not_finite_while_weights_travel
too_small_a_batch
a_last_step_of_fewer_rows_than_ranks
too_small_a_batch_to_replay
alone_without_mpirun
EOF
exit $failed
