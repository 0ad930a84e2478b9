#!/usr/bin/env bash
# Harms one rank of a run. The whole run must end soon, with a non-zero code, and name the rank and the reason.
#
#     dev/test/ranks/test_faults.sh          each fault once or twice, for make test
#     dev/test/ranks/test_faults.sh ROUNDS   at random times, ROUNDS rounds of six faults (make test-faults)
#
# Uses $GNS_BUILD (dev/test/run.sh sets it). Where a deadline must end the run, the deadline is about 2 s; elsewhere it
# allows for a slow disk and busy cores. A run may take 25 s more to end.
# shellcheck disable=SC2046,SC2086,SC2254
set -u
rounds=${1:-0}
. "$(dirname "$0")/../checks.sh" faults
has_mpi || skip_suite "no Open MPI here, or a build without it"
shopt -s extglob
mpirun=$root/scripts/mpirun.sh
cc -shared -fPIC -o "$work/fault.so" dev/test/preload/fault.c -lpthread -ldl || exit 1
cd "$work" || exit 70
mpi_here
export ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0
export FAULT_FSYNC=0 # a disk may stall for longer than a short deadline
deadline=30 # seconds for a step; set-up may take six times as long, a checkpoint three times

seq 1 150 | "$tokenize" --tokenizer bytes --out t - > log 2>&1 && mv t_train_*.bin t.bin || { cat log; exit 1; }

# machine.sh COUNT COMMAND: runs COMMAND as if each machine had COUNT ranks. Fakes the launcher's variables, the
# launcher's directory for shared files, and the machine's name.
cat > machine.sh << 'EOF'
#!/bin/sh
machine=$((OMPI_COMM_WORLD_RANK / $1))
mkdir -p "machine$machine"
export PMIX_SERVER_TMPDIR=$PWD/machine$machine OMPI_COMM_WORLD_LOCAL_SIZE=$1 FAULT_HOST=node$machine
shift
exec "$@"
EOF
chmod +x machine.sh
machine=() # empty: one machine

options() { # prints the options of every run
    echo --train t.bin --model d1 --channels ${channels:-32} --heads ${heads:-1} --vocab-size 256 --seq-len 16 --micro-batch 4 \
        --batch-tokens 192 --threads 1 ${val:---val-every 0} --deadline $deadline ${mode-}
}
forever="--steps 100000000"
zero3="--zero 3 --layers 3" # every pass transfers weights
tensor="--zero 3 --layers 3 --tensor 2" # every block also exchanges activations
shard="--zero 3 --layers 3 --shard machine" # machines of two ranks hold replicas

launch() { # RANKS COMMAND...: writes `log`, returns the exit code
    local ranks=$1
    shift
    begun=$EPOCHREALTIME
    timeout -k 3 60 "$mpirun" -np "$ranks" --oversubscribe --allow-run-as-root --bind-to none \
        -x LD_PRELOAD="$work/yield.so:$work/fault.so" "$@" > log 2>&1
}
own_words() { grep -E '^(error|warning)|exited|Exit code' log | tail -n 6; }

# Checks that the exit code matches CODES, and that a line of `log` says TEXT. Returns 2 if only TEXT is missing.
ended() { # CODE CODES TEXT
    case $1 in
    $2) ;;
    124 | 137) echo "did not end within 60 s" && return 1 ;;
    *) echo "exit code $1, not $2:" && own_words && return 1 ;;
    esac
    grep -qE "$3" log || { echo "nobody says '$3':" && own_words && return 2; }
}
soon() { # AFTER: seconds from the start to the harm. Checks that the run ended within its deadline + 25 s of the harm
    awk -v now="$EPOCHREALTIME" -v begun="$begun" -v after="$1" '
        match($0, /no progress for [0-9]+ s/) { deadline = substr($0, RSTART + 16, RLENGTH - 18) + 0 }
        END { late = now - begun - after - deadline - 25; if (late > 0) { print late " s too late"; exit 1 } }' log
}
one_error() { [ "$(grep -cE '^(error|stopped)' log)" = 1 ] || { echo "not one error:"; grep '^error' log; return 1; }; }
nobody_accused() { ! grep -E '^error.*(is stopped|keeps the others)' log; }

