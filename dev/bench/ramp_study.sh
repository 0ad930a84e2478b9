#!/usr/bin/env bash
# What a batch that follows the noise scale is worth, against the best constant batch: one small model (10.9M parameters,
# rows of 512 bytes of source code, 80M tokens), and then a second size. dev/docs/gns-study.md reports it.
#
#     TRAINER=./train_gpt2cu JOBS=8 dev/bench/ramp_study.sh
#
# The yardstick: every constant batch is tuned over rate, beta2, weight decay and final rate. The reference is the largest
# one within 0.001 of the best. The ramp starts from it, and is tuned over the same choices. Losses are training losses over
# the last tenth of the tokens, the same examples in the same order for each seed: differences are paired. The table has
# their standard errors, and the loss on VAL besides. dev/bench/ramp_study.py says how it is tuned.
#
#     TRAINER     the trainer (./train_gpt2cu)
#     TOKENIZE    the program that makes the shards (data/tokenize)
#     TEXTS       directories with source text (/usr /opt)
#     TRAIN, VAL  shards of bytes to use instead
#     OUT         table.txt, and a directory a run with run.json and metrics.jsonl.gz, and logs (build/ramp_study); a run
#                 that is there is not made again
#     JOBS        runs side by side (1), each on one GPU: CUDA_VISIBLE_DEVICES names those to take (as many as JOBS). Under
#                 nvidia-cuda-mps-control several runs on one GPU take less time than one after another
#     SEEDS       ("1 2 3 4 5 6 7 8")
#     BATCHES     rows of the constant batches ("8 16 32")
#     LRS         learning rates at 32 rows ("1e-3 1.4e-3 2e-3 2.8e-3"); at B rows x (B / 32)^0.5
#     BETA2S, DECAYS, FINALS   ("0.95 0.98 0.99", "0.1 0.2", "0.1 0.03"): beta2, weight decay, final rate
#     SHARES      ("0.25 0.5 1") of the tokens: every combination runs on the first, the best third on the next, and so on
#     KAPPAS      a ramp each ("0.65 0.8@32"): kappa; after a colon, its most rows, else BATCH_MAX (512); after an @, the
#                 constant batch that it starts from and is compared with, else the reference
#     TOKENS      length of a run (80000000); SEQ_LEN, SHAPE, MICRO_BATCH, VAL_TOKENS, WARMUP_STEPS: see below
#     LAUNCH      for wall clock on several GPUs, "scripts/mpirun.sh -np 4": starts the first ramp and the batch it starts
#                 from once more, with nothing beside them
#     VOCABULARY  data/gpt2, for a second size on tokens of the same files; or TRAIN_2 and VAL_2, shards to use instead.
#                 Without either there is no second size. Its other variables have the same names with _2 (BATCHES_2 "16 32 64",
#                 KAPPAS_2 "1.4@16", SHARES_2 "1", ...); beta2, weight decay and final rate are those of the reference
set -u
. "$(dirname "$0")/../../scripts/common.sh"
[[ ${1:-} != @(--help|-h) ]] || { print_header "$0" && exit; }
[ $# = 0 ] || fail 64 "$1: it takes no arguments, the environment says what to do" "See --help"
cd "$root" || exit 70
export TRAINER=${TRAINER:-./train_gpt2cu} JOBS=${JOBS:-1} KAPPAS=${KAPPAS-0.65 0.8@32} BATCH_MAX=${BATCH_MAX:-512}
export TRAIN=${TRAIN:-} VAL=${VAL:-} SEEDS=${SEEDS:-1 2 3 4 5 6 7 8} BATCHES=${BATCHES:-8 16 32}
export LRS=${LRS:-1e-3 1.4e-3 2e-3 2.8e-3} BETA2S=${BETA2S:-0.95 0.98 0.99} DECAYS=${DECAYS:-0.1 0.2} FINALS=${FINALS:-0.1 0.03}
export LAUNCH=${LAUNCH:-} SHARES=${SHARES:-0.25 0.5 1} SHARES_2=${SHARES_2:-1}
export TOKENS=${TOKENS:-80000000} SEQ_LEN=${SEQ_LEN:-512} VAL_TOKENS=${VAL_TOKENS:-2097152}
export SHAPE=${SHAPE:---vocab-size 256 --layers 6 --heads 6 --channels 384}
export MICRO_BATCH=${MICRO_BATCH:-128}  # rows; changes the time, not the numbers
export WARMUP_STEPS=${WARMUP_STEPS:-60} # at least; 5% of the tokens where that is more
export TRAIN_2=${TRAIN_2:-} VAL_2=${VAL_2:-} SEEDS_2=${SEEDS_2:-1 2 3} BATCHES_2=${BATCHES_2:-16 32 64} LRS_2=${LRS_2:-1.4e-3 2e-3 2.8e-3 4e-3}
export KAPPAS_2=${KAPPAS_2-1.4@16} BETA2S_2='' DECAYS_2='' FINALS_2='' TOKENS_2=${TOKENS_2:-100000000} SEQ_LEN_2=${SEQ_LEN_2:-1024}
export VAL_TOKENS_2=${VAL_TOKENS_2:-$VAL_TOKENS} SHAPE_2=${SHAPE_2:---model d6} MICRO_BATCH_2=${MICRO_BATCH_2:-32} WARMUP_STEPS_2=$WARMUP_STEPS
TOKENIZE=${TOKENIZE:-data/tokenize} VOCABULARY=${VOCABULARY:-} TEXTS=${TEXTS:-/usr /opt} OUT=${OUT:-build/ramp_study}
WORK=$(mktemp -d)
export WORK
trap 'rm -rf "$WORK"' EXIT
trap 'exit 130' INT TERM # and with it the trap above

# This machine's source files. Sorted by digest: that mixes the projects, and keeps the first by path of equal files, or
# training might see a copy of a validation file. No file is larger than 64 KiB, 3% of VAL_TOKENS, so that no odd one
# dominates the validation loss.
source_files() {
    # shellcheck disable=SC2086
    find $TEXTS -xdev -type f \( -name '*.py' -o -name '*.c' -o -name '*.h' -o -name '*.hpp' \) -size +1k -size -64k \
        -print0 2> /dev/null | xargs -0 -r -n 500 -P "$(nproc)" md5sum 2> /dev/null |
        LC_ALL=C sort | LC_ALL=C sort -u -k 1,1 | sed -nE 's/^[0-9a-f]{32}  //p' > "$WORK/files"
    [ -s "$WORK/files" ] || fail 65 "no source text under $TEXTS" "Name directories that hold some in TEXTS"
}

source_shards() { # NAME, TOKENIZER, --max-bytes: one file in 20 is for validation. Shards of a study that goes on are kept.
    ! compgen -G "$OUT/$1_train_*.bin" > /dev/null || return 0
    [ -s "$WORK/files" ] || source_files
    "$TOKENIZE" --tokenizer "$2" --invalid bytes --out "$OUT/$1" --files-from "$WORK/files" --format text \
        --val-every-file 20 --max-bytes "$3" > "$OUT/$1.log" 2>&1 ||
        fail 65 "$TOKENIZE: $(tail -n 1 "$OUT/$1.log")" "See $OUT/$1.log"
    grep shard "$OUT/$1.log"
}

mkdir -p "$OUT" || exit 74
[ -x "$TRAINER" ] || fail 64 "$TRAINER: not there" "Build it (make train_gpt2cu), or set TRAINER"
[ -n "$TRAIN" ] && [ -z "$VOCABULARY" ] || [ -x "$TOKENIZE" ] || fail 64 "$TOKENIZE: not there" "Build it (make data/tokenize), or set TOKENIZE"
started=$SECONDS
[ -n "$TRAIN" ] || { source_shards text bytes $((TOKENS * 11 / 10)) && TRAIN="$OUT/text_train_*.bin" VAL="$OUT/text_val_*.bin"; }
[ -z "$VOCABULARY" ] || { source_shards words "$VOCABULARY" 1000000000000 && TRAIN_2="$OUT/words_train_*.bin" VAL_2="$OUT/words_val_*.bin"; }
python3 dev/bench/ramp_study.py "$OUT" || exit
echo "$((SECONDS - started)) s in all; runs in $OUT ($(du -sk "$OUT" | cut -f 1) KiB)"
