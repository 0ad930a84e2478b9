#!/usr/bin/env bash
# Compares the CPU trainer for Arm under qemu ($GNS_BUILD, run by dev/test/arm_run.sh) with this machine's ($GNS_HERE):
# shards are equal, losses agree within rounding, and each trainer resumes the other's run. On Arm a rerun and a run on
# two threads give the same bits. make test-arm runs this script.
set -u
. "$(dirname "$0")/checks.sh" arm
here=$root/${GNS_HERE:-build/cpu}
unset GNS_RUNNER
cd "$work" || exit 70
on_arm() { "$root/dev/test/arm_run.sh" "$root/$build/$1" "${@:2}"; } # PROGRAM ARGUMENTS...
on_here() { "$here/$1" "${@:2}"; }

cat "$root"/llmc/*/*.h > text.txt
begin
for machine in arm here; do
    mkdir $machine
    returns 0 on_$machine data/tokenize --tokenizer bytes --out $machine/code --val-fraction 0.1 text.txt
done
check "the shards differ" diff -r arm here
end shards

options="--train here/code_train_*.bin --val here/code_val_*.bin --vocab-size 256 --layers 2 --heads 2 --channels 64 --seq-len 64
    --micro-batch 4 --batch-tokens 512 --steps 20 --lr 3e-3 --warmup-tokens 2048 --gns exact --val-every 5 --val-tokens 2048
    --checkpoint-every 10 --keep 0 --sample-every 0"
train() { # MACHINE RUN THREADS
    # shellcheck disable=SC2086
    GLOBIGNORE='*' returns 0 "on_$1" train_gpt2 $options --out "$2" --threads "$3"
}
same_bits() { # RUN RUN
    cmp "$1/step_00000020/model.safetensors" "$2/step_00000020/model.safetensors" &&
        cmp "$1/step_00000020/training/optimizer.safetensors" "$2/step_00000020/training/optimizer.safetensors" &&
        cmp <(numbers "$1") <(numbers "$2")
}
losses_within() { # MOST RUN RUN: relative differences are at most MOST, over at least 24 training and validation losses
    paste <(grep -oE '"(val_)?loss": [0-9.]+' "$2/metrics.jsonl") <(grep -oE '"(val_)?loss": [0-9.]+' "$3/metrics.jsonl") |
        awk -v most="$1" '{ d = ($2 - $4) / $4; if (d < 0) d = -d; if (d > worst) worst = d; if ($1 == $3 && $4 > 0) n++ }
            END { printf "  %d losses, at most %.2g apart\n", n, worst; exit !(n >= 24 && worst <= most) }'
}
resumed() { # MACHINE FROM RUN: resumes RUN at step 10; RUN is a copy of FROM, a run of the other machine
    cp -r "$2" "$3" && rm -r "$3/step_00000020"
    train "$1" "$3" 1
    check "it does not resume: $(cat "$work/log")" says "$work/log" "resuming"
}

begin
train here here_1 1
train arm arm_1 1
check "on Arm and here" losses_within 2e-6 arm_1 here_1
end losses
begin
train arm arm_again 1
check "two runs differ" same_bits arm_1 arm_again
train arm arm_2 2
check "1 and 2 threads differ" same_bits arm_1 arm_2
end bits
begin
returns 0 on_here train_gpt2 --check arm_1/step_00000020
resumed here arm_1 begun_on_arm
check "resumed here" losses_within 2e-6 begun_on_arm here_1
returns 0 on_arm train_gpt2 --check here_1/step_00000020
resumed arm here_1 begun_here
check "resumed on Arm" losses_within 2e-6 begun_here here_1
end resumed
begin # on a core without bf16
returns 69 qemu-aarch64 -cpu cortex-a72 -L /usr/aarch64-linux-gnu -E LD_LIBRARY_PATH="$root/build/arm64/usr/lib/aarch64-linux-gnu" \
    "$root/$build/train_gpt2" --sample-only --model arm_1 --prompt a --dtype bf16
check "$(cat "$work/log")" grep -q 'error: --dtype bf16: this machine lacks the instructions' "$work/log"
end no_bf16
exit $failed