run() { # RANKS CODES TEXT [NAME=VALUE...] OPTIONS...: NAME=VALUE are variables for fault.c
    local ranks=$1 codes=$2 text=$3 variables=()
    shift 3
    while [[ ${1-} == *=* ]]; do variables+=(-x "$1") && shift; done
    launch "$ranks" "${variables[@]}" "${machine[@]}" "$train" $(options) "$@"
    ended $? "$codes" "$text"
}
harm() { # RANKS RANK ACTION AFTER CODES TEXT OPTIONS...
    local told
    run "$1" "$5" "$6" FAULT_RANK="$2" FAULT_ACTION="$3" FAULT_AFTER="$4" $forever --out "run$RANDOM" "${@:7}"
    told=$?
    [ $told != 1 ] && soon "$4" && return $told
}
# For harms that only Open MPI reports. On busy cores Open MPI 4.1.4 omits the rank's name in one of a hundred reports:
# if only the name is missing, tries again.
harm_that_mpi_tells() { # the arguments of harm
    local told
    for _ in 1 2 3; do
        harm "$@"
        told=$?
        [ $told = 2 ] && grep -q 'process returned' log && ! grep -qE '^(mpirun (noticed|detected) that|error \(rank)' log || break
    done
    return $told
}
# 78 is right, too: a rank that dies early may make mpirun hang, and scripts/mpirun.sh then returns 78.
killed() { harm_that_mpi_tells "$1" "$2" kill "$3" 78 "process rank $2 .* exited on signal 9|^error .*; rank $2 \(process [0-9]+\) is stopped or gone"; }
exits() { harm_that_mpi_tells "$1" "$2" "exit:$4" "$3" "@($4|78)" "Process name: \[\[[0-9]*,1\],$2\]"; }
exits_with_0() { harm_that_mpi_tells "$1" "$2" exit:0 "$3" "@(1|78)" "process rank $2 .*exiting improperly|process rank $2"; }
# In the next faults only a deadline ends the run.
stopped() {
    deadline=2 harm "$1" "$2" stop "$3" 78 "^error \(rank [0-9]\): (step|set-up).*; rank $2 \(process [0-9]+\) is stopped or gone" \
        --checkpoint-every 0
}
# All ranks' watchdogs still run. Their board (ranks/watchdog.h) shows that the hung rank has begun fewest collectives,
# even if only some ranks worked on checkpoints. One watchdog reports.
hangs() {
    deadline=2 harm "$1" "$2" hang "$3" 78 "^error \(rank [0-9]\): (step|set-up|checkpoint).*; rank $2 \(process [0-9]+\) keeps the others waiting\. " "${@:4}" &&
        one_error
}
# Each rank sees only the ranks of its machine. The stopped rank's machine reports first. Other machines may see a rank
# that is late because it waits; they blame nobody.
stopped_elsewhere() { # AFTER: stops the last rank; its neighbour on machine 1 sees it
    local machine=("$work/machine.sh" 2)
    deadline=3 harm 4 3 stop "$1" 78 "^error \(rank 2 on node1\): .*; rank 3 \(process [0-9]+ on node1\) is stopped or gone" \
        --checkpoint-every 0 && one_error
}
killed_elsewhere() { local machine=("$work/machine.sh" 2) && killed 4 3 "$1"; }
hangs_elsewhere() { # AFTER: each machine reports and blames nobody; the hung rank has the smallest collective number
    local machine=("$work/machine.sh" 2) least
    deadline=2 harm 4 3 hang "$1" 78 '^error .*; rank 3 \(process [0-9]+ on node1\) is at the earliest collective, collective number' \
        --checkpoint-every 0 && nobody_accused || return 1
    least=$(sed -nE 's/^error .*collective number ([0-9]+): .*/\1/p' log | sort -n | head -n 1)
    grep '^error' log | grep -q "rank 3 (.*collective number $least:" || { grep '^error' log; return 1; }
}
stopped_alone() { # the stopped rank is alone on its machine: no other rank sees it
    local machine=("$work/machine.sh" 1)
    deadline=2 harm 3 1 stop "$1" 78 "^error \(rank [02] on node[02]\): .*; this machine's 1 rank runs, collective number [0-9]+: look at the other machines" \
        --checkpoint-every 0 && nobody_accused
}
# Stops a rank before MPI knows it, or while it joins.
never_came() { deadline=0.5 harm "$1" "$2" stop 0 78 "^error \(rank [0-9]\): set-up: .*start of MPI; rank $2 has not started"; }
stopped_early() { deadline=2 harm "$1" "$2" stop "$3" 78 "^error \(rank [0-9]\): .*; rank $2 (\(process [0-9]+\) is stopped or gone|has not started)"; }

