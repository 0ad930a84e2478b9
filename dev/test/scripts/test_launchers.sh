#!/usr/bin/env bash
# The launchers in scripts/: what they refuse, how they restart a run until it is done, and how they stop.
# Uses $GNS_BUILD (dev/test/run.sh sets it); no GPU is needed.
set -u
. "$(dirname "$0")/../checks.sh" launchers
mpi_here
unset CUDA_VISIBLE_DEVICES

# A launcher, and a stand-in for the trainer. Each start takes a line of the file `codes` and exits with its number. m before
# the number: it moves the run aside first; + after it: it leaves a checkpoint; k at the end: it kills the launcher of a
# Slurm job.
mkdir "$work/bin" "$work/data"
for tool in bash cat dirname env grep head id mkdir printf sed setsid; do
    path=$(command -v $tool) && [ -x "$path" ] && ln -s "$path" "$work/bin/$tool"
done
cat > "$work/launcher.sh" <<END
#!/usr/bin/env bash
NAME=test
OPTIONS=(--lr 1)
. "$root/scripts/launch.sh"
launch "\$@"
END
cat > "$work/fake_cu" <<'END'
#!/usr/bin/env bash
# MPI_Init_thread
cd "$(dirname "$0")"
echo "$*" >> starts
leave() { mkdir -p "$1" && touch "$1/MANIFEST.json"; }
code=$(head -n 1 codes)
sed -i 1d codes
case $code in m*) mv out "out.$(grep -c . starts)" && mkdir out ;; esac
case $code in *+*) leave "out/step_$(printf %08d "$(grep -c . starts)")" ;; esac
case $code in *k) kill -KILL "$(ps -o ppid= $PPID | tr -d ' ')" ;; esac
exit "${code//[mk+]/}"
END
printf '#!/usr/bin/env bash\necho "GPU 0: none"\necho "GPU 1: none"\n' > "$work/nvidia-smi"
chmod +x "$work"/launcher.sh "$work"/fake_cu "$work"/nvidia-smi
touch "$work"/data/x_{train,val}_0.bin
cat llmc/*/*.c > "$work/text"
"$tokenize" --tokenizer bytes --out "$work/data/y" --val-fraction 0.1 "$work/text" > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
leave() { mkdir -p "$1" && touch "$1/MANIFEST.json"; } # CHECKPOINT
data=(TRAIN="$work/data/x_train_*.bin" VAL="$work/data/x_val_*.bin" OUT="$work/out" PROGRAM="$work/fake_cu")

refuses() { # CODE TEXT VARIABLE=VALUE...
    local code=$1 text=$2 got
    shift 2
    env PATH="$work/bin" "${data[@]}" "$@" bash "$work/launcher.sh" > "$work/log" 2>&1
    got=$?
    [ $got = "$code" ] || { echo "exit code $got, not $code"; cat "$work/log"; return 1; }
    grep -q "^error: .*$text" "$work/log" && [ "$(wc -l < "$work/log")" = 1 ] || { cat "$work/log"; return 1; }
}
no_program() { refuses 64 "not there" PROGRAM=./no_such_cu; }
no_data() { refuses 65 "no training shards" TRAIN="$work/none_*.bin" && refuses 65 "no validation shards" VAL="$work/none_*.bin"; }
no_gpu() { refuses 69 "no NVIDIA GPU"; }
too_many_ranks() { refuses 69 "RANKS=9, and 2 GPUs" PATH="$work/bin:$work" RANKS=9; }
visible_gpus() { # those that CUDA_VISIBLE_DEVICES names
    local here="$work/bin:$work" devices
    refuses 69 "RANKS=2, and 1 GPU in CUDA_VISIBLE_DEVICES=1" PATH="$here" RANKS=2 CUDA_VISIBLE_DEVICES=1 || return 1
    for devices in "" -1 -1,0; do
        refuses 69 "CUDA_VISIBLE_DEVICES=$devices leaves no GPU" PATH="$here" CUDA_VISIBLE_DEVICES="$devices" || return 1
    done
    mkdir -p "$work/many"
    printf '#!/bin/sh\nfor i in 0 1 2 3; do echo "GPU $i: none"; done\n' > "$work/many/nvidia-smi"
    printf '#!/usr/bin/env bash\n[ "$*" = --version ] && echo "Open MPI" || echo "$*" > "%s"\n' "$work/starts" > "$work/many/mpirun"
    chmod +x "$work"/many/*
    for devices in unset:4 0,1:2 GPU-7d6f,GPU-12ab,GPU-aa:3 3,2,-1,0:2; do
        (
            [ "${devices%:*}" = unset ] && unset CUDA_VISIBLE_DEVICES || export CUDA_VISIBLE_DEVICES="${devices%:*}"
            env PATH="$work/many:$PATH" "${data[@]}" bash "$work/launcher.sh" > "$work/log" 2>&1
        )
        grep -q -- "-np ${devices##*:} " "$work/starts" || { echo "$devices: $(cat "$work/starts")"; cat "$work/log"; return 1; }
    done
}
no_mpirun() {
    refuses 64 "no mpirun" PATH="$work/bin:$work" || return 1
    PATH=$work/bin:$work "$BASH" scripts/mpirun.sh -np 2 program > "$work/log" 2>&1
    [ $? = 64 ] && one_line "$work/log" && says "$work/log" "error: no mpirun here. Install Open MPI" || { cat "$work/log"; return 1; }
}
no_mpi_in_it() {
    sed /MPI_Init_thread/d "$work/fake_cu" > "$work/other_cu" && chmod +x "$work/other_cu"
    refuses 64 "built without MPI or NCCL" PATH="$work/bin:$work" PROGRAM="$work/other_cu"
}
no_slurm() {
    env -u SLURM_JOB_ID bash scripts/slurm/run_gpt2.sbatch 124M > "$work/log" 2>&1
    [ $? = 64 ] && grep -q '^error: no Slurm job here' "$work/log"
}

# Stand-ins for Slurm: sbatch reads its lines and runs the job; srun and scontrol write their arguments to a log.
mkdir "$work/slurm"
cat > "$work/slurm/sbatch" <<'END'
#!/usr/bin/env bash
option() { sed -n "s/^#SBATCH --$1=//p" "$job"; }
job=$1
shift
grep -q '^#SBATCH --requeue$' "$job" && [ "$(option signal)" = USR1@300 ] || exit 90
export SLURM_JOB_ID=42 SLURM_SUBMIT_DIR=$PWD SLURM_NTASKS=$(($(option nodes) * $(option ntasks-per-node)))
[ -z "${FAKE_NO_TASKS:-}" ] || unset SLURM_NTASKS
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

submits() { # MODEL CODE STARTS CODES... [--OPTIONS...]: runs the job; the program ends with these codes
    local model=$1 code=$2 starts=$3 got
    shift 3
    local codes=()
    while [[ ${1:--} != -* ]]; do codes+=("$1") && shift; done
    [ -n "${again:-}" ] || rm -rf "$work"/out* "$work/starts"
    rm -f "$work"/slurm/*.log
    touch "$work/slurm/scontrol.log"
    printf '%s\n' "${codes[@]}" > "$work/codes"
    env PATH="$work/slurm:$PATH" "${data[@]}" sbatch scripts/slurm/run_gpt2.sbatch "$model" "$@" > "$work/log" 2>&1
    got=$?
    [ $got = "$code" ] || { echo "exit code $got, not $code"; cat "$work/log"; return 1; }
    [ "$starts" = 0 ] && return
    [ "$(wc -l < "$work/starts")" = "$starts" ] && grep -q -- "--model gpt2-$model " "$work/starts" &&
        grep -q "^--mpi=pmix --kill-on-bad-exit=0 --wait=30 $work/fake_cu --train" "$work/slurm/srun.log"
}
slurm_runs() { for model in 124M 350M 774M 1558M; do submits $model 0 1 0 || return 1; done; }
slurm_queues_again() { submits 350M 75 1 75+ && [ "$(cat "$work/slurm/scontrol.log")" = "requeue 42" ]; }
slurm_restarts_after_a_lost_rank() { submits 774M 0 3 137+ 78+ 0 && [ ! -s "$work/slurm/scontrol.log" ]; }
# sbatch's arguments reach the trainer, but --fresh only until a start has done what it says, in this job or before Slurm
# queued it again, however that start ended.
marked() { compgen -G "$work/out.fresh*" > /dev/null; }
starts_say() { # OPTIONS...: the last words of each start
    local ends="substr(\$2, length(\$2) - length(\$1) + 1) == \$1"
    [ "$(paste -d '|' <(printf '%s\n' "$@") "$work/starts" | awk -F '|' "$ends" | wc -l)" = $# ] &&
        [ "$(wc -l < "$work/starts")" = $# ] || { cat "$work/log" "$work/starts"; return 1; }
}
slurm_starts_over_once() { # CODE CODES: of a first start over an old run, which moves it aside
    old_run && again=1 submits 350M "$1" 1 "$2" --fresh --seed 3 && marked || { cat "$work/log"; return 1; }
    SLURM_RESTART_COUNT=1 again=1 submits 350M 0 3 78+ 0 --fresh --seed 3 || return 1
    starts_say '--fresh --seed 3' ' --seed 3 -y 1' ' --seed 3 -y 1' && ! grep -q -- '--fresh.*-y' "$work/starts" && ! marked
}
slurm_starts_over_at_last() { # CODE CODES: of a first start over an old run, which ends before it moves it aside
    old_run && again=1 submits 350M "$1" 1 "$2" --fresh --seed 3 || return 1
    SLURM_RESTART_COUNT=1 again=1 submits 350M 75 2 m75+ --fresh --seed 3 || return 1
    SLURM_RESTART_COUNT=2 again=1 submits 350M 0 3 0 --fresh --seed 3 || return 1
    starts_say '--fresh --seed 3' '--fresh --seed 3' ' --seed 3 -y 1' && ! marked
}
old_run() { rm -rf "$work"/out* "$work/starts" && leave "$work/out/step_00099999"; }
slurm_starts_over_here() { # without an old run: by option, by config file, and without either
    resumes_as() { # FIRST LATER OPTIONS...: the last words of the start with OPTIONS, and of that when the job is queued again
        submits 350M 75 1 75+ "${@:3}" && SLURM_RESTART_COUNT=1 again=1 submits 350M 0 2 0 "${@:3}" &&
            starts_say "$1" "$2" && ! marked
    }
    echo 'fresh = true' > "$work/fresh.cfg"
    resumes_as '--fresh' ' -y 1' --fresh && resumes_as fresh.cfg ' -y 1' --config "$work/fresh.cfg" &&
        resumes_as '--seed 3' '--seed 3' --seed 3 && submits 350M 75 1 75+ --seed 3 && ! marked
}
slurm_gives_up() { submits 124M 76 1 76 && [ ! -s "$work/slurm/scontrol.log" ]; }
slurm_without_pmix() { FAKE_MPI=pmi2 submits 124M 64 0 && grep -q '^error: this Slurm has no PMIx' "$work/log"; }
slurm_without_model() { submits 125M 64 0 && grep -q "^error: no model is called '125M'" "$work/log"; }
slurm_without_tasks() { FAKE_NO_TASKS=1 submits 124M 64 0 && grep -q '^error: Slurm does not say how many' "$work/log"; }

# The lengths of llm.c's scripts of the same names: their -x (an epoch, 18,865 steps, for 124M) times -d.
plans() { # LAUNCHER LINE OPTIONS...
    TRAIN="$work/data/y_train_*.bin" VAL="$work/data/y_val_*.bin" PROGRAM=$train RANKS=1 OUT="$work/dry" \
        bash "scripts/$1" --dry-run "${@:3}" > "$work/log" 2>&1
    grep -qE "$2" "$work/log" || { echo "$1 does not say $2"; grep -E '^error|^run' "$work/log"; return 1; }
}
recipes() {
    plans run_gpt2_124M.sh '^run +18,865 steps of 512 rows' && plans run_gpt2_350M.sh '^run +60,000 steps of 512 rows' &&
        plans run_gpt2_774M.sh '^run +286,102 steps of 512 rows' && plans run_gpt2_1558M.sh '^run +32,000 steps of 1024 rows' &&
        plans run_gpt2_124M_gns.sh '^FLOPs .* for 9.89B tokens'
}

launches() { # CODE STARTS CODES...: the launcher ends with CODE after STARTS when the program ends with CODES
    local code=$1 starts=$2 got
    shift 2
    rm -rf "$work/out" "$work/starts"
    printf '%s\n' "$@" > "$work/codes"
    env PATH="$PATH:$work" "${data[@]}" RANKS=1 bash "$work/launcher.sh" --seed 2 > "$work/log" 2>&1
    got=$?
    [ $got = "$code" ] || { echo "exit code $got, not $code"; cat "$work/log"; return 1; }
    [ "$(wc -l < "$work/starts")" = "$starts" ] || { echo "starts:"; cat "$work/starts"; return 1; }
    grep -q -- '--train .*x_train.* --lr 1 --seed 2$' "$work/starts"
}
done_at_once() { launches 0 1 0; }
one_tokenizer() { # an option overrides the environment
    rm -rf "$work/out" "$work/starts"
    echo 0 > "$work/codes"
    env PATH="$PATH:$work" "${data[@]}" RANKS=1 TOKENIZER=found bash "$work/launcher.sh" --tokenizer given > "$work/log" 2>&1
    [ "$(grep -o -- '--tokenizer [a-z]*' "$work/starts")" = "--tokenizer given" ] || { cat "$work/starts" "$work/log"; return 1; }
}
newest_by_name() { # in shell and in Python, by the names of llmc/checkpoint/archive.c
    local run="$work/new est" name python
    python=$(find_python) || return
    newest() {
        local got
        got=$(newest_checkpoint "$run") && [ "$got" = "$1" ] || { echo "not $1 but $got"; return 1; }
        got=$(PYTHONPATH=scripts "$python" -c 'import branched_probe, sys; print(branched_probe.newest_checkpoint(sys.argv[1]))' "$run" 2>&1)
        [ "$got" = "$1" ] || { [ -z "$1" ] && [[ $got == *"no checkpoint"* ]]; } || { echo "in Python: not $1 but $got"; return 1; }
    }
    for name in step_00000008.damaged step_notes step_7 step_0000000x step_000000009; do leave "$run/$name"; done
    mkdir "$run/step_00000009" # which is not whole
    newest "" && leave "$run/step_00000008" && newest "$run/step_00000008" && leave "$run/step_99999999" && leave "$run/step_100000000" &&
        newest "$run/step_100000000"
}
lost() { launches 78 1 137 && says "$work/log" "error: a rank was lost (exit code 137: signal 9). Start the same command again"; }
again_until_done() { launches 0 4 75+ 78+ 137+ 0; }
no_restart_without_checkpoint() { # the earlier run is moved aside, and the new one dies before its first checkpoint
    rm -rf "$work/out" "$work/starts"
    leave "$work/out/step_00099999"
    sed 's|^exit|rm -rf out/*; exit|' "$work/fake_cu" > "$work/moves_cu" && chmod +x "$work/moves_cu"
    printf '%s\n' 78 78 0 > "$work/codes"
    env PATH="$PATH:$work" "${data[@]}" PROGRAM="$work/moves_cu" RANKS=1 bash "$work/launcher.sh" --fresh > "$work/log" 2>&1
    [ $? = 78 ] && [ "$(wc -l < "$work/starts")" = 1 ] || { cat "$work/log" "$work/starts"; return 1; }
}
no_restart_without_progress() { launches 78 2 75+ 78 0; }
starts_over_once() { # SPELLING...: of --fresh; the later starts resume
    rm -rf "$work/out" "$work/starts"
    printf '%s\n' 137+ 75+ 0 > "$work/codes"
    env PATH="$PATH:$work" "${data[@]}" RANKS=1 bash "$work/launcher.sh" --seed 2 "$@" --keep 3 > "$work/log" 2>&1 || { cat "$work/log"; return 1; }
    diff <(sed 's/.* --lr 1 //' "$work/starts") <(
        echo "--seed 2 $* --keep 3"
        echo "--seed 2 --keep 3 -y 1"
        echo "--seed 2 --keep 3 -y 1"
    )
}
no_restart_of_a_permanent_error() { launches 76 2 75+ 76+ 0; }
while_the_last_start_dies() { # a restart that is refused is tried again, the first start is not
    mkdir -p "$work/quick" && printf '#!/bin/sh\n' > "$work/quick/sleep" && chmod +x "$work/quick/sleep"
    PATH="$work/quick:$PATH" launches 0 4 75+ 64 64 0 && launches 64 1 64 0 && PATH="$work/quick:$PATH" launches 78 4 75+ 64 64 78 0
}

# The user's option replaces the recipe's, under either name.
cat > "$work/recipe.sh" <<END
#!/usr/bin/env bash
# A made-up recipe.
# It does nothing.
NAME=recipe
OPTIONS=(--micro-batch 64 --steps 9 --keep-best --lr 6e-4)
. "$root/scripts/launch.sh"
launch "\$@"
END
recipe() { # ARGUMENTS...: runs it, or $recipe; the file starts then has the program's arguments
    rm -rf "$work/starts"
    echo 0 > "$work/codes"
    env PATH="$PATH:$work" "${data[@]}" RANKS=1 TOKENIZER= bash "${recipe:-$work/recipe.sh}" "$@" > "$work/log" 2>&1 || { cat "$work/log"; return 1; }
}
becomes() { # OPTIONS ARGUMENTS...: the words after --out
    recipe "${@:2}" && [ "$(sed "s|^--train .* --out $work/out ||" "$work/starts")" = "$1" ] && return
    echo "${*:2}: $(cat "$work/starts")"
    return 1
}
given_options() {
    becomes "--micro-batch 64 --steps 9 --keep-best --lr 6e-4" &&
        becomes "--steps 9 --keep-best --lr 6e-4 --micro-batch 16" --micro-batch 16 &&
        becomes "--steps 9 --keep-best --lr 6e-4 --micro-batch=16" --micro-batch=16 &&
        becomes "--steps 9 --keep-best --lr 6e-4 -b 16" -b 16 &&
        becomes "--micro-batch 64 --keep-best --lr 6e-4 -x 5" -x 5 &&
        becomes "--micro-batch 64 --keep-best --lr 6e-4 --train-tokens 1e9" --train-tokens 1e9 &&
        becomes "--micro-batch 64 --steps 9 --lr 6e-4 --keep-best" --keep-best &&
        becomes "--micro-batch 64 --steps 9 --keep-best --lr 6e-4 --prompt a --steps b [x]" --prompt 'a --steps b [x]' &&
        sed -i 's/--steps 9/--train-tokens 9e9/' "$work/recipe.sh" &&
        becomes "--micro-batch 64 --keep-best --lr 6e-4 --steps 5" --steps 5
}
# The user's options remove those of the recipe that have no effect with them: the user did not type those.
nothing_left_over() { # LAUNCHER ARGUMENTS...
    plans "$1" '^run|^FLOPs' "${@:2}" && ! grep 'of no use' "$work/log"
}
given_of_no_use() {
    local script
    printf 'lr-schedule = "constant" # as it was\n' > "$work/constant.cfg"
    for script in scripts/run_gpt2_*.sh; do
        script=${script##*/}
        nothing_left_over "$script" --device H200 -k constant --ramp fixed --steps 10 || { echo "$script"; return 1; }
    done
    script=run_gpt2_124M_gns.sh
    nothing_left_over "$script" --device H200 --lr-schedule=inverse-sqrt -v 0 &&
        nothing_left_over "$script" --device H200 --config "$work/constant.cfg" || return 1
    plans "$script" 'final-lr-frac has no effect' --final-lr-frac 0.1 -k constant && # what was typed is looked at
        plans "$script" 'batch-min has no effect' --ramp fixed --batch-min 8 || return 1
    local all="--batch-tokens 64 --ramp gns --batch-min 2 --batch-max 4 --final-lr-frac 0 --val-every 5 --val-tokens 9"
    script="$work/ramp.sh"
    sed "s/^OPTIONS=.*/OPTIONS=($all)/" "$work/recipe.sh" > "$script"
    recipe=$script becomes "$all --keep 3" --keep 3 &&
        recipe=$script becomes "$all --lr-schedule wsd" --lr-schedule wsd &&
        recipe=$script becomes "${all/--ramp gns /} --ramp linear" --ramp linear &&
        recipe=$script becomes "${all/--ramp gns --batch-min 2 --batch-max 4 /} --ramp replay:f" --ramp replay:f &&
        recipe=$script becomes "${all/--final-lr-frac 0 /} -k constant" -k constant &&
        recipe=$script becomes "${all/ --val-every 5 --val-tokens 9/} -v 0" -v 0
}
given_places() { # override the environment's, also for a restart
    local train_text="$work/data/y_train_*.bin" val_text="$work/data/y_val_*.bin"
    recipe -i "$train_text" --val="$val_text" -o "$work/out2" || return 1
    [[ $(cat "$work/starts") = "--micro-batch 64 "*" -i $train_text --val=$val_text -o $work/out2" ]] || { cat "$work/starts"; return 1; }
    ! recipe --train none > "$work/said" && grep -q '^error: no training shards at none' "$work/said" || { cat "$work/said"; return 1; }
    rm -rf "$work/out" "$work/starts"
    printf '%s\n' 137+ 0 > "$work/codes"
    env PATH="$PATH:$work" "${data[@]}" OUT="$work/other" RANKS=1 bash "$work/recipe.sh" --out "$work/out" -y 0 -nk 5 > "$work/log" 2>&1
    [ $? = 0 ] && grep -q "starting again from $work/out/step_" "$work/log" || { cat "$work/log"; return 1; }
}
# Every option of the recipes given again, under llm.c's name where it has one.
given_recipes() {
    local script option alias value again
    "$train" --help > "$work/help"
    for script in scripts/run_gpt2_{350M,124M_gns}.sh; do
        again=()
        while read -r option value; do
            alias=$(awk -v name="$option" '/^  --/ { mine = $1 == name } mine' "$work/help" | grep -oE 'llm\.c -[a-z]+' | cut -c 7-)
            again+=("${alias:-$option}" "$value")
        done < <(sed -n '/^OPTIONS=(/,/^)/p' "$script" | grep -oE -- '--[a-z0-9-]+ [^- ][^ ]*')
        [[ ${#again[@]} -ge 26 && " ${again[*]}" == *" -b "*" -v "* ]] || { echo "$script: only ${again[*]}"; return 1; }
        plans "${script##*/}" '^run|^FLOPs' "${again[@]}" || { echo "${again[*]}"; return 1; }
    done
}

# Paths are relative to the caller's directory; defaults are below the root.
from_elsewhere() {
    mkdir -p "$work/elsewhere/in"
    cp "$work"/data/x_*.bin "$work/elsewhere/in"
    cp "$work/fake_cu" "$work/elsewhere/program_cu"
    cd "$work/elsewhere" || return
    echo 0 > codes
    env PATH="$PATH:$work" RANKS=1 TRAIN='in/x_train_*' VAL='in/x_val_*' OUT=here PROGRAM=program_cu TOKENIZER=mine bash "$work/recipe.sh" > log 2>&1
    [ "$(cut -d ' ' -f 1-6 starts)" = "--train in/x_train_* --val in/x_val_* --out here" ] && grep -q -- '--tokenizer mine$' starts || { cat log starts; return 1; }
    env PATH="$PATH:$work" PROGRAM=./program_cu bash "$work/recipe.sh" > log 2>&1
    grep -qF "no training shards at $root/data/fineweb/" log || { cat log; return 1; }
    env PATH="$PATH:$work" bash "$work/recipe.sh" > log 2>&1
    [ -x "$root/train_gpt2cu" ] || grep -qF "error: $root/train_gpt2cu: not there. Build it: make -C $root train_gpt2cu" log || { cat log; return 1; }
    rm -rf starts
    echo 0 > codes
    env PATH="$PATH:$work" RANKS=1 TRAIN='in/x_train_*' VAL='in/x_val_*' PROGRAM=./program_cu bash "$work/recipe.sh" > log 2>&1
    [ "$(cut -d ' ' -f 5-6 starts)" = "--out $root/runs/recipe" ] || { cat log starts; return 1; }
}

helps() { # --help works whatever is missing
    local script
    for script in scripts/run_gpt2_*.sh dev/test/gpu_check.sh dev/test/ranks_check.sh scripts/lm_eval.sh; do
        (cd "$work" && env PATH="$work/bin" bash "$root/$script" --help) > "$work/log" 2>&1 || { echo "$script: exit code $?"; cat "$work/log"; return 1; }
        grep -q "^$(sed -n '2s/^# \(.\{40\}\).*/\1/p' "$script")" "$work/log" && grep -q '^ .* OUT\|--out' "$work/log" &&
            ! grep -q '^#' "$work/log" || { echo "$script"; cat "$work/log"; return 1; }
    done
    env PATH="$work/bin" bash "$work/recipe.sh" --steps 5 --help > "$work/log" 2>&1
    head -n 2 "$work/log" | cmp - <(printf 'A made-up recipe.\nIt does nothing.\n') && grep -q -- '--micro-batch 64' "$work/log"
}
wrong_words() { # are refused before anything runs
    local script
    for script in dev/test/gpu_check.sh dev/test/ranks_check.sh; do
        OUT=$work/none BUILD=$work/none timeout 20 bash "$script" bogus > "$work/log" 2>&1
        [ $? = 64 ] && grep -q '^error: .*bogus' "$work/log" && [ "$(wc -l < "$work/log")" = 1 ] && [ ! -e "$work/none" ] ||
            { echo "$script"; head -n 5 "$work/log"; return 1; }
    done
}
machines_that_nobody_can_play() {
    local wrong
    for wrong in 'MACHINES=x' 'MACHINES=0' 'MACHINES=2 scaling' 'MACHINES=2 agree scaling'; do
        # shellcheck disable=SC2086
        env OUT="$work/none" TRAINER=/bin/true RANKS=2 ${wrong%% *} timeout 20 bash dev/test/ranks_check.sh \
            $(sed 's/[^ ]* *//' <<< "$wrong") > "$work/log" 2>&1
        [ $? = 64 ] && grep -qE '^error: (MACHINES=. is no number|scaling measures)' "$work/log" && [ ! -e "$work/none" ] ||
            { echo "$wrong"; head -n 5 "$work/log"; return 1; }
    done
}

# An mpirun that hangs when its rank has ended. Started here, since the test takes 10 s.
mkdir "$work/hangs"
mkfifo "$work/hangs/never"
cat > "$work/hangs/mpirun" <<END
#!/usr/bin/env bash
OMPI_COMM_WORLD_RANK=0 sleep 2
read -r < "$work/hangs/never"
END
chmod +x "$work/hangs/mpirun"
(
    PATH="$work/hangs:$PATH" timeout 40 scripts/mpirun.sh -np 2 program > "$work/hangs/log" 2>&1
    echo $? > "$work/hangs/code"
) &
mpirun_that_hangs() {
    until [ -s "$work/hangs/code" ]; do sleep 0.2; done
    [ "$(cat "$work/hangs/code")" = 78 ] && grep -q 'it is killed' "$work/hangs/log" && tail -n 1 "$work/hangs/log" | grep -q '^error: a rank was lost' && return
    cat "$work/hangs/code" "$work/hangs/log"
    return 1
}

# An mpirun whose rank exits with 75 at USR1; its parent has the signal at its default, ignored or blocked. The bash is like
# one before 5.
mkdir "$work/asks"
echo 'unset EPOCHREALTIME EPOCHSECONDS' > "$work/asks/bash_4"
cat > "$work/asks/mpirun" <<'END'
#!/usr/bin/env bash
echo $$ > "$(dirname "$0")/started"
OMPI_COMM_WORLD_RANK=0 bash -c 'trap "exit 75" USR1; for ((i = 0; i < 200; i++)); do sleep 0.05; done'
END
chmod +x "$work/asks/mpirun"
mpirun_hears() {
    local how job code
    for how in default-signal ignore-signal block-signal to-mpirun to-all to-mpirun-ignore-signal to-mpirun-block-signal; do
        rm -f "$work/asks/started"
        env PATH="$work/asks:$PATH" BASH_ENV="$work/asks/bash_4" env --"$(sed -E 's/^to-(mpirun|all)$/default-signal/; s/^to-mpirun-//' <<< "$how")"=USR1,USR2 scripts/mpirun.sh -np 1 program > "$work/log" 2>&1 &
        job=$!
        until [ -s "$work/asks/started" ] || ! kill -0 $job; do sleep 0.05; done
        case $how in
        to-mpirun*) kill -TERM "$(cat "$work/asks/started")" ;;
        to-all) kill -TERM $job $(pgrep -P $job) ;; # the end of a service
        *) kill -USR1 $job ;;
        esac
        wait $job
        code=$?
        [ $code = 75 ] || { echo "$how: exit code $code"; cat "$work/log"; return 1; }
    done
}

