"""Transfers of a micro-batch's columns from the ranks of the teacher's layout to the ranks of the student's layout.

The transfers depend only on the micro-batch shapes and the two layouts, so every process computes the same transfers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from stillhouse.parallel import Mesh, padded_shapes


@dataclass(frozen=True)
class MicroBatchShape:
    """The shape of a micro-batch in both layouts.

    rows, tokens: rows, and tokens per row, before padding
    teacher_BS, student_BS: the padded shapes
    teacher_number: the micro-batch's number among the micro-batches on which the teacher runs
    """

    rows: int
    tokens: int
    teacher_BS: tuple[int, int]
    student_BS: tuple[int, int]
    teacher_number: int = 0


@dataclass(frozen=True)
class Transfer:
    """Rank `sender` sends the columns start:stop of a micro-batch's unsharded sequences to rank `receiver`."""

    micro_batch: int
    sender: int
    receiver: int
    start: int
    stop: int


def shapes_of(
    whole_BS: Sequence[tuple[int, int]],
    chosen: Sequence[int],
    teacher: Mesh,
    student: Mesh,
    *,
    uniform_shapes: bool,
) -> list[MicroBatchShape]:
    """Return the shapes of a step's micro-batches in both layouts.

    chosen: the numbers of the micro-batches on which the teacher runs

    All other micro-batches have `rows` = 0, because the teacher sends nothing for them. This includes the repeated
    micro-batches without targets that the student's layout adds.
    """
    student_shapes = padded_shapes(whole_BS, student.degrees, uniform_shapes=uniform_shapes)
    shapes = [MicroBatchShape(0, 0, (0, 0), student_BS) for student_BS in student_shapes]
    teacher_shapes = padded_shapes([whole_BS[number] for number in chosen], teacher.degrees) if chosen else []
    for teacher_number, (number, teacher_BS) in enumerate(zip(chosen, teacher_shapes, strict=False)):
        shapes[number] = MicroBatchShape(*whole_BS[number], teacher_BS, student_shapes[number], teacher_number)
    return shapes


def route(shapes: Sequence[MicroBatchShape], teacher_DCT: Tensor, student_DCT: Tensor) -> Iterator[Transfer]:
    """Yield all transfers of a step, in the same order on every process.

    teacher_DCT, student_DCT: the ranks of each layout's last stage, by their data, context and tensor coordinates

    Each process of the student's last stage receives each of its columns once, without padding. All tensor ranks of
    the teacher have the same columns, so each of them sends to a part of the student's tensor ranks.
    """
    teacher_data, teacher_context, teacher_tensor = teacher_DCT.shape
    student_data, student_context, student_tensor = student_DCT.shape
    for number, shape in enumerate(shapes):
        teacher_columns = shape.teacher_BS[1] // teacher_context
        student_columns = shape.student_BS[1] // student_context
        for teacher_rank, student_rank in product(range(teacher_context), range(student_context)):
            start = max(teacher_rank * teacher_columns, student_rank * student_columns)
            stop = min((teacher_rank + 1) * teacher_columns, (student_rank + 1) * student_columns, shape.tokens)
            if start >= stop:
                continue
            senders_T = teacher_DCT[shape.teacher_number % teacher_data, teacher_rank]
            for tensor in range(student_tensor):
                receiver = student_DCT[number % student_data, student_rank, tensor]
                yield Transfer(number, int(senders_T[tensor % teacher_tensor]), int(receiver), start, stop)


def local_columns(transfer: Transfer, shape_BS: tuple[int, int], mesh: Mesh) -> slice:
    """Return a transfer's columns relative to the first column of this process. shape_BS: the padded shape"""
    first = mesh.coordinate("context") * (shape_BS[1] // mesh.degrees.context)
    return slice(transfer.start - first, transfer.stop - first)


def empty_part(shape: MicroBatchShape, mesh: Mesh, width: int, dtype: torch.dtype) -> Tensor:
    """Return zeros [B, S, E] for this process's columns of a micro-batch in the student's layout.

    If the teacher does not run on the micro-batch, the zeros are a single expanded element, to save memory.
    """
    rows, tokens = shape.student_BS
    size = rows, tokens // mesh.degrees.context, width
    zeros = torch.zeros(size if shape.rows else (), dtype=dtype, device=mesh.device)
    return zeros.expand(size)
