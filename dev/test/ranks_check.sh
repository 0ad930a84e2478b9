#!/usr/bin/env bash
# Checks several GPUs of one machine as ranks: every number of ranks trains the same run; a run whose rank is killed or
# stopped ends. Measures speed and memory of all ranks together. Prints one table at the end. Full logs are in $OUT.
# LAUNCH="scripts/mpirun.sh -np 2" dev/test/cuda/gpu_resume.sh stops and resumes ranks.
#
#     dev/test/ranks_check.sh [agree] [tensor] [shard] [optimizers] [faults] [scaling] [memory]          (default: all)
#
#     BUILD    where the programs are (build): $BUILD/cuda-BF16/train_gpt2cu
#     TRAINER  another program: build/cpu/train_gpt2 with SMALL=1 tries this script without a GPU
#     MACHINES number of machines that this one simulates (1). Each has all GPUs here; NCCL connects them by sockets.
#              Slow, since ranks share GPUs; results are as on real machines.
#     RANKS    largest number of ranks (MACHINES times the GPUs here)
#     ZERO     --zero of the runs that are killed and stopped (1)
#     OUT      logs and run directories (build/ranks_check)
#     OPTIMIZERS names for the stage "optimizers" (lamb muon)
#     LIMIT    seconds for everything (915 x MACHINES)
#
# Verdicts: PASS, FAIL, SKIP; SLOW: a figure below its floor, no failure; FIGURE: a figure without a floor.
# shellcheck disable=SC2016,SC2046,SC2086
set -u
. "$(dirname "$0")/stages.sh"
stages="agree tensor shard optimizers faults scaling memory"
check_stages "$stages" "$@"
export LC_ALL=C # numbers with a point
cd "$root" || exit 70
BUILD=${BUILD:-build} OUT=${OUT:-build/ranks_check} MACHINES=${MACHINES:-1} SMALL=${SMALL:-} ZERO=${ZERO:-1}
TRAINER=${TRAINER:-$BUILD/cuda-BF16/train_gpt2cu}
gpu_count=$(count_gpus)