# Ctrl-C of `... | tee log` ends the tee as well; mpirun alone ends after ten lines that nobody reads.
mpirun_outlives_its_reader() {
    has_mpi || skip "no Open MPI here, or a build without it" || return
    "$root/scripts/mpirun.sh" -np 2 --oversubscribe "$train" --train "$work/data/y_train_*.bin" \
        --vocab-size 256 --model d1 --heads 1 --channels 32 --seq-len 16 --batch-tokens 128 --steps 300 --sample-every 10 \
        --sample-tokens 40 --threads 1 --out "$work/unread" 2>&1 | head -n 1 > /dev/null
    [ "${PIPESTATUS[0]}" = 0 ] && [ -s "$work/unread/step_00000300/MANIFEST.json" ]
}

mpirun_keeps_words_apart() {
    mkdir -p "$work/speaks"
    printf '#!/bin/sh\necho out; echo err >&2; exit 3\n' > "$work/speaks/mpirun"
    chmod +x "$work/speaks/mpirun"
    PATH="$work/speaks:$PATH" scripts/mpirun.sh -np 1 program > "$work/words" 2> "$work/errors"
    [ $? = 3 ] && [ "$(cat "$work/words")" = out ] && [ "$(cat "$work/errors")" = err ]
}

mpirun_binds_as_asked() { # and does not bind by default
    mkdir -p "$work/binds"
    printf '#!/bin/sh\necho "${OMPI_MCA_hwloc_base_binding_policy:-} $*"\n' > "$work/binds/mpirun"
    chmod +x "$work/binds/mpirun"
    becomes_mpirun() { # POLICY ARGUMENTS...
        local got
        got=$(PATH="$work/binds:$PATH" scripts/mpirun.sh "${@:2}" 2> /dev/null)
        [ "$got" = "$1 ${*:2}" ] || { echo "not '$1 ${*:2}' but '$got'"; return 1; }
    }
    becomes_mpirun none -np 2 program --lr 1 || return 1
    OMPI_MCA_hwloc_base_binding_policy=core becomes_mpirun core -np 2 program || return 1
    local binding
    for binding in "--cpus-per-proc 4" "--cpus-per-rank 4" "--map-by slot:PE=4" "--map-by ppr:2:node:pe=4" "--map-by slot:span,pe=2"; do
        # shellcheck disable=SC2086
        becomes_mpirun "" -np 2 $binding program || return 1
    done
}
mpirun_overrides_the_binding() { # Open MPI's own options, with the default above
    has_mpi && [ "$(nproc)" -gt 1 ] || skip "no Open MPI, or one core" || return
    echo "rank 0=localhost slot=0" > "$work/rankfile"
    cores() { scripts/mpirun.sh -np 1 "$@" grep Cpus_allowed_list /proc/self/status 2> /dev/null; }
    [ "$(cores)" = "$(grep Cpus_allowed_list /proc/self/status)" ] || { echo "bound: $(cores)"; return 1; }
    local binding
    for binding in "--bind-to core" "--cpu-set 0" "--map-by slot:PE=1" "--rankfile $work/rankfile" "--mca hwloc_base_binding_policy core"; do
        # shellcheck disable=SC2086
        [ "$(cores $binding)" != "$(cores)" ] || { echo "$binding does not bind"; return 1; }
    done
}

