"""Shards a step's micro-batches: selects a process's micro-batches and its part of each micro-batch."""

from collections.abc import Sequence

from stillhouse.data import MicroBatch, StepMicroBatches
from stillhouse.dry_run import replaceable
from stillhouse.parallel.mesh import Degrees, Mesh


class ShardedMicroBatches(list[MicroBatch]):
    """This process's micro-batches of a step, on its device. A context rank has only its columns of the sequences.

    all_ranks: all micro-batches of the step, with full sequences; the same on every process.
    uniform_shapes: see `padded_shapes`.
    on_cpu: the same micro-batches in host memory, which can be read without waiting for the device. None: `parts`.
    """

    def __init__(
        self,
        parts: Sequence[MicroBatch],
        all_ranks: StepMicroBatches,
        *,
        uniform_shapes: bool = False,
        on_cpu: Sequence[MicroBatch] | None = None,
    ):
        super().__init__(parts)
        self.all_ranks, self.uniform_shapes = all_ranks, uniform_shapes
        self.on_cpu: Sequence[MicroBatch] = parts if on_cpu is None else on_cpu


@replaceable
def shard_micro_batches(step: StepMicroBatches, mesh: Mesh, *, uniform_shapes: bool = False) -> ShardedMicroBatches:
    """Return this process's part of a step.

    All data ranks get the same number of micro-batches; if necessary, the first micro-batch is repeated without
    targets. uniform_shapes: see `padded_shapes`.
    """
    degrees, parts = mesh.degrees, []
    shapes_BS = padded_shapes(step.shapes_BS, degrees, uniform_shapes=uniform_shapes)
    for number in range(mesh.coordinate("data"), len(shapes_BS), degrees.data):
        micro_batch = step[number] if number < len(step) else step[0].without_targets()
        parts.append(micro_batch.padded(*shapes_BS[number]).part(mesh.coordinate("context"), degrees.context))
    moved = [part.to(mesh.device) for part in parts]
    return ShardedMicroBatches(moved, step, uniform_shapes=uniform_shapes, on_cpu=parts)


def padded_shapes(
    shapes_BS: Sequence[tuple[int, int]], degrees: Degrees, *, uniform_shapes: bool = False
) -> list[tuple[int, int]]:
    """Return the padded rows and columns of a step's micro-batches, before they are sharded over context ranks.

    The list includes the repeated micro-batches, so it may be longer than `shapes_BS`. uniform_shapes: all
    micro-batches get one shape, and the number of micro-batches per data rank becomes a multiple of the number of
    pipeline ranks. The pipeline schedules require both.
    """
    count = _rounded_up(len(shapes_BS), degrees.data * (degrees.pipeline if uniform_shapes else 1))
    shapes = list(shapes_BS)
    if uniform_shapes:
        rows_B, tokens_S = zip(*shapes, strict=True)
        shapes = [(max(rows_B), max(tokens_S))] * len(shapes)
    shapes += shapes[:1] * (count - len(shapes))
    return [(rows, _rounded_up(tokens, degrees.context)) for rows, tokens in shapes]


def _rounded_up(length: int, divisor: int) -> int:
    return -(-length // divisor) * divisor