with_another() { # CODE TEXT PROGRAM OPTIONS...: two ranks, and a third that runs PROGRAM with more OPTIONS
    launch 2 "$train" $(options) --steps 9 --out a : -np 1 --oversubscribe "$3" $(options) --steps 9 --out a "${@:4}"
    ended $? "$1" "$2"
}
other_options() { with_another 64 '^error \(rank 2\): this rank has other options than rank 0' "$train" --lr 1; }
bad_options_on_one_rank() { with_another 64 '^error \(rank 2\): --lr' "$train" --lr x; }
another_build() {
    { cat "$train"; echo; } > other && chmod +x other
    with_another 65 '^error \(rank 2\): this rank has another build than rank 0' ./other
}
nowhere_to_write() { : > file && run 3 74 '^error \(rank 0\): file' --steps 9 --out file/out && one_error; }

# A save takes longer than a step's deadline. The run still reports why it ends.
not_finite_while_saving() { # OPTIONS...: all ranks know the error, and wait for the save within a checkpoint's deadline
    deadline=2 run 2 76 '^error \(rank 0\): step 4.* not finite' FAULT_FSYNC=0.2 --steps 99 --out nan --lr 100 --grad-clip 0 \
        --weight-decay 100 --checkpoint-every 3 "$@" && one_error && [ -s nan/step_00000003/MANIFEST.json ]
}
asked_to_stop_while_saving() { # OPTIONS...: two saves; both make progress
    deadline=2 run 2 75 '^stopped \(rank 0\): (SIGUSR1|a signal to another rank) after step' FAULT_FSYNC=0.2 FAULT_SAVING=ask $forever --out stop \
        --checkpoint-every 400 "$@" && one_error
}
# Rank 0 may work long while it makes progress. A call that never returns is a hang.
saves_slowly() { # OPTIONS...
    deadline=1 run 2 0 '^model in slow/step_00000003' FAULT_FSYNC=0.25 --steps 3 --out slow "$@"
}
samples_slowly() {
    deadline=1 run 2 0 '^model in slow/step_00000002' FAULT_FLUSH=0.05 --steps 2 --out slow --sample-every 1 --sample-tokens 50
}
hangs_while_sampling() { # the report begins on a line of its own, not within the sample's
    deadline=1 run 2 78 '^error \(rank [01]\): checkpoint 1: no progress .*; rank 1 \(process [0-9]+\) keeps the others waiting' \
        FAULT_RANK=1 FAULT_ACTION=hang FAULT_AFTER=#3000 --steps 1 --out sampled --sample-every 1 --sample-tokens 100000
}
hangs_while_saving() { # OPTIONS...: the last save hangs, or a save during training, on which the next save waits
    deadline=1 run 2 78 '^error \(rank [01]\): checkpoint .*; rank 0 \(process [0-9]+\) keeps the others waiting\. .*or raise --deadline' \
        FAULT_SAVING=hang --out hung "$@" && soon 3
}
# At a resume rank 0 is slow to read the checkpoint, or hangs while it reads.
resumes_slowly() {
    run 2 0 . --steps 3 --out slow && deadline=0.7 run 2 0 '^resuming from slow/step_00000003' FAULT_READ=0.4 --steps 6 --out slow
}
hangs_while_resuming() {
    run 2 0 . --steps 3 --out slow && deadline=0.5 run 2 78 '^error \(rank [01]\): set-up.*; rank 0 \(process [0-9]+\) keeps the others waiting' \
        FAULT_READ=1000 --steps 6 --out slow && soon 2
}
large="--layers 4" # with channels=256 a checkpoint has eleven pieces of 4 MiB
reads_a_share() { # OPTIONS...: each of 4 ranks verifies and loads a quarter of the checkpoint
    local mode=$large channels=256 all rank n sum=0
    run 4 0 . --steps 1 --out read "$@" && all=$(cat read/step_*/*.safetensors read/step_*/*/*.safetensors | wc -c) &&
        run 4 0 '^resuming from read/step_00000001' FAULT_READS=reads --steps 2 --out read "$@" || return 1
    for rank in 0 1 2 3; do
        n=$(awk '/step_00000001/ { n += $1 } END { print n }' reads.$rank) sum=$((sum + n))
        [ $((n * 10)) -lt $((all * 6)) ] || { echo "rank $rank reads $n of $all bytes" && return 1; }
    done
    [ $sum -gt $((2 * all)) ] || { echo "all read $sum, of $all bytes" && return 1; }
}
damage() { printf x | dd of="$1" bs=1 seek="$2" conv=notrunc status=none; } # FILE BYTE
skips_what_any_rank_finds_damaged() { # all ranks then resume from the previous checkpoint
    local mode=$large channels=256 rank file=model.safetensors
    run 4 0 . --steps 2 --checkpoint-every 1 --keep 0 --out good || return 1
    for rank in 3 1; do # the rank's share includes piece number `rank`
        rm -rf bad && cp -r good bad && damage bad/step_00000002/$file $((rank * 4194304 + 9)) &&
            run 4 0 '^resuming from bad/step_00000001' --steps 2 --out bad && cmp {good,bad}/step_00000002/$file &&
            grep -q "^warning: rank $rank: bad/step_00000002/$file: damaged: .* from byte $((rank * 4194304)) is .* Skipped" log || return 1
        file=training/optimizer.safetensors
    done
    for file in bad/step_0*/$file; do damage "$file" 4210000; done
    run 4 65 '^error \(rank 0\): bad: all of its 2 checkpoints are damaged. restore a copy, use another run' --steps 3 --out bad && one_error
}
names_the_slowest() { # OPTIONS...: two of three ranks wait for the slowest rank most of the time; no bit changes
    run 3 0 . --steps 12 --out fast "$@" && run 3 0 . FAULT_RANK=1 FAULT_ACTION=slow FAULT_AFTER=0 --steps 12 --out slow "$@" &&
        cmp {fast,slow}/step_00000012/model.safetensors || return 1
    awk -F '[:,]' '{ for (i = 1; i < NF; i++) if ($i ~ /slowest_rank/) { n += $(i + 1) == 1; share += $(i + 3) } }
        END { if (n < 10 || share / NR < 0.3) { print n " of " NR " steps, a share of " share / NR; exit 1 } }' slow/metrics.jsonl &&
        run 1 0 . --steps 1 --out single && ! grep slowest single/metrics.jsonl
}
alone() { # one rank with PMIx, as under srun --mpi=pmix: there is no other rank to wait for
    local machine=(env -u OMPI_COMM_WORLD_SIZE)
    deadline=0.4 run 1 0 '^model in alone/step_00000003' FAULT_FSYNC=1.3 --steps 3 --out alone # a checkpoint may last 1.2 s, set-up 2.4
}
asked_while_joining() { harm "$1" "$2" ask 0 75 '^stopped \(rank 0\): a signal to another rank after step 1, saved in'; }
ends_before_open_mpi() { run 2 0 '^model in starved/step_00000001' FAULT_STARVE=1 --steps 1 --out starved; } # the run ends before Open MPI's thread runs
await_steps() { until grep -qs '"step"' stop/metrics.jsonl || ! kill -0 "$job" 2> /dev/null; do sleep 0.05; done; }
asked_to_stop() { # SIGNAL... start|step: scripts/mpirun.sh forwards signals to ranks, also while the ranks start
    run 3 75 '^stopped \(rank 0\): (SIGUSR1|a signal to another rank) after step' $forever --out stop &
    local job=$! script signal
    # Wait until mpirun.sh catches USR1, whose bit is 1 << 9.
    until script=$(pgrep -P "$(pgrep -P $job timeout)") && grep -q '^SigCgt:.*[2367abef]..$' "/proc/$script/status" || ! kill -0 $job; do sleep 0.02; done
    [ "${*: -1}" = start ] || await_steps
    for signal in "${@:1:$#-1}"; do kill -"$signal" "$script" && sleep 0.1; done
    wait $job && one_error
}

# Runs three faults at a time, as most only wait. Each has its own TMPDIR: two mpiruns that start in one TMPDIR make and
# remove the same directories, and may fail.
one() { # NUMBER NAME ARGUMENTS...
    local result
    mkdir "$work/$1" && cd "$work/$1" && cp ../t.bin . || exit 70
    export TMPDIR=$PWD
    result=$(try "${@:2}")
    echo "$result" | tee "$work/$1.result"
    cd .. && rm -r "${work:?}/$1"
}
tests=0
fault() { # NAME ARGUMENTS...
    while [ "$(jobs -rp | wc -l)" -ge 3 ]; do wait -n; done # wait -n may report a job that ended long ago
    tests=$((tests + 1))
    one $tests "$@" &
}
finish() {
    wait
    ! cat "$work"/*.result | grep -q '^FAIL'
    exit $?
}

between() { awk -v a="$1" -v b="$2" -v r=$RANDOM 'BEGIN { printf "%.2f", a + (b - a) * r / 32768 }'; }
for ((round = 0; round < rounds; round++)); do
    ranks=$((2 + RANDOM % 3)) mode=$([ $((RANDOM % 2)) = 0 ] || echo "$zero3")
    fault killed $ranks $((RANDOM % ranks)) "$(between 0 3)"
    fault exits $ranks $((RANDOM % ranks)) "$(between 0 3)" 3
    fault exits_with_0 $ranks $((RANDOM % ranks)) "$(between 1 3)"
    fault stopped $ranks $((RANDOM % ranks)) "$(between 1 3)"
    fault stopped_early $ranks $((RANDOM % ranks)) "$(between 0 0.2)"
    fault stopped_elsewhere "$(between 1 3)"
done
[ "$rounds" = 0 ] || finish

while read -r m name arguments; do # MODE (-, zero3, tensor or shard) FAULT ARGUMENTS...
    heads=1 val=
    [ "$m" != tensor ] || heads=2 val="--val t.bin --val-every 1 --val-tokens 16" # one group of two validates
    mode=$([ "$m" = - ] || echo "${!m}") fault "$name" $arguments
done << 'EOF'
- killed 2 1 0.05
zero3 killed 4 1 0.8
- exits 2 1 +0.7 3
- exits_with_0 3 1 +0.7
- stopped 2 0 +0.7
- stopped_elsewhere +0.4
- stopped_alone +0.5
- never_came 3 0
- stopped_early 3 2 0.05
- other_options
- bad_options_on_one_rank
- another_build
- nowhere_to_write
- hangs 3 2 +0.7 --zero 1 --checkpoint-every 20
zero3 hangs 3 2 #652 --checkpoint-every 20
tensor hangs 4 1 #1204 --checkpoint-every 0
tensor stopped 4 0 +0.7
shard killed_elsewhere +0.7
shard stopped_elsewhere +0.7
shard hangs_elsewhere +0.9
- not_finite_while_saving
- not_finite_while_saving --zero 0
- asked_to_stop_while_saving --zero 0
zero3 asked_to_stop_while_saving
- saves_slowly --zero 0
- saves_slowly --zero 1
zero3 samples_slowly
zero3 hangs_while_sampling
- hangs_while_saving --steps 3 --zero 0
- hangs_while_saving --steps 100000000 --checkpoint-every 40 --zero 0
- resumes_slowly
- hangs_while_resuming
- reads_a_share --zero 0
tensor reads_a_share --tensor 2
- reads_a_share --zero 3
- skips_what_any_rank_finds_damaged
- names_the_slowest --skip-grad-z 1e6
zero3 names_the_slowest
- alone
- asked_while_joining 3 1
- ends_before_open_mpi
- asked_to_stop USR1 start
zero3 asked_to_stop TERM TERM start
- asked_to_stop HUP HUP HUP step
EOF
finish
