#!/usr/bin/env bash
# What the pages in dev/docs and the README say of options, files and figures, against what is there.
# GNS_BUILD names the build directory.
set -u
. "$(dirname "$0")/checks.sh" docs
help=$work/help
"$train" --help > "$help" || { echo "FAIL docs/help: exit code $?"; exit 1; }

# Every row of the three tables, in its second column: an option that exists; of llm.c's, one with that alias.
tables() {
    awk -v help="$help" -F ' *[|] *' '
        function learn(text) { # what --help says of one option
            if (!match(text, /^  --[a-z0-9-]+/)) return
            option = substr(text, 3, RLENGTH - 2)
            known[option] = 1
            if (match(text, /llm\.c +-[a-z]+/)) { name = substr(text, RSTART, RLENGTH); sub(/.* /, "", name); alias[name] = option }
        }
        BEGIN {
            while ((getline line < help) > 0) if (line ~ /^  --/) { learn(text); text = line } else text = text line
            learn(text)
        }
        /^## / { llmc = /llm\.c/ }
        /^[|] `/ {
            from = $2; to = $3; gsub(/`/, "", from); gsub(/`/, "", to); rows++
            split(to, word, " ")
            if (to != "" && !(word[1] in known)) print from ": no option " word[1]
            if (llmc) { told[from] = 1; if (alias[from] != to) print from ": is " alias[from] ", not " to }
        }
        END { for (flag in alias) if (!(flag in told)) print flag ": is missing"; if (rows < 60) print rows " rows" }
    ' dev/docs/coming-from.md
}

# The flags of llm.c that the page says are passed over are.
passed_over() {
    local flag flags said
    flags=$(tr '\n' ' ' < dev/docs/coming-from.md | sed -n 's/.*say so in one line: `\([^`]*\)`.*/\1/p')
    [ -n "$flags" ] || echo "the page names none"
    for flag in $flags; do
        said=$("$train" "$flag" 1 --check dev/docs/none 2>&1)
        [[ $said == *"$flag "*"has no counterpart"* ]] || echo "$flag is not passed over"
    done
}

# Options of the trainer in code: those of its commands in every ```sh block.
options() {
    local page option
    for page in README.md dev/docs/*.md; do
        awk '/^```/ { code = $0 == "```sh"; next }
            code { if (!more) ours = /train_gpt2(cu)? |run_gpt2_/; more = /\\$/; if (ours) { sub(/ # .*/, ""); print } }' "$page" |
            grep -oE -- '--[a-z][a-z0-9-]*' | sort -u | while read -r option; do
            case $option in --bind-to | --allow-run-as-root) continue ;; esac # mpirun's
            grep -qE -- "^  $option( |\$)" "$help" || echo "$page: no option $option"
        done
    done
}

# Links to files, and the programs that a page has one run, exist.
files() {
    local page link file
    for page in README.md dev/docs/*.md; do
        grep -oE '\]\([^)#]+' "$page" | cut -c 3- | grep -v '^http' | while read -r link; do
            [ -e "$(dirname "$page")/$link" ] || echo "$page: no $link"
        done
        grep -oE '(^|[ `])(scripts|data|dev)/[a-z0-9_/]+\.(sh|py|c|md|sbatch)' "$page" | tr -d ' `' | sort -u |
            while read -r file; do [ -e "$file" ] || echo "$page: no $file"; done
    done
}

size() {
    local bytes
    bytes=$(cat dev/docs/*.* | wc -c)
    [ "$bytes" -lt 300000 ] || echo "dev/docs holds $bytes bytes"
}

for test in tables passed_over options files size; do
    begin
    complaints=$($test 2>&1)
    check "$(head -n 5 <<< "$complaints")" [ -z "$complaints" ]
    end $test
done
exit $failed
