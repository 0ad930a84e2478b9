#!/usr/bin/env bash
# What a person sees, on a terminal (util-linux's script) of 80 and of 40 columns, and in a log: no line is too wide, long
# work shows how far it is, bars end at 100%, and a signal is answered within the step.
# GNS_BUILD names the build directory.
set -u
. "$(dirname "$0")/checks.sh" terminal
command -v script > /dev/null || skip_suite "no script (util-linux)"
cd "$work" || exit 70
cat "$root"/llmc/*/*.[ch] > text.txt
model=(--vocab-size 256 --layers 2 --heads 4 --channels 64 --seq-len 64 --micro-batch 8)

# Runs a command on a terminal so wide. Its process is in the file pid, what it writes in the file screen.
on_terminal() { # COLUMNS COMMAND...
    local columns=$1
    shift
    rm -f pid
    script -qefc "stty cols $columns rows 24; echo \$\$ > pid; exec $(printf '%q ' "$@")" screen < /dev/null > /dev/null 2>&1
}

# What was written, a drawing a line, without what script and the terminal add. A line that is drawn again counts each time.
drawings() { sed '/^Script \(started\|done\)/d' screen | tr '\r' '\n' | sed 's/\x1b\[K//g' | grep .; }

# Errors stay whole, as commands in them are copied.
fits() { # COLUMNS
    drawings | grep -v '^error' | awk -v columns="$1" 'length > columns { print length " wide: " $0; bad = 1 } END { exit bad }'
}
shows() { drawings | grep -qE -- "$1" || { echo "never: $1"; drawings | tail -n 5; return 1; }; } # PATTERN
hides() { ! drawings | grep -E -- "$1"; }                                                         # PATTERN

tokenizing() { # COLUMNS
    on_terminal "$1" "$tokenize" --tokenizer bytes --val-fraction 0.1 --out "t$1" text.txt && fits "$1" && shows '100\.0%  ETA 0:00:00'
}
training() { # COLUMNS: the line, validations, a save
    on_terminal "$1" "$train" --train "t$1_train_*.bin" --val "t$1_val_*.bin" "${model[@]}" --steps 300 --val-every 100 \
        --out "run$1" && fits "$1" || return 1
    shows '^step  +[0-9]+ +[0-9]+%  ETA [0-9]+:[0-9]{2}  loss [0-9.]+' && shows '^step +300 100%  ETA 0:00' &&
        shows '^step +200  val loss' && hides 'unknown|val -|GNS (-|off|> 0)|NaN'
}
evaluating() { # COLUMNS: on standard error, so that the result can be read by a program
    on_terminal "$1" bash -c "'$train' --eval-only --threads 1 --model run$1 --val 't$1_train_*.bin' > result.txt" && fits "$1" &&
        says result.txt "loss " && shows '^validation [0-9]+%, [0-9]:[0-9]{2} left' && shows '^validation 100%, took'
}

wait_for() { # PATTERN: at most a minute, in screen
    local end=$((SECONDS + 60))
    until drawings 2> /dev/null | grep -qE -- "$1"; do
        [ $SECONDS -lt $end ] || { echo "not within a minute: $1"; return 1; }
        sleep 0.1
    done
}
stop_job() { kill -KILL "$(cat pid)" && wait $job; } 2> /dev/null

# A step of some minutes: a drawing within it, an answer to Ctrl-C, and an end at the second one.
long_step() { # COLUMNS
    : > screen
    on_terminal "$1" "$train" --train "t$1_train_*.bin" --layers 4 --vocab-size 50257 --heads 8 --channels 512 --seq-len 64 \
        --micro-batch 8 --batch-tokens 262144 --steps 1000 --out "long$1" > /dev/null &
    local job=$!
    wait_for 'step 1: [0-9]+%, [0-9]' && wait_for 'the run takes' && kill -INT "$(cat pid)" && wait_for 'finishing this step' ||
        { stop_job; return 1; }
    kill -INT "$(cat pid)"
    wait $job
    [ $? = 130 ] && fits "$1" && [ ! -e "long$1"/step_00000001 ]
}
# In a log: lines of 80 columns, each whole, and the same answer.
log() {
    "$train" --train 't80_train_*.bin' "${model[@]}" --batch-tokens 4096 --steps 100000 --out log > screen 2>&1 &
    local job=$!
    echo $job > pid
    wait_for '^step +[0-9]+ +[0-9]+%  ETA .*  loss' && wait_for '^step +[1-9][0-9]+ ' && kill -TERM $job && wait_for '^saved' ||
        { stop_job; return 1; }
    wait $job
    [ $? = 75 ] && ! grep -q $'\r' screen && grep '^step' screen | awk 'length > 80 { print; bad = 1 } END { exit bad }'
}

for columns in 80 40; do
    for test in tokenizing training evaluating long_step; do try $test $columns; done
done
try log
exit $failed
