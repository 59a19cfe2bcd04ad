#!/bin/bash
# sbatch --nodes=3 examples/slurm_vllm.sh run.yaml
#
# On-policy on one job: unpatched vLLMs hold the teacher on the first nodes and write the student's completions on the
# next ones, and all other nodes train. The sizes below are for Qwen3-32B into Qwen3-8B on GPUs of 80 GB; docs/scaling.md
# ("Servers beside a run") has the formulas for other models. Folders must be shared by all nodes, `out` among them.
# The models of the servers are TEACHER and STUDENT, and replace those of run.yaml.
#SBATCH --job-name=stillhouse-vllm
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --requeue
# only this script gets the signal, and passes it on to the trainer: the servers are needed until its checkpoint
#SBATCH --signal=B:TERM@300
#SBATCH --output=%x-%j.log
set -euo pipefail

TEACHER=${TEACHER:-Qwen/Qwen3-32B}
STUDENT=${STUDENT:-Qwen/Qwen3-8B}
# The teacher computes 2 N_t operations per token, and the trainer 8 N_s with recomputed layers: 66 billion each, so
# that they need the same number of GPUs. A GPU holds the 66 GB of the teacher, but nothing beside it: two of them do.
TEACHER_NODES=${TEACHER_NODES:-1}
TEACHER_GPUS=${TEACHER_GPUS:-2}
# A GPU holds the 16 GB of the student and the keys and values of 377,000 tokens, 92 completions of 4,096 tokens.
WRITER_NODES=${WRITER_NODES:-1}
WRITER_GPUS=${WRITER_GPUS:-1}
NODE_GPUS=${NODE_GPUS:-8}
# the port of the first server of a node
PORT=${PORT:-8000}
# seconds until all servers have loaded their models
LOAD_SECONDS=${LOAD_SECONDS:-1800}

: "${SLURM_JOB_NODELIST:?start it with sbatch}"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
server_nodes=$((TEACHER_NODES + WRITER_NODES))
if ((${#nodes[@]} <= server_nodes)); then
    echo "${#nodes[@]} nodes: expected more than the $server_nodes of the servers (TEACHER_NODES, WRITER_NODES)" >&2
    exit 2
fi
if ((TEACHER_GPUS > NODE_GPUS || WRITER_GPUS > NODE_GPUS)); then
    echo "a server has at most the $NODE_GPUS GPUs of a node (TEACHER_GPUS, WRITER_GPUS, NODE_GPUS)" >&2
    exit 2
fi
join() { local IFS=,; echo "$*"; }
teachers=("${nodes[@]:0:TEACHER_NODES}")
writers=("${nodes[@]:TEACHER_NODES:WRITER_NODES}")
trainers=("${nodes[@]:server_nodes}")

# serve GPUS COMMAND…: on this node, as many servers as its GPUs are enough for, on the ports from PORT on. A server
# that ends is started again; the run then gives it the newest weights, or proves it again.
serve() {
    local gpus=$1 number
    shift
    for ((number = 0; number < NODE_GPUS / gpus; number++)); do
        (
            CUDA_VISIBLE_DEVICES=$(seq --separator=, $((number * gpus)) $((number * gpus + gpus - 1)))
            export CUDA_VISIBLE_DEVICES
            while true; do
                "$@" --host 0.0.0.0 --port $((PORT + number)) --tensor-parallel-size "$gpus" || true
                sleep 5
            done
        ) &
    done
    wait
}
export NODE_GPUS PORT
export -f serve

# on NODES COMMAND…: the command once on each of the nodes. It becomes srun, so that a signal to it reaches the command.
on() {
    exec srun --nodes="$(wc -w <<<"${1//,/ }")" --ntasks-per-node=1 --nodelist="$1" "${@:2}"
}

# urls GPUS NODE…: the addresses of all servers on these nodes, as a list for the configuration
urls() {
    local gpus=$1 node number addresses=()
    for node in "${@:2}"; do
        for ((number = 0; number < NODE_GPUS / gpus; number++)); do
            addresses+=("http://$node:$((PORT + number))")
        done
    done
    echo "[$(join "${addresses[@]}")]"
}

servers=()
trap 'kill "${servers[@]}" 2>/dev/null || true' EXIT
on "$(join "${teachers[@]}")" bash -c 'serve "$@"' serve "$TEACHER_GPUS" vllm serve "$TEACHER" \
    --runner pooling --convert embed --pooler-config '{"task":"token_embed","use_activation":false}' &
servers+=($!)
# the routes that pause a server and load weights exist only in this mode: let nobody else reach the ports
VLLM_SERVER_DEV_MODE=1 on "$(join "${writers[@]}")" bash -c 'serve "$@"' serve "$WRITER_GPUS" vllm serve "$STUDENT" \
    --enable-scale-out --logprobs-mode processed_logprobs &
servers+=($!)

teacher_urls=$(urls "$TEACHER_GPUS" "${teachers[@]}")
writer_urls=$(urls "$WRITER_GPUS" "${writers[@]}")
for url in $(tr -d '[]' <<<"${teacher_urls//,/ } ${writer_urls//,/ }"); do
    until curl --silent --fail --output /dev/null "$url/health"; do
        if ((SECONDS > LOAD_SECONDS)) || ! kill -0 "${servers[0]}" || ! kill -0 "${servers[1]}"; then
            echo "$url does not answer after $SECONDS seconds (LOAD_SECONDS): see the output of its vLLM above" >&2
            exit 1
        fi
        sleep 5
    done
done

# without this, restarted processes get the addresses of dead ones from the store (pytorch#135712)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
on "$(join "${trainers[@]}")" torchrun \
    --nnodes "${#trainers[@]}" \
    --nproc-per-node "$NODE_GPUS" \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${trainers[0]}:29500" \
    --max-restarts 3 \
    --shutdown-timeout 280 \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGUSR1 \
    -m stillhouse distill "$@" \
    student.model="$STUDENT" teacher.model="$TEACHER" teacher.url="$teacher_urls" \
    rollout.engine=vllm rollout.url="$writer_urls" &
trainer=$!
trap 'kill -TERM "$trainer"' TERM
code=0
wait "$trainer" || code=$?
# a signal ends the first wait at once; the trainer still writes its checkpoint
while kill -0 "$trainer" 2>/dev/null; do
    code=0
    wait "$trainer" || code=$?
done
exit "$code"
