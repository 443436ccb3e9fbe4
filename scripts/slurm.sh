#!/usr/bin/env bash
# One run over the nodes of a SLURM allocation; any further arguments go to `flowalign train`.
#   source .venv/bin/activate
#   export HF_HOME=/shared/huggingface
#   sbatch --partition gpu --nodes 3 --gpus-per-node 8 scripts/slurm.sh configs/sd3/flow_grpo.yaml training.iterations=500
# The job gets the environment of the shell that calls sbatch. Every node must see the virtual environment and HF_HOME (the
# hub's cache). Where nodes have no internet, `flowalign fetch CONFIG` fills HF_HOME first. `sinfo` lists the partitions.
# Five minutes before its time is up, and where it is preempted, the run saves a checkpoint and leaves with code 75; the
# job then goes back into the queue, and on from that checkpoint. An iteration that takes longer than that wants an
# earlier signal: sbatch --signal USR1@1200. FLOWALIGN_SHARD=1 shards the weights (FSDP2).
#SBATCH --job-name flowalign
#SBATCH --ntasks-per-node 1
#SBATCH --cpus-per-task 32
#SBATCH --requeue
#SBATCH --signal USR1@300
#SBATCH --open-mode append
#SBATCH --output flowalign-%j.out
set -euo pipefail

gpus=${SLURM_GPUS_ON_NODE:-1}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*} MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) WORLD_SIZE=$((SLURM_NNODES * gpus))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
if [ "${FLOWALIGN_SHARD:-0}" = 1 ]; then
  export ACCELERATE_USE_FSDP=true FSDP_VERSION=2
fi
code=0
# a process a GPU, which gets the signals itself; --kill-on-bad-exit: where one ends, the others do too
srun --kill-on-bad-exit=1 --ntasks "$WORLD_SIZE" --ntasks-per-node "$gpus" \
  --cpus-per-task $((${SLURM_CPUS_PER_TASK:-gpus} / gpus)) \
  bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec python -m flowalign train "$@" --resume' flowalign "$@" ||
  code=$?
# 143: a process that had not left yet when the first one did was ended by srun
if [ "$code" = 75 ] || [ "$code" = 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
