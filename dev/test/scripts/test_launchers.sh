#!/usr/bin/env bash
# Tests the launchers of scripts/: refusals, restarts of a run until it is done, stops.
# shellcheck disable=SC2016,SC2046,SC2086
set -u
. "$(dirname "$0")/../checks.sh" launchers
mpi_here
unset CUDA_VISIBLE_DEVICES

# A launcher, and a stand-in for the trainer. Each start of the stand-in removes the first line of the file `codes` and
# exits with this line's number. mNUMBER: the stand-in first moves the run aside; NUMBER+: it leaves a checkpoint.
mkdir "$work/bin" "$work/data" "$work/gpus"
for tool in bash cat dirname env grep head id mkdir printf sed setsid tr; do
    path=$(command -v $tool) && [ -x "$path" ] && ln -s "$path" "$work/bin/$tool"
done
small="--vocab-size 256 --layers 1 --heads 1 --channels 32 --seq-len 16 --batch-tokens 128 --threads 1"
launcher() { # NAME RECIPE_OPTIONS
    sed -E '1i # A made-up recipe.\n# It does nothing.
        s/ ?--([a-z0-9-]+) ([^ ]+)/\1 = \2\n/g' <<< "$2" > "$work/$1.conf"
    printf '#!/usr/bin/env bash\nNAME=%s RECIPE=%s\n. %s/scripts/launch.sh\n' "$1" "$work/$1.conf" "$root" > "$work/$1.sh"
}
launcher test "--micro-batch 64 --steps 9 --lr 6e-4"
launcher small "$small --steps 3000 --val-every 0 --checkpoint-every 300"
cat > "$work/fake_cu" <<END
#!/usr/bin/env bash
# MPI_Init_thread
[[ "\$*" != *--print-options ]] || exec "$train" "\$@"
cd "\$(dirname "\$0")"
echo "\$*" >> starts
code=\$(head -n 1 codes)
sed -i 1d codes
case \$code in m*) mv out "out.\$(grep -c . starts)" && mkdir out ;; esac
case \$code in *+*) place=out/step_\$(printf %08d "\$(grep -c . starts)") && mkdir -p "\$place" && touch "\$place/MANIFEST.json" ;; esac
exit "\${code//[m+]/}"
END
printf '#!/usr/bin/env bash\necho "GPU 0: none"\necho "GPU 1: none"\n' > "$work/gpus/nvidia-smi"
printf '#!/usr/bin/env bash\n[ "$*" = --version ] && echo "Open MPI" || echo "$*" > "%s"\n' "$work/starts" > "$work/gpus/mpirun"
chmod +x "$work"/*.sh "$work"/fake_cu "$work"/gpus/*
touch "$work"/data/x_{train,val}_0.bin
cat llmc/*/*.c > "$work/text"
"$tokenize" --tokenizer bytes --out "$work/data/y" --val-fraction 0.1 "$work/text" > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
leave() { mkdir -p "$1" && touch "$1/MANIFEST.json"; } # CHECKPOINT
data=(TRAIN="$work/data/x_train_*.bin" VAL="$work/data/x_val_*.bin" OUT="$work/out" PROGRAM="$work/fake_cu" TOKENIZER=)
real=(TRAIN="$work/data/y_train_*.bin" VAL="$work/data/y_val_*.bin" TOKENIZER= PROGRAM="$train")

