#!/usr/bin/env bash
# Tests scripts/lm_eval.sh: its errors, and the arguments for lm-evaluation-harness, which a stand-in logs.
set -u
. "$(dirname "$0")/../checks.sh" lm_eval
unset LM_EVAL TOKENIZER DTYPE
cd "$work" || exit 70

# A copy of the script without build/venv, and a stand-in for the harness.
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

said() { # LINE...: checks the arguments that the harness got
    diff <(printf '%s\n' --model hf --model_args "$@") said.txt
}
all="hellaswag,lambada_openai,piqa,winogrande,arc_easy"
defaults() { # with and without a GPU; a run directory means its newest whole checkpoint
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
        said pretrained=mute/step_00000001,dtype=bfloat16,tokenizer=vocabulary --device cpu --batch_size 8 \
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

for test in defaults options_are_handed_on refusals a_failing_harness_is_said; do
    try $test
done
exit $failed