mpirun_that_cannot_start() {
    has_mpi || skip "no Open MPI here, or a build without it" || return
    "$root/scripts/mpirun.sh" -np 2 --oversubscribe "$work/nowhere" > "$work/log" 2>&1
    local code=$?
    [ $code = 64 ] && grep -q '^error: mpirun did not start the ranks' "$work/log" && ! grep -q 'rank was lost' "$work/log" ||
        { echo "code $code"; cat "$work/log"; return 1; }
}

mpirun_needs_room() { # for its temporary files, in a directory; otherwise one line, and no start
    mkdir -p "$work/crammed"
    printf '#!/bin/sh\necho head\necho "none 20000 19000 1000 95%% /"\n' > "$work/crammed/df"
    printf '#!/bin/sh\ntouch %s\n' "$work/crammed/ran" > "$work/crammed/mpirun"
    chmod +x "$work"/crammed/{df,mpirun}
    TMPDIR=$work PATH="$work/crammed:$PATH" scripts/mpirun.sh -np 1 program > "$work/log" 2>&1
    [ $? = 74 ] && [ ! -e "$work/crammed/ran" ] && one_line "$work/log" && says "$work/log" "error: $work: 1000 KiB are free, " || { cat "$work/log"; return 1; }
    TMPDIR=$work/crammed/df/none PATH="$work/crammed:$PATH" scripts/mpirun.sh -np 1 program > "$work/log" 2>&1
    [ $? = 74 ] && [ ! -e "$work/crammed/ran" ] && one_line "$work/log" && says "$work/log" "error: $work/crammed/df/none: cannot write" || { cat "$work/log"; return 1; }
}

