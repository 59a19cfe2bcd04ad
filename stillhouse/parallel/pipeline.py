"""The twin pipeline: student and teacher travel through the same stages side by side, by torch's schedules.

A stage holds some layers of both. What passes between stages is the pair of hidden states, never logits; the
teacher's half has no gradient. On the last stage both of the same micro-batch stand side by side, and the output
processor runs in the student's head as it does without a pipeline. Only hidden states travel: what a micro-batch is
about, every rank has already, and finds by its number.

B rows, S tokens per row of a micro-batch; D, E widths of student and teacher.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from stillhouse.parallel.ahead import Ahead, Schedule1F1BAhead, as_learner
from stillhouse.parallel.gradients import local, settle
from stillhouse.parallel.twin import Twin, Work


@dataclass(frozen=True)
class Scheme:
    """torch's schedule, the stages that each rank has, and whether they lie in a V: the last beside the first.

    ahead: the teacher runs by itself, as far as one step ahead.
    """

    schedule: Callable[..., Any]
    per_rank: int = 1
    in_v: bool = False
    ahead: bool = False

    def stages_of(self, rank: int, ranks: int) -> list[int]:
        """The numbers of a rank's stages."""
        if self.in_v:
            return [rank, 2 * ranks - 1 - rank]
        return [rank + turn * ranks for turn in range(self.per_rank)]

    def rank_of(self, stage: int, ranks: int) -> int:
        return 2 * ranks - 1 - stage if self.in_v and stage >= ranks else stage % ranks


SCHEMES = {
    "gpipe": Scheme(ScheduleGPipe),
    "1f1b": Scheme(Schedule1F1B),
    "1f1b_ahead": Scheme(Schedule1F1BAhead, ahead=True),
    "interleaved": Scheme(ScheduleInterleaved1F1B, 2),
    "zero_bubble": Scheme(ScheduleInterleavedZeroBubble, 2),
    "zbv": Scheme(ScheduleZBVZeroBubble, 2, in_v=True),
}


@dataclass(frozen=True)
class Width:
    """Of the hidden states that travel: D and E, 0 where the teacher's do not, and their dtypes."""

    student: int
    student_dtype: torch.dtype
    teacher: int = 0
    teacher_dtype: torch.dtype = torch.float32


