"""Which micro-batches of a step a process computes: every data rank as many, all of one shape where that is asked."""

from collections.abc import Sequence

import numpy as np
import torch

from stillhouse.data import Batch, PackedSequences
from stillhouse.parallel import Mesh


def deal(
    sequences: PackedSequences, rows: Sequence[np.ndarray], mesh: Mesh | None, device: torch.device, *, alike: bool
) -> list[Batch]:
    """This process's part of a step's micro-batches, each given by its packed sequences.

    Every data rank gets as many; for want of one it takes a micro-batch again, without targets, since all have to
    take part. Of each, a context rank gets its columns. alike: of one shape, and a multiple of the pipeline's ranks,
    as its schedules want them.
    """
    if mesh is None:
        return [sequences.batch(each).to(device) for each in rows]
    degrees, own = mesh.degrees, []
    even = degrees.data * (degrees.pipeline if alike else 1)
    count = _up_to(len(rows), even)
    height, width = max(map(len, rows)), max(map(sequences.width, rows))
    for number in range(mesh.place("data"), count, degrees.data):
        batch = sequences.batch(rows[number] if number < len(rows) else rows[0])
        if number >= len(rows):
            batch = batch.without_targets()
        shape_BS = (height, width) if alike else batch.input_ids_BS.shape
        batch = batch.padded(shape_BS[0], _up_to(shape_BS[1], degrees.context))
        own.append(batch.part(mesh.place("context"), degrees.context).to(device))
    return own


def _up_to(length: int, divisor: int) -> int:
    return -(-length // divisor) * divisor