if [ "$MACHINES" != 1 ]; then
    [[ $MACHINES =~ ^[1-9][0-9]*$ ]] || fail 64 "MACHINES=$MACHINES is no number" "Say how many, or leave it out"
    [[ " $* " != *" scaling "* ]] || fail 64 "scaling measures GPUs that no two ranks share" "Leave MACHINES out, or name other stages"
    [ $# -gt 0 ] || stages=${stages/scaling /}
fi
LIMIT=${LIMIT:-$((915 * MACHINES))} RANKS=${RANKS:-$((gpu_count * MACHINES))}
[ -x "$TRAINER" ] || fail 64 "$TRAINER: not there" "Build it, or set BUILD or TRAINER"
[ "$RANKS" -ge 2 ] || fail 69 "$gpu_count GPUs" "Run this where there are two or more, or set MACHINES=2, or RANKS and TRAINER=build/cpu/train_gpt2"
command -v mpirun > /dev/null || fail 64 "no mpirun" "Install Open MPI"
grep -q MPI_Init_thread "$TRAINER" || fail 64 "$TRAINER was built without MPI" "Install Open MPI (and NCCL) and build it again"
command -v python3 > /dev/null || fail 64 "no python3" "Install it: it makes the random text"

# Disable NVLink multicast (NVLS): some machines forbid it, and figures must be comparable. MPI uses shared memory.
export NCCL_NVLS_ENABLE=0 OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=none
mpirun=(scripts/mpirun.sh)
[ "$(id -u)" != 0 ] || mpirun+=(--allow-run-as-root)
gpus=1 threads=() as_machine=()
if [[ $TRAINER != *cu ]]; then
    gpus='' threads=(--threads 1)
    mpirun+=(--oversubscribe)
    export OMPI_MCA_mpi_yield_when_idle=1 ASAN_OPTIONS=detect_leaks=0
elif [ "$MACHINES" -gt 1 ]; then # a machine has consecutive ranks, and all GPUs
    export NCCL_SOCKET_IFNAME=lo
    as_machine=(bash -c 'export NCCL_HOSTID=machine$((OMPI_COMM_WORLD_RANK / $0)) CUDA_VISIBLE_DEVICES=$((OMPI_COMM_WORLD_RANK % $0)); exec "$@"' "$gpu_count")
fi

# Shapes for GPUs, or for a CPU. In d7 even two ranks have parts of different lengths.
if [ -z "$SMALL" ]; then
    agree_T=512 agree_shape=(--model d7 --seq-len 512) agree_rows=16 agree_batch=62 agree_steps=50 agree_lr=5e-5
    cadence_tolerance=1e-3
    small_model=(d12 64) large_model=(d48 16) strong_model=d12 strong_rows=64 strong_batch=512 speed_T=1024
    memory_model=d24 memory_rows=8 loss_tolerance=1e-3 gns_tolerance=0.02
    text_tokens=2000000 vocabulary=50257
else
    agree_T=32 agree_shape=(--model d2 --channels 32 --heads 2 --seq-len 32) agree_rows=4 agree_batch=15 agree_steps=50 agree_lr=1e-3
    cadence_tolerance=1e-5
    small_model=(d2 2) large_model=(d4 1) strong_model=d2 strong_rows=2 strong_batch=16 speed_T=32
    memory_model=d6 memory_rows=1 loss_tolerance=1e-5 gns_tolerance=1e-4
    text_tokens=100000 vocabulary=256
fi
[ "$MACHINES" = 1 ] || memory_model=d12 vocabulary=5000 # sockets are slow

calculate() { awk "BEGIN { printf \"${2:-%.4g}\", $1 }"; } # EXPRESSION [FORMAT]
verdict() { awk "BEGIN { exit !($1) }" && echo PASS || echo "${2:-FAIL}"; } # CONDITION [OTHERWISE]

rank_counts=1
for ((n = 2; n <= RANKS; n *= 2)); do rank_counts+=" $n"; done
[ $((n / 2)) = "$RANKS" ] || rank_counts+=" $RANKS"

# Half of the tokens follow from the previous token, so that a model can learn them. The others obey Zipf's law, since
# the embedding's kernels need tokens that repeat as in real text.
make_text() { # FILE COUNT VOCABULARY
    python3 - "$@" << 'PYTHON'
import array, random, sys
path, count, vocabulary = sys.argv[1], *map(int, sys.argv[2:])
draw, token, tokens = random.Random(1).random, 0, array.array("H")
for _ in range(count):
    token = (token * 31 + 7) % vocabulary if draw() < 0.5 else int(vocabulary ** draw()) - 1
    tokens.append(token)
with open(path, "wb") as f:
    f.write(array.array("i", [20240520, 1, count] + [0] * 253).tobytes() + tokens.tobytes())
PYTHON
}

# ---- Runs, one at a time ---------------------------------------------------------------------------------------------

job='' current='' code=0 status=0 # the run's process and name, and how it ended
now() { echo "${EPOCHREALTIME/,/.}"; }
seconds_left() { echo $((stage_end - SECONDS)); }
log() { echo "$OUT/$1.log"; }

begin() { # NAME RANKS OPTIONS...
    local launcher=()
    current=$1
    [ "$2" = 1 ] || launcher=("${mpirun[@]}" -np "$2" "${as_machine[@]}")
    GNS_RANKS_CHECK=$work/$current setsid "${launcher[@]}" "$TRAINER" --train "$work/text.bin" --out "$work/$current" \
        --vocab-size "$vocabulary" --val-every 0 --checkpoint-every 0 "${threads[@]}" "${@:3}" > "$(log "$current")" 2>&1 &
    job=$!
}

run_processes() { # [R]: prints the processes of the current run, with mpirun; given R, only rank R's
    local environment
    grep -lzxF "GNS_RANKS_CHECK=$work/$current" /proc/[0-9]*/environ 2> /dev/null | while read -r environment; do
        [ $# = 0 ] || grep -qzx "OMPI_COMM_WORLD_RANK=$1" "$environment" 2> /dev/null || continue
        cut -d / -f 3 <<< "$environment"
    done
}

runs() { kill -0 "$job" 2> /dev/null; }
steps_done() { cat "$work/$current/metrics.jsonl" 2> /dev/null | grep -c '"loss"'; }

# Kills the run. Waits until its processes are dead and their memory is free, at most 20 s.
kill_run() {
    local process state processes end=$((SECONDS + 20))
    {
        processes=$(run_processes)
        kill -KILL $processes
        for process in $processes; do
            while read -r _ _ state _ < "/proc/$process/stat" && [ "$state" != Z ] && [ $SECONDS -lt $end ]; do sleep 0.05; done
        done
        wait "$job"
    } 2> /dev/null
}

await_end() { # SECONDS: waits for the run's end and sets `code`; kills a run that is late and sets 124
    local end=$((SECONDS + $1))
    while runs; do
        [ $SECONDS -lt $end ] || { kill_run; code=124; return; }
        sleep 0.05
    done
    wait "$job" 2> /dev/null
    code=$?
}

await_steps() { # COUNT: waits for COUNT steps; fails if the run ends earlier, or time is up
    while [ "$(steps_done)" -lt "$1" ]; do
        sleep 0.05
        runs && [ "$(seconds_left)" -gt 0 ] || return 1
    done
}

tell_failure() { # WHAT
    row FAIL "$1" "exit code $code: $(grep -hE '^error|noticed that process' "$(log "$current")" | tail -n 1 | cut -c 1-150)"
}

await_success() { # WHAT: waits for the run's end; fails if the run fails
    await_end "$(seconds_left)"
    [ $code = 0 ] || { tell_failure "$1"; return 1; }
}
time_is_left() { [ "$(seconds_left)" -gt "$2" ] || { row SKIP "$1" "no time left"; return 1; }; } # WHAT SECONDS

values() { grep -o "\"$2\": [^,}]*" "$work/$1/metrics.jsonl" | cut -d ' ' -f 2; } # NAME FIELD
median() { sort -g | awk '{ x[NR] = $1 } END { print NR ? (x[int((NR + 1) / 2)] + x[int(NR / 2) + 1]) / 2 : "nan" }'; }

# ---- agree: every number of ranks trains the same run; every mode gives the same bits --------------------------------

# Prints the largest difference of a field between two runs at the same step, divided by SCALE. In SCALE, an awk
# expression, $2 is the second run's value, $3 its gns_ln_s, and $4 its batch.
farthest() { # A B FIELD SCALE
    paste <(values "$1" "$3") <(values "$2" "$3") <(values "$2" gns_ln_s) <(values "$2" batch) | awk '
        NF != 4 || /null/ { bad = 1; next }
        { d = ($1 - $2) / ('"$4"'); if (d < 0) d = -d; if (!(d <= most)) most = d }
        END { print NR && !bad ? most + 0 : "nan" }'
}

# Checks that two runs are equal up to rounding. Their learning rate must be low: rounding grows if the loss jumps.
# G2 may be near 0, so its error is relative to G2 + S / B.
same_run() { # A B
    local loss s g2
    loss=$(farthest "$1" "$2" loss 1) s=$(farthest "$1" "$2" gns_ln_s "\$2") g2=$(farthest "$1" "$2" gns_ln_g2 "(\$2 < 0 ? -\$2 : \$2) + \$3 / \$4")
    row "$(verdict "\"$loss\" != \"nan\" && $loss <= $loss_tolerance")" "$1 and $2: loss" \
        "differs by at most $loss ($(values "$1" loss | grep -c .) steps; $loss_tolerance)"
    row "$(verdict "\"$s$g2\" !~ /nan/ && $s <= $gns_tolerance && $g2 <= $gns_tolerance")" "$1 and $2: GNS" \
        "S differs by at most $s, G2 by $g2 of G2 + S/B ($gns_tolerance)"
    [ "$(values "$1" examples)" = "$(values "$2" examples)" ] || row FAIL "$1 and $2" "other numbers of examples"
}

