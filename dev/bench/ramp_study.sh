#!/usr/bin/env bash
# What a batch that follows the noise scale is worth: one small model (10.9M parameters, rows of 512 bytes of source
# code, 80M tokens) trained at constant batches of 32, 128 and 512 rows, and with --ramp gns from 32 to 512. dev/docs/gns.md
# reports it; dev/docs/plots.py draws its figures from $OUT.
#
#     TRAINER=./train_gpt2cu dev/bench/ramp_study.sh
#
#     TRAINER     the trainer (./train_gpt2cu)
#     TOKENIZE    the program that makes the shards (data/tokenize)
#     TEXTS       directories with source text (/usr /opt)
#     TRAIN, VAL  shards of bytes to use instead
#     OUT         a directory a run with run.json and metrics.jsonl.gz, logs, and table.txt (build/ramp_study)
#     JOBS        runs side by side, the k-th on GPU k (1)
#     BATCHES     rows of the constant batches ("32 128 512"); a ramp goes from the first to the last
#     KAPPAS      a ramp each ("1"); "" for none
#     LRS         learning rates at the first batch ("1e-3"), every run with every one; see below
#     SEEDS       ("1"), every run with every one
#
# The learning rate at a batch B is that of the first batch x (B / first)^0.5, in the ramp and at constant batches alike.
# Above the noise scale the best rate no longer grows with the batch (McCandlish et al. 2018, arXiv 1812.06162, section
# 2.2), so constant batches also run at the rates of LRS themselves. A run's name has the rate that the rule gives
# the first batch: constant-512-lr0.00025 runs at 1e-3 if the first is 32. Of several LRS each batch can have its best.
set -u
. "$(dirname "$0")/../../scripts/common.sh"
[[ ${1:-} != @(--help|-h) ]] || { print_header "$0" && exit; }
[ $# = 0 ] || fail 64 "$1: it takes no arguments, the environment says what to do" "See --help"
cd "$root" || exit 70
TRAINER=${TRAINER:-./train_gpt2cu} TOKENIZE=${TOKENIZE:-data/tokenize} TEXTS=${TEXTS:-/usr /opt}
TRAIN=${TRAIN:-} VAL=${VAL:-} OUT=${OUT:-build/ramp_study} JOBS=${JOBS:-1}
BATCHES=${BATCHES:-32 128 512} KAPPAS=${KAPPAS-1} LRS=${LRS:-1e-3} SEEDS=${SEEDS:-1}
TOKENS=${TOKENS:-80000000}
SHAPE=${SHAPE:---layers 6 --heads 6 --channels 384}
SEQ_LEN=${SEQ_LEN:-512}
MICRO_BATCH=${MICRO_BATCH:-128}   # rows; changes the time, not the numbers
VAL_TOKENS=${VAL_TOKENS:-524288}
WARMUP_STEPS=${WARMUP_STEPS:-60}  # at least; 5% of the tokens where that is more
RAMP_VAL_EVERY=${RAMP_VAL_EVERY:-50} # steps; constant batches are validated 16 times
EXACT_EVERY=${EXACT_EVERY:-8}     # steps between those that measure the noise of every tensor
LIMIT=${LIMIT:-300}               # seconds that a run may take
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM # and with it the trap above

# Bytes of this machine's source files, one file in 20 for validation. Sorted by digest: that mixes the projects, and keeps
# one of equal files, or training might see a copy of a validation file.
source_text() {
    # shellcheck disable=SC2086
    find $TEXTS -xdev -type f \( -name '*.py' -o -name '*.c' -o -name '*.h' -o -name '*.hpp' \) -size +1k -size -1000k \
        -print0 2> /dev/null | xargs -0 -r -n 500 -P "$(nproc)" md5sum 2> /dev/null |
        LC_ALL=C sort -u -k 1,1 | sed -nE 's/^[0-9a-f]{32}  //p' > "$work/files"
    [ -s "$work/files" ] || fail 65 "no source text under $TEXTS" "Name directories that hold some in TEXTS"
    "$TOKENIZE" --tokenizer bytes --invalid bytes --out "$work/text" --files-from "$work/files" --format text \
        --val-every-file 20 --max-bytes $((TOKENS * 11 / 10)) > "$OUT/text.log" 2>&1 ||
        fail 65 "$TOKENIZE: $(tail -n 1 "$OUT/text.log")" "See $OUT/text.log"
    TRAIN="$work/text_train_*.bin" VAL="$work/text_val_*.bin"
    grep shard "$OUT/text.log"
}

lr_at() { awk -v lr="$1" -v b="$2" -v first="$3" 'BEGIN { printf "%.6g", lr * sqrt(b / first) }'; } # LR BATCH FIRST

# The rates at the first batch that the rule turns into those of LRS at this batch, without those in LRS.
more_lrs() { # BATCH FIRST
    awk -v lrs="$LRS" -v b="$1" -v first="$2" 'BEGIN {
        n = split(lrs, lr)
        for (i = 1; i <= n; i++) { known[sprintf("%.6g", lr[i])] = 1 }
        for (i = 1; i <= n; i++) { less = sprintf("%.6g", lr[i] * sqrt(first / b)); if (!known[less]++) print less }
    }'
}

