#!/usr/bin/env bash
# One rank of a run comes to harm; the whole run must end soon, with a code that is not 0, saying which rank and why.
#
#     dev/test/ranks/test_faults.sh          each fault once or twice: what make test runs
#     dev/test/ranks/test_faults.sh ROUNDS   at random times, ROUNDS rounds of six (make test-faults)
#
# Uses $GNS_BUILD (dev/test/run.sh sets it). A deadline is some 2 s where it is what must end the run, and otherwise long
# enough for a slow disk and busy cores; a run may take 25 s more to end.
set -u
rounds=${1:-0}
. "$(dirname "$0")/../checks.sh" faults
. scripts/stop_requests.sh # catches_usr1
has_mpi || skip_suite "no Open MPI here, or a build without it"
shopt -s extglob
mpirun=$root/scripts/mpirun.sh
cc -shared -fPIC -o "$work/fault.so" dev/test/preload/fault.c -lpthread -ldl || exit 1
cd "$work" || exit 70
mpi_here
export ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0
deadline=30 # seconds of a step; set-up has six times that, a checkpoint three times

# A shard of 400 tokens below 127: 100 are enough for a window of 16.
le32() { printf '%b' "$(printf '\\x%02x\\x%02x\\x%02x\\x%02x' $(($1 & 255)) $(($1 >> 8 & 255)) $(($1 >> 16 & 255)) $(($1 >> 24 & 255)))"; }
shard() { # MAGIC COUNT
    le32 "$1"; le32 1; le32 "$2"
    head -c 1012 /dev/zero
    for ((i = 0; i < 400; i++)); do printf '%b' "\\x$(printf %02x $((1 + i * 37 % 126)))\\0"; done
}
shard 20240520 400 > t.bin

# Several machines, of so many ranks each, as far as a rank can tell: by what the launcher says, by its place for what
# they share, and by the machine's name.
cat > machine.sh << 'EOF'
#!/bin/sh
machine=$((OMPI_COMM_WORLD_RANK / $1))
mkdir -p "machine$machine"
export PMIX_SERVER_TMPDIR=$PWD/machine$machine OMPI_COMM_WORLD_LOCAL_SIZE=$1 FAULT_HOST=node$machine
shift
exec "$@"
EOF
chmod +x machine.sh
machine=() # all ranks are on this one

options() {
    echo --train t.bin --model d1 --channels 32 --heads 1 --vocab-size 256 --seq-len 16 --micro-batch 4 \
        --batch-tokens 192 --threads 1 --val-every 0 \
        --deadline $deadline ${mode-}
}
zero3="--zero 3 --layers 3" # a mode in which every pass transfers weights

launch() { # RANKS COMMAND...: into `log`; the exit code
    local ranks=$1
    shift
    begun=$EPOCHREALTIME
    timeout -k 3 60 "$mpirun" -np "$ranks" --oversubscribe --allow-run-as-root --bind-to none "$@" > log 2>&1
}

# How it ended: CODES (a pattern) and what some line must say; 2 where only that is missing.
ended() { # CODE CODES TEXT
    # shellcheck disable=SC2254
    case $1 in
    $2) ;;
    124 | 137) echo "did not end within 60 s" && return 1 ;;
    *) echo "exit code $1, not $2:" && own_words && return 1 ;;
    esac
    grep -qE "$3" log || { echo "nobody says '$3':" && own_words && return 2; }
}
soon() { # AFTER: within the deadline that ended it and 25 s of a harm that came so many seconds after the start, or
    # after joining, which is to take no time worth mentioning
    awk -v now="$EPOCHREALTIME" -v begun="$begun" -v after="$1" '
        match($0, /no progress for [0-9]+ s/) { deadline = substr($0, RSTART + 16, RLENGTH - 18) + 0 }
        END { late = now - begun - after - deadline - 25; if (late > 0) { print late " s too late"; exit 1 } }' log
}
own_words() { grep -E '^(error|warning)|exited|Exit code' log | tail -n 6; }
one_error() { [ "$(grep -cE '^(error|stopped)' log)" = 1 ] || { echo "not one error:"; grep '^error' log; return 1; }; }

