#!/usr/bin/env bash
# The recipes in data/, end to end on local files of the formats that they download, and without a network.
# GNS_BUILD names the build directory. What needs pyarrow is skipped where build/venv has none.
set -u
cd "$(dirname "$0")/../.."
build=$(cd "${GNS_BUILD:-build/cpu}" && pwd)
export TOKENIZE=$build/data/tokenize
here=$(mktemp -d)
export DOWNLOADS=$here/download
trap 'rm -rf "$here"' EXIT
failed=0

begin() { start=$EPOCHREALTIME && wrong=0; }
check() { "${@:2}" || { wrong=1 && echo "  $1"; }; } # WHAT COMMAND...
end() {
    local word=PASS
    [ $wrong = 0 ] || { word=FAIL && failed=1; }
    printf '%s test_recipes/%s %.2fs\n' $word "$1" "$(awk -v a="$start" -v b="$EPOCHREALTIME" 'BEGIN { print b - a }')"
}

# The text of byte shards: of every token the lower byte, behind the header.
text_of() { for shard in "$@"; do tail -c +1025 "$shard" | tr -d '\000'; done; }
says() { grep -qF -- "$2" "$1"; } # FILE TEXT

mkdir "$here/in"
seq 1 5000 | sed 's/^/To be or not to be, line /' > "$here/in/input.txt"
begin
data/shakespeare.sh --tokenizer bytes --from "$here/in" --out "$here/s" > "$here/log" 2>&1
check "exit code $?" [ $? = 0 ]
check "train and val are not the text" cmp <(text_of "$here"/s/shakespeare_{train,val}_000000.bin) "$here/in/input.txt"
data/shakespeare.sh --tokenizer bytes --from "$here/in" --out "$here/s" > "$here/log" 2>&1
check "a second run is not content with what is there" says "$here/log" "shards already"
end shakespeare

begin
printf 'One day\nthere was.\n<|endoftext|>\nAnother day.\n' > "$here/in/TinyStoriesV2-GPT4-train.txt"
printf 'A third day.\n<|endoftext|>\n' > "$here/in/TinyStoriesV2-GPT4-valid.txt"
data/tinystories.sh --tokenizer bytes --from "$here/in" --out "$here/t" > "$here/log" 2>&1
check "exit code $?" [ $? = 0 ]
check "train" [ "$(text_of "$here"/t/tinystories_train_*.bin)" = "$(printf 'One day\nthere was.\nAnother day.\n')" ]
check "val" [ "$(text_of "$here"/t/tinystories_val_*.bin)" = "A third day." ]
end tinystories

begin
question='{"ind": 1, "ctx": "A man", "endings": ["a", "b", "c", "d"], "label": 2}'
printf '%s\n%s\n' "$question" "$question" > "$here/in/hellaswag_val.jsonl"
data/hellaswag.sh --from "$here/in" --out "$here/h" > "$here/log" 2>&1
check "exit code $?" [ $? = 0 ]
check "not the file" cmp "$here/in/hellaswag_val.jsonl" "$here/h/hellaswag_val.jsonl"
printf '%s\n{"ctx": "cut' "$question" > "$here/in/hellaswag_val.jsonl"
data/hellaswag.sh --from "$here/in" --out "$here/h2" > "$here/log" 2>&1
check "a truncated file is accepted" [ $? = 65 ]
check "line not named" says "$here/log" "hellaswag_val.jsonl line 2"
check "something is left" [ ! -e "$here/h2/hellaswag_val.jsonl" ]
end hellaswag

# A curl that cannot reach anything; one that breaks off half-way and goes on when called again.
begin
mkdir "$here/none" "$here/slow"
printf '#!/bin/sh\nexit 6\n' > "$here/none/curl"
cat > "$here/slow/curl" << 'END'
#!/usr/bin/env bash
while [ $# -gt 0 ]; do [ "$1" != -o ] || out=$2; shift; done
have=$(stat -c %s "$out" 2> /dev/null || echo 0)
tail -c +$((have + 1)) "$SOURCE" | head -c 60000 >> "$out"
[ "$(stat -c %s "$out")" = "$(stat -c %s "$SOURCE")" ] || exit 18
END
chmod +x "$here"/*/curl
for recipe in shakespeare tinystories hellaswag; do
    PATH=$here/none:$PATH data/$recipe.sh --tokenizer bytes --out "$here/n" > "$here/log" 2>&1
    code=$?
    check "$recipe without a network: exit code $code" [ $code = 65 ]
    check "$recipe does not say so" says "$here/log" "error: no network"
done
fetch() { # in a shell of its own: the recipes' functions end it
    (NAME=test && PATH=$here/slow:$PATH && . data/recipe.sh && fetch https://example.org/file "$here/file" "$1") > "$here/log" 2>&1
}
export SOURCE=$here/in/input.txt
sum=$(sha256sum "$SOURCE" | cut -d ' ' -f 1)
fetch "$sum"
check "a download that broke off counts as whole" [ $? = 65 ]
check "not said" says "$here/log" "broke off"
for _ in 1 2 3 4; do fetch "$sum" && break; done
check "a download that goes on is not the file" cmp "$here/file" "$SOURCE"
rm "$here/file"
for _ in 1 2 3 4; do fetch "${sum//[0-4]/5}"; done
check "a wrong checksum is accepted" [ ! -e "$here/file" ]
end downloads

python=build/venv/bin/python
[ -x $python ] || python=python3
if $python -c 'import pyarrow.parquet' 2> /dev/null; then
    begin
    $python - "$here/in" << 'END'
import pyarrow as pa, pyarrow.parquet as pq, sys
for part in range(3):
    texts = [f'Document {part} {i} with "quotes",\nlines and ünïcode.' for i in range(700)]
    pq.write_table(pa.table({"text": texts, "id": list(range(700))}), f"{sys.argv[1]}/00{part}_00000.parquet", row_group_size=100)
END
    for recipe in fineweb fineweb_edu; do
        PYTHON=$python data/$recipe.sh --tokenizer bytes --from "$here/in" --files 2 --out "$here/f" > "$here/log" 2>&1
        check "$recipe: exit code $?" [ $? = 0 ]
        lines=$(text_of "$here"/f/${recipe}_train_*.bin "$here"/f/${recipe}_val_*.bin | grep -o 'Document [0-9]' | wc -l)
        check "$recipe: $lines documents" [ "$lines" = 1400 ]
        check "$recipe: text" says <(text_of "$here"/f/${recipe}_train_*.bin) 'lines and ünïcode.'
    done
    head -c 5000 "$here/in/002_00000.parquet" > "$here/in/003_00000.parquet"
    PYTHON=$python data/fineweb.sh --tokenizer bytes --from "$here/in" --out "$here/g" > "$here/log" 2>&1
    check "a truncated parquet file is accepted" [ $? = 65 ]
    check "the file is not named" says "$here/log" "003_00000.parquet"
    check "shards of half the text are left" [ -z "$(ls "$here/g")" ]
    end fineweb
else
    echo "SKIP test_recipes/fineweb 0.00s: $python has no pyarrow"
fi
PYTHON=/bin/false data/fineweb.sh > "$here/log" 2>&1
begin
check "without pyarrow" says "$here/log" "has no pyarrow"
for flags in "--what" "--files" "--files 0" "--from /no/such/place" "--sample"; do
    PYTHON=/bin/true data/fineweb.sh $flags > "$here/log" 2>&1
    code=$?
    check "fineweb.sh $flags: exit code $code" [ $code = 64 -o $code = 65 ]
    check "fineweb.sh $flags: no error line" says "$here/log" "error: "
done
end options
exit $failed