same_bits() { # A B
    if cmp -s "$(newest_checkpoint "$work/$1")/model.safetensors" "$(newest_checkpoint "$work/$2")/model.safetensors"; then
        row PASS "$1 and $2: weights" "equal bit for bit"
    else
        row FAIL "$1 and $2: weights" "differ"
    fi
}

agree_run() { # NAME RANKS OPTIONS...: runs with a batch that 4 or 8 ranks cannot divide evenly
    local tokens=$((agree_batch * agree_T))
    time_is_left "$1" 0 || return 1
    begin "$1" "$2" "${agree_shape[@]}" --micro-batch "$agree_rows" --batch-tokens $tokens --steps $agree_steps \
        --lr $agree_lr --warmup-tokens $((agree_steps * tokens / 2)) "${@:3}"
    await_success "$1"
}

agree_ranks() { # NAME
    local n
    agree_run "$1-r1" 1 || return
    for n in ${rank_counts#1 }; do
        agree_run "$1-r$n" "$n" && same_run "$1-r$n" "$1-r1"
    done
}

same_in_every_mode() { # NAME OPTIONS...: compares runs with --zero 0, 2 and 3 to run NAME, which has the default 1
    local zero
    for zero in 0 2 3; do agree_run "$1-z$zero" "$RANKS" --zero $zero "${@:2}" && same_bits "$1-z$zero" "$1"; done
}

agree() {
    local name=b$agree_batch all=b$agree_batch-r$RANKS
    agree_ranks "$name"
    same_in_every_mode "$all"
    agree_run "$name-again" "$RANKS" && same_bits "$name-again" "$all"

    # --reduce micro-step adds in another order, at every micro-step, hence with another rounding.
    local loss_tolerance=$cadence_tolerance by=$all-micro-step rows=$agree_rows
    agree_rows=$((rows / 4)) agree_run "$by" "$RANKS" --zero 2 --reduce micro-step && same_run "$by" "$name-r1"
    agree_rows=$((rows / 4)) agree_run "$by-z3" "$RANKS" --zero 3 --reduce micro-step --recompute block && same_bits "$by-z3" "$by"

    # Rounding gradients to bf16 for the transfer changes a loss less than a bf16 engine's own rounding.
    loss_tolerance=1e-3 gns_tolerance=0.02
    agree_run "$all-wire-bf16" "$RANKS" --comm-dtype bf16 && same_run "$all-wire-bf16" "$name-r1"

    # With ZeRO-3 a block's weights are converted to e4m3 when they arrive.
    local type
    for type in fp8 fp8-dw; do
        if "$TRAINER" --dry-run --vocab-size "$vocabulary" "${agree_shape[@]}" --dtype $type > "$work/$type.plan" 2>&1; then
            agree_run $type "$RANKS" --dtype $type && same_in_every_mode $type --dtype $type
        else row SKIP "$type" "$(head -n 1 "$work/$type.plan")"; fi
    done

    # Training in fp32 does not magnify rounding, so a difference above these tolerances is a fault.
    local TRAINER=$BUILD/cuda-FP32/train_gpt2cu gns_tolerance=1e-3
    loss_tolerance=1e-4
    [ -z "$gpus" ] || if [ -x "$TRAINER" ]; then agree_ranks fp32; else row SKIP "fp32" "no $TRAINER"; fi
}

# Pairs of ranks that share one model train like one rank with the whole model; every mode gives the same bits.
tensor() {
    local mesh=tensor-r$RANKS
    [ $((RANKS % 2)) = 0 ] || { row SKIP "--tensor 2" "$RANKS ranks are no pairs"; return; }
    agree_run tensor-r1 1 --dropout 0.1 || return
    agree_run "$mesh" "$RANKS" --tensor 2 --dropout 0.1 && same_run "$mesh" tensor-r1
    same_in_every_mode "$mesh" --tensor 2 --dropout 0.1
    agree_run "$mesh-again" "$RANKS" --tensor 2 --dropout 0.1 --recompute block && same_bits "$mesh-again" "$mesh"
}

# Replicas on two simulated machines train like one rank; every mode gives the same bits.
shard() {
    local mesh=shard-r$RANKS half=$((RANKS / 2)) as_machine
    [ $((RANKS % 2)) = 0 ] && [ "$MACHINES" = 1 ] || { row SKIP "--shard machine" "$RANKS ranks are no two machines"; return; }
    cc -shared -fPIC -o "$work/fault.so" dev/test/preload/fault.c -lpthread -ldl || { row SKIP "--shard machine" "no C compiler"; return; }
    as_machine=(bash -c 'export OMPI_COMM_WORLD_LOCAL_SIZE=$0 FAULT_HOST=node$((OMPI_COMM_WORLD_RANK / $0)) LD_PRELOAD=$1
        export NCCL_HOSTID=$FAULT_HOST NCCL_SOCKET_IFNAME=lo CUDA_VISIBLE_DEVICES=$OMPI_COMM_WORLD_RANK; shift; exec "$@"' "$half" "$work/fault.so")
    agree_run shard-r1 1 || return
    agree_run "$mesh" "$RANKS" --shard machine && same_run "$mesh" shard-r1
    same_in_every_mode "$mesh" --shard machine
    agree_run "$mesh-again" "$RANKS" --shard machine --recompute block && same_bits "$mesh-again" "$mesh"
    [ $((half % 2)) = 1 ] || { agree_run "$mesh-tensor" "$RANKS" --shard machine --tensor 2 --zero 3 && same_run "$mesh-tensor" shard-r1; }
    local loss_tolerance=1e-3 gns_tolerance=0.02
    agree_run "$mesh-wire-bf16" "$RANKS" --shard machine --comm-dtype bf16 && same_run "$mesh-wire-bf16" shard-r1
}

# With other optimizers, too, ranks train like one rank, and every mode gives the same bits. With Muon a rank owns whole matrices.
optimizers() {
    local name
    for name in ${OPTIMIZERS:-lamb muon}; do
        agree_run "$name-r1" 1 --optimizer "$name" || continue
        agree_run "$name" "$RANKS" --optimizer "$name" && same_run "$name" "$name-r1"
        same_in_every_mode "$name" --optimizer "$name"
    done
}

# ---- faults: a run whose rank is killed or stopped ends soon, and names the rank -------------------------------------

faults() {
    local victim=$((RANKS - 1)) name signal wanted gone struck seconds said verdict
    gone="rank $victim \(process [0-9]+\) is stopped or gone"
    while read -r name signal deadline wanted; do # NAME-after-N gets its signal after N seconds, while MPI, CUDA and NCCL start
        begin "$name" "$RANKS" "${agree_shape[@]}" --micro-batch $agree_rows --batch-tokens $((8 * RANKS * agree_T)) \
            --steps 100000000 --zero "$ZERO" --deadline "$deadline"
        case $name in
        *-after-*)
            until [ -n "$(run_processes $victim)" ] || ! runs; do :; done
            sleep "${name##*-}"
            ;;
        *) await_steps 10 ;;
        esac
        struck=$(now)
        kill -"$signal" $(run_processes $victim) 2> /dev/null
        await_end $((deadline + 30))
        seconds=$(calculate "$(now) - $struck" %.1f)
        said=$(grep -hoE "$wanted" "$(log "$name")" | tail -n 1 | cut -c 1-150)
        verdict=FAIL
        [ $code != 78 ] || [ -z "$said" ] || [ "${seconds%.*}" -ge $((deadline + 20)) ] || verdict=PASS
        row $verdict "rank $victim $name" \
            "exit code $code after $seconds s (wanted 78 within $((deadline + 20)) s): ${said:-no line with '$wanted'}"
    done << EOF
killed KILL 5 process rank $victim .* signal 9
stopped STOP 5 $gone
stopped-after-0 STOP 2 $gone|rank $victim has not started
stopped-after-1 STOP 2 $gone|rank $victim has not started
EOF
}

