#!/bin/bash
# sbatch examples/slurm.sh run.yaml parallel.tensor=8
#
# One torchrun on each node; they meet at the first one. The same job goes on where it stopped after a requeue: the run
# resumes from its newest checkpoint.
#SBATCH --job-name=stillhouse
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --requeue
#SBATCH --output=%x-%j.log
set -euo pipefail

# processes that are started again must not get the addresses of the dead ones (pytorch#135712)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# a run's data are packed alike on every node: the tokenizer and the files must be the same everywhere
srun torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node 8 \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$head_node:29500" \
    --max-restarts 3 \
    -m stillhouse distill "$@"
