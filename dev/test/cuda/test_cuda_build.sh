#!/usr/bin/env bash
# Compiles the CUDA trainer in bf16 for sm_80 and sm_90a, all files in one. Checks that the compiler does not warn, that
# no kernel spills registers, and that products of tensor cores (wgmma) overlap, with CUDA 12's ptxas, too
# (dev/make/ptxas.sh). Only parses the rest: each file in fp16 for the oldest GPU; all files in one in fp32 and for
# Blackwell; the CUDA programs of dev/test and dev/bench, which dev/test/gpu_check.sh builds and runs. Compares plans
# and refusals with the CPU trainer's.
# shellcheck disable=SC2046,SC2086
set -u
. "$(dirname "$0")/../checks.sh" cuda_build
case $build in *-san*) skip_suite "the sanitizers are for the CPU trainer" ;; esac
command -v nvcc > /dev/null || [ -x /usr/local/cuda/bin/nvcc ] || skip_suite "no nvcc"
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
export nvcc work
one=build/cuda-one
mkdir -p $one "$work/keep"

# trainer.cu: all files of the trainer in one, so that common headers are compiled once. Constants get the number of
# their file as a suffix, since several files use the same names.
number=0
cp train_gpt2.cu "$work/trainer.cu"
for file in llmc/cuda/*.cu; do
    enums=$(grep '^enum ' "$file" | grep -oP '(?<=[{,] )[A-Z_0-9]+' | paste -sd '|')
    printf '#line 1 "%s"\n' "$file"
    sed -E "s/\b(${enums:+$enums|}probe_kernel)\b/&_$((++number))/g" "$file"
done >> "$work/trainer.cu"
cmp -s "$work/trainer.cu" $one/trainer.cu || cp "$work/trainer.cu" $one

compiles() { # prints nothing; keeps the PTX
    make --no-print-directory -s $one/train_gpt2cu NVCC="$nvcc --threads 2 --keep --keep-dir $work/keep" PRECISION=BF16 CUDA_ARCH="80 90a" \
        CUDA_BUILD=$one CUDA_FILES=$one/trainer.cu > "$work/log" 2>&1 && [ ! -s "$work/log" ] || { cat "$work/log"; return 1; }
}

# engines.cu, tests.cu: the programs that need a GPU, merged into two files; each program has a namespace.
as_one() { # FILE...
    grep -h '^#include' "$@"
    for file; do printf 'namespace program_%d {\n#line 1 "%s"\n' $((++number)) "$file" && sed 's/^#include.*//' "$file" && echo "}"; done
}
as_one $(grep -l '"engine_test.cuh"' dev/test/*/*.cu) dev/bench/*.cu > "$work/engines.cu" && as_one $(grep -L '"engine_test.cuh"' dev/test/*/*.cu) > "$work/tests.cu"

# Parses each file of the trainer in fp16; trainer.cu in fp32, and for Blackwell if nvcc knows it (from CUDA 12.8 on);
# engines.cu and tests.cu in bf16. This finds calls that do not match a function's parameters. If nvcc has no option to
# only parse, it compiles to PTX.
parses() {
    local least="-Xcicc -O0"
    ! $nvcc --help | grep -q -- --fdevice-syntax-only || least=-fdevice-syntax-only
    export least
    {
        printf -- '-DGNS_FP16 -arch=compute_75 %s\n' train_gpt2.cu llmc/cuda/*.cu
        echo "-DGNS_FP32 -arch=compute_80 $work/trainer.cu"
        $nvcc --list-gpu-arch | grep -x compute_100 | sed "s|.*|-DGNS_BF16 -arch=& $work/trainer.cu|"
        printf -- '-DGNS_BF16 -arch=compute_80 %s\n' "$work"/{engines,tests}.cu
    } | xargs -L 1 -P 2 sh -c '$nvcc -std=c++20 -Illmc -diag-suppress 177 -Idev/test/cuda -Idev/bench $least -ptx -o "$work/$$.ptx" "$@"' sh
}

# In linear_sm90.cu CUDA 12's ptxas, up to 12.8, made every wgmma wait for the previous one.
overlaps_with_older_ptxas() {
    local python release tools
    python=$(find_python pip) || skip "no pip" || return
    # Compile only two kernels, one of bf16 and one of e4m3: the fault was in every kernel of the file.
    awk '/\.(entry|func) / { wanted = /linear_kernelIL14LinearEpilogue3E/; body = 1 } !body || wanted' "$work"/keep/trainer.compute_90a.ptx > "$work/new.ptx"
    [ "$(grep -c '\.entry ' "$work/new.ptx")" = 2 ] || { echo "not two kernels of linear_sm90.cu in trainer.compute_90a.ptx"; return 1; }
    for release in 12.4.131:8.4 12.8.93:8.7; do # RELEASE:PTX_VERSION
        tools=build/ptxas-${release%:*}
        [ -d "$tools" ] || { "$python" -m pip install -q --retries 0 --no-deps --target "$tools.new" "nvidia-cuda-nvcc-cu12==${release%:*}" > "$work/pip.log" 2>&1 &&
            mv -T "$tools.new" "$tools"; } || skip "no network for ${tools#*/}: $(tail -n 1 "$work/pip.log")" || return
        sed "s/^\.version .*/.version ${release#*:}/" "$work/new.ptx" > "$work/old.ptx"
        "$tools/nvidia/cuda_nvcc/bin/ptxas" -v -arch=sm_90a -o "$work/cubin" "$work/old.ptx" 2> "$work/report" &&
            dev/make/ptxas.sh linear_sm90.cu "$work/report" 90a || { tail -n 2 "$work/report"; return 1; }
    done
}
try compiles
try parses
try overlaps_with_older_ptxas