asked_before_it_began() { # while nvidia-smi runs
    mkdir -p "$work/slow"
    cat > "$work/slow/nvidia-smi" <<END
#!/bin/sh
touch "$work/slow/asked"
while [ -e "$work/slow/asked" ]; do sleep 0.05; done
echo GPU 0: x
END
    printf '#!/bin/sh\ntouch %s\n' "$work/slow/ran" > "$work/slow/train_cu"
    chmod +x "$work/slow/nvidia-smi" "$work/slow/train_cu"
    local signal launcher code
    for signal in TERM USR1 HUP; do
        TRAIN="$work/data/y_train_*.bin" VAL="$work/data/y_val_*.bin" OUT="$work/slow/out" PROGRAM="$work/slow/train_cu" \
            PATH="$work/slow:$PATH" env --default-signal=HUP scripts/run_gpt2_124M.sh > "$work/log" 2>&1 &
        launcher=$!
        until [ -e "$work/slow/asked" ] || ! kill -0 $launcher; do sleep 0.05; done
        kill -$signal $launcher
        rm -f "$work/slow/asked"
        wait $launcher
        code=$?
        [ $code = 75 ] && grep -q '^error: asked to stop before it began' "$work/log" && [ ! -e "$work/slow/ran" ] ||
            { echo "$signal: code $code"; cat "$work/log"; return 1; }
    done
}

