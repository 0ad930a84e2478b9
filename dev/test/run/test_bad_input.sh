#!/usr/bin/env bash
# Runs the program on bad input. Checks the exit code of every case; that stderr is one line ("error: WHAT. REMEDY"),
# which names the file or flag; and that no file is written, changed or lost. More cases of each kind are in
# dev/test/{text/test_shards,options/test_options,options/test_resolve,checkpoint/test_safetensors}.c.
#
#     dev/test/run/test_bad_input.sh [PROGRAM]     default: the one in $GNS_BUILD
set -u
export LC_ALL=C
program=${1:+$(realpath "$1")}
. "$(dirname "$0")/../checks.sh" bad_input
program=${program:-$train}
mkdir "$work/here" && cd "$work/here" || exit 70

# ---- Inputs, good and bad --------------------------------------------------------------------------------------------

le32() { printf "\\x$(printf %02x $(($1 & 255)))\\x$(printf %02x $(($1 >> 8 & 255)))$(
    printf '\\x%02x\\x%02x' $(($1 >> 16 & 255)) $(($1 >> 24 & 255)))"; }

header() { # MAGIC VERSION COUNT: prints a shard's header of 256 ints
    le32 "$1"; le32 "$2"; le32 "$3"
    head -c 1012 /dev/zero
}

tokens() { # COUNT: prints COUNT tokens, 1 to 126
    for ((i = 0; i < $1; i++)); do printf "\\x$(printf %02x $((1 + i * 37 % 126)))\\0"; done
}

magic=20240520
tokens 400 > "$work/tokens"
shard() { header $magic 1 400; cat "$work/tokens"; }

shard > good.bin
{ header 20240521 1 400; cat "$work/tokens"; } > wrong_magic.bin
mkdir shards
shard > shards/part_1.bin
cp wrong_magic.bin shards/part_2.bin

# Options of a complete tiny run, which a case's command line overrides.
base="seq-len = 16\nmodel = d1\nchannels = 16\nheads = 1\nvocab-size = 256\nmicro-batch = 2\nthreads = 1\nout = out\n"
printf "train = good.bin\nval = good.bin\nsteps = 2\n$base" > run.cfg
printf "train = good.bin\nval = good.bin\nsteps = 2\nout = out\nseq-len = 16\nthreads = 1\nfresh = true\n" > from_model.cfg

head -c 2000000 /dev/zero > huge.cfg
printf '\xef\xbb\xbflearning-rate = 1\n' > marked.cfg

# First make a good run: without one, refusals prove nothing. The cases damage this run's model.
if ! "$program" --config run.cfg --out first > "$work/stdout" 2> "$work/stderr"; then
    echo "FAIL bad_input/the_good_run: $(cat "$work/stderr")"
    exit 1
fi
cp -r first/step_00000002 model
mv first out # every case finds this run in its --out: a refusal must not change it
size=$(stat -c %s model/model.safetensors)

damaged() { cp -r model "$1" && rm "$1/MANIFEST.json"; } # NAME: copies the model without hashes, for damage
damaged no_config && rm no_config/config.json
mkdir pickled only_pickle young && cp model/config.json pickled/
: > pickled/pytorch_model.bin && : > only_pickle/pytorch_model.bin && : > young/metrics.jsonl
damaged bad_config && printf '{"n_layer": 1,' > bad_config/config.json
damaged deep && rm -r deep/training && sed -i 's/"n_layer": *[0-9]*/"n_layer": 1001/' deep/config.json
damaged odd_heads && sed -i 's/"n_head": *[0-9]*/"n_head": 3/' odd_heads/config.json
damaged fifo_config && rm fifo_config/config.json && mkfifo fifo_config/config.json
overwrite() { # NAME OCTAL: sets the last 4096 bytes of the weights to this byte
    damaged "$1" && head -c 4096 /dev/zero | tr '\0' "\\$2" |
        dd of="$1/model.safetensors" bs=1 seek=$((size - 4096)) conv=notrunc status=none
}
overwrite nan_weights 377
overwrite huge_weights 177 # 3.4e38
damaged nul_name && sed -i 's/transformer\.wpe\.weight/wpe.weight\\u0000xxxxxx/' nul_name/model.safetensors
damaged exact_gelu && sed -i 's/gelu_new/gelu/' exact_gelu/config.json
printf 'version https://git-lfs.github.com/spec/v1\noid sha256:%064d\nsize 500000000\n' 0 > lfs.bin
damaged no_state && rm no_state/training/state.json
damaged lfs && cp lfs.bin lfs/model.safetensors
damaged of_words && sed -i 's/"vocab_size": *[0-9]*/"vocab_size": 50257/' of_words/config.json
printf 'not a directory' > out_file
echo a line of another run > metrics.jsonl && mkdir with_data && cp metrics.jsonl with_data && ln -s ../good.bin with_data

inventory() { find . -printf '%y %m %p\n' | sort; find . -type f -print0 | sort -z | xargs -0 cksum; }
inventory > "$work/before"

# bad NAME CODE MENTION ARGUMENTS...: checks that the arguments are refused with CODE, in one line with MENTION
bad() {
    local name=$1 code=$2 mention=$3 start=$EPOCHREALTIME why=
    shift 3
    timeout -k 1 60 "$program" "$@" > "$work/stdout" 2> "$work/stderr" < /dev/null
    local got=$? said lines
    said=$(tr -d '\0' < "$work/stderr")
    lines=$(wc -l < "$work/stderr")
    inventory > "$work/after"
    [ $got -eq "$code" ] || why+=" exit code $got, want $code;"
    [ "$lines" -eq 1 ] || why+=" $lines lines on stderr, want 1;"
    [[ $said == error:\ * ]] || why+=" no 'error: ';"
    [[ $said == *"$mention"* ]] || why+=" no mention of '$mention';"
    [[ $said == *.\ [a-z-]* ]] || why+=" no remedy;"
    if ! cmp -s "$work/before" "$work/after"; then
        why+=" files changed: $(diff "$work/before" "$work/after" | grep '^[<>]' | head -3 | tr '\n' ' ');"
        cp "$work/after" "$work/before"
    fi
    if [ -z "$why" ]; then verdict PASS "$name" "$start"; else verdict FAIL "$name" "$start" "${why# } said: $said"; fi
}

