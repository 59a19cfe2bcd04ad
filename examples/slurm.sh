#!/bin/bash
# sbatch examples/slurm.sh run.yaml parallel.tensor=8
#
# One torchrun on each node; they meet at the first one. The same job goes on where it stopped after a requeue: the run
# resumes from its newest checkpoint. Five minutes before its time is up, SLURM sends SIGTERM to the ranks, which finish
# their step and write a checkpoint; what preempts the job does the same for as long as the partition's GraceTime.
#SBATCH --job-name=stillhouse
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --requeue
#SBATCH --signal=TERM@300
#SBATCH --output=%x-%j.log
set -euo pipefail

# processes that are started again must not get the addresses of the dead ones (pytorch#135712)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# seconds in which the ranks may finish their step and write a checkpoint; torchrun's own default is 30
shutdown_timeout=280
# a run's data are packed alike on every node: the tokenizer and the files must be the same everywhere
srun torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node 8 \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$head_node:29500" \
    --max-restarts 3 \
    --shutdown-timeout "$shutdown_timeout" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGUSR1 \
    -m stillhouse distill "$@"