refusals() {
    local run=(env "${data[@]}" bash "$work/test.sh")
    refuses 64 "not there" env "${data[@]}" PROGRAM=./no_such_cu bash "$work/test.sh" &&
        refuses 64 "unknown option --bogus" "${run[@]}" --bogus &&
        refuses 64 "no mpirun here. Install Open MPI" env PATH="$work/bin" "$BASH" scripts/mpirun.sh -np 2 program &&
        refuses 64 "no Slurm job here" env -u SLURM_JOB_ID bash scripts/slurm/run_gpt2.sbatch 124M
}
a_rank_a_gpu() { # one rank per GPU of CUDA_VISIBLE_DEVICES; without a GPU the trainer reports it
    local devices
    for devices in unset:2 1:1 GPU-7d6f,GPU-12ab:2 1,-1,0:1 -1:1 :1; do
        rm -f "$work/starts" && echo 0 > "$work/codes"
        env PATH="$work/gpus:$PATH" $([ "${devices%:*}" = unset ] || echo "CUDA_VISIBLE_DEVICES=${devices%:*}") "${data[@]}" bash "$work/test.sh" > "$work/log" 2>&1
        [ "$(grep -o -- '-np [0-9]*' "$work/starts")" = "$([ "${devices##*:}" = 1 ] || echo "-np ${devices##*:}")" ] || { echo "$devices: $(cat "$work/starts")"; cat "$work/log"; return 1; }
    done
}

# Runs are as long as in llm.c's scripts of the same names: -x steps (for 124M one epoch, 18,865 steps) of -d tokens.
recipes() {
    local launcher pattern options
    while IFS='|' read -r launcher pattern options; do
        env "${real[@]}" RANKS=1 OUT="$work/dry" bash "scripts/run_gpt2_$launcher.sh" --dry-run $options > "$work/log" 2>&1
        grep -qE "$pattern" "$work/log" || { echo "$launcher does not say $pattern"; cat "$work/log"; return 1; }
    done << 'END'
124M|^run +18,865 steps of 512 rows|
774M|^run +286,102 steps of 512 rows|
1558M|^run +32,000 steps of 1024 rows|
350M|^run +60,000 steps of 512 rows|
124M_gns|^FLOPs .* for 4,400,000,000 tokens|
350M_gns|^FLOPs .* for 6,999,999,488 tokens|
350M|^run +9 steps of 64 rows|-x 9 --batch-tokens=65536
124M|^run +2 steps of 512 rows|--train_tokens 1e6
124M_gns|^note: no effect.*--batch-min|--ramp fixed -k constant --device H200
124M_gns|^note: no effect: .*--final-lr-frac|--final-lr-frac 0.1 -k constant
END
}
starts_as() { # WORDS VARIABLE=VALUE... -- ARGUMENTS...: checks that the trainer gets WORDS after --config RECIPE
    local words=$1 variables=()
    shift
    while [ "$1" != -- ]; do variables+=("$1") && shift; done
    rm -rf "$work/starts" && echo 0 > "$work/codes"
    env PATH="$PATH:$work/gpus" "${data[@]}" RANKS=1 "${variables[@]}" bash "$work/test.sh" "${@:2}" > "$work/log" 2>&1
    [ "$(cat "$work/starts")" = "--config $work/test.conf $words" ] || { cat "$work/starts" "$work/log"; return 1; }
}
given_places() { # paths on the command line and in a file override the environment's
    local train="$work/data/y_train_*.bin" val="$work/data/y_val_*.bin" places="--train $work/data/x_train_*.bin --val $work/data/x_val_*.bin"
    starts_as "--seed 2 --out $work/out $places" -- --seed 2 && starts_as "--out $work/out $places --tokenizer found" TOKENIZER=found -- &&
        starts_as "-i $train --val=$val -o $work/o --tokenizer t" TOKENIZER=found -- -i "$train" --val="$val" -o "$work/o" --tokenizer t || return 1
    printf 'train = "%s"\nout = %s\nhellaswag-every = 5\n' "$train" "$work/o" > "$work/mine.conf"
    starts_as "--config $work/mine.conf --val $work/data/x_val_*.bin --hellaswag $root/data/hellaswag/hellaswag_val.jsonl" top= -- --config "$work/mine.conf" ||
        grep -q -- '--hellaswag data/hellaswag' "$work/starts"
}
from_elsewhere() { # paths that the user gives are relative to the caller's directory, default paths to the root
    mkdir -p "$work/elsewhere/in" && cp "$work"/data/x_*.bin "$work/elsewhere/in" && cp "$work/fake_cu" "$work/elsewhere/program_cu"
    cd "$work/elsewhere" && echo 0 > codes
    env PATH="$PATH:$work/gpus" RANKS=1 TRAIN='in/x_train_*' VAL='in/x_val_*' PROGRAM=program_cu TOKENIZER=mine bash "$work/test.sh" > log 2>&1
    [ "$(cut -d ' ' -f 3- starts)" = "--out $root/runs/test --train in/x_train_* --val in/x_val_* --tokenizer mine" ] || { cat log starts; return 1; }
    rm starts && echo 0 > codes
    env PATH="$PATH:$work/gpus" RANKS=1 PROGRAM=./program_cu bash "$work/test.sh" > log 2>&1
    grep -qF -- "--train $root/data/fineweb/fineweb_train_*.bin --val $root/data/fineweb/fineweb_val_*.bin" starts || { cat log starts; return 1; }
}
helps() { # --help needs nothing else, and works under any path
    local script
    ln -sfn "$root" "$work/run_here"
    for script in scripts/run_gpt2_*.sh scripts/lm_eval.sh; do
        (cd "$work" && env PATH="$work/bin:$PATH" bash "$work/run_here/$script" --help) > "$work/log" 2>&1 &&
            grep -qE "^(GPT-2 [0-9]+M on|Runs EleutherAI)" "$work/log" && grep -q '^ .* OUT\|--tasks' "$work/log" &&
            ! grep -q '^#\|shellcheck' "$work/log" || { echo "$script"; cat "$work/log"; return 1; }
    done
    bash "$work/test.sh" --steps 5 --help > "$work/log" 2>&1
    head -n 2 "$work/log" | cmp - <(printf 'A made-up recipe.\nIt does nothing.\n') && grep -q -- '--micro-batch 64' "$work/log"
}
newest_by_name() { # shell and Python find the newest checkpoint by llmc/checkpoint/archive.c's names
    local run="$work/new est" name python
    python=$(find_python) || return
    newest() {
        local got
        got=$(newest_checkpoint "$run") && [ "$got" = "$1" ] || { echo "not $1 but $got"; return 1; }
        got=$(PYTHONPATH=scripts "$python" -c 'import critical_batch, sys; print(critical_batch.newest_checkpoint(sys.argv[1]))' "$run" 2>&1)
        [ "$got" = "$1" ] || { [ -z "$1" ] && [[ $got == *"no checkpoint"* ]]; } || { echo "in Python: not $1 but $got"; return 1; }
    }
    for name in step_00000008.damaged step_notes step_7 step_0000000x step_000000009; do leave "$run/$name"; done
    mkdir "$run/step_00000009" # not whole
    newest "" && leave "$run/step_00000008" && newest "$run/step_00000008" && leave "$run/step_99999999" && leave "$run/step_100000000" &&
        newest "$run/step_100000000"
}

# Checks that the launcher, or the command `via`, ends with CODE after STARTS starts, which end with CODES.
launches() { # CODE STARTS CODES -- ARGUMENTS...
    local code=$1 starts=$2 got
    [ -n "${again:-}" ] || rm -rf "$work"/out* "$work/starts"
    printf '%s\n' $3 > "$work/codes"
    touch "$work/starts"
    env PATH="${slurm:-}$PATH:$work/gpus" "${data[@]}" RANKS=1 bash "${via[@]-$work/test.sh}" "${@:5}" > "$work/log" 2>&1
    got=$?
    [ $got = "$code" ] && [ "$(wc -l < "$work/starts")" = "$starts" ] || { echo "exit code $got, starts:"; cat "$work/starts" "$work/log"; return 1; }
}
restarts() { # the launcher restarts while each start leaves a newer checkpoint; a permanent error ends it
    launches 0 1 0 && launches 0 4 "75+ 78+ 137+ 0" && launches 78 2 "75+ 78 0" && launches 76 2 "75+ 76+ 0" && launches 64 2 "75+ 64 0" &&
        launches 78 1 137 && says "$work/log" "error: a rank was lost (exit code 137: signal 9). Start the same command again" || return 1
    rm -rf "$work/out" "$work/starts" && leave "$work/out/step_00099999" # the new run moves it aside and dies at once
    again=1 launches 78 1 "m78 78 0" -- --fresh
}
goes_on() { # a launcher of one's own has lines after the one that sources launch.sh
    local via=("$work/own.sh")
    { cat "$work/test.sh" && printf 'code=$?\necho "the run ended with $code"\nexit $code\n'; } > "$work/own.sh"
    launches 0 2 "78+ 0" && says "$work/log" "the run ended with 0" && launches 76 1 76 && says "$work/log" "the run ended with 76"
}
starts_over_once() { # --fresh counts for the first start; later starts resume, even if a file says fresh
    local how
    for how in --fresh --fresh=true '-y 0'; do
        launches 0 3 "137+ 75+ 0" -- --seed 2 $how --keep 3 || return 1
        diff <(sed 's/ --out.*--val [^ ]*//; s/.*test.conf //' "$work/starts") <(echo "--seed 2 $how --keep 3" && printf -- '--seed 2 --keep 3 -y 1\n%.0s' 1 2) || return 1
    done
}

# Stand-ins for Slurm: sbatch reads the job's #SBATCH lines and runs the job; srun and scontrol log their arguments.
mkdir "$work/slurm"
cat > "$work/slurm/sbatch" <<'END'
#!/usr/bin/env bash
option() { sed -n "s/^#SBATCH --$1=//p" "$job"; }
job=$1
shift
grep -q '^#SBATCH --requeue$' "$job" && [ "$(option signal)" = USR1@300 ] || exit 90
export SLURM_JOB_ID=42 SLURM_SUBMIT_DIR=$PWD SLURM_NTASKS=$(($(option nodes) * $(option ntasks-per-node)))
bash "$job" "$@"
END
cat > "$work/slurm/srun" <<'END'
#!/usr/bin/env bash
case $1 in --mpi=list) echo "MPI plugin types are... none ${FAKE_MPI-pmix}" >&2 && exit ;; esac
echo "$*" >> "$(dirname "$0")/srun.log"
while [[ $1 == --* ]]; do shift; done
"$@"
END
printf '#!/usr/bin/env bash\necho "$*" >> "$(dirname "$0")/scontrol.log"\n' > "$work/slurm/scontrol"
chmod +x "$work"/slurm/*
submits() { # MODEL CODE STARTS CODES [OPTIONS...]: like launches, through sbatch
    local via=("$work/slurm/sbatch" scripts/slurm/run_gpt2.sbatch "$1") slurm=$work/slurm:
    rm -f "$work"/slurm/*.log && touch "$work/slurm/scontrol.log"
    launches "$2" "$3" "$4" -- "${@:5}" || return 1
    [ "$3" = 0 ] && return
    grep -q -- "--config scripts/recipes/gpt2-$1.conf " "$work/starts" &&
        grep -q "^--mpi=pmix --kill-on-bad-exit=0 --wait=30 $work/fake_cu --config" "$work/slurm/srun.log" || { cat "$work/starts" "$work/log"; return 1; }
}
slurm() {
    submits 1558M 0 1 0 && submits 774M 0 3 "137+ 78+ 0" && submits 124M 76 1 76 && [ ! -s "$work/slurm/scontrol.log" ] &&
        submits 350M 75 1 75+ && [ "$(cat "$work/slurm/scontrol.log")" = "requeue 42" ] &&
        FAKE_MPI=pmi2 submits 124M 64 0 "" && says "$work/log" 'error: this Slurm has no PMIx' && submits 125M 64 0 "" &&
        says "$work/log" "error: no model is called '125M'"
}
slurm_starts_over_once() { # --fresh, as option or in a file, counts until Slurm queues the job again
    echo 'fresh = true' > "$work/fresh.cfg"
    local how
    for how in "--fresh" "--config $work/fresh.cfg"; do
        submits 350M 75 1 75+ $how && SLURM_RESTART_COUNT=1 again=1 submits 350M 0 2 0 $how &&
            [ "$(sed -E 's/.* -y 1$/resume/; s/.*(fresh).*/fresh/' "$work/starts" | xargs)" = "fresh resume" ] || { cat "$work/starts"; return 1; }
    done
}

