#!/bin/bash
# sbatch examples/slurm_engine.sh Qwen/Qwen3-0.6B
#
# A vLLM that generates the completions of an on-policy run. It loads new weights from the folder rollout.weights,
# which both jobs must see under the same path. If it is killed and starts again, the run sends it the newest weights.
#SBATCH --job-name=stillhouse-engine
#SBATCH --nodes=1
#SBATCH --gpus-per-node=1
#SBATCH --requeue
#SBATCH --output=%x-%j.log
set -euo pipefail

# the routes that pause the server and load weights exist only in this mode: let nobody else reach the port
export VLLM_SERVER_DEV_MODE=1
srun vllm serve "$1" \
    --host 0.0.0.0 \
    --port 8001 \
    --enable-scale-out \
    --logprobs-mode processed_logprobs
