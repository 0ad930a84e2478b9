#!/usr/bin/env bash
# make bench: compares kernels with the FMA peak of the same run, and with OpenBLAS if it is installed. Then compares
# whole steps of two models with the peak, and with PyTorch if $TORCH_PYTHON (or python3) has it. Then times a step
# kernel by kernel. THREADS: number of threads, by default all cores.
set -u
build=$1
threads=${THREADS:-$(nproc)}
python=${TORCH_PYTHON:-python3}
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}

declare -A peak roofline # by type: GFLOP/s, and ms of a step of 124M
for dtype in fp32 bf16; do
    echo "== kernels in $dtype, $threads threads"
    OPENBLAS_CORETYPE=${OPENBLAS_CORETYPE:-SkylakeX} "$build/dev/bench/bench_cpu" "$threads" 5 '' $dtype | tee "$build/bench_cpu.log"
    peak[$dtype]=$(awk '/ peak / && $NF == "GFLOP/s" { print $(NF - 1) }' "$build/bench_cpu.log")
    roofline[$dtype]=$(awk '/^kernels of the step/ { print $(NF - 1) }' "$build/bench_cpu.log")
done

# a model per line: name | options of the trainer | arguments of torch_cpu.py except the threads | steps
models="124M|--model gpt2-124M --seq-len 64 --micro-batch 4|12 12 768 50257 64 4|8
small|--layers 4 --heads 4 --channels 128 --vocab-size 256 --seq-len 64 --micro-batch 12|4 4 128 256 64 12|200"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
head -c 200000 /dev/urandom | od -An -v -tu1 -w1 | awk '{ printf "%c", $1 % 64 + 32 }' > "$work/text"
"$build/data/tokenize" --tokenizer bytes --out "$work/noise" "$work/text" > /dev/null 2>&1

step_speed() { # median tok/s of a run's steps, the first two left out
    grep -o '"tok_per_s": [0-9.]*' "$1/metrics.jsonl" | tail -n +3 | cut -d ' ' -f 2 | sort -g |
        awk '{ x[NR] = $1 } END { print x[int((NR + 1) / 2)] }'
}

whole_steps() { # DTYPE NAME OPTIONS TORCH STEPS
    local dtype=$1 name=$2 options=$3 torch=$4 steps=$5 out=$work/$1-$2
    for round in 1 2 3; do # the best of three medians counts, because other work may slow a round
        # shellcheck disable=SC2086
        "$build/train_gpt2" --train "$work/noise_train_000000.bin" $options --steps "$steps" --threads "$threads" \
            --dtype "$dtype" --fresh --out "$out" > "$work/log" 2>&1 || cat "$work/log"
        step_speed "$out" >> "$out.speeds"
        sync
    done
    flops=$(grep -o '"flops_per_token": [0-9.e+]*' "$out/run.json" | cut -d ' ' -f 2)
    awk -v name="$name, $dtype" -v speed="$(sort -g "$out.speeds" | tail -n 1)" -v flops="$flops" -v peak="${peak[$dtype]}" \
        -v roofline="${roofline[$dtype]}" 'BEGIN {
            printf "%s: %.0f tok/s, %.1f%% of the peak", name, speed, 100 * speed * flops / 1e9 / peak
            if (name ~ /^124M/) printf ", %.1f%% of the roofline", 100 * roofline / 1e3 * speed / 256
            print "" }'
    for compile in 0 1; do
        for _ in 1 2 3; do # again the best of three medians
            # shellcheck disable=SC2086
            DTYPE=$dtype COMPILE=$compile STEPS=$steps "$python" dev/bench/torch_cpu.py $torch "$threads" 2> "$work/torch.log" ||
                { tail -n 1 "$work/torch.log" >&2 && break; }
        done | sort -g -t , -k 2 | tail -n 1 | sed "s/^/$name, $dtype, torch.compile $compile: /"
    done
}
for dtype in fp32 bf16; do
    [ -n "${peak[$dtype]}" ] || continue
    echo "== whole steps in $dtype, $threads threads; peak of the run above: ${peak[$dtype]} GFLOP/s"
    while IFS='|' read -r name options torch steps; do whole_steps $dtype "$name" "$options" "$torch" "$steps"; done <<< "$models"
done

for dtype in fp32 bf16; do
    [ -n "${peak[$dtype]}" ] || continue
    echo "== a step of 124M in $dtype kernel by kernel: shares of what the cores give at the moment"
    OMP_NUM_THREADS=$threads "$build/dev/bench/bench_step" gpt2-124M 4 64 $dtype
done

echo "== what --gns ln costs: steps with and without by turns"
OMP_NUM_THREADS=$threads "$build/dev/bench/bench_engine" d12 4 64 12 | grep '^gns'