run=(--config run.cfg)
model=(--config from_model.cfg --model)
usage=64 input=65 write=74

# Shards
bad shard_missing         $input nosuch.bin         "${run[@]}" --train nosuch.bin
bad shard_one_of_several  $input part_2.bin         "${run[@]}" --train 'shards/part_*.bin'
bad dry_run_bad_shard     $input wrong_magic.bin    "${run[@]}" --train wrong_magic.bin --dry-run

# The command line
bad no_arguments          $usage "--train is missing"
bad line_break_in_value   $usage --lr               "${run[@]}" --lr $'1\n2'
# shellcheck disable=SC2046
bad unquoted_pattern      $usage "quote"            --val $(printf 'wrong_magic.bin %.0s' {1..300}) --config run.cfg
bad unquoted_pattern_2    $input "wrong_magic.bin: " "${run[@]}" -i good.bin wrong_magic.bin

# Options that contradict each other, the model or its files
bad heads_not_dividing    $usage --heads            "${run[@]}" --heads 3
bad prompt_too_long       $usage "at most 4095 bytes" "${run[@]}" --sample-every 5 --prompt "$(printf '%05000d' 0)"
bad dry_run_no_tokenizer  $usage --sample-every     "${run[@]}" --vocab-size 300 --sample-every 5 --dry-run
bad prompt_no_tokenizer   $usage --prompt           "${run[@]}" --vocab-size 300 --sample-every 5 --prompt hello

# The config file
bad config_huge           $input huge.cfg           --config huge.cfg

bad config_with_a_mark    $usage "marked.cfg line 1: unknown option learning-rate" --config marked.cfg
bad config_device         $input /dev/zero          --config /dev/zero

# Models
bad model_unknown         $usage gpt2-125M          "${run[@]}" --model gpt2-125M
bad model_not_there       $usage "--model nosuch: neither a preset, nor a directory" "${model[@]}" nosuch
bad model_neither         $input "--model shards: neither" "${model[@]}" shards --layers 2
bad model_is_a_young_run  $input "--model young: a run without a checkpoint" "${model[@]}" young
bad model_is_a_pickle     $input "from_pretrained('only_pickle').save_pretrained('only_pickle')" "${model[@]}" only_pickle
bad weights_are_a_pickle  $input "pickled: its weights are in pytorch_model.bin" "${model[@]}" pickled
bad model_of_hugging_face $usage "hf download openai-community/gpt2 "    "${model[@]}" gpt2
bad model_and_layers      $usage --layers           "${model[@]}" model --layers 2
bad model_and_vocabulary  $usage --vocab-size       "${model[@]}" model --vocab-size 300
bad model_context         $usage "--seq-len 1024: "  --model model --train good.bin --steps 2 --dry-run
bad model_no_config       $input no_config          "${model[@]}" no_config
bad config_json_cut       $input bad_config         "${model[@]}" bad_config
bad config_json_heads     $input "are not divisible by 3 heads. use another model" "${model[@]}" odd_heads
bad config_json_deep      $input "no GPT-2 that this program can train: 1001 layers: must be 1 to 1000" "${model[@]}" deep
bad config_json_fifo      $input fifo_config/config.json "${model[@]}" fifo_config
bad tokenizer_too_small   $input "the tokenizer bytes has 256 tokens, the model's vocabulary 50257" --sample-only --model of_words --tokenizer bytes
bad sample_not_finite     76 "--model huge_weights: the logits after token 1 are not finite" --sample-only --model huge_weights --prompt a
bad eval_not_finite       76 "the loss of --model huge_weights" --eval-only --model huge_weights --val good.bin --seq-len 16
bad weights_nan           $input "nan_weights: h.0.mlp.c_proj.weight is not finite. use another" "${model[@]}" nan_weights
bad moments_of_a_preset   $usage "--with-optimizer: --model d1 has no moments. name a run" "${run[@]}" --with-optimizer --out new
bad moments_without_a_run $input "with-optimizer needs a run" "${model[@]}" no_state --with-optimizer
bad dry_run_no_moments    $input "with-optimizer needs a run" "${model[@]}" no_state --with-optimizer --dry-run
bad weights_nul_name      $input "nul_name/model.safetensors: malformed JSON" "${model[@]}" nul_name
bad weights_lfs           $input "lfs/model.safetensors: a Git LFS pointer" "${model[@]}" lfs
bad shards_lfs            $input "lfs.bin: a Git LFS pointer" "${run[@]}" --train lfs.bin
bad config_exact_gelu     $input "write gelu_new to go on with the tanh form" "${model[@]}" exact_gelu
bad check_deep            $input "deep/config.json: it describes no GPT-2" --check deep

# Output
bad out_under_a_file      $write out_file           "${run[@]}" --out out_file/run
bad out_is_a_checkpoint   $usage "--out model is a checkpoint" "${run[@]}" --out model
bad out_is_here           $usage "the working directory is in it" "${run[@]}" --out .
bad out_holds_the_data    $usage "with_data/good.bin is in it" "${run[@]}" --train with_data/good.bin --out with_data
bad out_in_proc           $write /proc/gns          "${run[@]}" --out /proc/gns

exit $failed