# 5% of the run, but enough steps for Adam, which needs 2 / (1 - beta2) = 40 or more (Ma and Yarats 2021, arXiv
# 1910.04209, section 5). 5% at 512 rows are 15: gradients 30 times their usual norm, and a loss that stays at 2.
warmup_at() { # BATCH
    local least=$((WARMUP_STEPS * $1 * SEQ_LEN))
    echo $((least > TOKENS / 20 ? least : TOKENS / 20))
}

list_constant() { # LR SEED BATCH FIRST
    echo "constant-$3-lr$1-seed$2 --seed $2 --lr $(lr_at "$1" "$3" "$4") --batch-tokens $(($3 * SEQ_LEN))" \
        "--warmup-tokens $(warmup_at "$3") --val-every $((TOKENS / (16 * $3 * SEQ_LEN) + 1))"
}

list_ramp() { # LR SEED KAPPA FIRST LAST
    echo "ramp-kappa$3-lr$1-seed$2 --seed $2 --lr $1 --batch-tokens $(($4 * SEQ_LEN)) --warmup-tokens $(warmup_at "$4")" \
        "--ramp gns --batch-min $4 --batch-max $5 --ramp-kappa $3 --val-every $RAMP_VAL_EVERY"
}

# A line a run: its name and its own options.
list_runs() {
    local first=${BATCHES%% *} last=${BATCHES##* } lr seed batch kappa
    for seed in $SEEDS; do
        for lr in $LRS; do
            for batch in $BATCHES; do list_constant "$lr" "$seed" "$batch" "$first"; done
            for kappa in $KAPPAS; do list_ramp "$lr" "$seed" "$kappa" "$first" "$last"; done
        done
        for batch in $BATCHES; do
            for lr in $(more_lrs "$batch" "$first"); do list_constant "$lr" "$seed" "$batch" "$first"; done
        done
    done
}

train() { # GPU NAME OPTIONS...
    local gpu=$1 name=$2 out=$work/$2 code
    shift 2
    # shellcheck disable=SC2086
    CUDA_VISIBLE_DEVICES=$gpu timeout "$LIMIT" "$TRAINER" --train "$TRAIN" --val "$VAL" --out "$out" --vocab-size 256 \
        $SHAPE --seq-len "$SEQ_LEN" --micro-batch "$MICRO_BATCH" --train-tokens "$TOKENS" \
        --val-tokens "$VAL_TOKENS" --gns ln --gns-exact-every "$EXACT_EVERY" \
        --checkpoint-every 0 "$@" > "$OUT/$name.log" 2>&1
    code=$?
    rm -rf "$out"/step_*
    [ $code = 0 ] || { echo "FAIL $name: exit code $code: $(tail -n 1 "$OUT/$name.log")" && return $code; }
    mkdir -p "$OUT/$name" && cp "$out/run.json" "$OUT/$name/" && gzip -c "$out/metrics.jsonl" > "$OUT/$name/metrics.jsonl.gz"
}

# This GPU's share of the runs, one after the other.
train_share() { # GPU
    local number=0 run code=0
    while read -r -a run; do
        [ $((number++ % JOBS)) = "$1" ] || continue
        train "$1" "${run[@]}" < /dev/null || code=1
    done < "$work/runs"
    return $code
}

# One line of the table. The time is training alone: of every step, its tokens over its tok_per_s.
summary() { # NAME
    gzip -dc "$OUT/$1/metrics.jsonl.gz" | awk -v name="$1" '
        function field(key) { return match($0, "\"" key "\": [-0-9.e+]+") ? substr($0, RSTART + length(key) + 4, RLENGTH - length(key) - 4) + 0 : "" }
        /"val_loss"/ { val = field("val_loss"); if (best == "" || val < best) best = val; next }
        { step = field("step"); batch = field("batch"); if (batch > most) most = batch
          seconds += (field("tokens") - tokens) / field("tok_per_s"); tokens = field("tokens")
          if (field("gns_ln") != "") gns = field("gns_ln"); if (field("gns_ratio") != "") ratio = field("gns_ratio") }
        END { printf "%-32s %7d %11d %6d %8.1f %9.4f %9.4f %8.1f %6.2f\n", name, step, tokens, most, seconds, val, best, gns, ratio }'
}

mkdir -p "$OUT" || exit 74
[ -x "$TRAINER" ] || fail 64 "$TRAINER: not there" "Build it (make train_gpt2cu), or set TRAINER"
[ -n "$TRAIN" ] || [ -x "$TOKENIZE" ] || fail 64 "$TOKENIZE: not there" "Build it (make data/tokenize), or set TOKENIZE"
list_runs > "$work/runs"
while read -r name _; do rm -rf "${OUT:?}/$name"; done < "$work/runs"
started=$SECONDS
[ -n "$TRAIN" ] || source_text
jobs_running=()
for ((gpu = 0; gpu < JOBS; gpu++)); do
    train_share $gpu &
    jobs_running+=($!)
done
failed=0
for job in "${jobs_running[@]}"; do wait "$job" || failed=1; done

{
    printf '%-32s %7s %11s %6s %8s %9s %9s %8s %6s\n' run steps tokens batch seconds "val loss" best "GNS ln" ratio
    while read -r name _; do [ ! -d "$OUT/$name" ] || summary "$name"; done < "$work/runs"
} | tee "$OUT/table.txt"
echo "$((SECONDS - started)) s in all; runs in $OUT ($(du -sk "$OUT" | cut -f 1) KiB)"
exit $failed
