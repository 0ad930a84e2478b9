#!/usr/bin/env bash
# The trainer as a program: bits do not depend on threads, replay repeats a ramp, --dry-run predicts memory, and more.
# shellcheck disable=SC2086
set -u
. "$(dirname "$0")/../checks.sh" program
cd "$work" || exit 70

cat "$root"/llmc/*/*.[ch] > text.txt
"$tokenize" --tokenizer bytes --out code --val-fraction 0.1 text.txt > tokenize.log 2>&1 || { cat tokenize.log; exit 1; }

small="--train code_train_*.bin --val code_val_*.bin --vocab-size 256 --layers 2 --heads 2 --channels 32 --seq-len 32
    --val-every 10 --val-tokens 1024 --warmup-tokens 4000"
ramp="--ramp gns --batch-min 4 --batch-max 32 --train-tokens 60000 --gns-half-life 3000 --ramp-kappa 4 --ramp-waste 1 --ramp-step-rows 1e9 --micro-batch 6 --lr 3e-3"

run() { # run OUT OPTIONS...
    local out=$1
    shift
    GLOBIGNORE='*' "$train" $small --out "$out" "$@" > "$out.log" 2>&1 || { set -- $? && cat "$out.log" && return "$1"; }
}
trains() { GLOBIGNORE='*' timeout -k 1 60 "$train" $small --out "$@"; } # OUT OPTIONS...: prints what the trainer prints
same() {
    diff <(numbers "$1") <(numbers "$2") > diff.log || { echo "metrics of $1 and $2 differ:"; head -n 4 diff.log; return 1; }
    cmp "$1"/step_*/model.safetensors "$2"/step_*/model.safetensors
}

