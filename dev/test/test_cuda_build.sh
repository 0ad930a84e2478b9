#!/usr/bin/env bash
# The CUDA trainer compiles in both precisions, for sm_80 and sm_90a, without a warning; no kernel spills registers (the
# Makefile sees to that), and ptxas lets the tensor cores' products (wgmma) overlap, which it undoes with no more than a
# remark. Nothing runs: that is scripts/gpu_check.sh, on a machine with a GPU.
set -u
case $GNS_BUILD in *-san*) echo "SKIP cuda_build: the sanitizers are for the CPU trainer"; exit 0 ;; esac
command -v nvcc > /dev/null || [ -x /usr/local/cuda/bin/nvcc ] || { echo "SKIP cuda_build: no nvcc"; exit 0; }
failed=0

# Remarks on wgmma, from C7506 on, in the reports of all that is compiled, now or earlier.
serialized() { grep -rhE --include='*.ptxas' 'ptxas info *: \(C75[0-9]+\).*(wgmma|GMMA)' "build/cuda-$1"; }

for precision in BF16 FP32; do
    start=$EPOCHREALTIME
    log=$GNS_BUILD/cuda-$precision.log
    if make --no-print-directory -s -j2 train_gpt2cu PRECISION=$precision CUDA_ARCH="80 90a" > "$log" 2>&1 &&
        ! serialized $precision >> "$log" && [ ! -s "$log" ]; then
        status=PASS
    else
        status=FAIL failed=1
        tail -n 20 "$log" | sed 's/^/  /'
    fi
    printf '%s cuda_build/%s %.2fs\n' $status $precision "$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { print b - a }')"
done
exit $failed
