#!/usr/bin/env bash
# What ranks check before training: equal files on all machines, each rank's share of the cores, launchers without Open
# MPI. Machine m0's files are in the directory m0, m1's in m1.
set -u
. "$(dirname "$0")/../checks.sh" machines
has_mpi || skip_suite "no Open MPI here, or a build without it"
mpi_here
cc -shared -fPIC -o "$work/fault.so" dev/test/preload/fault.c -lpthread -ldl || exit 1
export ASAN_OPTIONS=$ASAN_OPTIONS:verify_asan_link_order=0 # preloaded libraries come first
cd "$work" || exit 70

seq 3000 > text.txt
"$tokenize" --tokenizer bytes --out code --val-fraction 0.1 text.txt > tokenize.log 2>&1 || { cat tokenize.log; exit 1; }
echo '{"ctx": "1", "endings": ["2", "3", "4", "5"], "label": 0}' > questions.jsonl
shape=(--vocab-size 256 --layers 1 --heads 1 --channels 32)
sizes=(--seq-len 16 --micro-batch 4 --batch-tokens 128)
small=("${shape[@]}" "${sizes[@]}")
mpi=(mpirun --oversubscribe --allow-run-as-root --bind-to none)

machines=(m0 m1)
make_machines() {
    rm -rf "${machines[@]}"
    for m in "${machines[@]}"; do mkdir "$m" && cp code_* questions.jsonl "$m"; done
}
change() { # FILE: replaces a byte near its end with another token
    local at=$(($(stat -c %s "$1") - 20)) byte
    byte=$(dd if="$1" bs=1 skip=$at count=1 status=none)
    [ "$byte" = 1 ] && byte=2 || byte=1
    printf %s "$byte" | dd of="$1" bs=1 seek=$at conv=notrunc status=none
}
both() { # CODE COMMAND...: runs one rank on each machine
    local code m each=() here=(env OMPI_COMM_WORLD_LOCAL_SIZE=1 LD_PRELOAD="$work/yield.so:$work/fault.so")
    for m in "${machines[@]}"; do each+=(-np 1 -wdir "$m" "${here[@]}" FAULT_HOST="$m" "${@:2}" :); done
    "${mpi[@]}" "${each[@]::${#each[@]}-1}" < /dev/null > log 2>&1
    code=$?
    [ $code = "$1" ] || { echo "exit code $code, not $1"; cat log; return 1; }
}
on_both() { # CODE OPTIONS...: trains
    both "$1" "$train" --train "code_train_*.bin" --val "code_val_*.bin" "${shape[@]}" "${sizes[@]}" --threads 1 \
        --train-tokens "${tokens:-512}" --val-tokens 64 --hellaswag questions.jsonl --hellaswag-every 4 --tokenizer bytes --zero ${zero:-0} "${@:2}"
}
refused() { # TEXT: checks that the error is one line with TEXT, and that no file was written
    [ "$(grep -c '^error' log)" = 1 ] && grep -q "^error.*$1" log && [ ! -e m0/run ] || { cat log; return 1; }
}
same_files() { make_machines && on_both 0 --out run; }
other_directory() { # each rank writes what it owns, so all must see one --out, not copies
    local shape=("${shape[@]}") error="^error (rank 1 on m1): this rank has another directory (--out) than rank 0"
    make_machines && zero=1 on_both 64 --out run && grep -q "$error" log && [ ! -e m1/run ] || { cat log; return 1; }
    mkdir m1/run && echo '{}' > m1/run/run.json && zero=3 on_both 64 --out run && ls m1/run | cmp - <(echo run.json) || return 1
    zero=1 on_both 0 --out "$work/run" && rm -r m?/run && cp -r run m0 && mv run m1 || return 1
    tokens=1024 zero=1 on_both 64 --out run && grep -q "$error" log || return 1
    shape=(--vocab-size 256 --layers 1 --heads 2 --channels 32)
    make_machines && on_both 64 --out run --tensor 2 && grep -q "$error. give a directory that all machines share" log || { cat log; return 1; }
}
a_group_on_two_machines() { # trains, with a warning
    local shape=(--vocab-size 256 --layers 1 --heads 2 --channels 32)
    make_machines && on_both 0 --out "$work/run" --tensor 2 && rm -r run && [ "$(grep -c '^warning' log)" = 1 ] &&
        grep -q '^warning: --tensor 2: ranks on two machines hold one model' log || { cat log; return 1; }
}
other() { # TEXT CHANGE OPTIONS...: runs the command CHANGE on machine 1's files
    make_machines && (cd m1 && eval "$2") && on_both 65 --out run "${@:3}" && refused "$1"
}
other_data() { # shards must have equal contents, and equal names, since checkpoints name them
    local text change
    while IFS='|' read -r text change; do other "$text" "$change" || return 1; done << 'END'
this rank has other training data (--train) than rank 0|change code_train_000000.bin
this rank has other training data|mv code_train_000000.bin code_train_000001.bin
this rank has other validation data (--val) than rank 0|change code_val_000000.bin
this rank has other questions (--hellaswag) than rank 0|sed -i 's/"5"/"6"/' questions.jsonl
(rank 1 on m1).*code_val|rm code_val_000000.bin
END
}
other_replay() {
    make_machines && on_both 0 --out "$work/run" && metrics=$work/run/metrics.jsonl && sed 's/"batch": 8/"batch": 16/' "$metrics" > other.jsonl || return 1
    other "this rank has another run to replay (--ramp) than rank 0" "cp $metrics ../m0; cp ../other.jsonl metrics.jsonl; rm -r $work/run" --ramp replay:metrics.jsonl
}
other_data_to_evaluate_on() { # both machines see the model
    make_machines && on_both 0 --out "$work/run" && change m1/code_val_000000.bin && evaluates 65 "$work/run" && refused "this rank has other validation data"
}
evaluates() { # CODE [MODEL]: the default model is on both machines
    both "$1" "$train" --eval-only --model "${2-mod}" --val "code_val_*.bin" --threads 1
}
other_model() { # a different weight, or a different shape
    make_machines && on_both 0 --out run && rm -rf mod && mv m0/run/step_00000004 mod && rm -r m0/run mod/MANIFEST.json || return 1
    for m in "${machines[@]}"; do cp -r mod "$m"; done
    evaluates 0 || return 1
    printf x | dd of=m1/mod/model.safetensors bs=1 seek=$(($(stat -c %s mod/model.safetensors) - 2)) conv=notrunc status=none
    evaluates 65 && refused "this rank has another model (--model, --tokenizer) than rank 0" || return 1
    local shape=(--vocab-size 256 --layers 2 --heads 1 --channels 32)
    make_machines && on_both 0 --out run && cp -r mod m0 && mv m0/run/step_00000004 m1/mod && rm -r m0/run m1/mod/MANIFEST.json || return 1
    evaluates 65 && refused "this rank has another model (--model, --tokenizer) than rank 0"
}
other_checkpoint() { # all machines must have the checkpoint to resume from
    local error="^error (rank 1 on m1): this rank has another checkpoint (run/step_00000004) than rank 0" zero
    make_machines && on_both 0 --out run && rm -rf gone && mv m0/run gone || return 1
    cp -r gone m1/run && on_both 0 --out run && ! grep '^resuming' log || return 1 # rank 0 decides
    echo >> m1/run/step_00000004/MANIFEST.json
    for zero in 0 1; do # machine 1 has another checkpoint, then none
        tokens=1024 on_both 64 --out run && grep -q "$error" log || { cat log; return 1; }
        rm -rf m1/run
    done
    cp -r m0/run m1/run
    zero=0 tokens=1024 on_both 0 --out run && grep -q "^resuming from run/step_00000004" log
}
# ---- Cores -----------------------------------------------------------------------------------------------------------