# ---- mpirun.sh: with stand-ins for mpirun ----------------------------------------------------------------------------------

stand_in() { # NAME: makes an mpirun from standard input
    mkdir -p "$work/$1" && { echo '#!/usr/bin/env bash' && cat; } > "$work/$1/mpirun" && chmod +x "$work/$1/mpirun"
}
stand_in hangs <<< "OMPI_COMM_WORLD_RANK=0 sleep 6; mkfifo $work/hangs/never; read -r < $work/hangs/never"
# A rank that frees its memory at its end looks like this for some seconds: a process without an environment.
stand_in frees <<< "OMPI_COMM_WORLD_RANK=0 sleep 6; env -i sleep 13; exit 0"
for how in hangs frees; do
    {
        PATH="$work/$how:$PATH" timeout 100 scripts/mpirun.sh -np 2 program > "$work/$how/log" 2>&1
        echo $? > "$work/$how/code"
    } & # starts early: it takes 16 s or more
done
mpirun_that_hangs() { # after its rank ended: mpirun.sh kills it, but not before the rank has freed its memory
    until [ -s "$work/hangs/code" ]; do sleep 0.2; done
    [ "$(cat "$work/hangs/code")" = 78 ] && says "$work/hangs/log" 'it is killed' && tail -n 1 "$work/hangs/log" | grep -q '^error: a rank was lost' ||
        { cat "$work/hangs/code" "$work/hangs/log"; return 1; }
    until [ -s "$work/frees/code" ]; do sleep 0.2; done
    [ "$(cat "$work/frees/code")" = 0 ] && [ ! -s "$work/frees/log" ] || { cat "$work/frees/code" "$work/frees/log"; return 1; }
}
# An mpirun with a rank that exits with 75 at USR1, with 3 at a second USR1.
stand_in asks <<'END'
trap : USR1 # as mpirun does while it starts ranks
echo $$ > "$(dirname "$0")/started"
OMPI_COMM_WORLD_RANK=0 python3 -c 'import os, signal, sys, time
asked, end = [], time.monotonic() + 20
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
while not asked and time.monotonic() < end: time.sleep(0.05)
time.sleep(float(os.environ["LONGER"]))
sys.exit(75 if len(asked) == 1 else 3)'
END
asks() { # HOW: mpirun.sh ends with 75, whichever process gets TERM
    local here=$work/asks_$1 job
    mkdir "$here" && cp "$work/asks/mpirun" "$here"
    # A busy machine needs 3 s to find the ranks.
    printf '#!/bin/sh\n[ ! -e %s ] || case $1 in -lszxF) sleep 3;; esac\nexec %s "$@"\n' "$here/busy" "$(command -v grep)" > "$here/grep" && chmod +x "$here/grep"
    env PATH="$here:$PATH" LONGER=$([ "$1" = two-at-once ] && echo 5 || echo 0.2) \
        scripts/mpirun.sh -np 1 program > "$here/log" 2>&1 &
    job=$!
    until [ -s "$here/started" ] || ! kill -0 $job; do sleep 0.05; done
    case $1 in
    to-mpirun) kill -TERM "$(cat "$here/started")" ;;
    to-all) kill -TERM $job $(pgrep -P $job) ;; # as when a service ends
    two-at-once) sleep 1 && touch "$here/busy" && kill -TERM $job && sleep 0.3 && kill -TERM $job ;; # as `timeout` may
    esac
    wait $job
    echo $? > "$here/code"
}
for how in to-mpirun to-all two-at-once; do asks $how & done 2> /dev/null
mpirun_hears() {
    local how
    for how in "$work"/asks_*; do
        until [ -s "$how/code" ]; do sleep 0.1; done
        [ "$(cat "$how/code")" = 75 ] || { echo "$how: exit code $(cat "$how/code")"; cat "$how/log"; return 1; }
    done
}
code_under_signals() { # signals that come while a job ends do not change its code: 30 jobs, a signal every 2 ms
    cat > "$work/waits.sh" << END
. "$root/scripts/stop_requests.sh"
asked=1 last=\$((SECONDS + 600)) # further requests are ignored
trap_stop_requests
touch "$work/waiting"
for ((i = 0; i < 30; i++)); do
    (sleep 0.02; exit 75) & job=\$!
    wait_for_job
    code=\$?
    [ \$code = 75 ] || { echo "exit code \$code of job \$i"; exit 1; }
done
END
    bash "$work/waits.sh" &
    local job=$!
    until [ -e "$work/waiting" ] || ! kill -0 $job; do sleep 0.01; done
    while kill -HUP $job; do sleep 0.002; done 2> /dev/null
    wait $job
}
mpirun_words() { # stdout and stderr stay apart; ranks are bound only as the user says; without room it refuses
    stand_in speaks <<< 'echo "${OMPI_MCA_hwloc_base_binding_policy:-} $*"; echo err >&2; exit 3'
    ln -s "$(type -P false)" "$work/speaks/mkdir" # a signal to all processes would kill a mkdir too
    speaks() { # WORDS VARIABLES -- ARGUMENTS
        PATH="$work/speaks:$PATH" scripts/mpirun.sh "${@:2}" > "$work/words" 2> "$work/errors"
        [ $? = 3 ] && [ "$(cat "$work/words")" = "$1 ${*:2}" ] && [ "$(cat "$work/errors")" = err ] || { cat "$work/words" "$work/errors"; return 1; }
    }
    speaks none -np 2 program --lr 1 && OMPI_MCA_hwloc_base_binding_policy=core speaks core -np 2 program || return 1
    local binding _
    for _ in {1..4}; do speaks none program || return 1; done # mpirun.sh adds no line if mpirun ends at once
    for binding in "--cpus-per-proc 4" "--map-by slot:PE=4" "--map-by slot:span,pe=2"; do
        speaks "" -np 2 $binding program || return 1
    done
    mkdir -p "$work/crammed" && printf '#!/bin/sh\necho head\necho "none 20000 19000 1000 95%% /"\n' > "$work/crammed/df" && chmod +x "$work/crammed/df"
    refuses 74 "$work: 1000 KiB are free, " env TMPDIR="$work" PATH="$work/crammed:$work/speaks:$PATH" scripts/mpirun.sh -np 1 program &&
        refuses 74 "$work/crammed/df/none: cannot write" env TMPDIR="$work/crammed/df/none" PATH="$work/speaks:$PATH" scripts/mpirun.sh -np 1 program
}