# ---- scaling and memory ----------------------------------------------------------------------------------------------

tok_per_s() { values "$1" tok_per_s | sed -n "6,${2}p" | median; } # NAME STEPS: prints the median of steps 6 to STEPS

# Kills the run after STEPS steps, before it saves. Writes NAME.speed (tok/s) and NAME.memory (MiB).
speed_run() { # NAME RANKS STEPS OPTIONS...
    time_is_left "$1" 5 || return 1
    begin "$1" "$2" --seq-len $speed_T --steps 1000000 "${@:4}"
    await_steps "$3" || { await_end 0; tell_failure "$1"; return 1; }
    memory_used > "$work/$1.memory"
    kill_run
    tok_per_s "$1" "$3" > "$work/$1.speed"
}

# Runs one training per GPU, all at once, since GPUs differ by a few percent and ranks wait for the slowest. Writes the
# speeds, sorted ascending, to NAME.all, and their mean to NAME.speed.
speed_alone() { # NAME STEPS OPTIONS...
    local gpu jobs=()
    for ((gpu = 0; gpu < RANKS; gpu++)); do
        CUDA_VISIBLE_DEVICES=$gpu begin "$1-gpu$gpu" 1 --seq-len $speed_T --steps 1000000 "${@:3}"
        jobs+=("$job")
    done
    for ((gpu = 0; gpu < RANKS; gpu++)); do
        current=$1-gpu$gpu job=${jobs[gpu]}
        await_steps "$2" || { code=none; tell_failure "$current"; kill -KILL "${jobs[@]}" 2> /dev/null; return 1; }
    done
    kill -KILL "${jobs[@]}" 2> /dev/null
    wait "${jobs[@]}" 2> /dev/null
    for ((gpu = 0; gpu < RANKS; gpu++)); do tok_per_s "$1-gpu$gpu" "$2"; done | sort -g > "$work/$1.all"
    awk '{ sum += $1 } END { print sum / NR }' "$work/$1.all" > "$work/$1.speed"
}

