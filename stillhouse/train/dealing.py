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
    degrees = mesh.degrees
    batches = [sequences.batch(each) for each in rows]
    even = degrees.data * (degrees.pipeline if alike else 1)
    batches += [batches[0].without_targets()] * (-len(batches) % even)
    width = max(each.input_ids_BS.shape[1] for each in batches)
    height = max(each.input_ids_BS.shape[0] for each in batches)
    own = batches[mesh.place("data") :: degrees.data]
    return [
        each.padded(
            height if alike else each.input_ids_BS.shape[0],
            _up_to(width if alike else each.input_ids_BS.shape[1], degrees.context),
        )
        .part(mesh.place("context"), degrees.context)
        .to(device)
        for each in own
    ]


def _up_to(length: int, divisor: int) -> int:
    return -(-length // divisor) * divisor