cc -shared -fPIC -o cores.so "$root/dev/test/preload/cores.c" -ldl || exit 1
# The launcher may use CORES cores; local rank i may use the i-th range in CORES_OF. Checks that each rank runs THREADS
# threads, and that a note appears if BOUND is set.
runs_with() { # RANKS CORES CORES_OF THREADS BOUND
    local bound=$5
    rm -rf cores
    "${mpi[@]}" -np "$1" -x LD_PRELOAD="$work/cores.so" -x CORES_HERE="$2" -x CORES_OF="$3" "$train" --train "code_train_*.bin" "${small[@]}" --val-every 0 --steps 1 --out cores < /dev/null > log 2>&1 || { cat log; return 1; }
    grep -q "^engine  CPU, fp32, $4 threads\?," log || { echo "not $4 threads:"; cat log; return 1; }
    grep '^note: rank 0 may run' log > note
    [ "$(cat note)" = "${bound:+note: rank 0 may run on $bound: mpirun --bind-to none lifts that (srun: --cpu-bind=none)}" ] || { cat note; return 1; }
}
cores() { # each rank has its own cores; all share; some share; there are fewer cores than ranks; ranks are bound
    while IFS='|' read -r -a with; do runs_with "${with[@]}" "" || { echo "${with[*]}"; return 1; }; done << 'END'
2|8|0-3,4-7|4
3|16|0-15|5
4|16|0-15|4
4|8|0-3,0-3,4-7,4-7|2
3|2|0-1|1
2|8|0-0,1-1|1|1 of the 8 cores here, and its share is 4
2|8|3-3,3-3|1|1 of the 8 cores here, and its share is 4
END
}

# ---- Launchers without PMIx ------------------------------------------------------------------------------------------

strangers() { # CODE TEXT OPTIONS...: runs as one of four processes that srun started without PMIx
    SLURM_STEP_NUM_TASKS=4 "$train" "${@:3}" > log 2>&1
    local code=$?
    [ $code = "$1" ] && grep -q -- "$2" log || { echo "exit code $code, not $1 with $2: ${*:3}"; tail -n 3 log; return 1; }
}
strangers_may_look() { # without MPI, a command may run if it neither writes nor shares anything
    local run=(--train "code_train_*.bin" "${small[@]}" --steps 1 --val-every 0 --out seen)
    "$train" "${run[@]}" > log 2>&1 || { cat log; return 1; }
    strangers 0 "^  --train" --help && strangers 0 . --version && strangers 0 ": undamaged$" --check seen &&
        strangers 0 "^parameters" --dry-run "${run[@]}" && strangers 0 "" --sample-only --model seen --sample-tokens 4
}
strangers_may_not_train() { # each process would write the same run or evaluate the same rows: both are refused
    local text="^error: started as one of 4 processes (SLURM_STEP_NUM_TASKS), but not in a way that Open MPI understands"
    strangers 64 "$text" --train "code_train_*.bin" "${small[@]}" --steps 1 --val-every 0 --out strange && [ ! -e strange ] &&
        strangers 64 "$text" --eval-only --model seen --val "code_val_*.bin" &&
        strangers 64 "^error: --lr" --train x --lr nothing
}

for test in same_files other_directory a_group_on_two_machines other_data other_replay other_data_to_evaluate_on other_model other_checkpoint cores strangers_may_look strangers_may_not_train; do
    try $test
done
exit $failed
