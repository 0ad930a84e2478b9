#!/usr/bin/env bash
# make demo: after a stop the same command resumes its run; with another text the earlier run is moved aside. In a tree of
# its own, with a trainer for fewer tokens. Uses $GNS_BUILD (dev/test/run.sh sets it).
set -u
. "$(dirname "$0")/../checks.sh" demo
case $build in *-san*) skip_suite "not under the sanitizers: it is scripts/demo.sh that is tested" ;; esac
mkdir -p "$work/tree/scripts" "$work/tree/data" "$work/mine"
cp "$root"/scripts/{common,demo}.sh "$work/tree/scripts"
ln -s "$tokenize" "$work/tree/data/tokenize"
cat > "$work/tree/train_gpt2" << END
#!/usr/bin/env bash
# The trainer, for \$TOKENS tokens; with a file \`stop\` it gets a signal to stop after its first step.
! flock -n "$work/tree/build/demo/lock" true || touch "$work/unlocked"
set -- "\${@/#2300000/\${TOKENS:-8000}}"
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

demo() { # CODE [TEXT]: its output is in the file log
    bash "$work/tree/scripts/demo.sh" "${@:2}" > "$work/log" 2>&1
    local got=$?
    [ $got = "$1" ] || { echo "exit code $got, not $1"; tail -n 5 "$work/log"; return 1; }
}
stays() { ! grep -q 'moved' "$work/log" && [ ! -e "$demo/run.1" ] || { cat "$work/log"; return 1; }; }

resumes_after_a_stop() { # and says when it is complete
    touch "$work/stop"
    TOKENS=1000000 demo 75 "$work/text" && compgen -G "$demo/run/step_*" > /dev/null || return 1
    rm "$work/stop"
    [ "$(wc -l < "$demo/run/metrics.jsonl")" -ge 40 ] && { echo "stopped too late to go on"; return 1; }
    TOKENS=24000 demo 0 "$work/text" && grep -q '^resuming from run/step_' "$work/log" && grep -q '^bits a byte' "$work/log" && stays || return 1
    TOKENS=24000 demo 0 "$work/text" && grep -q '^this run is complete' "$work/log" && stays || return 1
    local newest
    newest=$(newest_checkpoint "$demo/run")
    cp -r "$newest" "$newest.damaged" && TOKENS=24000 demo 0 "$work/text" && rm -r "$newest.damaged" &&
        grep -qF -- "--model $newest --prompt" "$work/log" || { tail -n 1 "$work/log"; return 1; }
}
another_text_starts_over() { # and nothing is deleted
    local before
    before=$(cat "$demo"/run/step_*/MANIFEST.json "$demo/run/metrics.jsonl" | cksum)
    demo 0 "$work/mine" || return 1
    [ "$(grep -c moved "$work/log")" = 1 ] && grep -q "not of this text: it is moved to $demo/run.1$" "$work/log" || { cat "$work/log"; return 1; }
    [ "$before" = "$(cat "$demo"/run.1/step_*/MANIFEST.json "$demo/run.1/metrics.jsonl" | cksum)" ] && [ ! -e "$demo/run.2" ] || return 1
    demo 0 "$work/mine" && grep -q '^this run is complete' "$work/log" && [ ! -e "$demo/run.2" ] # which is now the demo's text
}
the_text_has_changed() { # under the same name; also a run without its text's checksum
    echo "One more line." >> "$work/mine/b.txt"
    demo 0 "$work/mine" && grep -q 'moved to .*run.2$' "$work/log" || return 1
    rm "$demo/run/text.cksum"
    cd "$work" || return # from where a path may be relative
    demo 0 mine && grep -q 'not known to be of this text: it is moved to .*run.3$' "$work/log" && [ -d "$demo"/run.3/step_* ]
}
kept() { find "$demo" -path '*/run*' | sort | cksum && cat "$demo"/corpus_* | cksum; }
a_text_that_is_too_short() { # the existing run and its text are kept in place
    local before
    before=$(kept)
    head -c 300 "$work/text" > "$work/short"
    demo 65 "$work/short" && [ "$(grep -c '^error' "$work/log")" = 1 ] &&
        grep -q "^error: TEXT=$work/short: .*too few for one window" "$work/log" || { cat "$work/log"; return 1; }
    [ "$before" = "$(kept)" ] || { find "$demo" -maxdepth 1; return 1; }
}
a_second_demo() { # is refused while one is at work, and changes nothing; the trainer found the lock held
    local before
    before=$(kept)
    exec 8> "$demo/lock" && flock 8
    demo 64 "$work/mine" && one_line "$work/log" && grep -q '^error: another demo is at work' "$work/log" || return 1
    exec 8>&-
    demo 65 "$work/none" && [ "$before" = "$(kept)" ] && [ ! -e "$work/unlocked" ]
}
no_loss_to_compare() { # an error, not "inf" and 0
    demo 0 "$work/mine" && sed -i '/val_loss/d' "$demo/run/metrics.jsonl" && demo 65 "$work/mine" &&
        grep -q '^error: .*no validation loss' "$work/log" || { cat "$work/log"; return 1; }
}
any_path() { # with blanks and quotes
    mkdir -p "$work/it's a \"text\"" "$work/source" "$work/make/scripts" && cp "$work/text" "$work/it's a \"text\"/b.md"
    cp "$root/Makefile" "$work/make" && mkdir "$work/make/dev" && cp -r "$root/dev/make" "$work/make/dev" && printf '#!/bin/sh\n[ $# = 1 ] && printf "%%s\\n" "$1"\n' > "$work/make/scripts/demo.sh"
    printf '#!/bin/sh\n' | tee "$work/make/scripts/deps.sh" > "$work/make/train_gpt2" && chmod +x "$work"/make/scripts/*.sh
    local path
    for path in "$work/it's a \"text\"" "" "a;b & c"; do
        [ "$(make -s -C "$work/make" demo TEXT="$path" MAKE=true 2> "$work/log" | tail -n 1)" = "$path" ] || { cat "$work/log"; return 1; }
    done
    demo 0 "$work/it's a \"text\"" && demo 65 "$work/source" &&
        grep -qF "error: TEXT=$work/source: no .txt, .md, .jsonl or .ndjson file in it. Make one text of other files: find" "$work/log" ||
        { cat "$work/log"; return 1; }
}
no_such_text() { demo 65 "$work/none" && one_line "$work/log" && grep -q '^error: .*no such file' "$work/log"; }

for test in resumes_after_a_stop another_text_starts_over the_text_has_changed a_text_that_is_too_short any_path no_such_text a_second_demo no_loss_to_compare; do
    try $test
done
exit $failed
