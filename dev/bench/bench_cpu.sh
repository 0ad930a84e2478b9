#!/usr/bin/env bash
# make bench: kernels against the FMA peak of the same run (and OpenBLAS where it is installed), then whole steps of two
# models against the peak, and against PyTorch where $TORCH_PYTHON (or python3) has it. THREADS=n, all cores by default.
set -u
build=$1
threads=${THREADS:-$(nproc)}
python=${TORCH_PYTHON:-python3}
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}

echo "== kernels, $threads threads"
OPENBLAS_CORETYPE=${OPENBLAS_CORETYPE:-SkylakeX} "$build/dev/bench/bench_cpu" "$threads" | tee "$build/bench_cpu.log" 
peak=$(awk '/^FMA peak/ { for (i = 2; i <= NF; i++) if ($i == "GFLOP/s") print $(i - 1) }' "$build/bench_cpu.log")

# name, options of the trainer, arguments of torch_cpu.py before the threads, steps
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

echo "== whole steps, $threads threads; peak of the run above: $peak GFLOP/s"
while IFS='|' read -r name options torch steps; do
    for round in 1 2 3; do # other work on the machine comes and goes: the best of three medians
        # shellcheck disable=SC2086
        "$build/train_gpt2" --train "$work/noise_train_000000.bin" $options --steps "$steps" --threads "$threads" \
            --fresh --out "$work/$name" > "$work/log" 2>&1 || cat "$work/log"
        step_speed "$work/$name" >> "$work/$name.speeds"
        sync
    done
    flops=$(grep -o '"flops_per_token": [0-9.e+]*' "$work/$name/run.json" | cut -d ' ' -f 2)
    awk -v name="$name" -v speed="$(sort -g "$work/$name.speeds" | tail -n 1)" -v flops="$flops" -v peak="$peak" 'BEGIN {
        printf "%s: %.0f tok/s, %.1f%% of the peak\n", name, speed, 100 * speed * flops / 1e9 / peak }'
    for compile in 0 1; do
        # shellcheck disable=SC2086
        COMPILE=$compile STEPS=$steps "$python" dev/bench/torch_cpu.py $torch "$threads" 2> "$work/torch.log" |
            sed "s/^/$name, torch.compile $compile: /" || tail -n 1 "$work/torch.log"
    done
done <<< "$models"

echo "== what --gns ln costs: steps with and without by turns"
OMP_NUM_THREADS=$threads "$build/dev/bench/bench_engine" d12 4 64 12 | grep '^gns'
