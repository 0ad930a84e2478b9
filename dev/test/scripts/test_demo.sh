#!/usr/bin/env bash
# make demo: after a stop the same command resumes its run; another text begins another run. The test runs in a copy of
# the tree whose trainer stops after few tokens.
set -u
. "$(dirname "$0")/../checks.sh" demo
case $build in *-san*) skip_suite "not under the sanitizers: it is scripts/demo.sh that is tested" ;; esac
mkdir -p "$work/tree/scripts" "$work/tree/data" "$work/mine" "$work/source"
cp "$root"/scripts/{common,demo}.sh "$work/tree/scripts"
ln -s "$tokenize" "$work/tree/data/tokenize"
cat > "$work/tree/train_gpt2" << END
#!/usr/bin/env bash
# Runs the trainer for \$TOKENS tokens. A file \`stop\` makes the trainer stop by a signal after its first step.
! flock -n "$work/tree/build/demo/lock" true || touch "$work/unlocked"
set -- "\${@/#2300000/\${TOKENS:-4100}}"
set -- "\${@/#65536/2048}"
set -- "\${@/#400/20}"
"$train" "\$@" --threads 1 &
job=\$!
until [ ! -e "$work/stop" ] || ! kill -0 \$job 2> /dev/null; do
    grep -qs '"loss"' run/metrics.jsonl && kill -USR1 \$job && break
    sleep 0.01
done
wait \$job
END
chmod +x "$work/tree/train_gpt2"
cat "$root"/llmc/[a-m]*/*.c > "$work/text"
cat "$root"/llmc/[n-z]*/*.c > "$work/mine/b.txt"
demo=$work/tree/build/demo

demo() { # CODE [TEXT]: leaves the output in $work/log
    bash "$work/tree/scripts/demo.sh" "${@:2}" > "$work/log" 2>&1
    local got=$?
    [ $got = "$1" ] || { echo "exit code $got, not $1"; tail -n 5 "$work/log"; return 1; }
}
runs() { compgen -G "$demo/text-*/run" | wc -l; }

resumes_after_a_stop() { # and reports a complete run
    touch "$work/stop"
    TOKENS=1000000 demo 75 "$work/text" && compgen -G "$demo/text-*/run/step_*" > /dev/null || return 1
    rm "$work/stop"
    local newest
    local -x TOKENS
    TOKENS=$(($(grep -o '"tokens": [0-9]*' "$demo"/text-*/run/metrics.jsonl | tail -n 1 | cut -d ' ' -f 2) + 8000))
    demo 0 "$work/text" && grep -q '^resuming from run/step_' "$work/log" && grep -q '^bits per byte' "$work/log" || return 1
    newest=$(newest_checkpoint "$demo"/text-*/run)
    cp -r "$newest" "$newest.damaged" && demo 0 "$work/text" && rm -r "$newest.damaged" &&
        grep -q '^this run is complete' "$work/log" && grep -qF -- "--model $newest --prompt" "$work/log" && [ "$(runs)" = 1 ] || { cat "$work/log"; return 1; }
}
another_text_is_another_run() { # also a text of another length under the same name; earlier runs stay
    local before
    before=$(cat "$demo"/text-*/run/*/MANIFEST.json "$demo"/text-*/run/metrics.jsonl | cksum)
    mv "$demo"/text-* "$work/first" && demo 0 "$work/mine" && demo 0 "$work/mine" && grep -q '^this run is complete' "$work/log" || return 1
    echo "One more line." >> "$work/mine/b.txt"
    mv "$work/first" "$demo/text-0" && cd "$work" && demo 0 mine && [ "$(runs)" = 3 ] && # a relative path
        [ "$before" = "$(cat "$demo"/text-0/run/*/MANIFEST.json "$demo/text-0/run/metrics.jsonl" | cksum)" ]
}
refusals() { # refusals change no run; the trainer runs under the lock
    local before
    before=$(find "$demo"/text-*/run | sort | cksum)
    head -c 300 "$work/text" > "$work/short" && gzip -c "$work/text" > "$work/packed"
    demo 65 "$work/short" && [ "$(grep '^error' "$work/log")" = "$(grep 'too few for one window' "$work/log")" ] &&
        demo 65 "$work/packed" && says "$work/log" "is gzip, not text" && demo 65 "$work/none" && says "$work/log" "error: $work/none: cannot open" && demo 65 "$work/source" && says "$work/log" "error: no text in $work/source" || { cat "$work/log"; return 1; }
    exec 8> "$demo/lock" && flock 8
    demo 64 "$work/mine" && one_line "$work/log" && says "$work/log" 'error: another demo is at work' || return 1
    exec 8>&-
    [ "$before" = "$(find "$demo"/text-*/run | sort | cksum)" ] && [ ! -e "$work/unlocked" ]
}
no_loss_to_compare() { # without a loss the demo fails; it does not print "inf" and exit with 0
    sed -i '/val_loss/d' "$demo"/text-*/run/metrics.jsonl && demo 65 "$work/mine" &&
        grep -q '^error: .*no validation loss' "$work/log" || { cat "$work/log"; return 1; }
}
any_path() { # with blanks and quotes
    mkdir -p "$work/it's a \"text\"" "$work/make/scripts" && cp "$work/text" "$work/it's a \"text\"/b.md"
    cp "$root/Makefile" "$work/make" && mkdir "$work/make/dev" && cp -r "$root/dev/make" "$work/make/dev" && printf '#!/bin/sh\n[ $# = 1 ] && printf "%%s\\n" "$1"\n' > "$work/make/scripts/demo.sh"
    printf '#!/bin/sh\n' | tee "$work/make/scripts/deps.sh" > "$work/make/train_gpt2" && chmod +x "$work"/make/scripts/*.sh
    local path
    for path in "$work/it's a \"text\"" "" "a;b & c"; do
        [ "$(make -s -C "$work/make" demo TEXT="$path" MAKE=true 2> "$work/log" | tail -n 1)" = "$path" ] || { cat "$work/log"; return 1; }
    done
    demo 0 "$work/it's a \"text\""
}

for test in resumes_after_a_stop another_text_is_another_run any_path refusals no_loss_to_compare; do
    try $test
done
exit $failed
