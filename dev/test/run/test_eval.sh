#!/usr/bin/env bash
# Evaluation by the program: HellaSwag during training, and --eval-only. dev/oracle/check_evaluation.py compares scores
# with the oracle.
# shellcheck disable=SC2086
set -u
. "$(dirname "$0")/../checks.sh" eval
mpi_here
cd "$work" || exit 70

cat "$root"/llmc/*/*.h > text.txt
"$tokenize" --tokenizer bytes --out code --val-fraction 0.1 text.txt > tokenize.log 2>&1 || { cat tokenize.log; exit 1; }

# Questions that a model of C headers learns to answer: which of four words follows two others? Three of the words have
# their letters reversed.
tr -cs 'a-z' ' ' < text.txt | grep -oE '\b[a-z]+ [a-z]+ [a-z]{4,12}\b' | awk 'function back(s, i, t) {
        for (i = length(s); i > 0; i--) t = t substr(s, i, 1)
        return t }
    NR % 70 == 1 { n++; printf "{\"ctx\": \"%s %s\", \"endings\": [", $1, $2
        for (i = 0; i < 4; i++) printf "%s\"%s\"", i ? ", " : "", i == n % 4 ? $3 : substr(back($3), i + 1) substr(back($3), 1, i)
        printf "], \"label\": %d}\n", n % 4 }' > questions.jsonl
questions=$(wc -l < questions.jsonl)

small="--train code_train_*.bin --val code_val_*.bin --vocab-size 256 --layers 2 --heads 2 --channels 32 --seq-len 48
    --val-tokens 1024 --warmup-tokens 4000 --threads 1 --lr 3e-3"
asked="--hellaswag questions.jsonl --hellaswag-every 10"

run() { # OUT OPTIONS...
    local out=$1
    shift
    GLOBIGNORE='*' "$train" $small --out "$out" "$@" > "$out.log" 2>&1 || { cat "$out.log"; return 1; }
}
scores() { grep hellaswag "$1/metrics.jsonl"; }
same() { # A B WHAT: fails if two texts differ
    diff <(echo "$1") <(echo "$2") > diff.log && [ -n "$1" ] || { echo "$3 differs:"; head -n 4 diff.log; return 1; }
}

training_is_not_disturbed() { # HellaSwag during training changes no bit
    local common="--steps 35 --batch-tokens 576 --micro-batch 5 --gns exact --val-every 7 --checkpoint-every 20"
    run plain $common && run asked $common $asked || return 1
    cmp "$(newest_checkpoint plain)/model.safetensors" "$(newest_checkpoint asked)/model.safetensors" || return 1
    same "$(numbers plain)" "$(numbers asked | grep -v hellaswag)" metrics
}
asked_when_due() { # every --hellaswag-every steps, and at the end
    same "$(scores asked | grep -oE '"step": [0-9]+' | tr -d '\n')" '"step": 10"step": 20"step": 30"step": 35' steps || return 1
    scores asked | grep -q "\"hellaswag\": [0-9.]*, \"hellaswag_norm\": [0-9.]*}" || return 1
    [ "$(grep -cE "^step +[0-9]+  HellaSwag acc [0-9]+/$questions = 0\.[0-9]{4}  acc_norm" asked.log)" = 4 ] || cat asked.log
}
resumed_as_if_never_stopped() { # a run without its last checkpoint asks the same questions again
    cp -r asked lost && rm -r "$(newest_checkpoint lost)" || return 1
    run lost --steps 35 --batch-tokens 576 --micro-batch 5 --gns exact --val-every 7 --checkpoint-every 20 $asked &&
        grep -q '^resuming from lost/step_00000020' lost.log && same "$(numbers asked)" "$(numbers lost)" metrics
}
learns_to_answer() { # twice as well as guessing, or better
    run learner --steps 500 --micro-batch 12 --val-every 0 --hellaswag questions.jsonl --hellaswag-every 500 || return 1
    scores learner | awk -F'[:,} ]+' '{ exit !($6 > 0.5 && $8 > 0.5) }' || { scores learner; return 1; }
}
one_question() { # a score of one question has no standard error
    head -n 1 questions.jsonl > one.jsonl
    evaluate --hellaswag one.jsonl > e0 && grep -qE '^  acc_norm +[01]\.000000  by mean loss$' e0 && ! grep -q nan e0 || { cat e0; return 1; }
}

evaluate() { # OPTIONS...: evaluates the run "learner"
    "$train" --eval-only --model "$(newest_checkpoint learner)" --threads 1 "$@"
}
figures() { grep '^  ' "$1"; }
value() { awk -v name="$2" '$1 == name { print $2 }' "$1"; }

eval_only_says_what_the_run_said() { # the loss of the run's last validation, and its last HellaSwag score
    evaluate --val 'code_val_*.bin' --val-tokens 1024 --hellaswag questions.jsonl > e1 || return 1
    small="--train code_train_*.bin --val code_val_*.bin --seq-len 48 --val-tokens 1024 --threads 1 --lr 0" \
        run again --model "$(newest_checkpoint learner)" --steps 1 || return 1
    awk -v a="$(value e1 loss)" -v b="$(grep -oE 'val_loss": [0-9.]+' again/metrics.jsonl | cut -d ' ' -f 2)" \
        'BEGIN { d = a - b; exit !(a > 0 && d < 1e-6 && d > -1e-6) }' || { cat e1 again/metrics.jsonl; return 1; }
    awk -v a="$(value e1 acc)" -v b="$(scores learner | grep -oE 'swag": [0-9.]+' | cut -d ' ' -f 2)" \
        'BEGIN { d = a - b; exit !(a > 0 && d < 1e-6 && d > -1e-6) }' || { cat e1; scores learner; return 1; }
    awk -v l="$(value e1 loss)" -v p="$(value e1 perplexity)" -v b="$(grep 'bits per byte' e1 | awk '{ print $4 }')" \
        'BEGIN { exit !(p / exp(l) < 1.0001 && p / exp(l) > 0.9999 && b * log(2) / l < 1.0001 && b * log(2) / l > 0.9999) }' || return 1
    awk -v n="$questions" '$1 ~ /^acc/ { d = $4 - sqrt($2 * (1 - $2) / (n - 1)); lines++; wrong += !(d < 6e-5 && d > -6e-5) }
        END { exit lines != 2 || wrong }' e1 || { echo "standard errors of $questions answers:"; cat e1; return 1; }
}
the_whole_set_by_default() { # --eval-only reads the whole validation set
    evaluate --val 'code_*.bin' --micro-batch 16 > e2 && awk '/^validation/ { exit !($3 > 131072) }' e2 && grep -qE '^validation .* ([0-9]+) of \1 windows$' e2
}
a_run_is_its_newest_checkpoint() { # --model RUN means the newest whole checkpoint
    cp -r asked several && cp -r "$(newest_checkpoint several)" several/step_00000090 && truncate -s -4 several/step_00000090/model.safetensors &&
        "$train" --eval-only --model several --val 'code_val_*.bin' > e8 2> e8.err &&
        "$train" --eval-only --model "$(newest_checkpoint asked)" --val 'code_val_*.bin' > e9 && same "$(figures e8)" "$(figures e9)" "the model" &&
        grep -q step_00000090 e8.err && "$train" --sample-only --model asked --sample-tokens 3 --prompt int | grep -q '^int'
}
micro_batch_and_threads_change_no_bit() {
    evaluate --val 'code_val_*.bin' --hellaswag questions.jsonl --micro-batch 1 > e3 &&
        "$train" --eval-only --model "$(newest_checkpoint learner)" --threads 2 --val 'code_val_*.bin' --hellaswag questions.jsonl \
            --micro-batch 31 > e4 && same "$(figures e3)" "$(figures e4)" "the score"
}
ranks_share_the_work() { # 2 or 3 ranks print the results of one process
    has_mpi || skip "no Open MPI here, or a build without it" || return
    evaluate --val 'code_val_*.bin' --hellaswag questions.jsonl > e5 || return 1
    local ranks
    for ranks in 2 3; do
        mpirun -np $ranks --oversubscribe --allow-run-as-root --bind-to none "$train" --eval-only --model "$(newest_checkpoint learner)" \
            --threads 1 --val 'code_val_*.bin' --hellaswag questions.jsonl > e6 2> e6.err || { cat e6.err; return 1; }
        same "$(figures e5)" "$(figures e6)" "the score of $ranks ranks" || return 1
    done
    GLOBIGNORE='*' mpirun -np 3 --oversubscribe --allow-run-as-root --bind-to none "$train" --zero 3 ${small/--lr 3e-3/--lr 0} --out r3 --steps 10 \
        --micro-batch 4 --batch-tokens 576 $asked > r3.log 2>&1 &&
        small=${small/--lr 3e-3/--lr 0} run r1 --steps 10 --micro-batch 7 --batch-tokens 576 $asked &&
        same "$(scores r1)" "$(scores r3)" "the score in training" || { tail -n 3 r3.log; return 1; }
}
writes_nothing() {
    mkdir -p alone && cp -r "$(newest_checkpoint learner)" alone/model && cp questions.jsonl code_val_*.bin alone/ || return 1
    (cd alone && find . | sort > ../before && chmod -R a-w . &&
        "$train" --eval-only --model model --val 'code_val_*.bin' --hellaswag questions.jsonl > /dev/null)
    local code=$?
    chmod -R u+w alone
    (cd alone && find . | sort) | diff before - && return $code
}
a_tokenizer_for_a_model_from_scratch() { # --tokenizer is saved in the checkpoint and read from the checkpoint
    learn_vocabulary 300 vocabulary text.txt || return
    "$tokenize" --tokenizer vocabulary --out words --val-fraction 0.1 text.txt > bpe.log 2>&1 || { cat bpe.log; return 1; }
    local scratch="--train words_train_*.bin --layers 1 --heads 1 --channels 16 --seq-len 32 --steps 3 --threads 1"
    GLOBIGNORE='*' fails 64 'questions.jsonl: no tokenizer for the text in it. give --tokenizer' \
        "$train" $scratch --vocab-size 300 --out unknown --hellaswag questions.jsonl --hellaswag-every 2 || return 1
    small=$scratch run words --tokenizer vocabulary --val 'words_val_*.bin' --hellaswag questions.jsonl --hellaswag-every 2 --sample-every 3 || return 1
    [ "$(grep -c '^  "[be]os_token_id": 299,$' "$(newest_checkpoint words)/config.json")" = 2 ] || { cat words/step_*/config.json; return 1; }
    grep -q '"model_max_length": 32' "$(newest_checkpoint words)/tokenizer_config.json" &&
        grep -q '"eos_token_id": 299' "$(newest_checkpoint words)/generation_config.json" || return 1
    "$train" --sample-only --model "$(newest_checkpoint words)" --prompt 'static int' --sample-tokens 5 > sample &&
        grep -q '^static int' sample || { cat sample; return 1; }
    "$train" --eval-only --model "$(newest_checkpoint words)" --val 'words_val_*.bin' --hellaswag questions.jsonl > e7 || return 1
    awk -v at_the_end="$(sed -nE 's/^validation loss .* nats per token = ([0-9.]+) bits per byte$/\1/p' words.log)" \
        '/bits per byte/ { d = $4 - at_the_end; if (d > 1e-4 || d < -1e-4) { print "a run ends with " at_the_end ", --eval-only says " $4; exit 1 } }' e7
}
bits_are_of_the_words_bytes() { # vocab.json gives a token's bytes; <|endoftext|> has none
    local python part
    python=$(find_python) || skip "no python3" || return
    for part in 1 2 3 4 5 6; do head -c ${part}000 text.txt > "part$part.txt"; done # so few tokens that one too many would show
    "$tokenize" --tokenizer vocabulary --out documents part?.txt > documents.log 2>&1 || { cat documents.log; return 1; }
    "$train" --eval-only --model "$(newest_checkpoint words)" --val 'documents_*.bin' > e10 || return 1
    "$python" - <<'PYTHON'
import array, glob, json, math, re
vocabulary = json.load(open("vocabulary/vocab.json"))
length = {token: 0 if word == "<|endoftext|>" else len(word) for word, token in vocabulary.items()}
(shard,) = glob.glob("documents_*.bin")
tokens = array.array("H", open(shard, "rb").read()[1024:])
n = (len(tokens) - 1) // 32 * 32  # whole windows
want = sum(length[token] for token in tokens[1 : n + 1]) / n
said = open("e10").read()
loss, bits, got = (float(re.search(p + r" +([0-9.]+)", said).group(1)) for p in ("loss", "bits per byte", " at"))
assert sum(length[token] == 0 for token in tokens) >= 5, "no documents end"
assert abs(got - want) < 6e-4, f"{got} bytes a token, not {want}"
assert abs(bits * math.log(2) * want / loss - 1) < 1e-5, f"{bits} bits per byte, not {loss / math.log(2) / want}"
PYTHON
}

