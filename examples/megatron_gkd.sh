#!/bin/bash
# bash examples/megatron_gkd.sh examples/megatron_gkd.yaml
#
# On-policy distillation on Megatron-Core, on one machine: the student's server generates completions, the teacher's
# server scores them, and Megatron-Core trains on them and gives the new weights to the student's server. Arguments
# after the file are overrides, such as teacher.signal=hidden. The models here replace those of the file.
set -euo pipefail

STUDENT=${STUDENT:-Qwen/Qwen3-0.6B}
TEACHER=${TEACHER:-Qwen/Qwen3-8B}
# the GPUs of the servers, and those of the trainer, whose number is the product of the degrees in `parallel`
WRITER_GPU=${WRITER_GPU:-0} TEACHER_GPU=${TEACHER_GPU:-1} TRAINER_GPUS=${TRAINER_GPUS:-2,3,4,5}
WRITER_PORT=${WRITER_PORT:-8001} TEACHER_PORT=${TEACHER_PORT:-8000}

trap 'kill "${servers[@]}" 2>/dev/null || true' EXIT
CUDA_VISIBLE_DEVICES=$WRITER_GPU stillhouse serve "$STUDENT" --generate --port "$WRITER_PORT" &
servers=($!)
CUDA_VISIBLE_DEVICES=$TEACHER_GPU stillhouse serve "$TEACHER" --port "$TEACHER_PORT" &
servers+=($!)

# a server soon answers, with status 503 until it has loaded its model; the run waits for such a server
for port in "$WRITER_PORT" "$TEACHER_PORT"; do
    until curl --silent --output /dev/null "http://127.0.0.1:$port/healthz"; do
        kill -0 "${servers[0]}" && kill -0 "${servers[1]}" || exit 1
        sleep 1
    done
done
CUDA_VISIBLE_DEVICES=$TRAINER_GPUS torchrun --nproc-per-node "$(wc -w <<<"${TRAINER_GPUS//,/ }")" -m stillhouse distill "$@" \
    student.model="$STUDENT" rollout.url="http://127.0.0.1:$WRITER_PORT" \
    teacher.model="$TEACHER" teacher.url="http://127.0.0.1:$TEACHER_PORT" &
trainer=$!
# a signal goes to the trainer first, which writes a checkpoint and needs the servers until then
trap 'kill -TERM "$trainer"' TERM INT
code=0
while kill -0 "$trainer" 2>/dev/null; do
    code=0
    wait "$trainer" || code=$?
done
exit "$code"
