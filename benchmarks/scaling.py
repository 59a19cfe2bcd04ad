"""Computes the numbers of docs/scaling.md: Qwen3-32B into Qwen3-8B on 256 GPUs, by formulas that parallel.py checks.

    python -m benchmarks.scaling

The run has Stillhouse's defaults for bf16: the student's weights, gradients and optimizer state are in float32, its
products in bfloat16, the teacher in bfloat16, and layers are recomputed in backward. Nothing here is measured.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from benchmarks.parallel_costs import Job, Shape, between_steps, traffic, within_step
from benchmarks.pipeline_idle import in_flight, trace
from stillhouse.objective.tile.chunks import TILE_BYTES, TILE_ROWS
from stillhouse.parallel import Degrees, Layout

STUDENT = Shape(36, 4096, 32, 8, 128, 12288, 151936)
TEACHER = Shape(64, 5120, 64, 8, 128, 25600, 151936)
STEP_TOKENS = 2 << 20
#: of a GPU with 80 GB, what a server fills
USABLE_BYTES = 72e9
#: layouts, and the tokens of a micro-batch under each of them
LAYOUTS = [
    (Degrees(fsdp=256), 8192),
    (Degrees(fsdp=32, tensor=8), 16384),
    (Degrees(pipeline=4, fsdp=8, tensor=8), 16384),
]


def main() -> None:
    jobs = [job(*layout) for layout in LAYOUTS]
    columns = [(job, 0) for job in jobs]
    columns.insert(3, (jobs[-1], jobs[-1].layout.degrees.pipeline - 1))
    names = [f"{job.layout.degrees}, m {job.micro_batches}, rank {rank} of the pipeline" for job, rank in columns]
    print("\n".join(names))
    table("held, GB", [held(*column) for column in columns])
    table("sent in a step, GB", [traffic(*column) for column in columns])
    gathered = [job(*layout, torch.bfloat16) for layout in LAYOUTS]
    both_ways = ("student's weights, forward", "student's weights, backward")
    for gathered_job in gathered:
        sent = sum(traffic(gathered_job, 0)[name] for name in both_ways)
        taken = held(gathered_job, 0)["gathered weights"]
        degrees = gathered_job.layout.degrees
        print(f"{degrees}, gathered in bf16: weights sent {sent / 1e9:.2f} GB, held {taken / 1e9:.2f} GB")
    products = [8 * weights(STUDENT) + 2 * weights(TEACHER), *map(weights, (STUDENT, TEACHER))]
    print("operations of a step on each GPU", f"{products[0] * STEP_TOKENS / 256:.2e}", "weights", products[1:])
    served()


def served() -> None:
    """The sizes of a run whose teacher and writer are servers, on GPUs of which `USABLE_BYTES` can be filled."""
    teacher, student = 2 * weights(TEACHER), 2 * weights(STUDENT)
    per_token = 4 * STUDENT.layers * STUDENT.keys
    print(f"teacher's server: {teacher / 1e9:.1f} GB")
    print(f"writer: {student / 1e9:.1f} GB, {per_token:,} bytes per token in flight")
    print(f"tokens in flight on one GPU: {(USABLE_BYTES - student) / per_token:,.0f}")
    for fsdp in (8, 16, 32):
        sizes = held(job(Degrees(fsdp=fsdp), 8192), 0)
        # of the teacher only its head is here
        layers = 2 * (weights(TEACHER) - TEACHER.rows()) / fsdp
        print(f"trainer, fsdp {fsdp}: {(sizes.total() - layers) / 1e9:.1f} GB")
    print("operations per token, teacher and trainer:", f"{2 * weights(TEACHER):.2e}", f"{8 * weights(STUDENT):.2e}")


def job(degrees: Degrees, tokens: int, gather_dtype: torch.dtype | None = None) -> Job:
    rows = TILE_BYTES["cuda"] // (4 * STUDENT.vocabulary // degrees.tensor)
    return Job(
        STUDENT,
        TEACHER,
        Layout(degrees, gather_dtype=gather_dtype),
        micro_batches=STEP_TOKENS // (tokens * degrees.data),
        tokens=tokens,
        chunk=min(max(rows, TILE_ROWS["cuda"][0]), TILE_ROWS["cuda"][1]),
        scratch_tiles=0,
        recomputed=True,
        teacher_bytes=2,
        product_bytes=2,
    )


def held(job: Job, rank: int) -> Counter[str]:
    degrees, flying = job.layout.degrees, 1
    if degrees.pipeline > 1:
        flying = int(in_flight(trace(job.layout.schedule, degrees.pipeline, job.micro_batches)[rank]))
    held_bytes = between_steps(job, rank) + within_step(job, rank, flying)
    # the activations of one layer while it is recomputed; products and intermediate tensors are in bfloat16
    held_bytes["a layer, recomputed"] = job.own_tokens * STUDENT.kept(degrees.tensor) * job.product_bytes
    return held_bytes


def weights(shape: Shape) -> int:
    return shape.weights(shape.layers, True, True)


def table(title: str, columns: Sequence[Counter[str]]) -> None:
    print(f"\n| {title} |" + " |" * len(columns))
    for name in dict.fromkeys(name for column in columns for name in column):
        print(
            f"| {name} | "
            + " | ".join(f"{column[name] / 1e9:.2f}" if name in column else "" for column in columns)
            + " |"
        )
    print("| together | " + " | ".join(f"{column.total() / 1e9:.1f}" for column in columns) + " |")


if __name__ == "__main__":
    main()
