#!/usr/bin/env bash
# One run over the nodes of a SLURM allocation; any further arguments go to `flowalign train`.
#   sbatch --nodes 3 --gpus-per-node 8 scripts/slurm.sh configs/sd3/flow_grpo.yaml training.iterations=500
# A job that is requeued goes on from the run's last checkpoint. FLOWALIGN_SHARD=1 shards the weights (FSDP2).
#SBATCH --job-name flowalign
#SBATCH --ntasks-per-node 1
#SBATCH --cpus-per-task 32
#SBATCH --requeue
#SBATCH --output flowalign-%j.out
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
if [ "${FLOWALIGN_SHARD:-0}" = 1 ]; then
  export ACCELERATE_USE_FSDP=true FSDP_VERSION=2
fi
# --kill-on-bad-exit: where one node's launcher ends, the others' do too
srun --kill-on-bad-exit=1 torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "$head:$((20000 + SLURM_JOB_ID % 20000))" --rdzv-id "$SLURM_JOB_ID" \
  -m flowalign train "$@" --resume
