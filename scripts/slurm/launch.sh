# shellcheck shell=bash
# What the Slurm jobs share; sourced by them, with LAUNCHER set to the launcher whose run this is. 300 s before the time
# limit Slurm sends SIGUSR1 to the ranks: they finish their step, save and end with 75, and the job queues itself again.
# Options behind the job's name go to the launcher: sbatch scripts/slurm/NAME.sbatch --seed 2.
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-.}" || exit 70
. "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
[ -n "${SLURM_JOB_ID:-}" ] ||
    fail 64 "no Slurm job here" "Say sbatch scripts/slurm/NAME.sbatch, or $LAUNCHER on one machine"
[[ $(srun --mpi=list 2>&1) == *pmix* ]] ||
    fail 64 "this Slurm has no PMIx (srun --mpi=list)" "Ask for it, or use mpirun within salloc"
[ -n "${SLURM_NTASKS:-}" ] ||
    fail 64 "Slurm does not say how many tasks this job has" "Give it --nodes and --ntasks-per-node"
export RANKS=$SLURM_NTASKS
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # which newer srun do not take from sbatch by themselves
# Ranks that stop with 75 do not leave together, for each has a GPU to give back: --kill-on-bad-exit would kill the later
# ones, and make of a stop a lost rank. A rank that dies is noticed by the others, or else by srun.
export RUN="srun --mpi=pmix --kill-on-bad-exit=0 --wait=30"
"$LAUNCHER" "$@"
code=$?
[ $code != 75 ] || scontrol requeue "$SLURM_JOB_ID"
exit $code
