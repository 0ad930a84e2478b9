#!/usr/bin/env bash
# Several GPUs of one machine as ranks: do all numbers of them train the same run, also when it stops and goes on with
# others, does a run end when one comes to harm, how fast are they together, and what do they keep in memory. Prints one
# table at the end; whole logs lie in $OUT.
#
#     scripts/ranks_check.sh [agree] [resume] [faults] [scaling] [memory] [nccl]          (default: all)
#
#     BUILD    where the programs are (build): $BUILD/cuda-BF16/train_gpt2cu
#     TRAINER  the program itself; with build/cpu/train_gpt2 and SMALL=1 this script can be tried without a GPU
#     MACHINES so many machines, all of them played by this one (1): each has all GPUs here, and between them NCCL goes
#              through sockets. Slow, since ranks take turns on a GPU, but the numbers are those of so many machines.
#     RANKS    the largest number of ranks (as many as MACHINES have GPUs)
#     OUT      logs and run directories (build/ranks_check)
#     LIMIT    seconds for everything (725 x MACHINES)
#
# Verdicts: PASS and FAIL; SLOW where a figure lies below its floor, which does not make this script fail; FIGURE for
# what has no floor; SKIP.
set -u
. "$(dirname "$0")/common.sh"
stages="agree resume faults scaling memory nccl"
check_stages "$stages" "$@"
export LC_ALL=C # numbers with a point
cd "$root" || exit 70
BUILD=${BUILD:-build} OUT=${OUT:-build/ranks_check} MACHINES=${MACHINES:-1} SMALL=${SMALL:-}
TRAINER=${TRAINER:-$BUILD/cuda-BF16/train_gpt2cu}
gpu_count=$(nvidia-smi --list-gpus 2> /dev/null | grep -c '^GPU ')