harm() { # RANKS RANK ACTION AFTER CODES TEXT OPTIONS...
    local told
    # shellcheck disable=SC2046
    launch "$1" -x LD_PRELOAD="$work/fault.so" -x FAULT_RANK="$2" -x FAULT_ACTION="$3" -x FAULT_AFTER="$4" \
        "${machine[@]}" "$train" $(options) --steps 100000000 --out "run$RANDOM" "${@:7}"
    ended $? "$5" "$6"
    told=$?
    [ $told != 1 ] && soon "$4" && return $told
}
# About once in a hundred times, with busy cores, Open MPI 4.1.4 ends a job in time and with the right code, but without a
# word on which rank it was: then again. Only where nobody but Open MPI has to say it.
harm_that_mpi_tells() { # as harm
    local told
    for _ in 1 2 3; do
        harm "$@"
        told=$?
        [ $told = 2 ] && grep -q 'process returned' log && ! grep -qE '^(mpirun (noticed|detected) that|error \(rank)' log || break
    done
    return $told
}
# 78 beside the code that mpirun should return: a rank that dies early may make mpirun hang (scripts/mpirun.sh).
killed() { harm_that_mpi_tells "$1" "$2" kill "$3" 78 "process rank $2 .* exited on signal 9|^error .*; rank $2 \(process [0-9]+\) is stopped or gone"; }
exits() { harm_that_mpi_tells "$1" "$2" "exit:$4" "$3" "@($4|78)" "Process name: \[\[[0-9]*,1\],$2\]"; }
exits_with_0() { harm_that_mpi_tells "$1" "$2" exit:0 "$3" "@(1|78)" "process rank $2 .*exiting improperly|process rank $2"; }
# What only a deadline ends.
stopped() {
    deadline=2 harm "$1" "$2" stop "$3" 78 "^error \(rank [0-9]\): (step|set-up).*; rank $2 \(process [0-9]+\) is stopped or gone" \
        --checkpoint-every 0
}
# Its watchdog runs, and so do those of the others: the board tells which rank is at the earliest collective, whatever
# some ranks alone did for checkpoints. One watchdog reports.
hangs() {
    deadline=2 harm "$1" "$2" hang "$3" 78 "^error \(rank [0-9]\): (step|set-up|checkpoint).*; rank $2 \(process [0-9]+\) keeps the others waiting\. " "${@:4}" || return 1
    one_error
}
# Each rank sees the ranks of its own machine only. The machine that knows reports first; the others may see a late rank
# that waits as they do, and accuse nobody.
stopped_elsewhere() { # RANK: the last one, and its neighbour on machine 1 sees it; AFTER
    local machine=("$work/machine.sh" 2)
    deadline=3 harm 4 3 stop "$1" 78 "^error \(rank 2 on node1\): .*; rank 3 \(process [0-9]+ on node1\) is stopped or gone" \
        --checkpoint-every 0 && one_error
}
stopped_alone() { # on a machine of its own, which nobody sees
    local machine=("$work/machine.sh" 1)
    deadline=2 harm 3 1 stop "$1" 78 "^error \(rank [02] on node[02]\): .*; this machine's 1 rank runs, collective number [0-9]+: look at the other machines" \
        --checkpoint-every 0 || return 1
    ! grep -E '^error.*(is stopped|keeps the others)' log
}
hangs_elsewhere() { # its watchdog runs: its neighbour, like other machines, sees which of its ranks is at the earliest collective
    local machine=("$work/machine.sh" 2)
    deadline=3 harm 4 3 hang "$1" 78 "^error \(rank [23] on node1\): .*; this machine's 2 ranks run; rank 3 \(process [0-9]+ on node1\) is at the earliest collective" \
        --checkpoint-every 0 || return 1
    ! grep -E '^error.*(is stopped|keeps the others)' log
}
# before it is a rank that MPI knows, or in the midst of becoming one
never_came() { deadline=0.5 harm "$1" "$2" stop 0 78 "^error \(rank [0-9]\): set-up: .*start of MPI; rank $2 has not started"; }
stopped_early() { deadline=0.5 harm "$1" "$2" stop "$3" 78 "^error \(rank [0-9]\): .*; rank $2 (\(process [0-9]+\) is stopped or gone|has not started)"; }

