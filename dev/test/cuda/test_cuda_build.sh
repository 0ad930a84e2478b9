#!/usr/bin/env bash
# The CUDA trainer compiles without a warning; no kernel spills registers (the Makefile sees to that), and ptxas lets the
# tensor cores' products (wgmma) overlap, which it undoes with no more than a remark. bf16 for sm_80 and sm_90a; the other
# precisions, which share its kernels, for sm_80, to save a minute. Nothing runs: that is dev/test/gpu_check.sh, on a
# machine with a GPU.
set -u
. "$(dirname "$0")/../checks.sh" cuda_build
case $build in *-san*) skip_suite "the sanitizers are for the CPU trainer" ;; esac
command -v nvcc > /dev/null || [ -x /usr/local/cuda/bin/nvcc ] || skip_suite "no nvcc"

# Remarks on wgmma, from C7506 on, in the reports of all that is compiled, now or earlier.
serialized() { grep -rhE --include='*.ptxas' 'ptxas info *: \(C75[0-9]+\).*(wgmma|GMMA)' "build/cuda-$1"; }

compiles() { # PRECISION GPUS: without a word
    make --no-print-directory -s -j2 train_gpt2cu PRECISION="$1" CUDA_ARCH="$2" > "$work/log" 2>&1 &&
        ! serialized "$1" >> "$work/log" && [ ! -s "$work/log" ] || { cat "$work/log"; return 1; }
}

for precision in BF16 FP16 FP32; do
    begin
    check "it says:" compiles $precision "$([ $precision = BF16 ] && echo 80 90a || echo 80)"
    end $precision
done
exit $failed
