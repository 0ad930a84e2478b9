#!/usr/bin/env bash
# Checks that every option, file and function in the README and dev/docs exists, and that the commands of these pages
# work, one after another in one directory.
set -u
. "$(dirname "$0")/../checks.sh" docs
help=$work/help
pages=(README.md data/README.md dev/RESULTS.md dev/docs/*.md)
"$tokenize" --help > "$work/tokenize"
"$train" --help > "$help" || { echo "FAIL docs/help: exit code $?"; exit 1; }

# Lists the options of --help, one per line: the name, then llm.c's name if there is one.
awk '
    function tell(text) {
        if (!match(text, /^  --[a-z0-9-]+/)) return
        option = substr(text, 3, RLENGTH - 2)
        if (match(text, /llm\.c +-[a-z]+/)) { alias = substr(text, RSTART, RLENGTH); sub(/.* /, " ", alias) } else alias = ""
        print option alias
    }
    /^  --/ { tell(text); text = "" }
    { text = text $0 }
    END { tell(text) }
' "$help" > "$work/options"

# In coming-from.md's three tables the second column names an option; in llm.c's table the first is the option's alias.
tables() {
    awk -v options="$work/options" -F ' *[|] *' '
        BEGIN {
            while ((getline line < options) > 0) { split(line, word, " "); known[word[1]] = 1; if (word[2]) alias[word[2]] = word[1] }
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

# Our trainer refuses other trainers' option names. Its error names the same option as the tables.
foreign() {
    local name ours said
    sed -n '/^## From nanoGPT/,/^A GPT-2 of your own/p' dev/docs/coming-from.md | grep -E '^[|] `[^|]*[|] `--' | while IFS='|' read -r _ name ours _; do
        ours=$(grep -oE -- '--[a-z0-9-]+' <<< "$ours" | head -n 1)
        for name in $(grep -oE '`(--)?[a-z0-9_]+[` ]' <<< "${name%% (*}" | tr -d '` ' | tr _ -); do
            [ "--${name#--}" != "$ours" ] && [ "$name" != get-batch ] || continue
            said=$("$train" "--${name#--}" 1 2>&1)
            [ $? = 64 ] && [[ $said == *"the option here is $ours"* ]] || echo "$name, $ours: $said"
        done
    done
}

# The trainer skips the flags of llm.c that coming-from.md calls skipped.
passed_over() {
    local flag flags said
    flags=$(tr '\n' ' ' < dev/docs/coming-from.md | sed -n 's/.*says so in one line: `\([^`]*\)`.*/\1/p')
    [ -n "$flags" ] || echo "the page names none"
    for flag in $flags; do
        said=$("$train" "$flag" 1 --check dev/docs/none 2>&1)
        [[ $said == *"$flag "*"has no counterpart"* ]] || echo "$flag is not passed over"
    done
}