# What is wrong with one rank before the first step: rank 1 runs in a directory of its own.
apart() { # CODE TEXT PREPARATION: of the directory of rank 1
    rm -rf d0 d1
    mkdir d0 d1
    shard 20240520 400 | tee d0/t.bin > d1/t.bin
    (cd d1 && eval "$3") || return 1
    # shellcheck disable=SC2016,SC2046
    launch 2 -x LD_PRELOAD="$work/fault.so" "${machine[@]}" sh -c 'cd d$OMPI_COMM_WORLD_RANK && exec "$@"' sh "$train" \
        $(options) --steps 100000000 --out out
    ended $? "$1" "$2"
}
broken_shard() { apart 65 '^error \(rank 1\): t.bin.*magic' 'shard 20240521 400 > t.bin'; }
elsewhere() { # which of several machines a rank is on
    local machine=("$work/machine.sh" 1)
    apart 65 '^error \(rank 1 on node1\): t.bin.*magic' 'shard 20240521 400 > t.bin' &&
        apart 65 '^error \(rank 0 on node0\): rank 1 on node1 has other training data' 'shard 20240520 390 | head -c 1804 > t.bin'
}
missing_shard() { apart 65 '^error \(rank 1\): .*t.bin' 'rm t.bin'; }
token_out_of_range() { apart 65 '^error \(rank 1\): t.bin' 'printf "\054\001" | dd of=t.bin bs=1 seek=1100 conv=notrunc status=none'; }
other_data() { apart 65 '^error \(rank 0\): rank 1 has other training data' 'shard 20240520 390 | head -c 1804 > t.bin'; }
shard_that_shrinks() { # while it is read
    rm -rf d0 d1
    mkdir d0 d1
    shard 20240520 400 | tee d0/t.bin > d1/t.bin
    (sleep 1.2; : > d1/t.bin) &
    # shellcheck disable=SC2016,SC2046
    launch 3 sh -c 'cd d$((OMPI_COMM_WORLD_RANK % 2)) && exec "$@"' sh "$train" $(options) --steps 100000000 --out out
    ended $? 65 '^error \(rank 1\): t.bin'
}

