#!/usr/bin/env bash
# Tests --dry-run as a program: it needs no data, plans GPUs on a machine without a GPU, predicts the trainer's steps,
# and reports a disk that is too small.
# shellcheck disable=SC2086
set -u
. "$(dirname "$0")/../checks.sh" plan
cd "$work" || exit 70

d12="--model gpt2-124M --micro-batch 64 --batch-tokens 524288 --train-tokens 10e9"
plan() { "$train" --dry-run "$@" > plan.txt 2>&1 || { cat plan.txt; return 1; }; }
said() { grep -qE -- "$1" plan.txt || { echo "nothing like '$1' in:"; cat plan.txt; return 1; }; }

plans_a_gpu_from_here() {
    plan $d12 --device H200 --ranks 8 --zero 1 --price 3 && said "^device +H200: 989 TFLOP/s bf16.*; Hopper's kernels\\)" &&
        said '^ +matmul, blocks .* compute ' && said '^ +LayerNorm, residual .* memory ' && said '^> +8 +1 +1 +1 +[0-9.]+ +65,536 ' && said '^ +8 +1 +4 +1 +[0-9.]+ ' &&
        said '^ +16 +1 +1 +2 ' && said '^run +19,074 steps of 512 rows, .* cost [0-9]' || return 1
    awk 'length > 125 { print "too wide: " $0; bad = 1 } END { if (NR > 63) { print NR " lines"; bad = 1 } exit bad }' plan.txt &&
        plan $d12 --device H200 --dtype fp32 && said '^device +H200: 67 TFLOP/s fp32'
}
plans_fp8() { # products in e4m3 are faster and need copies of their factors
    local bf16 fp8
    plan $d12 --device H200 && bf16=$(plan_speed) && plan $d12 --device H200 --dtype fp8 && said '^  copies in e4m3 +475.0 MiB$' || return 1
    awk -v bf16="$bf16" -v fp8="$(plan_speed)" 'BEGIN { if (!(fp8 > 1.1 * bf16 && fp8 < 1.2 * bf16)) { print bf16 " and " fp8 " tok/s"; exit 1 } }' || return 1
    fp8=$(plan_speed) && plan $d12 --device H200 --dtype fp8 --fp8-head && said '^  copies in e4m3 +511.8 MiB$' && [ "$(plan_speed)" -gt $((fp8 * 102 / 100)) ] || return 1
    plan $d12 --device H200 --dtype fp8-dw && said '^  copies in e4m3 +715.0 MiB$' && [ "$(plan_speed)" -gt "$fp8" ] || return 1
    ! plan $d12 --device A100 --dtype fp8 > /dev/null && said 'error: --dtype fp8 needs a Hopper GPU .H100, H200., not A100. use --dtype bf16$' &&
        ! plan --model d2 --channels 96 --device H100 --dtype fp8 > /dev/null && said 'error: --dtype fp8 on a GPU needs channels that are a multiple of 64, not 96' &&
        plan --model d2 --channels 96 --dtype fp8 && said '^  rounded factors '
}
plan_speed() { awk '/tok\/s, MFU/ { gsub(",", "", $3); print $3 }' plan.txt; }
plans_this_cpu() {
    plan --model d2 --vocab-size 256 --seq-len 64 --steps 10 && said '^device +CPU, ' && said 'measured just now' &&
        said ' tok/s, MFU ' && said '^run +10 steps of 4 rows'
}
plans_a_cut_model() { # tests --tensor, also on a machine whose link is unknown
    plan --model d2 --ranks 4 --tensor 2 --batch-tokens 8192 && said '^  copy for checkpoints' && said '^> +4 +1 +2 .* unknown ' &&
        ! grep nan plan.txt && plan --model d12 --device H200 --ranks 8 --tensor 4 --zero 3 && said '^> +8 +3 +4 +1 ' &&
        said '^  waiting for other ranks ' && ! grep -E '^>? +(1|2) ' plan.txt
}
plans_a_run_without_length() {
    plan --model d2 --device H200 && said '^device +H200' && ! said '^run ' > /dev/null && ! said 'checkpoints are written' > /dev/null
}
hours_are_tokens_over_speed() { # without --val, since hours include validation
    plan $d12 --device H200 || return 1
    awk '/tok\/s, MFU/ { gsub(",", "", $3); speed = $3 } /^run/ { for (i = 1; i < NF; i++) if ($(i + 1) ~ /^hours/) hours = $i }
        END { want = 1e10 / speed / 3600; if (!(speed > 0) || hours < 0.99 * want || hours > 1.01 * want) {
            print hours " hours at " speed " tok/s, want " want; exit 1 } }' plan.txt
}
waiting_share() { # RANKS: prints the percentage of a step spent waiting
    plan "${many[@]}" --ranks "$1" && awk '/waiting for other ranks/ { print $NF + 0; found = 1 } END { if (!found) print 0 }' plan.txt
}
# With many ranks, each with enough tokens for its link, the latency of ring rounds limits the step.
reports_ranks_that_wait() {
    local many=(--device H200 --model gpt2-124M --batch-tokens 73400320 --zero 2) most
    plan "${many[@]}" --ranks 8960 && said '^> +8960 .* interconnect ' && said '^ +8 +2 .* compute ' || return 1
    most=$(sed -nE 's/^  compute-bound up to ([0-9]+) ranks: .*/\1/p' plan.txt)
    awk -v n="$most" -v at="$(waiting_share "$most")" -v beyond="$(waiting_share $((most + 1)))" 'BEGIN {
        if (!(n > 8 && n < 8960 && at <= 50 && at > 49 && beyond >= 50)) { print n " ranks: " at "%, one more: " beyond "%"; exit 1 } }' || return 1
    plan --model d6 --batch-tokens 8192 --seq-len 1024 --ranks 8 --device H100 && said '^  compute-bound up to 8 ranks: ' # the batch has 8 rows
}
rows() { grep -oE '^[> ] +8 +1 .*' plan.txt | cut -c2- | sort; }
# The table's lines for 8 ranks do not depend on --tensor. The size of the copy for checkpoints does not depend on --zero.
compares_cuts() {
    local cut d24="--model d24 --device H200 --ranks 8 --batch-tokens 524288 --micro-batch 16"
    plan $d24 && rows > rows.txt && said '^  compute-bound up to 118 ranks' || return 1
    for cut in 2 4 8; do plan $d24 --tensor $cut && cmp <(rows) rows.txt || { cat plan.txt; return 1; }; done
    said '^> .* interconnect ' && said '^  interconnect-bound on any number of ranks: more than half of a step' || return 1
    plan --model d2 --ranks 4 --tensor 2 --zero 0 --batch-tokens 8192 && cp plan.txt plan0.txt && plan --model d2 --ranks 4 --tensor 2 --zero 1 --batch-tokens 8192 &&
        cmp <(grep copy plan0.txt) <(grep copy plan.txt)
}
step_of() { # MESH (@ for blanks): prints the milliseconds of a step with `options` and MESH
    local mesh=${1//@/ }
    [[ $mesh == *micro-batch* ]] || mesh+=" --micro-batch $rows"
    plan "${options[@]}" $mesh && ! grep 'DOES NOT FIT' plan.txt && awk '$1 == ">" { print $11 }' plan.txt
}
advises_a_mesh() { # MODEL DEVICE RANKS ROWS: both advised meshes fit; the ratio of their times is the advice's
    local options=(--model "$1" --device "$2" --ranks "$3" --batch-tokens 524288) rows=$4 best other times first second
    plan "${options[@]}" --micro-batch "$rows" || return 1
    read -r best other times < <(sed -nE 's/^  advice: (.*); (.*) takes (.*) times as long$/\1|\2|\3/p' plan.txt | tr ' |' '@ ')
    first=$(step_of "$best") && second=$(step_of "$other") && [[ $best != *tensor* && $other == *tensor* ]] &&
        awk -v a="$first" -v b="$second" -v times="$times" 'BEGIN { exit !(times > 1 && b / a < times + 0.01 && b / a > times - 0.01) }' ||
        { echo "$best: $first ms, $other: ${second-} ms, $times"; return 1; }
}
advises_replicas() { # on two machines with a slow network; a rank then needs the same memory as on one machine
    local base=(--model d24 --device H200 --batch-tokens 524288 --micro-batch 16) ranks zero
    plan "${base[@]}" --ranks 16 --link 0.625 && said '^  advice: --zero [1-3] --shard machine; ' && plan "${base[@]}" --ranks 16 && ! grep 'advice.*--shard' plan.txt || return 1
    for zero in 1 3 "1 --tensor 2"; do
        for ranks in 8 16; do plan "${base[@]}" --ranks $ranks --zero $zero --link 0.625 --shard machine && grep -E 'memory in all|on the host' plan.txt > $ranks.txt || return 1; done
        said '^> +16 ' && cmp 8.txt 16.txt || { cat plan.txt; return 1; }
    done
    refuses 64 '--shard machine: --ranks 12 on machines of 8. use a multiple, or --device-count' "$train" --dry-run "${base[@]}" --ranks 12 --shard machine --steps 1
}
compares_the_modes() { # with a model too large for one card
    plan --device H200 --model d84 --ranks 4 --batch-tokens 524288 --micro-batch 4 --zero 3 --reduce micro-step && said '^> +4 +3 +1 +1 +[0-9.]+ +131,072 +compute ' &&
        said '^  compute-bound up to 255 ranks: ' && said '^  ranks from which it fits, at this micro-batch: none with --zero 0, 4 with 1, 3 with 2, 3 with 3$' || return 1
    awk '$1 == ">" { $1 = ""; $0 = $0 } $1 == 4 && $3 == 1 && $8 > 0 { memory[$2] = $5; n++ }
        END { for (zero = 1; zero < 4; zero++) if (!(memory[zero] < memory[zero - 1])) bad = 1; exit bad || n != 4 }' plan.txt || { cat plan.txt; return 1; }
    plan --device H200 --model d84 --micro-batch 4 && said '^  ranks from which it fits, at this micro-batch: none with --zero 0, 4 with 1, 3 with 2, 3 with 3' &&
        plan --model d2 --ranks 4 --batch-tokens 8192 && said '^> +4 +1 .* unknown '
}
# Compares with "How to scale your model" (Austin et al. 2025): first the book's example, a TPU pod with the book's
# figures; then GPUs behind switches. twin.py searches the best splits and batches in float64, from the
# transfers of one MLP.
agrees_with_the_textbook() {
    local python
    python=$(find_python) || skip "no Python" || return
    cat > twin.py <<- 'END'
		import math, re, sys
		C, W, axes, K, B, d, L, V = map(float, sys.argv[1:])
		D, v = 4 * d, 2
		def search(low, high, rises):  # bisects log x; returns the point where `rises` becomes true
		    for _ in range(200):
		        middle = math.sqrt(low * high)
		        low, high = (low, middle) if rises(middle) else (middle, high)
		    return low
		products = lambda B, K: 4 * B * d * D / (K * C)
		fsdp = lambda K_F, K, axes: 2 * v * d * D * K_F / K / (axes * W)
		tensors = lambda B, K_F, axes: 2 * v * B * d / K_F / (axes * W)
		def both(B, K_F):  # on a torus both at once: two axes for FSDP, one for tensors; on a switch one after the other
		    times = (fsdp(K_F, K, 2), tensors(B, K_F, 1)) if axes else (fsdp(K_F, K, 1), tensors(B, K_F, 1))
		    return max(times) if axes else sum(times)
		best = lambda B: search(1e-6, 1e9, lambda K_F: both(B, K_F * 1.0000001) > both(B, K_F))
		all_axes = axes or 1
		alone = search(1, 1e9, lambda B: products(B, 1) > fsdp(1, 1, all_axes))
		ranks = search(1e-3, 1e6, lambda K_T: tensors(B, 1, all_axes) > products(B, K_T))
		together = search(1e-3, 1e12, lambda B: products(B, K) > both(B, best(B))) / K
		T = search(1, 1e12, lambda T: 6 * L * d * T > 6 * (L * d * d * (4 + 3 * 8 / 3) + V * d))
		page = open("plan.txt").read()
		said = [float(x.replace(",", "")) for pattern in (r"here (\S+) tokens a rank\n", r"FSDP: from (\S+) tokens", r"tensor parallel: up to (\S+) ranks",
		        r"FSDP and tensor parallel: from (\S+) tokens", r"best here over (\S+) and", r"products from T (\S+)") for x in re.findall(pattern, page)]
		want = [B / K, alone, min(ranks, K), together, best(B), T]
		assert len(said) == 6 and all(abs(x - y) <= max(0.51, 1e-3 * y) for x, y in zip(said, want)), (said, want)
		print(*(round(x) for x in want))
	END
    plan --device pod --device-flops 459 --device-bandwidth 2765 --device-link 180 --device-axes 3 --device-count 8960 --ranks 8960 \
        --layers 80 --heads 56 --channels 7168 --vocab-size 50257 --seq-len 128 --batch-tokens 4194304 --micro-batch 1 --zero 3 &&
        ! grep -q '^ *16384 ' plan.txt && "$python" twin.py 459e12 180e9 3 8960 4194304 7168 80 50257 > twin.txt || return 1
    grep -q '^468 850 34 113 1619 ' twin.txt || { cat twin.txt; return 1; } # the textbook's numbers
    # The book's best split has 8960 / 1619 = 5.5 ranks for --tensor. The advice tries only powers of two.
    said '^  advice: --zero 1 --tensor 4; --zero 1 takes 1\.' || return 1
    plan --device H200 --ranks 8 --layers 4 --heads 64 --channels 8192 --vocab-size 1000 --seq-len 64 --batch-tokens 16384 &&
        "$python" twin.py 989e12 450e9 0 8 16384 8192 4 1000 > twin.txt || return 1
    plan --device H200 --ranks 64 --layers 4 --heads 64 --channels 8192 --batch-tokens 65536 && # network: 400 GB/s per node
        said ' FSDP: from 2,472 tokens a rank; tensor parallel: up to 8 ranks$' && said 'from no fewer tokens than FSDP alone$' || return 1
    plan --device 'A100 80GB' --ranks 8 --batch-tokens 8192 && said '^> +8 .* unknown +no times without --link$' && ! grep -qE '^ +(4|16) ' plan.txt
}
suggests_what_nobody_gave() { # by hand: 0.58 x 80e6^0.571 = 18.4 rows of 1024 tokens; 1.79 x 84,934,656^-0.713 x 80e6^0.307 = 1.06e-3
    plan --device H200 --model d12 --train-tokens 80e6 && said '^suggested +for 80,000,000 tokens: --batch-tokens 18432 --lr 1.1e-03 --warmup-tokens 737280$' &&
        plan --device H200 --model d12 && said '^suggested +for 2,488,796,160 tokens: --batch-tokens 134144 --lr 3.0e-03 ' && said '20 tokens per parameter' || return 1
    plan --device H200 --ranks 8 --model d12 --micro-batch 4 --train-tokens 1e6 && said ': --batch-tokens 8192 ' || return 1 # a row for each rank
    for options in "--lr 1e-3 --batch-tokens 65536" "--optimizer muon"; do
        plan --device H200 --model d12 --train-tokens 80e6 $options && ! grep -q suggested plan.txt || return 1
    done
}
reports_a_disk_too_small() {
    plan --device H200 --layers 1000 --heads 512 --channels 65536 --out not/there/yet && said 'NOT ENOUGH' &&
        plan --device H200 --model d2 --out not/there/yet && ! grep -q 'NOT ENOUGH' plan.txt && said 'free in not/there/yet'
}
reports_memory_too_small() { # an error for this machine, a note for another machine; both name a remedy that helps
    local fits
    plan --device "RTX 4090" --model gpt2-1558M && said 'NOT EVEN ONE ROW FITS' && said '; general kernels' &&
        said '^note: the model does not fit: .* use --recompute block and --zero 3 on more ranks' &&
        plan --device "RTX 4090" --model gpt2-1558M --seq-len 8192 --zero 2 --ranks 8 && said '^note: .* use --recompute block, with' &&
        fits=$(sed -nE 's/^note: .* with --micro-batch ([0-9]+) or less.*/\1/p' plan.txt) &&
        plan --device "RTX 4090" --model gpt2-1558M --seq-len 8192 --zero 2 --ranks 8 --recompute block --micro-batch $((fits + 1)) &&
        said "DOES NOT FIT: the largest --micro-batch that fits is $fits$" || return 1
    plan --device GB200 --layers 1 --heads 1 --channels 1 --vocab-size 256 --seq-len 65536 --micro-batch 512 &&
        said 'the largest --micro-batch that fits is 512$' || return 1 # 2^25 tokens, in the smallest model on a large device
    "$train" --dry-run --layers 900 --heads 64 --channels 8192 > plan.txt 2> error.txt
    [ $? = 71 ] && said 'memory in all +[0-9.]+ MiB of .*NOT EVEN ONE ROW FITS' && said '^  [0-9.,]+ (hours|days), 0 tok/s' && ! grep -E '[0-9]e\+[0-9]* (ms|s|hours|%)' plan.txt &&
        grep -qE '^error: the model does not fit: [0-9.]+ GiB are needed.*\(CPU' error.txt && [ "$(wc -l < error.txt)" = 1 ] ||
        { cat error.txt plan.txt; return 1; }
}
plans_with_the_users_figures() { # for a GPU that the table lacks, or instead of the table's figures
    plan --device 'Radeon X' --device-flops 120 --device-bandwidth 960 --device-memory 24 --model gpt2-124M --steps 10 &&
        said '^device +Radeon X: 120 TFLOP/s bf16, 960 GB/s, 24 GiB \(figures as given; general kernels\)' && said ' MiB of 23839; the largest' &&
        said '^run +10 steps of 4 rows, ' || return 1
    plan --device 'Radeon X' --device-flops 120 --device-bandwidth 960 --ranks 4 --link 10 --batch-tokens 65536 &&
        said '960 GB/s, memory unknown' && said '^> +4 +1 +1 +4 ' || return 1
    plan --device 4090 --device-memory 48 && said '^device +RTX 4090: 165 TFLOP/s bf16, .* 48 GiB' || return 1
    plan --device 4090 --dtype fp16 --loss-scale 4 && said '^device +RTX 4090: 165 TFLOP/s fp16' || return 1
    refuses 64 '--device 40: not in the table' "$train" --dry-run --device 40 && grep -q ' L40, .*RTX 4090' log &&
        refuses 64 3dfx "$train" --dry-run --device 3dfx && says log H200 &&
        refuses 64 '--device-flops has no effect without --device' "$train" --dry-run --device-flops 40 &&
        refuses 64 'add --device-link' "$train" --dry-run --device pod --device-flops 459 --device-bandwidth 2765 --device-count 8 --ranks 4 &&
        says log 'error: --device-count, --device-axes: '
}
writes_nothing() { plan --model d2 --steps 3 --out runs/none && [ ! -e runs ]; }

# The plan predicts the run's number of steps.
predicts_the_steps() {
    local small="--train code_train_*.bin --vocab-size 256 --layers 1 --heads 1 --channels 16 --seq-len 32 --lr 1e-3
        --train-tokens 30000 --micro-batch 8 --gns off --checkpoint-every 0" ramp planned made
    cat "$root"/llmc/*/*.[ch] > text.txt
    "$tokenize" --tokenizer bytes --out code --val-fraction 0.1 text.txt > tokenize.log 2>&1 || { cat tokenize.log; return 1; }
    for ramp in "" "--ramp linear --batch-min 2 --batch-max 9" "--ramp seesaw --batch-min 2 --batch-max 9 --warmup-tokens 3000"; do
        GLOBIGNORE='*' plan $small $ramp || return 1
        planned=$(awk '/^run / { print $2 }' plan.txt)
        GLOBIGNORE='*' "$train" $small $ramp --out run --fresh > run.log 2>&1 || { cat run.log; return 1; }
        made=$(grep -c '"loss"' run/metrics.jsonl)
        [ "$planned" = "$made" ] || { echo "$ramp: planned $planned steps, made $made"; return 1; }
    done
}

tunes_a_gpu_only() { # --tune is refused where a run would refuse it
    refuses 64 '--tune is for GPUs: on the CPU ' "$train" --dry-run --tune --model d2 --steps 3 &&
        plan --tune --model d2 --steps 3 --device H100
}

# A plan for a GPU refuses what the CUDA trainer refuses (test_cuda_build.sh compares the two). A plan for this machine
# accepts the same shapes, and a run accepts them even if its config file names a GPU.
refuses_for_a_gpu_what_only_the_cpu_can() {
    local wide="--model d1 --channels 192 --vocab-size 256 --seq-len 16" shard=code_train_000000.bin code what
    "$train" --train $shard $wide --steps 1 --out wide --fresh > run.log 2>&1 || { cat run.log; return 1; }
    while read -r code what; do
        refuses "$code" 'head sizes up to 128, not 192. ' "$train" --dry-run --device H200 $what && plan $what || return 1
    done <<- END
		64 --channels 768 --heads 4
		64 $wide
		65 --model wide/step_00000001 --seq-len 16
	END
    # Exit code 64, not 65: an option is at fault, not the checkpoint.
    refuses 64 '--dtype fp8-dw on a GPU needs a --seq-len that is a multiple of 16, not 8. use --dtype fp8' \
        "$train" --dry-run --device H200 --model wide/step_00000001 --seq-len 8 --dtype fp8-dw || return 1
    plan --device H200 $wide --heads 2 && plan --device H200 --channels 129 --heads 3 &&
        plan --device H200 --channels 1920 --heads 15 || return 1
    printf 'device = H200\nchannels = 192\nvocab-size = 256\nseq-len = 16\n' > shared.cfg
    "$train" --config shared.cfg --model d1 --train $shard --steps 1 --out wide --fresh > plan.txt 2>&1 ||
        { cat plan.txt; return 1; }
    said 'note: no effect: --device without --dry-run'
}

for test in plans_a_gpu_from_here plans_fp8 plans_this_cpu plans_a_cut_model plans_a_run_without_length hours_are_tokens_over_speed \
    reports_ranks_that_wait compares_the_modes compares_cuts advises_replicas "advises_a_mesh d24 H200 8 16" "advises_a_mesh d84 H100 4 4" agrees_with_the_textbook suggests_what_nobody_gave reports_a_disk_too_small reports_memory_too_small \
    plans_with_the_users_figures writes_nothing \
    predicts_the_steps tunes_a_gpu_only refuses_for_a_gpu_what_only_the_cpu_can; do
    try $test
done
exit $failed