stops_and_resumes() { # the real trainer with two ranks: USR1 to the launcher
    has_mpi || skip "no Open MPI here, or a build without it" || return
    cat > "$work/small.sh" <<END
NAME=small
OPTIONS=(--vocab-size 256 --layers 1 --heads 1 --channels 32 --seq-len 16 --batch-tokens 128 --steps 30000 --threads 1 --val-every 0)
. "$root/scripts/launch.sh"
launch "\$@"
END
    local run=(TRAIN="$work/data/y_train_*.bin" VAL="$work/data/y_val_*.bin" OUT="$work/small" PROGRAM="$train" RANKS=2
        bash "$work/small.sh") launcher code
    rm -f "$work/log"
    env --block-signal=USR1 "${run[@]}" > "$work/log" 2>&1 &
    launcher=$!
    until [ -s "$work/log" ] || ! kill -0 $launcher; do sleep 0.05; done
    kill -USR1 $launcher
    wait $launcher
    code=$?
    [ $code = 75 ] && grep -q '^stopped (rank 0): SIGUSR1 after step' "$work/log" || { echo "code $code"; tail -n 4 "$work/log"; return 1; }
    rm "$work/log"
    env --ignore-signal=TERM "${run[@]}" > "$work/log" 2>&1 &
    launcher=$!
    until [ -s "$work/log" ] || ! kill -0 $launcher; do sleep 0.05; done
    kill -TERM $launcher
    wait $launcher
    code=$?
    [ $code = 75 ] && grep -q '^resuming from' "$work/log" || { echo "code $code"; tail -n 4 "$work/log"; return 1; }
}