cuda=$root/$one/train_gpt2cu
export CUDA_VISIBLE_DEVICES=
cd "$work" || exit 70
plan() { "$train" --dry-run "$@" > plan.txt 2>&1 || { cat plan.txt; return 1; }; }
said() { grep -qE -- "$1" plan.txt || { echo "nothing like '$1' in:"; cat plan.txt; return 1; }; }

# Without a GPU the CUDA trainer plans its memory exactly, the CPU trainer roughly. Both add the same for libraries.
engine_memory() { awk '/memory in all/ { sum += $4 } /^  (CUDA|NCCL|rounded) .* MiB/ { sum -= $(NF - 1) } END { print sum }' "$1"; }
libraries() { grep -E '^  (CUDA|NCCL|rounded) .* MiB' "$1"; }
estimates_what_the_cuda_engine_takes() {
    local options
    for options in "--model d12" "--model d12 --recompute gelu --gns ln" "--model d12 --recompute block --optimizer muon" \
        "--model d12 --ranks 8 --zero 1 --comm-dtype bf16" "--model d12 --ranks 8 --zero 2 --batch-tokens 262144" \
        "--model d48 --ranks 4 --zero 0" "--model d48 --recompute block --dtype fp8" "--model d12 --dtype fp8-dw" \
        "--model d48 --recompute block --ranks 4 --zero 3 --batch-tokens 131072 --dtype fp8"; do
        plan --device H200 --micro-batch 32 $options || return 1
        "$cuda" --dry-run --device H200 --micro-batch 32 $options > cuda.txt 2>&1 || { cat cuda.txt; return 1; }
        awk -v here="$(engine_memory plan.txt)" -v there="$(engine_memory cuda.txt)" -v options="$options" 'BEGIN {
            if (!(there > 0) || here / there > 1.05 || here / there < 0.95) {
                print options ": " here " MiB, the engine " there; exit 1 } }' || return 1
        diff <(libraries plan.txt) <(libraries cuda.txt) && said '^  CUDA context and libraries ' || return 1
        [[ $options != *--ranks* ]] || { said '^  NCCL ' && said '; NCCL with NCCL_NVLS_ENABLE=0'; } || return 1
        [[ $options != *bf16* ]] || said '^  rounded gradients, .* 75\.2 MiB' || return 1 # (50304 + 1024) x 768 values of 2 bytes
    done
}

plans_the_largest_micro_batch() { # of a tiny model on a large device: MICRO_BATCH_TOKENS_MAX / --seq-len
    "$cuda" --dry-run --device GB200 --layers 1 --heads 1 --channels 1 --vocab-size 256 --seq-len 65536 --micro-batch 512 > plan.txt 2>&1 &&
        said 'the largest --micro-batch that fits is 512$' || { cat plan.txt; return 1; }
}

refuses_what_the_cuda_engine_cannot() { # too wide heads, from options or files, before it plans or writes
    local wide="--model d1 --channels 192 --vocab-size 256 --seq-len 16" shard=code_train_000000.bin what code
    seq 99 > text.txt
    "$tokenize" --tokenizer bytes --out code text.txt > run.log 2>&1 && "$train" --train $shard $wide --steps 1 --out wide >> run.log 2>&1 ||
        { cat run.log; return 1; }
    while read -r code what; do
        "$cuda" $what --out none > plan.txt 2>&1
        [ $? = "$code" ] && said 'head sizes up to 128, not 192' || { cat plan.txt; return 1; }
        [ "$code" = 64 ] && { said 'use more heads' || return 1; } || ! grep -q 'more heads' plan.txt || return 1
        [ ! -e none ] || return 1
    done <<- END
		64 --dry-run $wide
		64 --dry-run --model d12 --heads 4
		64 --train $shard $wide --steps 1
		65 --dry-run --model wide/step_00000001 --seq-len 16
		65 --train $shard --model wide/step_00000001 --seq-len 16 --steps 1
		65 --sample-only --model wide
	END
    # The CPU trainer's plan for a GPU refuses these shapes with the same message.
    for what in "--channels 768 --heads 4" "$wide" "--model wide/step_00000001 --seq-len 16"; do
        diff <("$train" --dry-run --device H200 $what 2>&1) <("$cuda" --dry-run --device H200 $what 2>&1) || return 1
    done
}

try estimates_what_the_cuda_engine_takes
try plans_the_largest_micro_batch
try refuses_what_the_cuda_engine_cannot
exit $failed