memory_used() { # prints MiB used on the fullest GPU; without a GPU, resident MiB of the largest process, with MPI's memory
    if [ -n "$gpus" ]; then
        nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | awk -v ranks="$MACHINES" '{ print $1 / ranks }'
    else
        for process in $(run_processes); do awk '/^VmRSS/ { print $2 / 1024 }' "/proc/$process/status" 2> /dev/null; done
    fi | sort -g | tail -n 1
}

tell_alone() { # WHAT NAME
    row FIGURE "$1, each GPU alone" "$(awk '{ printf "%.0f ", $1 }' "$work/$2.all")tok/s, mean $(calculate "$(cat "$work/$2.speed")" %.0f)$3"
}

tell_speed() { # WHAT NAME RANKS BASE FLOOR MORE; FLOOR may be empty
    local speed share slowest verdict=FIGURE
    speed=$(cat "$work/$2.speed")
    share=$(calculate "100 * $speed / ($3 * $(cat "$work/$4.speed"))" %.1f)
    slowest=$(calculate "100 * $speed / ($3 * $(head -n 1 "$work/$4.all"))" %.1f)
    [ -z "$5" ] || verdict=$(verdict "$share >= $5" SLOW)
    row "$verdict" "$1" "$(calculate "$speed" %.0f) tok/s, $share% of $3 x one GPU${5:+ (floor $5%)}, $slowest% of $3 x the slowest$6"
}

