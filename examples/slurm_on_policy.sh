#!/bin/bash
# sbatch examples/slurm_on_policy.sh recipes/qwen3_32b_to_8b_on_policy.yaml rollout.schedule=async rollout.prompts_per_step=256
#
# On-policy as one job: servers hold the teacher on the first nodes and write the student's completions on the next ones,
# and all other nodes train. docs/cluster.md explains the sizes, which are for Qwen3-32B into Qwen3-8B on four nodes of
# eight GPUs with 80 GB, and says what to do when a part dies. Folders must be shared by all nodes, `out` among them. The
# models of the servers are TEACHER and STUDENT, and replace those of run.yaml.
#SBATCH --job-name=stillhouse
#SBATCH --nodes=4
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
# vllm or stillhouse: what serves them
TEACHER_ENGINE=${TEACHER_ENGINE:-vllm}
WRITER_ENGINE=${WRITER_ENGINE:-vllm}
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
if [[ $WRITER_ENGINE == stillhouse ]] && ((WRITER_GPUS > 1)); then
    echo "stillhouse serve --generate has the whole model in one process: expected WRITER_GPUS=1" >&2
    exit 2
fi
# of a server: the options for its work, where it says that it is ready, and the teacher's model for the run, which
# `stillhouse serve` sends itself
case $TEACHER_ENGINE in
vllm)
    teacher=(--runner pooling --convert embed --pooler-config '{"task":"token_embed","use_activation":false}')
    teacher_health=health teacher_model=$TEACHER
    ;;
stillhouse) teacher=() teacher_health=healthz teacher_model=null ;;
*) echo "TEACHER_ENGINE=$TEACHER_ENGINE: expected vllm or stillhouse" >&2 && exit 2 ;;
esac
case $WRITER_ENGINE in
vllm) writer=(--enable-scale-out --logprobs-mode processed_logprobs) writer_health=health ;;
stillhouse) writer=(--generate) writer_health=healthz ;;
*) echo "WRITER_ENGINE=$WRITER_ENGINE: expected vllm or stillhouse" >&2 && exit 2 ;;
esac
join() { local IFS=,; echo "$*"; }
teachers=("${nodes[@]:0:TEACHER_NODES}")
writers=("${nodes[@]:TEACHER_NODES:WRITER_NODES}")
trainers=("${nodes[@]:server_nodes}")

# serve ENGINE GPUS OPTION…: on this node, as many servers as its GPUs are enough for, on the ports from PORT on. A server
# that ends is started again; the run then gives it the newest weights, or proves it again.
serve() {
    local engine=$1 gpus=$2 number command
    for ((number = 0; number < NODE_GPUS / gpus; number++)); do
        command=(vllm serve "${@:3}" --tensor-parallel-size "$gpus")
        if [[ $engine == stillhouse ]]; then
            command=(torchrun --standalone --nproc-per-node "$gpus" -m stillhouse serve "${@:3}")
        fi
        (
            CUDA_VISIBLE_DEVICES=$(seq --separator=, $((number * gpus)) $((number * gpus + gpus - 1)))
            export CUDA_VISIBLE_DEVICES
            while true; do
                "${command[@]}" --host 0.0.0.0 --port $((PORT + number)) || true
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

# `stillhouse serve` answers nobody without this token, which the run sends
export STILLHOUSE_TOKEN=${STILLHOUSE_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
servers=()
trap 'kill "${servers[@]}" 2>/dev/null || true' EXIT
on "$(join "${teachers[@]}")" bash -c 'serve "$@"' serve "$TEACHER_ENGINE" "$TEACHER_GPUS" "$TEACHER" "${teacher[@]}" &
servers+=($!)
# the routes that pause a vLLM and load weights exist only in this mode: let nobody else reach the ports
VLLM_SERVER_DEV_MODE=1 on "$(join "${writers[@]}")" \
    bash -c 'serve "$@"' serve "$WRITER_ENGINE" "$WRITER_GPUS" "$STUDENT" "${writer[@]}" &
servers+=($!)

teacher_urls=$(urls "$TEACHER_GPUS" "${teachers[@]}")
writer_urls=$(urls "$WRITER_GPUS" "${writers[@]}")
# ready PATH URLS: wait until all servers of this list have loaded their models
ready() {
    local url
    for url in $(tr -d '[]' <<<"${2//,/ }"); do
        until curl --silent --fail --output /dev/null "$url/$1"; do
            if ((SECONDS > LOAD_SECONDS)) || ! kill -0 "${servers[0]}" || ! kill -0 "${servers[1]}"; then
                echo "$url does not answer after $SECONDS seconds (LOAD_SECONDS): see the output of its server above" >&2
                exit 1
            fi
            sleep 5
        done
    done
}
ready "$teacher_health" "$teacher_urls"
ready "$writer_health" "$writer_urls"

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
    student.model="$STUDENT" teacher.model="$teacher_model" teacher.url="$teacher_urls" \
    rollout.engine="$WRITER_ENGINE" rollout.url="$writer_urls" &
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
