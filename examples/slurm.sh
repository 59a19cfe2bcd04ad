#!/bin/bash
# sbatch examples/slurm.sh run.yaml parallel.tensor=8
#
# On-policy, with servers as jobs of their own (examples/slurm_engine.sh), on the shared folder runs:
#   engine=$(sbatch --parsable examples/slurm_engine.sh Qwen/Qwen3-0.6B)
#   sbatch --dependency=after:"$engine" examples/slurm.sh run.yaml rollout.engine=vllm rollout.weights=runs/weights \
#       rollout.url="http://$(squeue --noheader --format=%N --job "$engine"):8001"
# The second line needs the node of the first job, so wait until it runs. A new run ends if its server does not answer
# yet, so give the second line when `curl http://NODE:8001/health` answers. A requeued run waits for its server.
#
# One torchrun runs on each node, and all of them connect to the first node. After a requeue, the job resumes from
# its newest checkpoint. Five minutes before the job's time limit, SLURM sends SIGTERM to the ranks, which finish
# their step and write a checkpoint. A preempted job gets SIGTERM too; the ranks then have the partition's GraceTime.
#SBATCH --job-name=stillhouse
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --requeue
#SBATCH --signal=TERM@300
#SBATCH --output=%x-%j.log
set -euo pipefail

# without this, restarted processes get the addresses of dead ones from the store (pytorch#135712)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
: "${SLURM_JOB_NODELIST:?start it with sbatch}"
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# seconds for the ranks to finish their step and write a checkpoint; torchrun's default is 30
shutdown_timeout=280
# every node packs the data itself, so the tokenizer and all files must be the same on every node
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
