#!/usr/bin/env bash
# scripts/lm_eval.sh: the arguments that it gives lm-evaluation-harness, to a stand-in that logs them, and its errors. If the
# harness is installed (LM_EVAL, build/venv or PATH), its accuracy on made-up questions must be that of --eval-only. Uses
# $GNS_BUILD (dev/test/run.sh sets it).
set -u
. "$(dirname "$0")/../checks.sh" lm_eval
harness=$(command -v "${LM_EVAL:-}" "$root/build/venv/bin/lm_eval" lm_eval | head -n 1)
unset LM_EVAL TOKENIZER DTYPE
cd "$work" || exit 70

# A copy of the script with no build/venv beside it, and a stand-in for the harness.
mkdir -p clone/scripts bin
cp "$root"/scripts/{lm_eval,common}.sh clone/scripts/
cat > bin/lm_eval << 'END'
#!/bin/sh
printf '%s\n' "$@" > said.txt
exit "$(cat code.txt)"
END
chmod +x bin/lm_eval
echo 0 > code.txt
script() { PATH=$work/bin:$PATH clone/scripts/lm_eval.sh "$@"; }

cat "$root"/llmc/*/*.h > text.txt
find_python tokenizers > /dev/null || skip_suite "no Python package tokenizers"
learn_vocabulary 400 vocabulary text.txt > log 2>&1 &&
    "$tokenize" --tokenizer vocabulary --out words text.txt >> log 2>&1 || { cat log; exit 1; }
shape="--train words_train_*.bin --vocab-size 400 --layers 1 --heads 2 --channels 32 --seq-len 32 --threads 1"
# shellcheck disable=SC2086
GLOBIGNORE='*' "$train" $shape --tokenizer vocabulary --steps 12 --lr 1e-2 --checkpoint-every 5 --out run >> log 2>&1 &&
    GLOBIGNORE='*' "$train" $shape --steps 1 --out mute >> log 2>&1 || { cat log; exit 1; }

said() { # LINE...: the harness was called with these arguments
    diff <(printf '%s\n' --model hf --model_args "$@") said.txt
}
all="hellaswag,lambada_openai,piqa,winogrande,arc_easy"
defaults() { # without a GPU, and with one; a run is its newest checkpoint that is whole
    mkdir -p run/step_00000099
    script run > out.txt && said pretrained=run/step_00000012,dtype=float32 --tasks $all --device cpu --batch_size 8 &&
        grep -q '^/.*/bin/lm_eval --model hf' out.txt || return 1
    printf '#!/bin/sh\necho "GPU 0: an accelerator"\n' > bin/nvidia-smi && chmod +x bin/nvidia-smi && script run/step_00000012 > out.txt
    local code=$?
    rm bin/nvidia-smi
    [ $code = 0 ] && said pretrained=run/step_00000012,dtype=float32 --tasks $all --device cuda --batch_size auto
}
options_are_handed_on() {
    TOKENIZER=vocabulary DTYPE=bfloat16 script mute/ --tasks a,b --limit 5 --include_path 'my tasks' > out.txt &&
        said pretrained=mute/step_00000001,dtype=bfloat16,tokenizer=vocabulary --tasks $all --device cpu --batch_size 8 \
            --tasks a,b --limit 5 --include_path 'my tasks'
}
refusals() {
    mkdir -p empty 'a,b' weightless && cp -r run/step_00000012 'a,b/' && cp run/step_00000012/config.json weightless/
    rm -f said.txt
    refuses 64 "no model" script && refuses 64 "no model" script --tasks piqa run && refuses 65 "nosuch: no such directory" script nosuch &&
        refuses 65 "empty: no config.json" script empty && refuses 65 "weightless: no config.json and weights" script weightless &&
        refuses 65 "no , or =" script 'a,b' && refuses 65 "mute/step_00000001: no tokenizer" script mute &&
        TOKENIZER=empty refuses 65 "empty: no tokenizer" script mute && [ ! -e said.txt ] || return 1
    mv bin/lm_eval hidden
    PATH=$(dirname "$(command -v sort)"):$(dirname "$(command -v bash)") refuses 65 "pip install 'lm-eval[hf]'" script run
    local code=$?
    mv hidden bin/lm_eval
    return $code
}
a_failing_harness_is_said() {
    echo 3 > code.txt
    fails 65 'exit code 3' script run && says log huggingface.co && echo 0 > code.txt
}

the_harness_agrees() { # on acc, which both define alike
    tr -cs '[:lower:]' ' ' < text.txt | grep -oE '\b[a-z]+ [a-z]+ [a-z]{4,12}\b' | awk 'NR >= 60 && NR % 60 < 4 {
        w[NR % 60] = $3; if (NR % 60 == 0) ctx = $1 " " $2
        if (NR % 60 == 3) { n++; printf "{\"ctx\": \"%s\", \"endings\": [\"%s\", \"%s\", \"%s\", \"%s\"], \"label\": %d}\n",
            ctx, w[n % 4], w[(n + 1) % 4], w[(n + 2) % 4], w[(n + 3) % 4], (4 - n % 4) % 4 } }' > questions.jsonl
    cat > made_up.yaml << END
task: made_up
dataset_path: json
dataset_kwargs:
  data_files:
    validation: $work/questions.jsonl
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{ctx}}"
doc_to_target: "{{label}}"
doc_to_choice: "{{endings}}"
metric_list:
  - metric: acc
END
    HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_HOME=$work/cache LM_EVAL=$harness timeout 300 "$root/scripts/lm_eval.sh" run --device cpu --batch_size 8 --tasks made_up \
        --include_path "$work" > out.txt 2> err.txt || { cat err.txt out.txt; return 1; }
    "$train" --eval-only --model run/step_00000012 --hellaswag questions.jsonl > ours.txt || return 1
    local theirs ours
    theirs=$(awk -F'|' '$6 ~ /^ *acc *$/ { print $8 + 0 }' out.txt)
    ours=$(awk '$1 == "acc" { printf "%.4f", $2 }' ours.txt)
    [ -n "$ours" ] && awk -v a="$ours" -v b="$theirs" 'BEGIN { d = a - b; exit !(b > 0 && d < 1e-4 && d > -1e-4) }' ||
        { cat out.txt ours.txt; return 1; }
}

for test in defaults options_are_handed_on refusals a_failing_harness_is_said; do
    try $test
done
if [ -n "$harness" ] && "$(head -n 1 "$harness" | sed -E 's/^#!//')" -c 'import torch, accelerate, datasets' 2> /dev/null; then try the_harness_agrees
else echo "SKIP lm_eval/the_harness_agrees: no lm_eval here; pip install 'lm-eval[hf]', and LM_EVAL=its path"; fi
exit $failed