time_is_up() { # the real trainer ends in time, of its own option and, with two ranks, at a launcher's end; nobody restarts it
    local begun code ranks end how=--max-hours=0.003
    for ranks in 1 2; do
        [ $ranks = 1 ] || { has_mpi && how=--max-hours=100; } || skip "no Open MPI here, or a build without it" || return
        begun=$(date +%s) end=$(($(date +%s) + 11))
        env $([ $ranks = 1 ] || echo GNS_END=$end) TRAIN="$work/data/y_train_*.bin" VAL="$work/data/y_val_*.bin" OUT="$work/up$ranks" PROGRAM="$train" \
            RANKS=$ranks bash "$work/small.sh" --steps 100000000 $how > "$work/log" 2>&1
        code=$?
        [ $code = 75 ] && [ "$(date +%s)" -le $end ] && [ "$(date +%s)" -ge $((begun + 6)) ] && ! grep 'starting again' "$work/log" &&
            grep -qE '^stopped( .rank 0.)?: the end of --max-hours after step [0-9]+, saved in ' "$work/log" ||
            { echo "code $code, $(($(date +%s) - begun)) s"; tail -n 4 "$work/log"; return 1; }
    done
}
time_is_not_up_for_a_lost_rank() { GNS_END=1 launches 75 2 78+ 75+; }
restarts_when_a_rank_is_killed() { # the real trainer
    has_mpi || skip "no Open MPI here, or a build without it" || return
    cat > "$work/again.sh" <<END
NAME=again
OPTIONS=(--vocab-size 256 --layers 1 --heads 1 --channels 32 --seq-len 16 --batch-tokens 128 --steps 3000 --threads 1 --val-every 0
    --checkpoint-every 300)
. "$root/scripts/launch.sh"
launch "\$@"
END
    echo "fresh = true" > "$work/fresh.cfg" # for the first start only
    TRAIN="$work/data/y_train_*.bin" VAL="$work/data/y_val_*.bin" OUT="$work/again" PROGRAM="$train" RANKS=2 \
        bash "$work/again.sh" --config "$work/fresh.cfg" > "$work/log" 2>&1 &
    local launcher=$! process
    until compgen -G "$work/again/step_00000?00" > /dev/null || ! kill -0 $launcher; do sleep 0.05; done
    for process in $(pgrep -f -- "--out $work/again "); do
        grep -qzx OMPI_COMM_WORLD_RANK=1 "/proc/$process/environ" && kill -KILL "$process"
    done
    wait $launcher || { echo "exit code $?"; tail -n 4 "$work/log"; return 1; }
    grep -q '^exit code 78: starting again from .*/step_' "$work/log" && grep -q '^resuming from' "$work/log" || { tail -n 9 "$work/log"; return 1; }
    [ "$(grep -c '"step": 3000,' "$work/again/metrics.jsonl")" = 1 ] && [ "$(grep -c '"loss"' "$work/again/metrics.jsonl")" = 3000 ]
}

