"""Which micro-batches of a step a process computes: every data rank as many, all of one shape where that is asked."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stillhouse.data import Batch, PackedSequences
from stillhouse.objective.recipe import Recipe
from stillhouse.parallel import Degrees, Extent, Mesh, Runner, Work
from stillhouse.train.step import router_balances, works


def shapes_of(
    sequences: PackedSequences, rows: Sequence[np.ndarray], degrees: Degrees, *, alike: bool
) -> list[tuple[int, int]]:
    """Rows and columns of a step's micro-batches, each given by its packed sequences, as they go through a model.

    Every data rank gets as many: there may be more than were given. alike: all of one shape, and a multiple of the
    pipeline's ranks, as its schedules want them.
    """
    count = _up_to(len(rows), degrees.data * (degrees.pipeline if alike else 1))
    shapes = [(len(each), sequences.width(each)) for each in rows]
    if alike:
        rows_B, tokens_S = zip(*shapes, strict=True)
        shapes = [(max(rows_B), max(tokens_S))] * len(rows)
    shapes += shapes[:1] * (count - len(rows))
    return [(height, _up_to(width, degrees.context)) for height, width in shapes]


def deal(
    sequences: PackedSequences, rows: Sequence[np.ndarray], mesh: Mesh | None, device: torch.device, *, alike: bool
) -> list[Batch]:
    """This process's part of a step's micro-batches: of each of its data rank's, a context rank gets its columns. One
    too many is the first one again, without targets.
    """
    if mesh is None:
        return [sequences.batch(each).to(device) for each in rows]
    degrees, own = mesh.degrees, []
    shapes_BS = shapes_of(sequences, rows, degrees, alike=alike)
    for number in range(mesh.place("data"), len(shapes_BS), degrees.data):
        batch = sequences.batch(rows[number] if number < len(rows) else rows[0])
        if number >= len(rows):
            batch = batch.without_targets()
        own.append(batch.padded(*shapes_BS[number]).part(mesh.place("context"), degrees.context).to(device))
    return own


def dealt_works(
    runner: Runner,
    sequences: PackedSequences,
    rows: Sequence[np.ndarray],
    recipe: Recipe,
    normalizer: float,
    device: torch.device,
    *,
    training: bool,
    router_aux_loss: float = 0.0,
    **given: Any,
) -> list[Work]:
    """What this process computes of a step or, not training, of an evaluation. normalizer and given: as for `works`.

    Under a teacher's own layout a collective, which lets the teacher speak.
    """
    alike = training and runner.pipeline is not None
    batches = deal(sequences, rows, runner.mesh, device, alike=alike)
    told = heard(sequences, rows, runner, device, alike=alike) if recipe.needs_teacher else ()
    balances = router_balances(batches, router_aux_loss, normalizer, runner.context_group) if training else ()
    return works(batches, recipe, normalizer, balances=balances, heard=told, **given)


def heard(
    sequences: PackedSequences, rows: Sequence[np.ndarray], runner: Runner, device: torch.device, *, alike: bool
) -> list[torch.Tensor | None]:
    """What a teacher in a layout of its own says of the micro-batches that `deal` gives this process; empty where
    the teacher lies as the student does. alike: as for `deal`.
    """
    separate = runner.separate
    if separate is None or runner.mesh is None:
        return []
    theirs = shapes_of(sequences, rows, separate.mesh.degrees, alike=False)
    ours = shapes_of(sequences, rows, runner.mesh.degrees, alike=alike)
    extents = [
        Extent(len(each), sequences.width(each), theirs[number], ours[number]) for number, each in enumerate(rows)
    ]
    extents += [Extent(0, 0, (0, 0), shape_BS) for shape_BS in ours[len(rows) :]]
    return separate.hear(deal(sequences, rows, separate.mesh, device, alike=False), extents)


def _up_to(length: int, divisor: int) -> int:
    return -(-length // divisor) * divisor
