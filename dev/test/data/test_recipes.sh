#!/usr/bin/env bash
# Runs the recipes of data/ end to end, without a network, on local files in the formats of the downloads. Skips
# tests that need pyarrow if build/venv lacks it.
set -u
. "$(dirname "$0")/../checks.sh" test_recipes
export TOKENIZE=$tokenize DOWNLOADS=$work/download
# Prints the text of byte shards: the lower byte of every token after the header.
text_of() { for shard in "$@"; do tail -c +1025 "$shard" | tr -d '\000'; done; }

mkdir "$work/in"
seq 1 5000 | sed 's/^/To be or not to be, line /' > "$work/in/input.txt"
begin
returns 0 data/shakespeare.sh --tokenizer bytes --from "$work/in" --out "$work/s"
check "train and val are not the text" cmp <(text_of "$work"/s/shakespeare_{train,val}_000000.bin) "$work/in/input.txt"
returns 0 data/shakespeare.sh --tokenizer bytes --from "$work/in" --out "$work/s"
check "a second run is not content with what is there" says "$work/log" "shards already"
end shakespeare

# A path that the user gives is relative to the caller's directory, a default path to the root of the copy.
begin
mkdir -p "$work/copy/data" "$work/copy/scripts" "$work/elsewhere/mine"
cp data/*.sh data/*.py "$work/copy/data" && cp scripts/common.sh "$work/copy/scripts"
cp "$tokenize" "$work/elsewhere/my_tokenize" && cp "$tokenize" "$work/copy/data/tokenize"
cp "$work/in/input.txt" "$work/elsewhere/mine"
cd "$work/elsewhere" || exit 70
TOKENIZE=./my_tokenize returns 0 ../copy/data/shakespeare.sh --tokenizer bytes --from mine --out here
check "--out is not where the caller is" [ -f here/shakespeare_train_000000.bin ]
rm my_tokenize
(unset TOKENIZE && returns 0 ../copy/data/shakespeare.sh --tokenizer bytes --from mine && exit $wrong) || wrong=1
check "the default is not below the root" [ -f "$work/copy/data/shakespeare/shakespeare_train_000000.bin" ]
returns 0 ../copy/data/fineweb.sh --help
check "--help from elsewhere" says "$work/log" "--from DIR"
cd "$root" || exit 70
end from_elsewhere

begin
printf 'One day\nthere was.\n<|endoftext|>\nAnother day.\n' > "$work/in/TinyStoriesV2-GPT4-train.txt"
printf 'A third day.\n<|endoftext|>\n' > "$work/in/TinyStoriesV2-GPT4-valid.txt"
returns 0 data/tinystories.sh --tokenizer bytes --from "$work/in" --out "$work/t"
check "train" [ "$(text_of "$work"/t/tinystories_train_*.bin)" = "$(printf 'One day\nthere was.\nAnother day.\n')" ]
check "val" [ "$(text_of "$work"/t/tinystories_val_*.bin)" = "A third day." ]
returns 65 data/tinystories.sh --tokenizer "$work/typo" --from "$work/in" --out "$work/t" --force
check "a refused command removed shards" [ -e "$work/t/tinystories_train_000000.bin" ]
end tinystories

# A recipe that is killed in either of its two steps, then run again, leaves whole shards of one vocabulary.
if ! learn_vocabulary 280 "$work/bpe" "$work/in/TinyStoriesV2-GPT4-train.txt" > "$work/log" 2>&1; then
    echo "SKIP test_recipes/tinystories_interrupted: $(cat "$work/log")"
else
begin
cc -shared -fPIC -o "$work/fault.so" dev/test/preload/file_fault.c -ldl
cat > "$work/breaks" << END
#!/bin/sh
case "\$BREAKS \$*" in [a-z]*$work/t*) export LD_PRELOAD=$work/fault.so FAULT_AT=1 FAULT_NAME=\$BREAKS FAULT_ACTION=kill ;; esac
ASAN_OPTIONS=verify_asan_link_order=0 exec "$tokenize" --shard-tokens 5 "\$@"
END
chmod +x "$work/breaks"
export TOKENIZE=$work/breaks
stories() { data/tinystories.sh --tokenizer "$1" --from "$work/in" --out "$work/$2" "${@:3}"; } # TOKENIZER OUT ...
returns 0 stories "$work/bpe" words
for split in train val; do check "one $split shard" [ -e "$work/words/tinystories_${split}_000001.bin" ]; done
for at in val_000000.bin val_000001.bin train_000000.bin train_000001.bin; do
    for old in '' --force; do
        rm -rf "$work/t"
        [ -z "$old" ] || BREAKS='' returns 0 stories bytes t
        BREAKS=$at returns 137 stories bytes t $old
        BREAKS='' returns 0 stories "$work/bpe" t
        check "broken off at $at $old: other shards" diff -r "$work/words" "$work/t"
    done
done
export TOKENIZE=$tokenize
end tinystories_interrupted
fi

begin
question='{"ind": 1, "ctx": "A man", "endings": ["a", "b", "c", "d"], "label": 2}'
printf '%s\n%s\n' "$question" "$question" > "$work/in/hellaswag_val.jsonl"
returns 0 data/hellaswag.sh --from "$work/in" --out "$work/h"
check "not the file" cmp "$work/in/hellaswag_val.jsonl" "$work/h/hellaswag_val.jsonl"
end hellaswag

begin
mkdir "$work/ready"
shard() { printf '%b' '\x88\xd8\x34\x01\x01\0\0\0\x03\0\0\0' && head -c 1012 /dev/zero && printf 'a\0b\0c\0'; }
for name in val_000000 train_000001 train_000002; do shard > "$work/ready/fineweb_$name.bin"; done
for again in "" --force; do returns 0 data/fineweb10B.sh --from "$work/ready" --shards 2 --out "$work/r" $again; done
check "other files" diff -r "$work/ready" "$work/r"
{ shard | head -c 8 && printf '\377\377\377\0' && shard | head -c 1024 | tail -c +13 && seq -f %08g 4194304 | head -c $((2 * 16777215)); } > "$work/ready/fineweb_val_000000.bin"
returns 0 data/fineweb10B.sh --from "$work/ready" --shards 2 --out "$work/r2"
check "not the first tokens" cmp <(tail -c +1025 "$work/r2/fineweb_val_000000.bin") <(tail -c +1025 "$work/ready/fineweb_val_000000.bin" | head -c $((2 * 10485761)))
returns 0 "$train" --check "$work/r2/fineweb_val_000000.bin"
check "not so many" says "$work/log" "10485761 tokens"
returns 65 data/fineweb10B.sh --from "$work/ready" --shards 3 --out "$work/r"
check "the missing one is not named" says "$work/log" "fineweb_train_000003.bin: no such file"
for n in 0 104; do returns 64 data/fineweb10B.sh --from "$work/ready" --shards $n --out "$work/r"; done
mkdir "$work/links" && for name in val_000000 train_000001; do ln -s "../ready/fineweb_$name.bin" "$work/links"; done
returns 0 data/fineweb10B.sh --from "$work/links" --shards 1 --out "$work/r3/deep"
check "a link was copied" cmp "$work/ready/fineweb_train_000001.bin" "$work/r3/deep/fineweb_train_000001.bin"
end fineweb10B

# Two stand-ins for curl: one finds no network, the other breaks off half-way and resumes at the next call.
begin
mkdir "$work/none" "$work/slow"
printf '#!/bin/sh\nexit 6\n' > "$work/none/curl"
cat > "$work/slow/curl" << 'END'
#!/usr/bin/env bash
while [ $# -gt 0 ]; do [ "$1" != -o ] || out=$2; shift; done
have=$(stat -c %s "$out" 2> /dev/null || echo 0)
tail -c +$((have + 1)) "$SOURCE" | head -c 60000 >> "$out"
[ "$(stat -c %s "$out")" = "$(stat -c %s "$SOURCE")" ] || exit 18
END
chmod +x "$work"/*/curl
for recipe in shakespeare tinystories hellaswag; do
    PATH=$work/none:$PATH returns 65 data/$recipe.sh --tokenizer bytes --out "$work/n"
    check "$recipe does not say so" says "$work/log" "error: no https://"