other_options() {
    # shellcheck disable=SC2046
    launch 1 "$train" $(options) --steps 9 --out a : -np 2 --oversubscribe "$train" $(options) --steps 9 --out a --lr 1
    ended $? 64 '^error \(rank 0\): rank 1 has other options than rank 0'
}
bad_options_on_one_rank() {
    # shellcheck disable=SC2046
    launch 2 "$train" $(options) --steps 9 --out a : -np 1 --oversubscribe "$train" $(options) --steps 9 --out a --lr x
    ended $? 64 '^error \(rank 2\): --lr'
}
another_build() {
    { cat "$train"; echo; } > other && chmod +x other
    # shellcheck disable=SC2046
    launch 2 "$train" $(options) --steps 9 --out a : -np 1 --oversubscribe ./other $(options) --steps 9 --out a
    ended $? 65 '^error \(rank 0\): rank 2 has another build than rank 0'
}
nowhere_to_write() {
    : > file
    # shellcheck disable=SC2046
    launch 3 "$train" $(options) --steps 9 --out file/out
    ended $? 74 '^error \(rank 0\): file' && one_error
}
not_finite() { # known to all: one of them says it
    # shellcheck disable=SC2046
    launch 3 "$train" $(options) --steps 99 --out nan --lr 100 --grad-clip 0 --weight-decay 100
    ended $? 76 '^error \(rank 0\): step .* not finite' && one_error
}
# While a checkpoint is being written, for longer than the others have patience in a step: the reason is told all the same.
slow_disk="-x LD_PRELOAD=$work/fault.so -x FAULT_FSYNC=0.5"
not_finite_while_saving() { # OPTIONS...: known to all, who wait for the save: a checkpoint's patience
    # shellcheck disable=SC2046,SC2086
    launch 2 $slow_disk "$train" $(deadline=2 options) --steps 99 --out nan --lr 100 --grad-clip 0 --weight-decay 100 \
        --checkpoint-every 3 "$@"
    ended $? 76 '^error \(rank 0\): step 4.* not finite' && one_error && [ -s nan/step_00000003/MANIFEST.json ]
}
asked_to_stop_while_saving() { # OPTIONS...: two saves, and both make progress
    # shellcheck disable=SC2046,SC2086
    launch 2 $slow_disk -x FAULT_SAVING=ask "$train" $(deadline=2 options) --steps 100000000 --out stop --checkpoint-every 400 "$@"
    ended $? 75 '^stopped \(rank 0\): SIGUSR1 after step' && one_error
}
# Long work of rank 0 that makes progress is no hang, however long the others wait; a call that never returns is one.
saves_slowly() { # ZERO
    # shellcheck disable=SC2046,SC2086
    launch 2 ${slow_disk/0.5/0.6} "$train" $(deadline=1 options) --steps 3 --out slow --zero "$1"
    ended $? 0 '^model in slow/step_00000003'
}
samples_slowly() {
    # shellcheck disable=SC2046,SC2086
    launch 2 -x LD_PRELOAD="$work/fault.so" -x FAULT_FLUSH=0.04 "$train" $(deadline=1 options) --steps 2 --out slow \
        --sample-every 1 --sample-tokens 100
    ended $? 0 '^model in slow/step_00000002'
}
hangs_while_saving() { # OPTIONS...: in the last save, or in one beside training, when the next is due
    # shellcheck disable=SC2046
    launch 2 -x LD_PRELOAD="$work/fault.so" -x FAULT_SAVING=hang "$train" $(deadline=1 options) --out hung "$@"
    ended $? 78 '^error \(rank [01]\): checkpoint .*; rank 0 \(process [0-9]+\) keeps the others waiting\. .*or raise --deadline' && soon 3
}
# So it is when rank 0 reads what there is to go on from.
resumes_slowly() {
    # shellcheck disable=SC2046
    launch 2 "$train" $(options) --steps 3 --out slow && launch 2 -x LD_PRELOAD="$work/fault.so" -x FAULT_READ=1 "$train" \
        $(deadline=2 options) --steps 6 --out slow
    ended $? 0 '^resuming from slow/step_00000003'
}
hangs_while_resuming() {
    # shellcheck disable=SC2046
    launch 2 "$train" $(options) --steps 3 --out slow && launch 2 -x LD_PRELOAD="$work/fault.so" -x FAULT_READ=1000 "$train" \
        $(deadline=0.5 options) --steps 6 --out slow
    ended $? 78 '^error \(rank [01]\): set-up.*; rank 0 \(process [0-9]+\) keeps the others waiting' && soon 2
}
shard_that_shrinks_while_saving() { # DEADLINE: known to rank 0, which cannot have the others wait
    local deadline=$1
    mkdir d0 d1
    shard 20240520 400 | tee d0/t.bin > d1/t.bin
    # shellcheck disable=SC2016,SC2046,SC2086
    launch 2 $slow_disk -x FAULT_SAVING=t.bin sh -c 'cd d$OMPI_COMM_WORLD_RANK && exec "$@"' sh "$train" $(options) \
        --steps 100000000 --out out --checkpoint-every 400
    ended $? 65 '^error \(rank 0\): t.bin' && one_error
}
alone() { # srun --mpi=pmix says only that there is PMIx, and MPI that there is one rank: there is nobody to wait for
    # shellcheck disable=SC2046,SC2086
    launch 1 ${slow_disk/0.5/2.5} env -u OMPI_COMM_WORLD_SIZE "$train" $(deadline=0.7 options) --steps 3 --out alone
    ended $? 0 '^model in alone/step_00000003'
}
asked_while_joining() { harm "$1" "$2" ask 0 75 '^stopped \(rank 0\): a signal to another rank after step 1, saved in'; }
ends_before_open_mpi() { # whose own thread has not run since MPI_Init
    # shellcheck disable=SC2046
    launch 2 -x LD_PRELOAD="$work/fault.so" -x FAULT_STARVE=1 "$train" $(options) --steps 1 --out starved
    ended $? 0 '^model in starved/step_00000001'
}
asked_to_stop() { # SIGNAL... SECONDS: scripts/mpirun.sh hands it to the ranks, also while they are being started
    # shellcheck disable=SC2046
    launch 3 "$train" $(options) --steps 100000000 --out stop &
    local job=$!
    local script signal
    sleep "${*: -1}"
    # not before it is there and hears it, which takes its time where the cores are busy
    until script=$(pgrep -P "$(pgrep -P $job timeout)" 2> /dev/null) && catches_usr1 "$script" || ! kill -0 $job; do sleep 0.02; done
    for signal in "${@:1:$#-1}"; do kill -"$signal" "$script" && sleep 0.1; done
    wait $job
    ended $? 75 '^stopped \(rank 0\): (SIGUSR1|a signal to another rank) after step' && one_error
}