# Each rank processes as many rows as a GPU alone. The extra time of a step is communication.
weak_scaling() { # STEPS FLOOR RANK_COUNTS MODEL ROWS
    local n mode zero wire cut floor base=$4-alone name tokens ms ms1
    speed_alone "$base" "$1" --model "$4" --micro-batch "$5" --batch-tokens $(($5 * speed_T)) || return
    ms1=$(calculate "1000 * $5 * $speed_T / $(head -n 1 "$work/$base.all")" %.3f)
    tell_alone "$4, $5 rows" "$base" "; the slowest one's step $ms1 ms"
    for n in $3; do
        tokens=$((n * $5 * speed_T))
        # mode: ZERO [COMM_DTYPE [TENSOR]]. llm.c transfers gradients in bf16.
        for mode in 0 1 2 3 "1 bf16" "1 fp32 2"; do
            read -r zero wire cut <<< "$mode"
            [ "$n" = "$RANKS" ] || [ "$mode" = 1 ] || continue
            [ $((n % ${cut:-1})) = 0 ] || continue
            name=$4-r$n-z$zero$wire$cut floor=$2
            [ -z "$cut" ] || floor=''
            speed_run "$name" "$n" "$1" --model "$4" --micro-batch $(($5 * ${cut:-1})) --batch-tokens $tokens --zero "$zero" \
                --comm-dtype "${wire:-fp32}" --tensor "${cut:-1}" || continue
            ms=$(calculate "1000 * $tokens / $(cat "$work/$name.speed")" %.3f)
            tell_speed "$4, $5 rows a rank, $n ranks, ZeRO-$zero${wire:+, $wire}${cut:+, --tensor $cut}" "$name" "$n" "$base" "$floor" \
                "; a step $ms ms, $(calculate "$ms - $ms1" %.2f) ms more than the slowest alone"
        done
    done
}

