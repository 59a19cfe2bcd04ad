"""Which process of the teacher's layout sends which columns of a micro-batch to which process of the student's.

Routing is a pure function of the micro-batch shapes and the two layouts, so every process computes the
same transfers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stillhouse.parallel import Mesh, padded_shapes


@dataclass(frozen=True)
class MicroBatchShape:
    """The shape of a micro-batch in both layouts.

    rows, tokens: rows, and tokens per row, before padding
    teacher_BS, student_BS: the padded shapes
    teacher_number: its number among the micro-batches on which the teacher runs
    """

    rows: int
    tokens: int
    teacher_BS: tuple[int, int]
    student_BS: tuple[int, int]
    teacher_number: int = 0


@dataclass(frozen=True)
class LastStage:
    """The processes of a layout that hold its last stage: their ranks, indexed by (data, context, tensor)."""

    ranks_DCT: Tensor

    @classmethod
    def of(cls, mesh: Mesh, coordinate: int) -> "LastStage":
        """coordinate: of the last stage on the pipeline axis"""
        return cls(mesh.tokens.mesh[coordinate])

    @property
    def data(self) -> int:
        return self.ranks_DCT.shape[0]

    @property
    def context(self) -> int:
        return self.ranks_DCT.shape[1]

    @property
    def tensor(self) -> int:
        return self.ranks_DCT.shape[2]


@dataclass(frozen=True)
class Transfer:
    """Columns start:stop of a micro-batch, from rank `sender` to rank `receiver`; columns of the whole sequence."""

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

    The others have 0 rows here, because the teacher sends nothing for them; so do the repeated micro-batches without
    targets that the student's layout adds.
    """
    student_shapes = padded_shapes(whole_BS, student.degrees, uniform_shapes=uniform_shapes)
    shapes = [MicroBatchShape(0, 0, (0, 0), student_BS) for student_BS in student_shapes]
    teacher_shapes = padded_shapes([whole_BS[number] for number in chosen], teacher.degrees) if chosen else []
    for teacher_number, (number, teacher_BS) in enumerate(zip(chosen, teacher_shapes, strict=False)):
        shapes[number] = MicroBatchShape(*whole_BS[number], teacher_BS, student_shapes[number], teacher_number)
    return shapes


def route(shapes: Sequence[MicroBatchShape], teacher: LastStage, student: LastStage) -> Iterator[Transfer]:
    """Yield all transfers of a step, in the same order on every process.

    Each process of the student's last stage receives each of its columns once, without the padding. The teacher's
    ranks on one tensor axis have the same columns, so each of them sends to some of the student's tensor ranks.
    """
    for number, shape in enumerate(shapes):
        if not shape.rows:
            continue
        teacher_columns = shape.teacher_BS[1] // teacher.context
        student_columns = shape.student_BS[1] // student.context
        for teacher_rank in range(teacher.context):
            for student_rank in range(student.context):
                start = max(teacher_rank * teacher_columns, student_rank * student_columns)
                stop = min((teacher_rank + 1) * teacher_columns, (student_rank + 1) * student_columns, shape.tokens)
                if start >= stop:
                    continue
                senders_T = teacher.ranks_DCT[shape.teacher_number % teacher.data, teacher_rank]
                for tensor in range(student.tensor):
                    receiver = student.ranks_DCT[number % student.data, student_rank, tensor]
                    yield Transfer(number, int(senders_T[tensor % teacher.tensor]), int(receiver), start, stop)


def columns(shape_BS: tuple[int, int], mesh: Mesh) -> slice:
    """Return the columns of the whole sequence that this process has."""
    width = shape_BS[1] // mesh.degrees.context
    first = mesh.coordinate("context") * width
    return slice(first, first + width)


def empty_part(shape: MicroBatchShape, mesh: Mesh, width: int, dtype: torch.dtype) -> Tensor:
    """Return zeros [B, S, E], all one zero, for this process's columns of a micro-batch in the student's layout."""
    rows, tokens = shape.student_BS
    zero = torch.zeros((), dtype=dtype, device=mesh.device)
    return zero.expand(rows, tokens // mesh.degrees.context, width)