if [ "$MACHINES" != 1 ]; then
    [[ $MACHINES =~ ^[1-9][0-9]*$ ]] || fail 64 "MACHINES=$MACHINES is no number" "Say how many, or leave it out"
    [[ " $* " != *" scaling "* && " $* " != *" nccl "* ]] || fail 64 "scaling and nccl measure GPUs that nobody shares" "Leave MACHINES out, or name other stages"
    [ $# -gt 0 ] || stages="agree resume faults memory"
fi
LIMIT=${LIMIT:-$((725 * MACHINES))} RANKS=${RANKS:-$((gpu_count * MACHINES))}
[ -x "$TRAINER" ] || fail 64 "$TRAINER: not there" "Build it, or set BUILD or TRAINER"
[ "$RANKS" -ge 2 ] || fail 69 "$gpu_count GPUs" "Run this where there are two or more, or set MACHINES=2, or RANKS and TRAINER=build/cpu/train_gpt2"
command -v mpirun > /dev/null || fail 64 "no mpirun" "Install Open MPI"
grep -q MPI_Init_thread "$TRAINER" || fail 64 "$TRAINER was built without MPI" "Install Open MPI (and NCCL) and build it again"
command -v python3 > /dev/null || fail 64 "no python3" "Install it: the random text comes from there"

# NVLink multicast (NVLS) stays off: it is not everywhere allowed, and what is measured here is to be comparable. All
# ranks are on this machine, and talk over shared memory.
export NCCL_NVLS_ENABLE=0 OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=none
mpirun=(scripts/mpirun.sh)
[ "$(id -u)" != 0 ] || mpirun+=(--allow-run-as-root)
gpus=1 threads=()
if [[ $TRAINER != *cu ]]; then
    gpus='' threads=(--threads 1)
    mpirun+=(--oversubscribe)
    export OMPI_MCA_mpi_yield_when_idle=1 ASAN_OPTIONS=detect_leaks=0
fi

# Of several machines each has ranks that follow each other, and all GPUs.
as_machine=()
if [ "$MACHINES" -gt 1 ] && [ -n "$gpus" ]; then
    export NCCL_SOCKET_IFNAME=lo
    # shellcheck disable=SC2016
    as_machine=(bash -c 'export NCCL_HOSTID=machine$((OMPI_COMM_WORLD_RANK / $0)) CUDA_VISIBLE_DEVICES=$((OMPI_COMM_WORLD_RANK % $0)); exec "$@"' "$gpu_count")
fi

# Shapes: for GPUs, or small enough for a processor.
if [ -z "$SMALL" ]; then
    agree_T=512 agree_shape=(--model d6 --seq-len 512) agree_rows=16 agree_batch=62 agree_steps=50 agree_lr=5e-5
    resume_batch=1024 resume_steps=60 resume_lr=5e-5 resume_tolerance=1e-3 wire_tolerance=1e-3 cadence_tolerance=1e-3
    small_model=d12:64 large_model=d48:16 strong_model=d12 strong_rows=64 strong_batch=512 speed_T=1024
    memory_model=d24 memory_rows=8 loss_tolerance=1e-3 gns_tolerance=0.02
    text_tokens=2000000 vocabulary=50257
else
    agree_T=32 agree_shape=(--model d2 --channels 32 --heads 2 --seq-len 32) agree_rows=4 agree_batch=15 agree_steps=50 agree_lr=1e-3
    resume_batch=32 resume_steps=6000 resume_lr=1e-4 resume_tolerance=1e-4 wire_tolerance=1e-3 cadence_tolerance=1e-5
    small_model=d2:2 large_model=d4:1 strong_model=d2 strong_rows=2 strong_batch=16 speed_T=32
    memory_model=d6 memory_rows=1 loss_tolerance=1e-5 gns_tolerance=1e-4
    text_tokens=100000 vocabulary=256
fi
[ "$MACHINES" = 1 ] || memory_model=d12 vocabulary=5000 # sockets are slow

row() { printf '%-6s %-8s %-46s %s\n' "$1" "$stage" "$2" "$3" | tee -a "$table"; }
calculate() { awk "BEGIN { printf \"${2:-%.4g}\", $1 }"; }
holds() { awk "BEGIN { exit !($1) }"; }

rank_counts=1
for ((n = 2; n <= RANKS; n *= 2)); do rank_counts+=" $n"; done
[ $((n / 2)) = "$RANKS" ] || rank_counts+=" $RANKS"

# A million tokens, half of them settled by the one before, the others by Zipf's law: something to learn, and for the
# embedding's kernels what real text is to them.
make_text() { # FILE COUNT SEED VOCABULARY
    python3 - "$@" << 'PYTHON'
import array, random, sys
path, count, seed, vocabulary = sys.argv[1], *map(int, sys.argv[2:])
draw, token, tokens = random.Random(seed).random, 0, array.array("H")
for _ in range(count):
    token = (token * 31 + 7) % vocabulary if draw() < 0.5 else int(vocabulary ** draw()) - 1
    tokens.append(token)
with open(path, "wb") as f:
    f.write(array.array("i", [20240520, 1, count] + [0] * 253).tobytes() + tokens.tobytes())
PYTHON
}

# ----------------------------------------------------------------------------------------------------------------------
# Runs. One at a time: begin, then await what it shall come to, then end.

job='' current='' code=0   # the run's process and name; how it ended
now() { echo "${EPOCHREALTIME/,/.}"; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.1f", b - a }'; }
seconds_left() { echo $((stage_end - SECONDS)); }
log() { echo "$OUT/$1.log"; }

begin() { # NAME RANKS OPTIONS...
    local launcher=()
    current=$1
    [ "$2" = 1 ] || launcher=("${mpirun[@]}" -np "$2" "${as_machine[@]}")
    shift 2
    GNS_RANKS_CHECK=$work/$current setsid "${launcher[@]}" "$TRAINER" --train "$work/text.bin" --out "$work/$current" \
        --vocab-size "$vocabulary" --val-every 0 --checkpoint-every 0 "${threads[@]}" "$@" > "$(log "$current")" 2>&1 &
    job=$!
}

begin_alone() { # NAME GPU OPTIONS...
    CUDA_VISIBLE_DEVICES=$2 begin "$1" 1 "${@:3}"
}

# Processes of the run under way: all of them, with mpirun; or those that are rank R.
run_processes() { # [R]
    local environment
    grep -lzxF "GNS_RANKS_CHECK=$work/$current" /proc/[0-9]*/environ 2> /dev/null | while read -r environment; do
        [ $# = 0 ] || grep -qzx "OMPI_COMM_WORLD_RANK=$1" "$environment" 2> /dev/null || continue
        environment=${environment%/environ}
        echo "${environment#/proc/}"
    done
}

runs() { kill -0 "$job" 2> /dev/null; }
steps_done() { sed -n '/"loss"/p' "$work/$current/metrics.jsonl" 2> /dev/null | wc -l; }

# And waits, not for ever, until its processes have given back what they held.
kill_run() {
    local process state processes end=$((SECONDS + 20))
    {
        processes=$(run_processes)
        # shellcheck disable=SC2086
        kill -KILL $processes
        for process in $processes; do
            while read -r _ _ state _ < "/proc/$process/stat" && [ "$state" != Z ] && [ $SECONDS -lt $end ]; do sleep 0.05; done
        done
        wait "$job"
    } 2> /dev/null
}

# Waits for the run's end, for so many seconds at most; `code` is its exit code, 124 where it had to be ended.
await_end() { # SECONDS
    local end=$((SECONDS + $1)) late=
    while runs && [ -z "$late" ]; do
        sleep 0.05
        [ $SECONDS -lt $end ] || late=1
    done
    [ -z "$late" ] || kill_run
    wait "$job" 2> /dev/null
    code=$?
    [ -z "$late" ] || code=124
}

await_steps() { # COUNT: false where the run ends before, or time is up
    while [ "$(steps_done)" -lt "$1" ]; do
        sleep 0.05
        runs && [ "$(seconds_left)" -gt 0 ] || return 1
    done
}

tell_failure() { # WHAT
    row FAIL "$1" "exit code $code: $(grep -hE '^error|noticed that process' "$(log "$current")" | tail -n 1 | cut -c 1-150)"
}

# To its end, with code 0.
run_whole() { # NAME RANKS OPTIONS...
    [ "$(seconds_left)" -gt 0 ] || { row SKIP "$1" "no time left"; return 1; }
    begin "$@"
    await_end "$(seconds_left)"
    [ $code = 0 ] || { tell_failure "$1"; return 1; }
}

checkpoint() { newest_checkpoint "$work/$1"; }
values() { grep -o "\"$2\": [^,}]*" "$work/$1/metrics.jsonl" | cut -d ' ' -f 2; }
median() { sort -g | awk '{ x[NR] = $1 } END { print NR ? (x[int((NR + 1) / 2)] + x[int(NR / 2) + 1]) / 2 : "nan" }'; }

# ----------------------------------------------------------------------------------------------------------------------
# agree: the same run with every number of ranks, and the same bits in every mode

# The largest difference of a field in two runs, step by step. SCALE: what it is divided by, in awk, where $2 is the
# second run's value, $3 its gns_ln_s and $4 its batch.
farthest() { # A B FIELD SCALE
    paste <(values "$1" "$3") <(values "$2" "$3") <(values "$2" gns_ln_s) <(values "$2" batch) | awk '
        NF != 4 || /null/ { bad = 1; next }
        { d = ($1 - $2) / ('"$4"'); if (d < 0) d = -d; if (!(d <= most)) most = d }
        END { print NR && !bad ? most + 0 : "nan" }'
}

verdict() { holds "$1" && echo PASS || echo FAIL; }

# Up to rounding, which a learning rate that makes the loss jump would magnify. G2 may be near 0: its error is measured
# by itself and the noise that it is found in.
same_run() { # A B
    local loss s g2
    loss=$(farthest "$1" "$2" loss 1) s=$(farthest "$1" "$2" gns_ln_s "\$2") g2=$(farthest "$1" "$2" gns_ln_g2 "(\$2 < 0 ? -\$2 : \$2) + \$3 / \$4")
    row "$(verdict "\"$loss\" != \"nan\" && $loss <= $loss_tolerance")" "$1 and $2: loss" \
        "differs by $loss at most ($(values "$1" loss | grep -c .) steps; $loss_tolerance)"
    row "$(verdict "\"$s$g2\" !~ /nan/ && $s <= $gns_tolerance && $g2 <= $gns_tolerance")" "$1 and $2: GNS" \
        "S differs by $s, G2 by $g2 of G2 + S/B at most ($gns_tolerance)"
    [ "$(values "$1" examples)" = "$(values "$2" examples)" ] || row FAIL "$1 and $2" "other numbers of examples"
}

same_bits() { # A B
    if cmp -s "$(checkpoint "$1")/model.safetensors" "$(checkpoint "$2")/model.safetensors"; then
        row PASS "$1 and $2: weights" "equal bit for bit"
    else
        row FAIL "$1 and $2: weights" "differ"
    fi
}

# A batch that the ranks do not share evenly.
agree_run() { # NAME RANKS OPTIONS...
    local tokens=$((agree_batch * agree_T))
    run_whole "$1" "$2" "${agree_shape[@]}" --micro-batch "$agree_rows" --batch-tokens $tokens --steps $agree_steps \
        --lr $agree_lr --warmup-tokens $((agree_steps * tokens / 2)) "${@:3}"
}

agree_ranks() { # NAME
    local n
    agree_run "$1-r1" 1 || return
    for n in ${rank_counts#1 }; do
        agree_run "$1-r$n" "$n" && same_run "$1-r$n" "$1-r1"
    done
}

# In fp32 rounding is too small for training to magnify it to something: what differs there is a fault.
agree_fp32() {
    local TRAINER=$BUILD/cuda-FP32/train_gpt2cu loss_tolerance=1e-4 gns_tolerance=1e-3
    [ -n "$gpus" ] || return 0
    if [ -x "$TRAINER" ]; then agree_ranks fp32; else row SKIP "fp32" "no $TRAINER"; fi
}

# Sums over the ranks at every micro-step, of which there are four, are another order, and so another rounding.
agree_by_micro_step() {
    local name=b$agree_batch-r$RANKS-micro-step loss_tolerance=$cadence_tolerance agree_rows=$((agree_rows / 4))
    agree_run "$name" "$RANKS" --zero 2 --reduce micro-step && same_run "$name" "b$agree_batch-r1"
}

# Rounding every gradient to bf16 for the transfer moves a loss less than a bf16 engine's own rounding may.
agree_in_bf16() {
    local name=b$agree_batch-r$RANKS-wire-bf16 loss_tolerance=$wire_tolerance gns_tolerance=0.02
    agree_run "$name" "$RANKS" --comm-dtype bf16 && same_run "$name" "b$agree_batch-r1"
}

agree() {
    local zero name=b$agree_batch
    agree_ranks "$name"
    for zero in 0 2; do # besides the default
        agree_run "$name-r$RANKS-z$zero" "$RANKS" --zero "$zero" && same_bits "$name-r$RANKS-z$zero" "$name-r$RANKS"
    done
    agree_run "$name-again" "$RANKS" && same_bits "$name-again" "$name-r$RANKS"
    agree_by_micro_step
    agree_in_bf16
    agree_fp32
}

# ----------------------------------------------------------------------------------------------------------------------
# resume: a run that is asked to stop saves and says so, and goes on with other ranks as if nothing had happened

resume_begin() { # NAME RANKS
    local tokens=$((resume_batch * agree_T))
    begin "$1" "$2" "${agree_shape[@]}" --micro-batch $agree_rows --batch-tokens $tokens --steps $resume_steps \
        --lr $resume_lr --warmup-tokens $((resume_steps * tokens / 2)) --deadline-setup 60 --deadline-step 20
}

# Asks the run to stop once it has done so many steps.
resume_stop() { # WHAT STEPS SIGNAL [RANK]
    await_steps "$2"
    strike "${@:3}"
    fault_ends "$1" 75 "^error \(rank 0\): .*: stopped after step [0-9]+, saved in" 20
}

resume() {
    local parts=$((RANKS > 2 ? RANKS / 2 : RANKS)) loss_tolerance=$resume_tolerance quarter=$((resume_steps / 4))
    resume_begin undisturbed "$RANKS"
    await_end "$(seconds_left)"
    [ $code = 0 ] || { tell_failure undisturbed; return; }
    resume_begin stopping "$RANKS"
    resume_stop "SIGUSR1 to mpirun.sh, $RANKS ranks" $quarter USR1
    resume_begin stopping $parts
    resume_stop "SIGTERM to rank $((parts - 1)) of $parts, gone on with" $((2 * quarter)) TERM $((parts - 1))
    resume_begin stopping 1
    await_end "$(seconds_left)"
    [ $code = 0 ] || { tell_failure "the rest with 1 rank"; return; }
    row "$(verdict "$(grep -c '^resuming from' "$(log stopping)") == 1")" "the rest with 1 rank" \
        "$(grep -h '^resuming from' "$(log stopping)" | cut -c 1-150)"
    cmp -s <(values undisturbed step; values undisturbed examples) <(values stopping step; values stopping examples)
    row "$(verdict "$? == 0")" "every step once, the examples in order" "$(values stopping loss | grep -c .) steps"
    same_run stopping undisturbed
}

# ----------------------------------------------------------------------------------------------------------------------
# faults: a rank that is killed or stopped ends the run soon, which says which one

deadline=5 # seconds
fault_begin() { # NAME RANKS OPTIONS...
    begin "$1" "$2" "${agree_shape[@]}" --micro-batch $agree_rows --batch-tokens $((8 * RANKS * agree_T)) \
        --steps 100000000 --deadline-step $deadline "${@:3}"
}

strike() { # SIGNAL [RANK]: that rank; without it the run as a whole
    struck=$(now)
    # shellcheck disable=SC2046
    kill -"$1" $(if [ $# = 2 ]; then run_processes "$2"; else echo "$job"; fi) 2> /dev/null
}

fault_ends() { # WHAT CODES TEXT SECONDS: since `struck`
    local seconds said
    await_end $(($4 + 10))
    seconds=$(since "$struck")
    said=$(grep -hoE "$3" "$(log "$current")" | tail -n 1 | cut -c 1-150)
    if [[ $code =~ ^($2)$ ]] && [ -n "$said" ] && holds "$seconds <= $4"; then
        row PASS "$1" "exit code $code after $seconds s: $said"
    else
        row FAIL "$1" "exit code $code after $seconds s (wanted $2 within $4 s, and a line with '$3')"
    fi
}

faults() {
    local victim=$((RANKS - 1)) after
    fault_begin killed "$RANKS"
    await_steps 10
    strike KILL $victim
    fault_ends "rank $victim killed" 78 "process rank $victim .* signal 9" 15

    fault_begin stopped "$RANKS"
    await_steps 10
    strike STOP $victim
    fault_ends "rank $victim stopped" 78 "rank $victim \(process [0-9]+\) is stopped or gone" $((deadline + 15))

    for after in 0 1; do # in the midst of MPI's start, and of CUDA's or NCCL's
        fault_begin stopped-after-$after "$RANKS" --deadline-setup 10
        until [ -n "$(run_processes $victim)" ] || ! runs; do :; done
        sleep $after
        strike STOP $victim
        fault_ends "rank $victim stopped $after s after its start" 78 \
            "rank $victim (\(process [0-9]+\) is stopped or gone|has not started)" 25
    done
}

# ----------------------------------------------------------------------------------------------------------------------
# scaling and memory

# Steps of a run, then an end of it by force: nothing is saved. What a rank holds is looked up at the end (MiB, on the
# fullest GPU); the first steps do not count.
speed_skip=5
speed_run() { # NAME RANKS STEPS OPTIONS...
    local steps=$3
    [ -f "$work/$1.speed" ] && return
    [ "$(seconds_left)" -gt 5 ] || { row SKIP "$1" "no time left"; return 1; }
    begin "$1" "$2" --seq-len $speed_T --steps 1000000 "${@:4}"
    if ! await_steps "$steps"; then
        await_end 0
        tell_failure "$1"
        return 1
    fi
    memory_used > "$work/$current.memory"
    kill_run
    values "$current" tok_per_s | sed -n "$((speed_skip + 1)),${steps}p" | median > "$work/$current.speed"
    rm -rf "${work:?}/$current/step_"*
}

# GPUs differ by a few percent, and with several ranks the slowest sets the pace. So each runs by itself, all at once:
# NAME.speed is their mean, NAME.slowest the slowest, NAME.all all.
speed_alone() { # NAME STEPS OPTIONS...
    local gpu jobs=() left
    [ ! -f "$work/$1.speed" ] || return 0
    for ((gpu = 0; gpu < RANKS; gpu++)); do
        begin_alone "$1-gpu$gpu" $gpu --seq-len $speed_T --steps 1000000 "${@:3}"
        jobs+=("$job")
    done
    while left=; do
        for ((gpu = 0; gpu < RANKS; gpu++)); do
            current=$1-gpu$gpu
            [ "$(steps_done)" -ge "$2" ] || left=1
        done
        [ -n "$left" ] && kill -0 "${jobs[@]}" 2> /dev/null && [ "$(seconds_left)" -gt 0 ] || break
        sleep 0.05
    done
    kill -KILL "${jobs[@]}" 2> /dev/null
    wait "${jobs[@]}" 2> /dev/null
    [ -z "$left" ] || { code='none' tell_failure "$1"; return 1; }
    for ((gpu = 0; gpu < RANKS; gpu++)); do
        values "$1-gpu$gpu" tok_per_s | sed -n "$((speed_skip + 1)),${2}p" | median
    done > "$work/$1.all"
    awk '{ sum += $1 } END { print sum / NR }' "$work/$1.all" > "$work/$1.speed"
    sort -g "$work/$1.all" | head -n 1 > "$work/$1.slowest"
}

memory_used() { # MiB: of the fullest GPU; without one, what is resident of the fullest process, MPI's buffers and all
    if [ -n "$gpus" ]; then
        nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | awk -v ranks="$MACHINES" '{ print $1 / ranks }'
    else
        for process in $(run_processes); do awk '/^VmRSS/ { print $2 / 1024 }' "/proc/$process/status" 2> /dev/null; done
    fi | sort -g | tail -n 1
}

speed() { cat "$work/$1.speed"; }

tell_alone() { # WHAT NAME
    row FIGURE "$1, each GPU alone" "$(awk '{ printf "%.0f ", $1 }' "$work/$2.all")tok/s, mean $(calculate "$(speed "$2")" %.0f)$3"
}

# The same rows a rank, so that a rank computes what one GPU alone does, and what is more is communication.
weak_scaling() { # MODEL ROWS STEPS FLOOR RANK_COUNTS
    local n mode zero wire base=$1-alone name tokens ms ms1
    speed_alone "$base" "$3" --model "$1" --micro-batch "$2" --batch-tokens $(($2 * speed_T)) || return
    ms1=$(calculate "1000 * $2 * $speed_T / $(cat "$work/$base.slowest")" %.3f)
    tell_alone "$1, $2 rows" "$base" "; the slowest one's step $ms1 ms"
    for n in $5; do
        tokens=$((n * $2 * speed_T))
        for mode in 0 1 2 "1 bf16"; do # gradients that travel in bf16, as llm.c's do
            read -r zero wire <<< "$mode"
            [ "$n" = "$RANKS" ] || [ "$mode" = 1 ] || continue
            name=$1-r$n-z$zero$wire
            speed_run "$name" "$n" "$3" --model "$1" --micro-batch "$2" --batch-tokens $tokens --zero "$zero" \
                --comm-dtype "${wire:-fp32}" || continue
            ms=$(calculate "1000 * $tokens / $(speed "$name")" %.3f)
            tell_speed "$1, $2 rows a rank, $n ranks, ZeRO-$zero${wire:+, $wire}" "$name" "$n" "$base" "$4" \
                "; a step $ms ms, $(calculate "$ms - $ms1" %.2f) ms more than the slowest alone"
        done
    done
}

# The same batch for any number of ranks.
strong_scaling() {
    local base=$strong_model-b$strong_batch-alone name=$strong_model-b$strong_batch-r$RANKS tokens=$((strong_batch * speed_T))
    local options=(--model "$strong_model" --micro-batch "$strong_rows" --batch-tokens "$tokens")
    speed_alone "$base" 12 "${options[@]}" || return
    tell_alone "$strong_model, $tokens tokens a step" "$base" ""
    speed_run "$name" "$RANKS" 20 "${options[@]}" --zero 1 &&
        tell_speed "$strong_model, $tokens tokens a step, $RANKS ranks, ZeRO-1" "$name" "$RANKS" "$base" 95 ""
}

tell_speed() { # WHAT NAME RANKS BASE FLOOR MORE
    local share slowest
    share=$(calculate "100 * $(speed "$2") / ($3 * $(speed "$4"))" %.1f)
    slowest=$(calculate "100 * $(speed "$2") / ($3 * $(cat "$work/$4.slowest"))" %.1f)
    row "$(holds "$share >= $5" && echo PASS || echo SLOW)" "$1" "$(calculate "$(speed "$2")" %.0f) tok/s, $share% of $3 x one GPU (floor $5%), $slowest% of $3 x the slowest$6"
}

scaling() {
    strong_scaling
    weak_scaling "${small_model%:*}" "${small_model#*:}" 30 95 "${rank_counts#1 }"
    weak_scaling "${large_model%:*}" "${large_model#*:}" 16 96 "$RANKS"
}

# What --dry-run foretells of the lines that match, in MiB.
planned() { # FILE PATTERN
    awk -v pattern="^ *($2)" '$0 ~ pattern { for (i = 2; i <= NF; i++) if ($i ~ /^MiB/) { sum += $(i - 1); break } } END { print sum + 0 }' "$1"
}

# ZeRO changes nothing but the state, so what all modes take besides (the driver, NCCL, activations) shows where
# nothing is shared out, and what is above it in another mode is state.
memory() {
    local zero name parameters rest state bytes foretold close=FIGURE options=(--model "$memory_model" --micro-batch "$memory_rows")
    options+=(--batch-tokens $((RANKS * memory_rows * speed_T)))
    for zero in 0 1 2; do
        name=memory-z$zero
        "$TRAINER" --dry-run --vocab-size "$vocabulary" --seq-len $speed_T --checkpoint-every 0 "${options[@]}" --zero "$zero" --ranks "$RANKS" \
            > "$work/$name.plan" 2> "$work/$name.error" || { row SKIP "ZeRO-$zero" "$(cat "$work/$name.error")"; return; }
        speed_run "$name" "$RANKS" 5 "${options[@]}" --zero "$zero" || return
        parameters=$(awk '/^parameters / { gsub(/[,:]/, "", $2); print $2 }' "$work/$name.plan")
        foretold=$(planned "$work/$name.plan" "parameters|master|working|gradients|AdamW")
        [ "$zero" != 0 ] || rest=$(calculate "$(cat "$work/$name.memory") - $foretold" %.1f)
        state=$(calculate "$(cat "$work/$name.memory") - $rest" %.1f)
        bytes=$(calculate "$state * 1048576 / $parameters" %.2f)
        foretold=$(calculate "$foretold * 1048576 / $parameters" %.2f)
        [ -z "$gpus" ] || close=$(verdict "$bytes <= 1.05 * $foretold && $bytes >= 0.95 * $foretold")
        row "$close" "$memory_model, $RANKS ranks, ZeRO-$zero" \
            "$bytes bytes of state a parameter, foretold $foretold; $(cat "$work/$name.memory") MiB in all, foretold $(planned "$work/$name.plan" "memory in all")"
    done
}

# ----------------------------------------------------------------------------------------------------------------------
# nccl: the bandwidth that there is, by PyTorch's hand

nccl() {
    if [ -z "$gpus" ] || ! python3 -c 'import torch' 2> /dev/null; then
        row SKIP all-reduce "no GPUs, or no PyTorch"
        return
    fi
    cat > "$work/all_reduce.py" << 'PYTHON'
import os, time, torch, torch.distributed as dist
rank, ranks = (int(os.environ["OMPI_COMM_WORLD_" + x]) for x in ("RANK", "SIZE"))
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29517", rank=rank, world_size=ranks)
for megabytes in (28, 249, 3100):
    x = torch.zeros(megabytes * 250000, device="cuda")
    for _ in range(3):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    start, times = time.perf_counter(), 10
    for _ in range(times):
        dist.all_reduce(x)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / times
    if rank == 0:  # bus bandwidth as nccl-tests counts it
        print(f"{megabytes} MB: {1e3 * seconds:.2f} ms, {megabytes / 1e3 / seconds * 2 * (ranks - 1) / ranks:.0f} GB/s")
dist.destroy_process_group()
PYTHON
    timeout -k 5 60 "${mpirun[@]}" -np "$RANKS" python3 "$work/all_reduce.py" > "$(log nccl)" 2>&1 || row FAIL all-reduce "$(tail -n 1 "$(log nccl)")"
    grep ' GB/s' "$(log nccl)" | while read -r line; do row FIGURE "all-reduce, fp32, $RANKS GPUs" "$line"; done
}

# ----------------------------------------------------------------------------------------------------------------------

finish() {
    local status=$?
    [ -z "$job" ] || { runs && kill_run; } 2> /dev/null
    echo
    [ -z "$gpus" ] || nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    cat "$table"
    for run in "$work"/*/metrics.jsonl; do
        [ -f "$run" ] && cp "$run" "$OUT/$(basename "$(dirname "$run")").jsonl"
    done
    rm -rf "$work"
    [ $status = 0 ] && ! grep -q '^FAIL' "$table"
}

stage_limit() { # seconds, for each machine; a rank of d48 takes 15 to start
    case $1 in
    agree) echo 130 ;;
    resume) echo 90 ;;
    faults) echo 90 ;;
    scaling) echo 280 ;;
    memory) echo 75 ;;
    nccl) echo 60 ;;
    esac
}

# shellcheck disable=SC2086
[ $# -gt 0 ] || set -- $stages
mkdir -p "$OUT"
work=$(mktemp -d -p "$OUT" runs.XXXXXX)
table=$OUT/table.txt
: > "$table"
trap 'finish; exit $?' EXIT
trap 'exit 130' INT TERM
make_text "$work/text.bin" "$text_tokens" 1 "$vocabulary"
for stage in "$@"; do
    begun=$SECONDS
    stage_end=$((SECONDS + MACHINES * $(stage_limit "$stage")))
    [ $stage_end -lt "$LIMIT" ] || stage_end=$LIMIT
    $stage
    row FIGURE "the stage $stage took" "$((SECONDS - begun)) s"
done