# The batch is the same for any number of ranks.
strong_scaling() {
    local base=$strong_model-b$strong_batch-alone name=$strong_model-b$strong_batch-r$RANKS tokens=$((strong_batch * speed_T))
    local options=(--model "$strong_model" --micro-batch "$strong_rows" --batch-tokens "$tokens")
    speed_alone "$base" 12 "${options[@]}" || return
    tell_alone "$strong_model, $tokens tokens a step" "$base" ""
    speed_run "$name" "$RANKS" 20 "${options[@]}" --zero 1 &&
        tell_speed "$strong_model, $tokens tokens a step, $RANKS ranks, ZeRO-1" "$name" "$RANKS" "$base" 95 ""
}

scaling() {
    strong_scaling
    weak_scaling 30 95 "${rank_counts#1 }" "${small_model[@]}"
    weak_scaling 16 96 "$RANKS" "${large_model[@]}"
}

planned() { # NAME PATTERN: prints the sum of the MiB in the plan's lines that match
    awk -v pattern="^ *($2)" '$0 ~ pattern { for (i = 2; i <= NF; i++) if ($i ~ /^MiB/) { sum += $(i - 1); break } } END { print sum + 0 }' "$work/$1.plan"
}

# --zero changes only the memory of the state. A ZeRO-0 rank holds all state. Other memory (driver, NCCL,
# activations) is the same in all modes.
memory() {
    local zero name used parameters rest state bytes want all close=FIGURE options=(--model "$memory_model" --micro-batch "$memory_rows")
    options+=(--batch-tokens $((RANKS * memory_rows * speed_T)))
    for zero in 0 1 2 3; do
        name=memory-z$zero
        "$TRAINER" --dry-run --vocab-size "$vocabulary" --seq-len $speed_T --checkpoint-every 0 "${options[@]}" --zero "$zero" --ranks "$RANKS" \
            > "$work/$name.plan" 2> "$work/$name.error" || { row SKIP "ZeRO-$zero" "$(cat "$work/$name.error")"; return; }
        speed_run "$name" "$RANKS" 5 "${options[@]}" --zero "$zero" || return
        used=$(cat "$work/$name.memory")
        parameters=$(awk '/^parameters / { gsub(/[,:]/, "", $2); print $2 }' "$work/$name.plan")
        state=$(planned "$name" "parameters|master|working|gradients|AdamW")
        [ "$zero" != 0 ] || rest=$(calculate "$used - $state" %.1f)
        bytes=$(calculate "($used - $rest) * 1048576 / $parameters" %.2f)
        want=$(calculate "$state * 1048576 / $parameters" %.2f)
        all=$(planned "$name" "memory in all")
        [ -z "$gpus" ] || close=$(verdict "$bytes <= 1.05 * $want && $bytes >= 0.95 * $want && $used <= 1.05 * $all && $used >= 0.95 * $all")
        row "$close" "$memory_model, $RANKS ranks, ZeRO-$zero" \
            "$bytes bytes of state a parameter, predicted $want; $used MiB in all, predicted $all"
    done
}

finish() {
    local run
    [ -z "$job" ] || { runs && kill_run; } 2> /dev/null
    for run in "$work"/*/metrics.jsonl; do
        [ ! -f "$run" ] || cp "$run" "$OUT/$(basename "$(dirname "$run")").jsonl"
    done
    rm -rf "$work"
    show_table
}

declare -A stage_seconds=([agree]=180 [tensor]=60 [shard]=120 [optimizers]=50 [faults]=90 [scaling]=320 [memory]=95) # d48's ranks take 15 s to start
[ $# -gt 0 ] || set -- $stages
begin_table "$OUT"
work=$(mktemp -d -p "$OUT" runs.XXXXXX)
trap 'status=$?; finish || status=1; exit $status' EXIT
trap 'exit 130' INT TERM
make_text "$work/text.bin" "$text_tokens" "$vocabulary"
for stage in "$@"; do
    begun=$SECONDS
    echo "== $stage" | tee -a "$table"
    stage_end=$((SECONDS + MACHINES * stage_seconds[$stage]))
    [ $stage_end -lt "$LIMIT" ] || stage_end=$LIMIT
    $stage
    row FIGURE "the stage $stage took" "$((SECONDS - begun)) s"
done