# Faults are mostly waited for, so some run at a time, each in a directory of its own: two mpiruns that start in one TMPDIR
# make and remove the same directories, and one may fail.
one() { # NUMBER NAME ARGUMENTS...
    mkdir "$work/$1" && cd "$work/$1" && cp ../t.bin . || exit 70
    export TMPDIR=$PWD
    try "${@:2}" > "$work/$1.result"
}
tests=0
fault() { # NAME ARGUMENTS...
    while [ "$(jobs -rp | wc -l)" -ge 3 ]; do wait -n; done # which may be told of one that ended long ago
    tests=$((tests + 1))
    one $tests "$@" &
}
finish() {
    wait
    for ((i = 1; i <= tests; i++)); do cat "$work/$i.result"; done
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

fault killed 2 0 1
fault killed 2 1 0.05
fault killed 3 2 1.2
mode=$zero3 fault killed 4 1 0.8
fault exits 2 1 +0.7 3
fault exits 3 0 1.1 1
fault exits 3 2 0.1 9
fault exits_with_0 3 1 +0.7
fault stopped 2 0 +0.7
fault stopped 2 1 +0.9
mode=$zero3 fault stopped 3 2 +0.4
fault stopped 4 3 +0.6
fault stopped_elsewhere +0.4
fault stopped_elsewhere +0.9
fault stopped_alone +0.5
fault hangs_elsewhere +0.6
fault never_came 2 1
fault never_came 3 0
fault stopped_early 2 0 0.02
fault stopped_early 3 2 0.05
for test in broken_shard elsewhere missing_shard token_out_of_range other_data shard_that_shrinks other_options \
    bad_options_on_one_rank another_build nowhere_to_write not_finite; do
    fault $test
done
fault hangs 2 0 +0.6
fault hangs 3 2 +0.7 --zero 1 --checkpoint-every 20
mode=$zero3 fault hangs 3 0 +0.9 --checkpoint-every 20
fault not_finite_while_saving
fault not_finite_while_saving --zero 0
fault shard_that_shrinks_while_saving 8
fault shard_that_shrinks_while_saving 4
fault asked_to_stop_while_saving
# shellcheck disable=SC2086
fault asked_to_stop_while_saving $zero3
fault asked_to_stop_while_saving --zero 0
fault saves_slowly 0
fault saves_slowly 1
mode=$zero3 fault samples_slowly
fault hangs_while_saving --steps 3
fault hangs_while_saving --steps 100000000 --checkpoint-every 40 --zero 0
fault resumes_slowly
fault hangs_while_resuming
fault alone
fault asked_while_joining 3 1
fault ends_before_open_mpi
fault asked_to_stop USR1 2
mode=$zero3 fault asked_to_stop TERM TERM 1.2
fault asked_to_stop USR1 0.5
fault asked_to_stop HUP HUP HUP 1.5
finish