done
fetch() { # uses a subshell, since the recipes' functions may exit
    (NAME=test && PATH=$work/slow:$PATH && . data/recipe.sh --force && fetch https://example.org/file "$work/file" "$1") > "$work/log" 2>&1
}
export SOURCE=$work/in/input.txt
sum=$(sha256sum "$SOURCE" | cut -d ' ' -f 1)
fetch "$sum"
check "a download that broke off counts as whole" [ $? = 65 ]
check "not said" grep -q "(curl 18).* or save it as $work/file yourself" "$work/log"
for _ in 1 2 3 4; do fetch "$sum" && break; done
check "a resumed download is not the file" cmp "$work/file" "$SOURCE"
rm "$work/file"
for _ in 1 2 3; do fetch "${sum//[0-4]/5}"; done
check "a wrong checksum is accepted" [ ! -e "$work/file" ]
check "the sum that was found is not said" says "$work/log" "SHA-256 $sum, not"
end downloads

if python=$(find_python pyarrow.parquet); then
    begin
    $python - "$work/in" << 'END'
import pyarrow as pa, pyarrow.parquet as pq, sys
for part in range(3):
    texts = [f'Document {part} {i} with "quotes",\nlines and ünïcode.' for i in range(700)]
    pq.write_table(pa.table({"text": texts, "id": list(range(700))}), f"{sys.argv[1]}/00{part}_00000.parquet", row_group_size=100)
END
    for recipe in fineweb fineweb_edu; do
        PYTHON=$python returns 0 data/$recipe.sh --tokenizer bytes --from "$work/in" --files 2 --out "$work/f"
        lines=$(text_of "$work"/f/${recipe}_train_*.bin "$work"/f/${recipe}_val_*.bin | grep -o 'Document [0-9]' | wc -l)
        check "$recipe: $lines documents" [ "$lines" = 1400 ]
        check "$recipe: text" says <(text_of "$work"/f/${recipe}_train_*.bin) 'lines and ünïcode.'
    done
    head -c 5000 "$work/in/002_00000.parquet" > "$work/in/003_00000.parquet"
    before=$(cksum "$work"/f/fineweb_*)
    PYTHON=$python returns 65 data/fineweb.sh --tokenizer bytes --from "$work/in" --out "$work/f" --force
    check "the file is not named" says "$work/log" "003_00000.parquet"
    check "earlier shards changed" [ "$(cksum "$work"/f/fineweb_*)" = "$before" ]
    mkdir "$work/hidden" && echo 'raise ImportError("hidden")' > "$work/hidden/pyarrow.py"
    PYTHONPATH=$work/hidden returns 65 "$python" data/parquet_to_jsonl.py "$work/in/000_00000.parquet"
    check "without pyarrow: $(cat "$work/log")" grep -q '^error: .*pyarrow.* .*build/venv/bin/python -m pip install pyarrow$' "$work/log"
    check "not one line" one_line "$work/log"
    "$python" data/parquet_to_jsonl.py "$work/in/000_00000.parquet" > /dev/full 2> "$work/log"
    code=$?
    check "on a full disk: exit code $code, $(cat "$work/log")" [ "$code $(grep -c "^error: standard output: No space.*; choose another" "$work/log")" = "74 1" ]
    end fineweb
else
    echo "SKIP test_recipes/fineweb: no Python with pyarrow"
fi
PYTHON=/bin/false data/fineweb.sh > "$work/log" 2>&1
begin
check "without pyarrow" says "$work/log" "has no pyarrow"
for flags in "--what" "--files" "--files 0" "--from /no/such/place" "--sample"; do
    PYTHON=/bin/true data/fineweb.sh $flags > "$work/log" 2>&1
    code=$?
    check "fineweb.sh $flags: exit code $code" [ $code = 64 -o $code = 65 ]
    check "fineweb.sh $flags: no error line" says "$work/log" "error: "
done
returns 64 data/fineweb.sh --from /no/such/place --out ''
end options
exit $failed