# SIGKILL to a launcher, to mpirun.sh or to mpirun: the ranks save and end. RANKS without mpirun.sh: 1.
trainers() { pgrep -f "^$train .*--out $work/killed "; }
killed() { # launch.sh|mpirun.sh|mpirun RANKS
    local what=$1 ranks=$2 started victim code end=$((SECONDS + 60))
    has_mpi || skip "no Open MPI here, or a build without it" || return
    rm -rf "$work/killed" "$work/log"
    if [ "$what" = launch.sh ]; then
        TRAIN="$work/data/y_train_*.bin" VAL="$work/data/y_val_*.bin" OUT="$work/killed" PROGRAM="$train" RANKS=$ranks \
            bash "$work/small.sh" --steps 100000000 > "$work/log" 2>&1 &
    else
        scripts/mpirun.sh -np "$ranks" --oversubscribe --allow-run-as-root "$train" --train "$work/data/y_train_*.bin" --out "$work/killed" \
            --vocab-size 256 --model d1 --heads 1 --channels 32 --seq-len 16 --batch-tokens 128 --steps 100000000 --threads 1 > "$work/log" 2>&1 &
    fi
    started=$! victim=$!
    until grep -qs 'step  ' "$work/log" || ! kill -0 $started; do sleep 0.05; done
    [ "$what" != mpirun ] || victim=$(pgrep -P $started -x mpirun)
    kill -KILL "$victim"
    wait $started
    code=$?
    while trainers > /dev/null && [ $SECONDS -lt $end ]; do sleep 0.05; done
    if trainers | xargs -r kill -KILL && [ $SECONDS -ge $end ]; then
        echo "ranks trained on" && return 1
    fi
    if [ "$what" = mpirun ]; then
        [ $code = 78 ]
    else
        grep -q "$what (process $victim) is gone after step" "$work/log"
    fi && [ -n "$(newest_checkpoint "$work/killed")" ] || { echo "exit code $code"; tail -n 5 "$work/log"; return 1; }
}
outlives_its_shell() { # which is no launcher
    has_mpi || skip "no Open MPI here, or a build without it" || return
    bash -c 'exec > "$1" 2>&1; shift; nohup setsid "$@" & sleep 0.1' bash "$work/log" scripts/mpirun.sh -np 2 --oversubscribe --allow-run-as-root \
        "$train" --train "$work/data/y_train_*.bin" --out "$work/outlives" --vocab-size 256 --model d1 --heads 1 --channels 32 --seq-len 16 \
        --batch-tokens 128 --steps 300 --threads 1
    local end=$((SECONDS + 60))
    until [ -s "$work/outlives/step_00000300/MANIFEST.json" ] || [ $SECONDS -ge $end ]; do sleep 0.05; done
    [ $SECONDS -lt $end ] && ! grep 'is gone' "$work/log"
}

