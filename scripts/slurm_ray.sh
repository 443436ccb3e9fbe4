#!/usr/bin/env bash
# One run over a SLURM allocation whose first node learns and whose other nodes sample (docs/rollout-workers.md):
#   sbatch --nodes 3 --gpus-per-node 8 scripts/slurm_ray.sh configs/sd3/flow_grpo.yaml 'rollout.workers={count: 2}'
# Each GPU of the first node has a process that learns, and each of those has `count` workers: 16 here, a GPU each. As with
# scripts/slurm.sh the run leaves with code 75 before its time is up, and also where Ray is lost; the job then goes back
# into the queue, and on from its last checkpoint.
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
first=${hosts%%$'\n'*} port=$((20000 + SLURM_JOB_ID % 20000))
export RAY_ADDRESS=$first:$port MASTER_ADDR=$first MASTER_PORT=$((port + 1)) WORLD_SIZE=$gpus
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
# by which Ray 2.60 and later lets others in; earlier ones know neither
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
ray get-auth-token --generate >/dev/null 2>&1 || true
# the run is told to leave, and needs its workers until its iteration is over
ray='trap "" USR1 TERM; exec ray start --block --disable-usage-stats "$@"'
srun --overlap --nodes 1 --ntasks 1 --nodelist "$first" bash -c "$ray" ray --head --port "$port" --num-gpus 0 &
until ray status --address "$RAY_ADDRESS" >/dev/null 2>&1; do sleep 2; done
srun --overlap --nodes $((SLURM_NNODES - 1)) --ntasks-per-node 1 --exclude "$first" \
  bash -c "$ray" ray --address "$RAY_ADDRESS" --num-gpus "$gpus" &
code=0
srun --overlap --kill-on-bad-exit=1 --nodes 1 --nodelist "$first" --ntasks "$gpus" --ntasks-per-node "$gpus" \
  --cpus-per-task $((${SLURM_CPUS_PER_TASK:-gpus} / gpus)) \
  bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec python -m flowalign train "$@" --resume' flowalign "$@" ||
  code=$?
# 143: a process that had not left yet when the first one did was ended by srun
if [ "$code" = 75 ] || [ "$code" = 143 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
# Ray's processes, which ignored what the run was told
kill $(jobs -p) 2>/dev/null || true
exit "$code"