refusals() {
    local model size code text words
    model=$(newest_checkpoint learner)
    printf 'nonsense\n' > broken.jsonl
    cp -r "$model" nan && rm nan/MANIFEST.json # otherwise a wrong hash is refused first
    size=$(stat -c %s nan/model.safetensors)
    head -c 400 /dev/zero | tr '\0' '\177' | dd of=nan/model.safetensors bs=1 seek=$((size - 400)) conv=notrunc status=none
    while IFS='|' read -r code text words; do
        refuses "$code" "$text" "$train" ${words/EVAL/--eval-only --model $model} && [[ $(cat log) == *.\ [a-z-]* ]] || return 1
    done << END
65|text.txt: neither a preset|--eval-only --model text.txt --val code_val_*.bin
65|nosuch.bin|EVAL --val nosuch.bin
65|nosuch.jsonl|EVAL --hellaswag nosuch.jsonl
65|broken.jsonl: line 1|EVAL --hellaswag broken.jsonl
65|endings have at most 3 tokens|EVAL --hellaswag questions.jsonl --seq-len 3
65|nosuch_dir|EVAL --val code_val_*.bin --tokenizer nosuch_dir
65|vocabulary has 300 tokens|EVAL --val code_val_*.bin --tokenizer vocabulary
65|data/hellaswag/hellaswag_val.jsonl|--train code_train_*.bin --vocab-size 256 --steps 2 -h 1
END
    fails 76 "questions.jsonl is not finite" "$train" --eval-only --model nan --hellaswag questions.jsonl
}

for test in training_is_not_disturbed asked_when_due resumed_as_if_never_stopped learns_to_answer \
    one_question eval_only_says_what_the_run_said the_whole_set_by_default a_run_is_its_newest_checkpoint micro_batch_and_threads_change_no_bit \
    ranks_share_the_work writes_nothing a_tokenizer_for_a_model_from_scratch bits_are_of_the_words_bytes \
    refusals; do
    try $test
done
exit $failed