# ---- With Open MPI and the real trainer ------------------------------------------------------------------------------------

mpirun() { scripts/mpirun.sh -np 2 "$@"; }
mpirun_that_cannot_start() { # no such program, a wrong option, no command; a rank that exits with 1 had started; ranks may share cores
    local words
    for words in "$work/nowhere" no_such_program "$work" "--bogus true" "--hostfile $work/nowhere true" ""; do
        mpirun $words > "$work/log" 2>&1
        [ $? = 64 ] && says "$work/log" 'error: mpirun did not start the ranks' && ! says "$work/log" 'rank was lost' || { echo "$words"; cat "$work/log"; return 1; }
    done
    mpirun false > "$work/log" 2>&1
    [ $? = 1 ] && scripts/mpirun.sh -np $(($(nproc) + 1)) true > "$work/log" 2>&1 || { cat "$work/log"; return 1; }
}
mpirun_returns_the_code() {
    mpirun sh -c '[ $OMPI_COMM_WORLD_RANK = 0 ] || exit 76; sleep 20' > "$work/log" 2>&1
    [ $? = 76 ] || { cat "$work/log"; return 1; }
    mpirun sh -c '[ $OMPI_COMM_WORLD_RANK = 0 ] || kill -9 $$; sleep 20' > "$work/log" 2>&1
    [ $? = 78 ] || { cat "$work/log"; return 1; }
}
mpirun_outlives_its_reader() { # in `... | tee log` Ctrl-C also ends tee; mpirun alone would end after ten unread lines
    mpirun "$train" $small --train "$work/data/y_train_*.bin" --steps 300 --out "$work/unread" --sample-every 10 --sample-tokens 40 2>&1 | head -n 1 > /dev/null
    [ "${PIPESTATUS[0]}" = 0 ] && [ -s "$work/unread/step_00000300/MANIFEST.json" ]
}
started() { # LAUNCHER ARGUMENTS...: starts it in the background and waits until it trains
    rm -f "$work/log"
    "$@" > "$work/log" 2>&1 &
    job=$!
    until grep -qs 'step  ' "$work/log" || ! kill -0 $job; do sleep 0.05; done
}
stopped() { # SIGNAL TEXT: checks that the started job ends with 75 and logs TEXT
    kill "-$1" $job && wait $job
    local code=$?
    [ $code = 75 ] && grep -q "$2" "$work/log" || { echo "code $code"; tail -n 4 "$work/log"; return 1; }
}
stops_and_resumes() { # two ranks
    local job run=(env "${real[@]}" OUT="$work/small" RANKS=2 bash "$work/small.sh" --steps 30000)
    started "${run[@]}" && stopped USR1 '^stopped (rank 0): \(SIGUSR1\|a signal to another rank\) after step' &&
        started "${run[@]}" && stopped TERM '^resuming from'
}
asked_before_the_start() { # newest_checkpoint's `sort` sends TERM, before launch.sh starts the trainer
    local i code
    mkdir "$work/early" && printf '#!/bin/sh\nkill -TERM "$LAUNCHER"\nexec %s "$@"\n' "$(command -v sort)" > "$work/early/sort" && chmod +x "$work/early/sort"
    for i in {1..20}; do
        env PATH="$work/early:$PATH" "${real[@]}" OUT="$work/asked" RANKS=1 bash -c 'LAUNCHER=$$ exec bash "$0" --fresh --steps 300000' "$work/small.sh" > "$work/log" 2>&1
        code=$?
        [ $code = 75 ] || { echo "run $i: exit code $code"; tail -n 3 "$work/log"; return 1; }
    done
}
ends_in_time() { # RANKS SECONDS: by its own --max-hours, or with two ranks by the launcher's GNS_END; nothing restarts it
    local code how=--max-hours=100 end=$(($(date +%s) + $2))
    local saved # when the manifest was written, in seconds: on a busy machine mpirun outlives its ranks by a second or two
    [ $1 = 2 ] || how=--max-hours=$(awk -v s="$2" 'BEGIN { printf "%.4f", 0.8 * s / 3600 }')
    env $([ $1 = 1 ] || echo GNS_END=$end) "${real[@]}" OUT="$work/up$1-$2" RANKS=$1 bash "$work/small.sh" --steps 100000000 $how > "$work/log" 2>&1
    code=$?
    saved=$(stat -c %Y "$work/up$1-$2"/step_*/MANIFEST.json | sort -n | tail -n 1)
    [ $code = 75 ] && [ "$saved" -le $end ] && ! grep 'starting again' "$work/log" &&
        grep -qE '^stopped( .rank 0.)?: the end of --max-hours after step [0-9]{2,}, saved in ' "$work/log" ||
        { echo "code $code, saved $((saved - end)) s after the end"; grep -v '^ *$' "$work/log" | tail -n 12; return 1; }
}
time_is_up() { # a machine that needs seconds to start a run gets more of them
    ends_in_time 1 6 || ends_in_time 1 30 || return 1
    has_mpi || skip "no Open MPI here, or a build without it" || return
    ends_in_time 2 6 || ends_in_time 2 30 || return 1
    GNS_END=1 launches 75 2 "78+ 75+"
}
restarts_when_a_rank_is_killed() {
    local job process end
    printf 'fresh = true\nsteps = 30000\n' > "$work/fresh.cfg" # for the first start only
    started env "${real[@]}" OUT="$work/again" RANKS=2 bash "$work/small.sh" --config "$work/fresh.cfg"
    until compgen -G "$work/again/step_*" > /dev/null || ! kill -0 $job; do sleep 0.05; done
    for process in $(pgrep -f -- "--out $work/again "); do
        grep -qzx OMPI_COMM_WORLD_RANK=1 "/proc/$process/environ" && kill -STOP "$process" && break # stops the run
    done
    end=$(newest_checkpoint "$work/again") && end=$((10#${end##*_} + 1000)) && printf 'fresh = true\nsteps = %s\n' $end > "$work/fresh.cfg"
    kill -KILL "$process"
    wait $job && grep -q '^exit code 78: starting again from .*/step_' "$work/log" && grep -q '^resuming from' "$work/log" &&
        [ "$(grep -c '"loss"' "$work/again/metrics.jsonl")" = $end ] || { tail -n 9 "$work/log"; return 1; }
}
# After SIGKILL to a launcher, to mpirun.sh or to mpirun, ranks save and end. launch.sh starts 1 rank without mpirun.sh.
trainers() { pgrep -f "^$train .*--out $work/killed "; }
killed() { # launch.sh|mpirun.sh|mpirun RANKS
    local what=$1 ranks=$2 job victim code end=$((SECONDS + 60)) segments=''
    rm -rf "$work/killed"
    if [ "$what" = launch.sh ]; then
        started env "${real[@]}" OUT="$work/killed" RANKS=$ranks bash "$work/small.sh" --steps 100000000
    else
        started scripts/mpirun.sh -np "$ranks" "$train" $small --train "$work/data/y_train_*.bin" --out "$work/killed" --steps 100000000
    fi
    victim=$job
    if [ "$what" = mpirun ]; then
        victim=$(pgrep -P $job -x mpirun)
        segments=$(for process in $(trainers); do grep -oE '/dev/shm/vader_segment[^ ]*' "/proc/$process/maps"; done | sort -u)
        [ "$ranks" = 1 ] || [ -n "$segments" ] || { echo "no shared memory"; return 1; }
    fi
    kill -KILL "$victim"
    wait $job
    code=$?
    while trainers > /dev/null && [ $SECONDS -lt $end ]; do sleep 0.05; done
    if trainers | xargs -r kill -KILL && [ $SECONDS -ge $end ]; then
        echo "ranks trained on" && return 1
    fi
    if [ "$what" = mpirun ]; then
        [ $code = 78 ] && { [ -z "$segments" ] || ! ls $segments 2> /dev/null; } && ! compgen -G "${TMPDIR:-/tmp}/ompi.*/pid.$victim"
    else
        until grep -qE '^stopped( .rank [01].)?: (SIGUSR1|a signal to another rank) after step' "$work/log" || [ $SECONDS -ge $end ]; do sleep 0.05; done
        [ $SECONDS -lt $end ]
    fi && [ -n "$(newest_checkpoint "$work/killed")" ] || { echo "exit code $code"; tail -n 5 "$work/log"; return 1; }
}
for test in refusals a_rank_a_gpu recipes given_places from_elsewhere helps newest_by_name restarts goes_on starts_over_once slurm slurm_starts_over_once \
    code_under_signals mpirun_words asked_before_the_start time_is_up mpirun_hears mpirun_that_hangs; do
    try $test
done
has_mpi || { echo "SKIP launchers/mpi: no Open MPI here, or a build without it" && exit $failed; }
for test in mpirun_that_cannot_start mpirun_returns_the_code mpirun_outlives_its_reader stops_and_resumes restarts_when_a_rank_is_killed; do
    try $test
done
for how in "launch.sh 1" "launch.sh 2" "mpirun.sh 2" "mpirun 2" "mpirun 1"; do try killed $how; done
exit $failed