# Every option in the docs exists: options of a trainer's command in ```sh blocks are the trainer's, options in the text
# are the trainer's or data/tokenize's.
options() {
    local page option
    for page in "${pages[@]}"; do
        awk '/^```/ { code = $0 == "```sh"; next }
            code { if (!more) ours = /train_gpt2(cu)? |run_gpt2_/; more = /\\$/; if (ours) { sub(/ # .*/, ""); print } }' "$page" |
            grep -oE -- '--[a-z][a-z0-9-]*' | sort -u | while read -r option; do
            case $option in --bind-to | --allow-run-as-root) continue ;; esac # options of mpirun
            grep -qE -- "^  $option( |\$)" "$help" || echo "$page: no option $option"
        done
        [ "$page" != dev/docs/coming-from.md ] || continue # its text names other programs' options
        grep -oE '`--[a-z][a-z0-9-]*' "$page" | tr -d '`' | sort -u | while read -r option; do
            [ "$option" = --from ] && continue # an option of data/*.sh
            grep -qE -- "^  $option( |\$)" "$help" "$work/tokenize" || echo "$page: no option $option in the text"
        done
    done
}

# Linked and named files exist.
files() {
    local page link file
    for page in "${pages[@]}"; do
        grep -oE '\]\([^)#]+' "$page" | cut -c 3- | grep -v '^http' | while read -r link; do
            [ -e "$(dirname "$page")/$link" ] || echo "$page: no $link"
        done
        grep -oE '(^|[ `(])((scripts|data|dev|llmc)/[A-Za-z0-9_./-]+|train_gpt2)\.(sh|py|c|h|cu|cuh|def|md|mk|sbatch)\b' "$page" |
            tr -d ' `(' | sort -u | while read -r file; do [ -e "$file" ] || echo "$page: no $file"; done
    done
}

# The tree in the tour (dev/docs/code.md) equals llmc/floors.
tree() { grep -v '^#' llmc/floors | while read -r line; do grep -qxF -- "$line" dev/docs/code.md || echo "no line '$line'"; done; }

# The tour's table "One evening" has the stated length, within a tenth, and each row's functions are in the row's file.
evening() {
    local row file name lines=0 said
    said=$(sed -nE 's/^## One evening: about ([0-9]+),([0-9]+) lines.*/\1\2/p' dev/docs/code.md)
    while read -r row; do
        mapfile -t named < <(cut -d '|' -f 2 <<< "$row" | grep -oE '`[^`]+`' | tr -d '`')
        lines=$((lines + $(cat "${named[@]}" | wc -l)))
        for name in $(cut -d '|' -f 3 <<< "$row" | grep -oE '`[a-z0-9_]+`' | tr -d '`'); do
            grep -qw "$name" "${named[@]}" || echo "no $name in ${named[*]}"
        done
    done < <(sed -n '/^## One evening/,/^## To add/p' dev/docs/code.md | grep '^| `')
    [ $((10 * lines)) -gt $((9 * said)) ] && [ $((10 * lines)) -lt $((11 * said)) ] || echo "$lines lines, not $said"
}

# For every "`function` in `file`" of the tour, the file has the function.
decided() {
    local function file
    grep -oE '`[a-z0-9_]+` in `llmc/[^`]+`' dev/docs/code.md | sed 's/ in / /' | tr -d '`' > "$work/decided"
    [ -s "$work/decided" ] || echo "no places"
    while read -r function file; do grep -qw -- "$function" "$file" || echo "no $function in $file"; done < "$work/decided"
}

# The functions of the tour's diagrams and text exist.
arrows() {
    local name
    { sed -n '/^```$/,/^```$/p' dev/docs/code.md; grep -oE '`[a-z0-9_]+`' dev/docs/code.md; } |
        grep -oE '\b[a-z0-9]+(_[a-z0-9]+)+\b' | sort -u > "$work/names"
    [ "$(wc -l < "$work/names")" -ge 40 ] || echo "$(wc -l < "$work/names") names"
    while read -r name; do grep -rqw -- "$name" llmc scripts train_gpt2.c train_gpt2.cu || echo "no $name"; done < "$work/names"
}

# ---- Commands in a page ---------------------------------------------------------------------------------------------

# Prints the ```sh blocks under a matching heading, one command per line, with an empty line after each block.
commands() { # PAGE HEADING
    awk -v heading="$2" '/^#+ / && !code { wanted = $0 ~ heading }
        /^```/ { code = wanted && $0 == "```sh"; print ""; next }
        code { sub(/^ +/, ""); line = line $0; if (!sub(/ *\\$/, " ", line)) { print line; line = "" } }' "$1"
}

# Makes a tree whose trainer stops after a few steps, with stand-ins for downloads: data/gpt2 is a vocabulary of bytes,
# models/gpt2 a small model with this vocabulary.
make_tree() {
    local entry
    mkdir -p "$work/tree/data/gpt2" "$work/tree/models" "$work/tree/llmc" "$work/bin" && cd "$work/tree" || return
    for entry in "$root"/{README.md,scripts,dev}; do ln -s "$entry" .; done
    ln -s "$root/llmc/math" llmc # the README trains on llmc/*/*.[ch]: one folder is enough
    for entry in "$root"/data/*.*; do ln -s "$entry" data; done
    ln -s "$tokenize" data/tokenize
    cat > train_gpt2 << END
#!/usr/bin/env bash
for word in "\$@"; do
    case \${last:-} in --steps) word=3 ;; --train-tokens) [ "\$word" = 10e9 ] || word=5000 ;; --sample-every) word=2 ;; esac
    words+=("\$word") last=\$word
done
[[ " \$* " != *" --ramp gns "* ]] || words+=(--ramp-step-rows 1e3) # saves the time to measure it
exec "$train" "\${words[@]}"
END
    printf '#!/bin/sh\necho "$@" >> "%s"\n' "$work/targets" > "$work/bin/make" # other tests run the recipes
    chmod +x train_gpt2 "$work/bin/make"
    "$python" - data/gpt2 << 'END' || return
import json, sys
own = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2 writes as they are; it writes others as 256, 257, ...
others = [b for b in range(256) if b not in own]
names = [chr(b) for b in own] + [chr(256 + i) for i in range(len(others))] + ["<|endoftext|>"]
json.dump({name: i for i, name in enumerate(names)}, open(sys.argv[1] + "/vocab.json", "w"))
open(sys.argv[1] + "/merges.txt", "w").write("#version: 0.2\n")
END
    "$tokenize" --tokenizer data/gpt2 --out "$work/w" README.md &&
        "$train" --train "$work/w_train_*.bin" --tokenizer data/gpt2 --layers 1 --heads 2 --channels 16 --seq-len 256 \
            --micro-batch 1 --steps 1 --out "$work/w_run" && cp -r "$work"/w_run/step_* models/gpt2
}

walk() { # PAGE HEADING LEAST_COMMANDS: runs all commands that need neither a GPU nor a network
    commands "$root/$1" "$2" | grep -vE '# (GPU|network)' > "$work/commands"
    [ "$(grep -c . "$work/commands")" -ge "$3" ] || echo "$1: $(grep -c . "$work/commands") commands, not $3"
    (cd "$work/tree" && PATH=$work/bin:$PATH bash -eux "$work/commands" > "$work/log" 2>&1) || tail -n 4 "$work/log"
}
readme() {
    python=$(find_python) || { echo "no python3" && return; }
    (make_tree) > "$work/log" 2>&1 || { tail -n 3 "$work/log" && return; }
    walk README.md . 9
    walk dev/docs/gns.md 'How the ramp' 1
    walk dev/docs/gpt2-124M.md '^## [23]' 7
    [ -d "$work/tree/runs/ramp" ] && [ -d "$work/tree/runs/try" ] && [ -d "$work/tree/runs/tuned" ] || echo "a run is missing"
    # shellcheck disable=SC2046
    make -n -s $(tr ' ' '\n' < "$work/targets" | sort -u) > "$work/log" 2>&1 || tail -n 1 "$work/log"
}

size() {
    local page lines most
    while read -r page most; do
        lines=$(wc -l < "$page")
        [ "$lines" -le "$most" ] || echo "$page has $lines lines, more than $most"
    done <<< "README.md 150
dev/RESULTS.md 150
dev/docs/gns.md 150
dev/docs/lab-notes.md 250"
}

# The Dockerfile's make targets exist. The Dockerfile installs the packages of scripts/deps.sh demo. CI runs make test.
container() {
    local command package
    grep -oE 'make -j[^&]+' Dockerfile > "$work/commands"
    [ "$(wc -l < "$work/commands")" = 3 ] || cat "$work/commands"
    while read -r command; do eval "$command -n" > "$work/log" 2>&1 || tail -n 1 "$work/log"; done < "$work/commands"
    for package in make libc6-dev $(grep -oE 'lib(cjson|xxhash|openmpi)-dev|openmpi-bin' scripts/deps.sh | sort -u); do
        [ "$(grep -cw -- "$package" Dockerfile)" -ge 2 ] || echo "Dockerfile: $package"
    done
    sed '1,/AS cuda/d' Dockerfile | grep -q ' g++ ' || echo "Dockerfile: nvcc needs g++"
    grep -q 'run: sudo make test\b' .github/workflows/*.yml || echo ".github: no make test"
}

results() { # dev/RESULTS.md is what results.py draws
    local python
    python=$(find_python) || { echo "no python3" && return; }
    "$python" dev/bench/results.py draw dev/results "$work/page.md" && cmp dev/RESULTS.md "$work/page.md"
}

for test in tables foreign passed_over options files tree evening decided arrows readme size container results; do
    begin
    complaints=$($test 2>&1)
    check "$(head -n 5 <<< "$complaints")" [ -z "$complaints" ]
    end $test
done
exit $failed