class Pipeline:
    """The stages of this rank and their schedule. `twins`: by stage number.

    sharding: FSDP's mesh, where the twins are sharded by it.
    tied: the student's embedding, on the first stage, and its head, on the last, are one weight. Both have it; their
    gradients are summed after every step, so that they stay equal.
    teacher_cost: of the teacher's layers, in forwards of the student's. further: two more groups of
    the same ranks. Both are for a scheme that runs the teacher ahead.
    """

    def __init__(
        self,
        twins: dict[int, Twin],
        scheme: Scheme,
        width: Width,
        group: ProcessGroup,
        device: torch.device,
        *,
        tied: bool = False,
        sharding: DeviceMesh | None = None,
        teacher_cost: float = 0.0,
        further: Sequence[ProcessGroup | None] = (),
    ):
        self.ranks, self.rank = group.size(), group.rank()
        self.count = self.ranks * scheme.per_rank
        self.stages = {number: _Stage(number, self.count, twin) for number, twin in twins.items()}
        if sharding is not None:
            # without weights of its own: so that the schedule holds what is gathered, and sums gradients once a step
            for stage in self.stages.values():
                fully_shard(stage, mesh=sharding)
        self.tied = tied
        self.scheme, self.width, self.group, self.device = scheme, width, group, device
        self.ahead: Ahead | None = None
        if scheme.ahead:
            (stage,), (teaching, backward) = self.stages.values(), further
            assert teaching is not None
            assert backward is not None
            teacher = (teacher_cost, width.teacher, width.teacher_dtype)
            self.ahead = Ahead(stage.speak, *teacher, teaching, backward, device)
        self._made_for: tuple[Any, ...] = ()
        self._latest: Any = None

    def forward_backward(self, works: Sequence[Work], upcoming: Sequence[Work] = ()) -> list[Any]:
        """Adds the gradients of the works' losses; gives what the processor made of each, on the last stage's rank.

        All works have the same shape. upcoming: those of the next step, for a scheme that runs their teacher already.
        Raises ValueError for a number of works that the schedule cannot take.
        """
        numbers = torch.arange(len(works))
        made = self._begin(works)
        schedule = self._schedule(works)
        if self.ahead is not None:
            self._begin_ahead(self.ahead, schedule, works, upcoming)
        first = (numbers,) if 0 in self.stages else ()
        target = numbers if self.count - 1 in self.stages else None
        schedule.step(*first, target=target, number=numbers, return_outputs=False)
        if self.ahead is not None:
            self.ahead.end()
        if self.tied:
            self._sum_tied_gradient()
        return [made[number] for number in sorted(made)]

    @torch.no_grad()
    def forward(self, works: Sequence[Work]) -> list[Any]:
        """What the processor makes of each work, on the last stage's rank; no gradient. Any number, any shapes.

        Not by torch's schedules: that of ZBV does not evaluate (torch 2.13), and without a backward there is nothing
        to schedule. All works go through a stage before the rank turns to its next one.
        """
        made = self._begin(works)
        stays: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # from a stage to the next on the same rank
        sent: list[tuple[Any, Tensor]] = []
        for number, stage in sorted(self.stages.items()):
            before, behind = (self.scheme.rank_of(each, self.ranks) for each in (number - 1, number + 1))
            for at, work in enumerate(works):
                received: tuple[Tensor, ...] = ()
                if number and before != self.rank:
                    received = self._receive(work, before)
                elif number:
                    received = stays.pop((number - 1, at))
                passed = stage(*received, number=torch.tensor([at]))
                if number + 1 == self.count:
                    continue
                if behind == self.rank:
                    stays[number, at] = passed
                else:
                    sent += [(dist.isend(each, group=self.group, group_dst=behind), each) for each in passed]
        for sending, _ in sent:
            sending.wait()
        return [made[number] for number in sorted(made)]

    def _sum_tied_gradient(self) -> None:
        first, last = 0, self.scheme.rank_of(self.count - 1, self.ranks)
        if self.rank not in (first, last):
            return
        gradients = [local(weight.grad) for weight in settle(self._tied_weights()) if weight.grad is not None]
        if first == last:
            total = gradients[0] + gradients[1]
        else:
            own = gradients[0].to(self.device)  # it may be in host memory
            other = torch.empty_like(own)
            there = last if self.rank == first else first
            sending = dist.isend(own.contiguous(), group=self.group, group_dst=there)
            dist.recv(other, group=self.group, group_src=there)
            assert sending is not None  # this rank is of the group
            sending.wait()
            total = own + other
        for gradient in gradients:
            gradient.copy_(total)

    def _tied_weights(self) -> list[nn.Parameter]:
        """The embedding's and the head's, as far as they are here."""
        weights = []
        if 0 in self.stages:
            weights.append(self.stages[0].twin.student.pretrained.get_input_embeddings().weight)
        if self.count - 1 in self.stages:
            weights.append(self.stages[self.count - 1].twin.student.output_weight)
        return weights

    def _receive(self, work: Work, source: int) -> tuple[Tensor, ...]:
        rows, tokens = work.tokens.input_ids_BS.shape
        hidden = self._hidden(rows, tokens, work.asks_teacher)
        received = tuple(torch.empty_like(each, device=self.device, requires_grad=False) for each in hidden)
        for each in received:
            dist.recv(each, group=self.group, group_src=source)
        return received

    def _begin(self, works: Sequence[Work]) -> dict[int, Any]:
        made: dict[int, Any] = {}
        for stage in self.stages.values():
            stage.works, stage.made = works, made
        return made

    def _begin_ahead(self, ahead: Ahead, schedule: Any, works: Sequence[Work], upcoming: Sequence[Work]) -> None:
        (stage,) = self.stages.values()
        asked = [work for work in upcoming if work.asks_teacher]
        order, stage.said = ahead.begin(works, asked)
        stage.works = [*(as_learner(work, is_last=stage.is_last) for work in works), *asked]
        schedule.follow(order, ahead.teach, ahead.backward_group)

    def _schedule(self, works: Sequence[Work]) -> Any:
        """torch's, for these shapes: it fixes what travels when it is made."""
        shapes = {(work.tokens.input_ids_BS.shape, work.asks_teacher) for work in works}
        assert len(shapes) == 1, f"micro-batches of different shapes in one step: {shapes}"
        ((rows, tokens), asks_teacher) = next(iter(shapes))
        asks_teacher = asks_teacher and self.ahead is None
        key = (len(works), rows, tokens, asks_teacher)
        if key != self._made_for:
            hidden = self._hidden(rows, tokens, asks_teacher)
            stages = [self._stage(number, hidden) for number in sorted(self.stages)]
            options = {"loss_fn": _sum, "scale_grads": False}
            chosen = stages if self.scheme.per_rank > 1 else stages[0]
            self._made_for, self._latest = key, self.scheme.schedule(chosen, len(works), **options)
        return self._latest

    def _stage(self, number: int, hidden: tuple[Tensor, ...]) -> PipelineStage:
        anything, loss = torch.empty(1, dtype=torch.int64, device="meta"), torch.empty(1, device="meta")
        return PipelineStage(
            self.stages[number],
            number,
            self.count,
            self.device,
            input_args=hidden if number else (anything,),
            output_args=hidden if number + 1 < self.count else (loss.requires_grad_(),),
            group=self.group,
        )

    def _hidden(self, rows: int, tokens: int, asks_teacher: bool) -> tuple[Tensor, ...]:
        width = self.width
        student = torch.empty(rows, tokens, width.student, dtype=width.student_dtype, device="meta")
        teacher = torch.empty(rows, tokens, width.teacher, dtype=width.teacher_dtype, device="meta")
        return (student.requires_grad_(), teacher) if asks_teacher and width.teacher else (student.requires_grad_(),)


class _Stage(nn.Module):
    """A twin as torch's schedules call it: with what it received and a micro-batch's number."""

    def __init__(self, number: int, count: int, twin: Twin):
        super().__init__()
        self.number, self.twin = number, twin
        self.is_last = number + 1 == count
        self.works: Sequence[Work] = ()
        self.made: dict[int, Any] = {}
        self.said: dict[int, Tensor] = {}  # by a teacher that runs ahead, of micro-batches to come

    def speak(self, at: int, *received: Tensor) -> Tensor:
        """The teacher's part alone. By way of `forward`, whose hooks gather its weights."""
        return self(*received, number=torch.tensor([at]), teacher_alone=True)

    def forward(self, *received: Tensor, number: Tensor, teacher_alone: bool = False) -> Tensor | tuple[Tensor, ...]:
        at = int(number)
        if teacher_alone:
            return self.twin.speak(self.works[at].tokens, *received)
        made = self.twin(self.works[at], *(received if self.number else ()), said_BSE=self.said.pop(at, None))
        if not self.is_last:
            return made if isinstance(made, tuple) else (made,)
        self.made[at] = made
        if not torch.is_grad_enabled():
            return ()
        # of one dim: a loss without any breaks the schedule's merge, and the other ranks wait
        return torch.stack([made.loss])


def _sum(loss: Tensor, _: Tensor) -> Tensor:
    return loss.sum()