a_run_is_run_again() { # --config RUN/run.json repeats a run, in another --out
    run a $ramp --threads 1 && "$train" --config a/run.json --out again > again.log 2>&1 && same a again && grep -q '"out": "again"' again/run.json &&
        "$train" --config a/run.json --print-options | grep -cxE 'ramp-kappa = 4|# deadline = 300' | grep -qx 2
}
a_step_is_measured_once() { # run.json has --ramp-step-rows; a run that began without it cannot measure it later, and goes on from its batch
    run am ${ramp/--ramp-step-rows 1e9/} --threads 1 && "$train" --config am/run.json --out again_am > again.log 2>&1 && same am again_am &&
        grep -q '"ramp_step_rows": [0-9]' am/run.json || { cat again.log; return 1; }
    run ab --threads 1 --steps 3 --batch-tokens 320 || return 1
    refused "ab/step_00000003/training/state.json: --ramp gns measures what a step costs before a run's first step" ab --threads 1 ${ramp/1e9/0} &&
        [ -d ab/step_00000003 ] && refused "loads moments. add --ramp-step-rows X" none --model ab --with-optimizer ${ramp/--ramp-step-rows 1e9/} &&
        run ab --threads 1 $ramp && grep -q '^resuming' ab.log && grep -q '^{"step": 4, .*"batch": 10,' ab/metrics.jsonl
}
bash_completes_its_options() {
    "$root/dev/make/completion.sh" "$train" train_gpt2 > completion && . ./completion || return 1
    completes() { # WANTED WORD...: checks the completions of the last word
        COMP_WORDS=("${@:2}") COMP_CWORD=$(($# - 2)) COMPREPLY=()
        _gns_train_gpt2
        [ "${COMPREPLY[*]}" = "$1" ] || { echo "${*:2}: ${COMPREPLY[*]}"; return 1; }
    }
    completes '--beta1 --beta2' train_gpt2 --beta && completes 'ln' train_gpt2 --gns l && completes '' train_gpt2 --out run && completes 'beta1 beta2' train_gpt2 --help beta
}
threads_do_not_matter() { run c $ramp --threads 2 && same a c; }
another_seed_is_another_run() { run d $ramp --threads 1 --seed 7 && ! same a d > /dev/null; }
blocks_begin_as_the_identity() { # --zero-projections: one and two layers have the same first loss; refused with --model PATH
    first_loss() { small=${small/--layers 2/} run zero --steps 1 --micro-batch 4 --threads 1 --fresh "$@" && grep -o '"loss": [0-9.]*' zero/metrics.jsonl; }
    [ "$(first_loss --layers 1 --zero-projections)" = "$(first_loss --layers 2 --zero-projections)" ] &&
        [ "$(first_loss --layers 1)" != "$(first_loss --layers 2)" ] &&
        refused "--zero-projections has no effect without new weights" none --model a --zero-projections --steps 1
}
a_schedule_holds() { # the rate stays until --lr-hold-frac of the run (wsd: 0.8); --adamw-lr-factor changes no Muon rate
    rates() {
        small=${small/--warmup-tokens 4000/} run held --steps 10 --batch-tokens 128 --lr 1 --final-lr-frac 0 --threads 1 --fresh --lr-schedule "$@" &&
            grep -o '"lr": [0-9.]*' held/metrics.jsonl | awk '{ printf "%.2f ", $2 }'
    }
    rates linear --optimizer muon > /dev/null && mv held/metrics.jsonl factor_1 && rates linear --optimizer muon --adamw-lr-factor 2 > /dev/null &&
        ! diff -q <(grep -o '"loss": [0-9.]*' factor_1) <(grep -o '"loss": [0-9.]*' held/metrics.jsonl) > /dev/null || return 1
    [ "$(rates linear --lr-hold-frac 0.5 --optimizer muon --adamw-lr-factor 2)" = "1.00 1.00 1.00 1.00 1.00 0.80 0.60 0.40 0.20 0.00 " ] &&
        [ "$(rates wsd)" = "1.00 1.00 1.00 1.00 1.00 1.00 1.00 1.00 0.29 0.00 " ]
}
replay_repeats_the_batches() {
    run e --ramp replay:a/metrics.jsonl --batch-min 4 --batch-max 32 --batch-tokens 128 --train-tokens 60000 \
        --micro-batch 6 --lr 3e-3 --threads 1 &&
        diff <(grep -o '"batch": [0-9]*' a/metrics.jsonl) <(grep -o '"batch": [0-9]*' e/metrics.jsonl)
}
micro_batch_does_not_matter() { # losses are equal up to rounding
    run f --steps 20 --batch-tokens 384 --micro-batch 12 --gns exact --threads 1 --lr 3e-3 &&
        run g --steps 20 --batch-tokens 384 --micro-batch 1 --gns exact --threads 1 --lr 3e-3 || return 1
    paste <(grep -o '"loss": [0-9.e-]*' f/metrics.jsonl) <(grep -o '"loss": [0-9.e-]*' g/metrics.jsonl) |
        awk '{ d = $2 - $4; if (d < 0) d = -d; if (!($2 > 0) || d > 1e-5 * $2) { print "losses " $2 " and " $4; exit 1 } }'
}
same_weights() { cmp "$(newest_checkpoint "$1")/model.safetensors" "$(newest_checkpoint "$2")/model.safetensors"; }
documents_are_kept_apart() { # each line is a document: a newline opens one
    local from lines="--tokenizer lines --threads 1 --lr 3e-3 --steps 20 --micro-batch 12 --checkpoint-every 10" mask
    from=$(newest_checkpoint f) && mkdir lines && cp "$from/merges.txt" lines || return 1
    sed 's/"Ċ": 10/"<|endoftext|>": 10/' "$from/vocab.json" > lines/vocab.json
    run m0 $lines && run m1 $lines --document-mask && run m2 $lines --document-mask --recompute block && same_weights m1 m2 || return 1
    ! same_weights m0 m1 > /dev/null || { echo "no mask"; return 1; }
    cp -r m1 m3 && rm -r "$(newest_checkpoint m3)" && run m3 $lines --document-mask && grep -q '^resuming from m3/step_00000010' m3.log && same_weights m1 m3 || return 1
    "$train" --eval-only --model m1 --val 'code_val_*.bin' --val-tokens 1024 --tokenizer lines --document-mask > eval.log 2>&1 && ! grep 'kept documents apart' eval.log || return 1
    awk '$1 == "loss" { loss = $2 } /"val_loss"/ { val = $NF + 0 } END { exit !(loss > 0 && (loss - val) ^ 2 < 1e-12) }' eval.log m1/metrics.jsonl ||
        { cat eval.log; tail -n 1 m1/metrics.jsonl; return 1; }
    "$train" --eval-only --model "$(newest_checkpoint m1)" --val 'code_val_*.bin' --tokenizer lines > note.log 2>&1 && grep -q '^note: the run kept documents apart' note.log || return 1
    for mask in "" --document-mask; do # a prompt is a single document
        "$train" --sample-only --model m1 --tokenizer lines --prompt 'static int ' --temperature 0 --sample-tokens 9 $mask > "prompt$mask.txt" || return 1
    done
    cmp prompt.txt prompt--document-mask.txt
}
refused() { fails 64 "$1" run "${@:2}"; } # MESSAGE OUT OPTIONS...
a_document_mask_is_refused() {
    refused 'm0/step_00000020/training/state.json: this run has --document-mask false, the command has true' m0 --tokenizer lines --document-mask --steps 30 --micro-batch 12 &&
        refused '--document-mask: the vocabulary of 256 tokens has no <|endoftext|>' none --document-mask --steps 1
}
windows_shift() { # --shift-windows changes the run; a resumed run has the same bits
    local text="--epochs 3 --micro-batch 50 --lr 3e-3 --threads 1 --checkpoint-every 5 --keep 0"
    head -c 6000 text.txt > few.txt && "$tokenize" --tokenizer bytes --out few few.txt > few.log || return 1
    local small="--train few_train_*.bin ${small#* * }"
    run shift0 $text && run shift1 $text --shift-windows && ! same_weights shift0 shift1 > /dev/null && grep -q '"shift_windows": true' shift1/run.json || return 1
    cp -r shift1 shift2 && rm -r "$(newest_checkpoint shift2)" && run shift2 $text --shift-windows && grep -q '^resuming' shift2.log && same_weights shift1 shift2 &&
        refused "$(newest_checkpoint shift1)/training/state.json: this run has --shift-windows true, the command has false" shift1 $text
}
a_model_is_read_back() { # a run from a model begins with that model's loss
    small=$(sed -E 's/--layers 2 --heads 2 --channels 32//; s/--vocab-size 256//' <<< "$small") \
        run h --model "$(ls -d f/step_*)" --steps 1 --lr 0 --batch-tokens 384 --threads 1 || return 1
    local before after
    before=$(grep -o '"val_loss": .*' f/metrics.jsonl | tail -n 1)
    after=$(grep -o '"val_loss": .*' h/metrics.jsonl | tail -n 1)
    [ -n "$after" ] && [ "$before" = "$after" ] || { echo "$before became $after"; return 1; }
}
a_run_stands_for_its_newest_checkpoint() { # --model RUN, also for training; a resume does not need the named run
    local from small="--train code_train_*.bin --seq-len 32 --threads 1 --lr 1e-3 --batch-tokens 384"
    mkdir source && cp -r "$(ls -d f/step_*)" source/ && from=$(newest_checkpoint source) || return 1
    run w1 --model "$from" --steps 3 && run w2 --model source/ --steps 3 && same w1 w2 || return 1
    grep -q "^model .*; weights from $from$" w2.log && grep -q '"start":[[:space:]]*"source"' w2/step_00000003/training/state.json || { cat w2.log; return 1; }
    cp -r "$(ls -d d/step_*)" source/step_00099999 && rm -r "$from" &&
        run w2 --model source --steps 5 && run w1 --model "f/${from##*/}" --steps 5 &&
        diff <(numbers w1) <(numbers w2) && cmp w1/step_00000005/model.safetensors w2/step_00000005/model.safetensors || return 1
    echo bad > source/step_00099999/model.safetensors # a resume neither reads nor mentions it
    run w1 --model "f/${from##*/}" --steps 6 && run w2 --model source --steps 6 && ! grep -q '\(warning\|note\|--model\|source/\)' w2.log || { cat w2.log; return 1; }
    grep -q "\"model\": *\"$from\"" w2/run.json || { cat w2/run.json; return 1; }
    rm -r source && run w2 --model source --steps 7 && run w1 --model "f/${from##*/}" --steps 7 &&
        diff <(numbers w1) <(numbers w2) && cmp w1/step_00000007/model.safetensors w2/step_00000007/model.safetensors || return 1
    refused '--model sauce: neither a preset, nor a directory' w2 --model sauce --steps 8
}
prints_the_origin_of_the_weights() { # a note tells of a missing tokenizer if the vocabulary is larger than 256
    local note='^note: checkpoints will hold no tokenizer.*--tokenizer'
    run n --steps 2 --threads 1 --seed 5 && grep -q '^model   .*, T 32; from scratch, seed 5$' n.log && ! grep -q "$note" n.log || { cat n.log; return 1; }
    run n --steps 3 --threads 1 --seed 5 && grep -q '^model   .*, T 32$' n.log || { cat n.log; return 1; } # a resume
    local small="--train code_train_*.bin --seq-len 32 --threads 1"
    run o --model n/step_00000002 --steps 1 && grep -q '^model   .*, T 32; weights from n/step_00000002$' o.log && ! grep -q "$note" o.log || { cat o.log; return 1; }
    run p --steps 1 --model d1 && grep -q "$note" p.log || { cat p.log; return 1; }
}
the_vocabulary_is_the_tokenizers() { # if --vocab-size is not given
    learn_vocabulary 300 vocabulary text.txt || return
    "$tokenize" --tokenizer vocabulary --out words --val-fraction 0.1 text.txt > bpe.log 2>&1 || { cat bpe.log; return 1; }
    local small=${small/--vocab-size 256/} seems='^warning: [a-z]*_train_000000.bin has no token above [0-9]*, '
    run v1 --steps 1 --threads 1 --tokenizer bytes && grep -q '^model .*, vocabulary 256, T 32' v1.log || { cat v1.log; return 1; }
    ! grep -q '^warning' v1.log || { cat v1.log; return 1; }
    run v2 --steps 1 --threads 1 --tokenizer vocabulary && # shards of bytes, a tokenizer of words
        grep -q '^model .*, vocabulary 300, T 32' v2.log && grep -q "$seems"'and the vocabulary is 300' v2.log || { cat v2.log; return 1; }
    run v3 --steps 1 --threads 1 && grep -q '^model .*, vocabulary 50257, T 32' v3.log && # shards of bytes, GPT-2's vocabulary
        grep -q "$seems"'and the vocabulary is 50257. .*--tokenizer bytes' v3.log || { cat v3.log; return 1; }
    fails 65 'error: code_train_000000.bin has no token above ' "$train" --train 'code_train_*.bin' --steps 1 --out v9 && # shards of bytes, no model given
        says log '--tokenizer bytes' && [ ! -e v9 ] || return 1
    run v4 --steps 1 --threads 1 --tokenizer vocabulary --vocab-size 320 && grep -q ', vocabulary 320, ' v4.log || { cat v4.log; return 1; }
    small=${small//code_/words_} run v5 --steps 1 --threads 1 --tokenizer vocabulary && ! grep -q '^warning' v5.log &&
        small=${small//code_/words_} run v6 --steps 1 --threads 1 --vocab-size 1500 && ! grep -q '^warning' v6.log || { cat v5.log v6.log; return 1; }
    "$train" --dry-run --tokenizer vocabulary --model d2 --seq-len 32 > v7.log && grep -q 'vocabulary 300' v7.log || { cat v7.log; return 1; }
}
prints_its_length() { # a new run, a run that resumes with another batch, a complete run
    local windows
    run v --steps 20 --batch-tokens 384 --threads 1 || return 1
    windows=$(sed -nE 's/.*"train_data": .*"windows": ([0-9]+).*/\1/p' v/run.json)
    grep -qx 'run     20 steps of 12 rows of 32 tokens, 7680 tokens' v.log &&
        grep -qx "data    .* windows of T; the run is $(awk -v w="$windows" 'BEGIN { printf "%.3g", 7680 / (w * 32) }') epochs" v.log || { cat v.log; return 1; }
    run v --steps 20 --batch-tokens 768 --threads 1 &&
        grep -qx 'run     10 more steps of 24 rows of 32 tokens, 15360 tokens in all' v.log &&
        [ -d v/step_00000030 ] || { cat v.log; return 1; }
    run v --steps 5 --batch-tokens 384 --threads 1 &&
        grep -q '^this run is complete: 30 steps, 15360 tokens are done, and the command asks for 1920\. .*v/step_00000030\. A longer run resumes' v.log || { cat v.log; return 1; }
    run v --train-tokens 15360 --batch-tokens 384 --threads 1 &&
        grep -q '^this run is complete: 30 steps, 15360 tokens are done, and the command asks for 15360\. .*A longer run resumes' v.log || { cat v.log; return 1; }
    grep -qx 'run     60000 tokens in steps of 4 to 32 rows of 32 tokens' a.log || { cat a.log; return 1; }
}
a_length_in_epochs() { # --epochs equals the length in tokens; more --epochs resume the run; --dry-run plans epochs
    local windows tokens
    windows=$(sed -nE 's/.*"train_data": .*"windows": ([0-9]+).*/\1/p' v/run.json)
    tokens=$((32 * ((windows + 25) / 50)))
    run e1 --epochs 0.02 --batch-tokens 640 --threads 1 --lr 1e-3 && run e2 --train-tokens $tokens --batch-tokens 640 --threads 1 --lr 1e-3 && same e1 e2 || return 1
    grep -q "the run is 0.02 epochs" e1.log && grep -q "\"horizon_tokens\": $tokens," e1/run.json && grep -q '"epochs": 0.02' e1/run.json || { cat e1.log; return 1; }
    run e1 --epochs 0.02 --batch-tokens 640 --threads 1 --lr 1e-3 && grep -q 'A longer run resumes' e1.log &&
        run e1 --epochs 0.04 --batch-tokens 640 --threads 1 --lr 1e-3 && grep -q '^resuming from e1' e1.log || { cat e1.log; return 1; }
    GLOBIGNORE='*' "$train" --dry-run $small --epochs 0.02 --batch-tokens 640 > plan.txt && grep -q ': 0.02 epochs$' plan.txt &&
        grep -q "^run  *$(tail -n 1 e2/metrics.jsonl | grep -oE '[0-9]+' | head -n 1) steps" plan.txt || { cat plan.txt; return 1; }
}
mixes_sources() { # with any micro-batch the rows are the same; a resume with other weights is refused
    head -c 90000 text.txt | tr a-z A-Z > other.txt
    "$tokenize" --tokenizer bytes --out other other.txt > tokenize.log 2>&1 || { cat tokenize.log; return 1; }
    local common="--batch-tokens 384 --threads 1 --lr 1e-3 --checkpoint-every 4 --keep 0" small="--val code_val_*.bin ${small#*--val code_val_\*.bin}" why
    local mixed="code_train_*.bin:3 other_*.bin:1"
    run x1 --train "$mixed" --steps 8 $common --micro-batch 12 && run x2 --train "$mixed" --steps 4 $common --micro-batch 5 &&
        run x2 --train code_train_*.bin:3 other_*.bin:1 --steps 8 $common --micro-batch 5 && run x3 --train 'code_train_*.bin' --steps 8 $common || return 1
    losses() { grep -o '"loss": [0-9.]\{6\}' "$1/metrics.jsonl"; }
    diff <(losses x1) <(losses x2) && ! diff <(losses x1) <(losses x3) > diff.log || { echo "not the examples of the mixture"; return 1; }
    grep -q '^ *75\.00% of the rows from code_train_\*.bin: .* epochs$' x1.log && grep -q '"sources": \[{"files": "code_train_\*.bin", "share": 0.75, ' x1/run.json || { cat x1.log; return 1; }
    while IFS='|' read -r code words why; do
        refuses "$code" "$why" trains x1 $common --steps 9 $words || return 1
    done <<- END
		65|--train code_train_*.bin:1 other_*.bin:1|train_mixture[0].share = "0.75" (--train), the command has "0.5". give the run's own; to go on with other data: --model x1
		65|--train code_train_*.bin other_*.bin|this run has train_mixture of 2 weights (--train), the command has 0. give the run's own; to go on with other data: --model x1
		64|--train code_train_*.bin:1 other_*.bin:0|other_*.bin:0: the weight of a source is not above 0
		64|--train code_train_*.bin:1 other_*.bin:nan|other_*.bin:nan: the weight of a source is not above 0
	END
    fails 64 '--epochs 1: the sources of a --train with weights have epochs' "$train" ${small/code_val/code_train} --train "$mixed" --epochs 1 &&
        fails 64 "--val code_val_*.bin:1: it has weights" "$train" --train 'other_*.bin' --val 'code_val_*.bin:1' --vocab-size 256 --steps 1
}
several_patterns_are_one() { # several patterns, or a shell's expansion, equal one pattern of all files, without weights
    cp other_*.bin code_train_000001.bin
    local small="--val code_val_*.bin ${small#*--val code_val_\*.bin} --steps 4 --batch-tokens 384 --threads 1"
    run z1 --train 'code_train_*.bin' && run z2 --train 'code_train_000001.bin code_train_000000.bin' && same z1 z2 || return 1
    "$train" --train code_train_*.bin $small --out z3 > z3.log 2>&1 && same z1 z3
    rm code_train_000001.bin
}
notes_validation_on_training_data() { # a file with another name is noted too
    local note='^note: --val shares 1 of its 1 shards with --train: '
    cp code_train_*.bin again.bin
    small=${small/code_val_\*.bin/again.bin} run w --steps 1 --threads 1 && grep -q "$note" w.log || { cat w.log; return 1; }
    ! grep -q "$note" v.log
}
sample() { "$train" --sample-only --model "$(newest_checkpoint f)" "$@"; }
samples_from_a_model() { # samples repeat, have the default length, and the first of several equals a single one
    local int=(--prompt 'static int' --sample-tokens 50 --seed 3)
    sample "${int[@]}" > s1 && sample "${int[@]}" > s2 && cmp s1 s2 && sample "${int[@]}" --samples 3 > s3 || return 1
    [ "$(grep -c '^--- sample [123] of 3$' s3)$(grep -c '^static int' s3)" = 33 ] || { cat s3; return 1; }
    diff s1 <(sed -n '/^--- sample 1/,/^--- sample 2/p' s3 | sed '1d;$d') || return 1
    [ "$(sed 's/^--- sample/\f&/' s3 | awk 'BEGIN { RS = "\f" } NR > 1 { sub(/[^\n]*\n/, ""); print | "cksum" ; close("cksum") }' | sort -u | wc -l)" = 3 ] || { cat s3; return 1; }
    run x --steps 4 --threads 1 --sample-every 2 --samples 2 --sample-tokens 9 --prompt int &&
        [ "$(grep -c '"text": "int' x/samples.jsonl)$(grep -c '"step": 2,' x/samples.jsonl)" = 42 ] || { cat x/samples.jsonl; return 1; }
    sample --prompt 'int ' --temperature 0 > s1 && sample --prompt 'int ' --top-k 1 --seed 9 > s2 && cmp s1 s2 && # the likeliest tokens
        sample --prompt 'int ' --top-p 1e-9 --seed 9 > s2 && cmp s1 s2 && sample --prompt 'int ' --top-p 0.5 > s3 && ! cmp -s s1 s3 &&
        [ "$(wc -c < s1)" = $((4 + 400 + 1)) ] || { echo "$(wc -c < s1) bytes by default"; return 1; }
}
a_conversation() { # --interactive: each line is a prompt; the model is read once; the end of input ends the program
    local answer talk=("$train" --sample-only --model spoken --sample-tokens 20)
    cp -r "$(newest_checkpoint f)" spoken && "${talk[@]}" --prompt 'static int' > s1 && "${talk[@]}" --prompt 'void' --samples 2 > s2 || return 1
    coproc "${talk[@]}" --interactive 2> spoken.err
    local pid=$COPROC_PID
    exec {answer}<&"${COPROC[0]}"
    echo 'static int' >&"${COPROC[1]}" && head -c "$(wc -c < s1)" <&"$answer" > a1 && cmp s1 a1 || return 1
    rm -r spoken
    echo 'void' >&"${COPROC[1]}" && eval "exec ${COPROC[1]}>&-" && cat <&"$answer" > a2
    wait "$pid" || { echo "exit code $?"; cat spoken.err; return 1; }
    diff <(sed '1,/^--- sample 2/d' s2) a2 || return 1
    sample --interactive < /dev/null > a3 && [ ! -s a3 ] && fails 64 '--prompt and --interactive exclude' sample --interactive --prompt x &&
        fails 65 'standard input: cannot read: Is a directory' sample --interactive < . && # a read error is not the end of input
        fails 65 'standard input: a line has a zero byte' sample --interactive < <(printf 'int\0lost\n')
}
config_file_is_the_command_line() {
    tr -s ' \n' '\n' <<< "$small --steps 5 --threads 1 --out i" |
        awk '/^--/ { name = substr($0, 3); next } name { print name " = " $0; name = "" }' > run.cfg
    "$train" --config run.cfg > i.log 2>&1 && run j --steps 5 --threads 1 && same i j
}
a_closed_pipe_does_not_end_it() { # in `... | tee log` Ctrl-C also ends tee
    GLOBIGNORE='*' "$train" $small --out k --steps 60 --threads 1 2> k.log | head -n 1 > /dev/null
    [ "${PIPESTATUS[0]}" = 0 ] || { cat k.log; return 1; }
    [ "$(wc -l < k/metrics.jsonl)" -ge 60 ] && [ -s k/step_00000060/MANIFEST.json ] || { cat k.log; return 1; }
}
standard_output_on_a_full_disk() {
    "$train" --help > /dev/full 2> full.log
    [ $? = 74 ] && one_line full.log && grep -q '^error: standard output: No space left on device. send it to a disk with free space$' full.log ||
        { cat full.log; return 1; }
    trains full --threads 1 --steps 5 > /dev/full 2> full.log
    [ $? = 74 ] && same j full || { cat full.log; return 1; } # the run fails only after its save
}
a_hole_in_the_log() { # a hole of zeros is not read into memory as one line
    cp -r j hole && truncate -s 16G hole/metrics.jsonl && (ulimit -v 4000000 && trains hole --threads 1 --steps 7 > hole.log 2>&1) &&
        [ "$(stat -c %s hole/metrics.jsonl)" -lt 1000000 ] || { cat hole.log; return 1; }
}
closed_standard_streams() { # no output file may get descriptor 0, 1 or 2
    trains closed --threads 1 --steps 5 >&- 2>&- <&- && same j closed || return 1
    "$train" --version >&- 2> full.log
    [ $? = 74 ] || { cat full.log; return 1; }
}
prints_its_commit() { # --version and run.json name the commit
    local commit
    commit=$(cat "$root/$build/commit")
    [ -n "$commit" ] || skip "no git, or not a clone" || return
    "$train" --version | tee version | grep -qE '^gns\.c [0-9.]+ \([0-9a-z.-]+\+?\)$' && grep -qF "($commit)" version ||
        { cat version; return 1; }
    grep -qF "\"program\": \"$(cat version)\"" a/run.json
}
dry_run_predicts_the_memory() { # within 10%; not under AddressSanitizer, whose shadow memory counts
    case $build in *-san*) skip "not under the sanitizers" || return ;; esac
    local plan peak options="--train code_train_*.bin --model d6 --micro-batch 4 --seq-len 128 --steps 1 --threads 2 --out m"
    plan=$("$train" $options --dry-run | awk '/memory in all/ { print $4 }') || return 1
    peak=$("$root/$build/dev/test/run/peak_memory" "$train" $options) || { echo "$peak"; return 1; }
    awk -v plan="$plan" -v peak="$peak" 'BEGIN { if (!(plan > 0) || peak / plan > 1.1 || peak / plan < 0.9) {
        print "planned " plan " MiB, took " peak; exit 1 } }'
}

for test in a_run_is_run_again a_step_is_measured_once bash_completes_its_options threads_do_not_matter another_seed_is_another_run blocks_begin_as_the_identity a_schedule_holds \
    replay_repeats_the_batches micro_batch_does_not_matter documents_are_kept_apart a_document_mask_is_refused windows_shift a_model_is_read_back a_run_stands_for_its_newest_checkpoint prints_the_origin_of_the_weights \
    the_vocabulary_is_the_tokenizers prints_its_length a_length_in_epochs mixes_sources several_patterns_are_one \
    notes_validation_on_training_data samples_from_a_model a_conversation config_file_is_the_command_line a_closed_pipe_does_not_end_it standard_output_on_a_full_disk a_hole_in_the_log closed_standard_streams prints_its_commit dry_run_predicts_the_memory; do
    try $test
done
exit $failed
