# shellcheck shell=bash
# The recipes set NAME, FLAGS (their own flags' names) and USAGE, then source this file, which reads the command line.
#
#   --tokenizer gpt2|bytes|DIR   gpt2 (default): OpenAI's vocabulary, fetched to data/gpt2
#   --from DIR                   read the data from DIR, unchecked; download only GPT-2's vocabulary
#   --out DIR                    directory of the shards; data/NAME by default
#   --force                      make the shards again
# Downloads go to data/download/NAME. A broken download is resumed. A known SHA-256 is checked. A path that the caller
# names is relative to the caller's directory; a default path is relative to the root of this repository.
set -euo pipefail
export LC_ALL=C
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/common.sh"
TOKENIZE=${TOKENIZE:-${top}data/tokenize}
PYTHON=${PYTHON:-$([ -x "${top}build/venv/bin/python" ] && echo "${top}build/venv/bin/python" || echo python3)}

# Sets TOKENIZER, FROM, OUT, FORCE and the variables of FLAGS.
TOKENIZER=gpt2 FROM='' OUT=${top}data/$NAME FORCE=''
while [ $# -gt 0 ]; do
    case $1 in
    --force) FORCE=--force && shift && continue ;;
    --help)
        sed -n 's/^#   \(--.*\)/  \1/p' "$root/data/recipe.sh"
        [ -z "${USAGE:-}" ] || echo "  $USAGE"
        exit
        ;;
    esac
    [[ $1 == --* && " tokenizer from out ${FLAGS:-} " == *" ${1#--} "* ]] || fail 64 "$1: unknown" "See --help"
    [ -n "${2:-}" ] || fail 64 "$1 needs a value" "See --help"
    flag=${1#--}
    printf -v "${flag^^}" %s "$2"
    shift 2
done
DOWNLOAD=${DOWNLOADS:-${top}data/download}/$NAME
[ -z "$FROM" ] || [ -d "$FROM" ] || fail 65 "--from $FROM: no such directory" "Name the one that holds the files"
# The first training shard gets its name last (data/writer.h).
if [ -z "$FORCE" ] && [ -e "$OUT/${NAME}_train_000000.bin" ]; then
    echo "$OUT has shards already (--force makes them again)"
    exit 0
fi

# fetch URL FILE [SHA256|hub]: downloads URL. FILE exists only once it is complete, and checked if its SHA-256 is known.
fetch() {
    local url=$1 file=$2 want=${3:-} got
    if [ -f "$file" ]; then return 0; fi
    command -v curl > /dev/null || fail 65 "curl is missing" "Install curl, or save $url as $file"
    if [ "$want" = hub ]; then # Hugging Face gives a large file's SHA-256 as its ETag, before the redirection
        want=$(curl -sS --max-time 60 -I "$url" 2> /dev/null | tr -d '\r"' |
            awk 'tolower($1) == "x-linked-etag:" && $2 ~ /^[0-9a-f]+$/ && length($2) == 64 { print $2 }') || true
    fi
    mkdir -p "$(dirname "$file")"
    echo "fetching $url"
    curl -fL --retry 5 --retry-delay 2 --connect-timeout 20 -C - -o "$file.part" --progress-bar "$url" || {
        local code=$?
        [ $code != 23 ] || fail 74 "cannot write $file.part" "Free some space; the same command resumes it"
        fail 65 "no $url (curl $code)" "The same command resumes a download; or save it as $file yourself"
    }
    if [ -n "$want" ] && ! sha256sum --check --status <<< "$want  $file.part"; then
        got=$(sha256sum "$file.part" | cut -d ' ' -f 1)
        rm -f "$file.part"
        fail 65 "$url: SHA-256 $got, not $want" "It was removed: try again, unless the source has changed"
    fi
    mv "$file.part" "$file"
    [ -n "$want" ] || echo "$file: its source states no SHA-256, it was not checked"
}

# input URL [SHA256|hub]: sets INPUT to the path of URL's file: in the directory of --from, or downloaded.
input() {
    INPUT=${FROM:-$DOWNLOAD}/${1##*/}
    [ -z "$FROM" ] || [ -f "$INPUT" ] || fail 65 "$INPUT: no such file" "Get it from $1"
    fetch "$1" "$INPUT" "${2:-}"
}

need_tokenize() {
    if [ "$TOKENIZE" = "${top}data/tokenize" ] && [ ! -x "$TOKENIZE" ]; then make -s -C "$root" data/tokenize; fi
    [ "$TOKENIZER" = gpt2 ] || return 0
    TOKENIZER=${GPT2:-${top}data/gpt2}
    local from=https://openaipublic.blob.core.windows.net/gpt-2/encodings/main
    fetch $from/encoder.json "$TOKENIZER/encoder.json" 196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783
    fetch $from/vocab.bpe "$TOKENIZER/vocab.bpe" 1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5
}

tokenize() { "$TOKENIZE" --tokenizer "$TOKENIZER" --out "$OUT/$NAME" $FORCE "$@"; }