for test in no_program no_data no_gpu too_many_ranks visible_gpus no_mpirun no_mpi_in_it no_slurm slurm_runs slurm_queues_again \
    slurm_restarts_after_a_lost_rank slurm_starts_over_here slurm_gives_up slurm_without_pmix slurm_without_model slurm_without_tasks recipes \
    given_options given_of_no_use given_places given_recipes from_elsewhere helps wrong_words machines_that_nobody_can_play newest_by_name done_at_once \
    one_tokenizer lost again_until_done no_restart_without_progress no_restart_without_checkpoint no_restart_of_a_permanent_error while_the_last_start_dies \
    mpirun_hears mpirun_outlives_its_reader mpirun_keeps_words_apart mpirun_binds_as_asked mpirun_overrides_the_binding mpirun_that_cannot_start mpirun_needs_room asked_before_it_began stops_and_resumes time_is_up time_is_not_up_for_a_lost_rank restarts_when_a_rank_is_killed mpirun_that_hangs; do
    try $test
done
try slurm_starts_over_once 75 m75+
try slurm_starts_over_once 75 m75
try slurm_starts_over_once 137 m0k
try slurm_starts_over_once 137 m0+k
try slurm_starts_over_at_last 75 75
try slurm_starts_over_at_last 137 0k
try starts_over_once --fresh
try starts_over_once -y 0
try killed launch.sh 1
try killed launch.sh 2
try killed mpirun.sh 2
try killed mpirun 2
try killed mpirun 1
try outlives_its_shell
exit $failed
