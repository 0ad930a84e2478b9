#!/usr/bin/env bash
# Fetches FineWeb's sample of 10 billion tokens as ready-made shards of GPT-2's tokens, 200 MB each
# (kjj0/fineweb10B-gpt2). This takes minutes and needs no parquet files and no tokenizer. Keeps the validation shard's
# first 10,485,760 tokens, on which llm.c and modded-nanogpt validate; train with --val-tokens 10485760. See --help
# (--tokenizer does nothing here).
NAME=fineweb10B SHARDS=10 FLAGS=shards
USAGE="--shards N    the first N of 103 training shards of 100 million tokens (10)"
. "$(dirname "$0")/recipe.sh"
val_tokens=10485761 # 10,485,760 inputs, and the target of the last input
[[ $SHARDS =~ ^[1-9][0-9]?[0-9]?$ && $SHARDS -le 103 ]] ||
    fail 64 "--shards $SHARDS: not a whole number from 1 to 103" "See --help"
mkdir -p "$OUT"
for shard in fineweb_val_000000.bin $(seq -f 'fineweb_train_%06g.bin' "$SHARDS"); do
    [ -n "$FORCE" ] || [ ! -f "$OUT/$shard" ] || continue
    input "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main/$shard" hub
    # Keep the validation shard's first tokens. printf writes val_tokens as int32, the header's third number.
    if [[ $shard == *_val_* ]] && [ "$(stat -Lc %s "$INPUT")" -gt $((1024 + 2 * val_tokens)) ]; then
        { head -c 8 "$INPUT" && printf '\001\000\240\000' && head -c $((1024 + 2 * val_tokens)) "$INPUT" | tail -c +13; } > "$OUT/$shard.partial"
    else
        ln -fL "$INPUT" "$OUT/$shard" 2> /dev/null && continue
        cp "$INPUT" "$OUT/$shard.partial"
    fi
    mv "$OUT/$shard.partial" "$OUT/$shard"
done
echo "$OUT/fineweb_{train,val}_*.bin: $SHARDS training shards and one of validation"
