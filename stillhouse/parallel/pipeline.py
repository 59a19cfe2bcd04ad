"""The pipeline: student and teacher run side by side in the same stages, under torch's schedules.

A stage holds some layers of both models. It sends the hidden states of both to the next stage, never logits; the
teacher's hidden states have no gradient. The last stage thus has both hidden states of a micro-batch, and the output
processor runs in the student's head as it does without a pipeline. Nothing but hidden states is sent: every rank
already has the micro-batches and looks each of them up by its number.

B rows, S tokens per row of a micro-batch; D, E widths of student and teacher.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage

from stillhouse.data import MicroBatch
from stillhouse.models.dtensors import local
from stillhouse.objective import TEACHER, Signals
from stillhouse.parallel.gradients import reduce_partial_grads
from stillhouse.parallel.mesh import Mesh
from stillhouse.parallel.older_torch import stage_class
from stillhouse.parallel.pair import InStage, StageInputs, StageResults, TeacherStudentPair
from stillhouse.parallel.run_layout import Scheme
from stillhouse.parallel.teacher_head import TeacherHidden
from stillhouse.parallel.teacher_prefetch import TeacherPrefetch


@dataclass(frozen=True)
class Width:
    """The widths D, E and the dtypes of the hidden states that stages send. E is 0 if the teacher's are not sent."""

    student: int
    student_dtype: torch.dtype
    teacher: int = 0
    teacher_dtype: torch.dtype = torch.float32


class Pipeline:
    """The stages of this rank and their schedule.

    pairs: by stage number.
    copies_embedding: the last stage has a copy of the student's embedding, which is on the first stage: as its head,
    if the two are tied, or for MTP layers. The two gradients are summed after every step, so that the copies stay
    equal.
    teacher_cost: a forward of the teacher's layers, in forwards of the student's layers; for schemes with prefetch.
    """

    def __init__(
        self,
        pairs: dict[int, TeacherStudentPair],
        scheme: Scheme,
        width: Width,
        mesh: Mesh,
        *,
        copies_embedding: bool,
        teacher_cost: float,
    ):
        group = mesh.group("pipeline")
        assert group is not None
        self.ranks, self.rank = group.size(), group.rank()
        self.count = self.ranks * scheme.per_rank
        self.stages = {number: _Stage(number, self.count, pair) for number, pair in pairs.items()}
        if mesh.sharding is not None:
            # the stage itself has no weights, but wrapping it makes the schedule keep gathered weights and sum
            # gradients once per step
            for stage in self.stages.values():
                fully_shard(stage, mesh=mesh.sharding)
        self.copies_embedding = copies_embedding
        self.scheme, self.width, self.group, self.device = scheme, width, group, mesh.device
        self.reverse_groups = mesh.pipelines
        self.prefetch: TeacherPrefetch | None = None
        if scheme.prefetch:
            (stage,), (teacher_group, backward_group) = self.stages.values(), mesh.pipelines
            teacher = (teacher_cost, width.teacher, width.teacher_dtype, teacher_group)
            self.prefetch = TeacherPrefetch(stage.teacher_forward, *teacher, backward_group, mesh.device)
        self._schedule_key: tuple[Any, ...] = ()
        self._schedule: Any = None

    def forward_backward(self, inputs: Sequence[StageInputs]) -> list[StageResults]:
        """Add the gradients of the micro-batches' losses to the parameters.

        Returns the results of this rank's stages, stage by stage; those of all but the last stage have no outputs.
        All micro-batches must have the same shape. Raises ValueError if the schedule does not support this number of
        micro-batches.
        """
        step, numbers = _Step(inputs), torch.arange(len(inputs))
        schedule = self._schedule_for(inputs, with_teacher=step.in_stage and self.prefetch is None)
        if self.prefetch is not None:
            order = self.prefetch.begin([batch.micro_batch for batch in inputs], step.request, runs=step.in_stage)
            schedule.follow(order, self.prefetch.run_teacher, self.prefetch.backward_group)
            if step.in_stage:
                step.prefetched = self.prefetch.now.hidden
        first = (numbers,) if 0 in self.stages else ()
        target = numbers if self.count - 1 in self.stages else None
        schedule.step(*first, target=target, number=numbers, step=step, return_outputs=False)
        if self.prefetch is not None:
            self.prefetch.end()
        if self.copies_embedding:
            self._sum_embedding_gradient()
        return [step.results[key] for key in sorted(step.results)]

    @torch.no_grad()
    def forward(self, inputs: Sequence[StageInputs]) -> list[StageResults]:
        """Run the micro-batches, of any number and shapes, without gradients.

        Returns the results of the last stage, and an empty list on the ranks of all others. Does not use torch's
        schedules: the one of ZBV cannot evaluate (torch 2.13), and without backward there is nothing to schedule. A
        rank runs all micro-batches through one of its stages before it begins with its next stage.
        """
        step = _Step(inputs)
        if self.prefetch is not None:
            self.prefetch.forget(step.request)
        outputs: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # of a stage, for the next one on this rank
        sends: list[tuple[Any, Tensor]] = []
        for number, stage in sorted(self.stages.items()):
            source, target = (self.scheme.rank_of(other, self.ranks) for other in (number - 1, number + 1))
            for index, batch in enumerate(inputs):
                received: tuple[Tensor, ...] = ()
                if number and source != self.rank:
                    received = self._receive(batch.micro_batch, source, with_teacher=step.in_stage)
                elif number:
                    received = outputs.pop((number - 1, index))
                passed = stage(*received, number=torch.tensor([index]), step=step)
                if number + 1 == self.count:
                    continue
                if target == self.rank:
                    outputs[number, index] = passed
                else:
                    group = self._message_group(self.rank, target)
                    sends += [(dist.isend(hidden, group=group, group_dst=target), hidden) for hidden in passed]
        for send, _ in sends:
            send.wait()
        return [step.results[key] for key in sorted(step.results) if key[0] + 1 == self.count]

    def _sum_embedding_gradient(self) -> None:
        """Give the embedding of the first stage and its copy on the last stage the sum of their gradients."""
        first, last = 0, self.scheme.rank_of(self.count - 1, self.ranks)
        if self.rank not in (first, last):
            return
        gradients = [local(weight.grad) for weight in reduce_partial_grads(self._embeddings())]
        if first == last:
            total = gradients[0] + gradients[1]
        else:
            sent = gradients[0].to(self.device)  # the gradient may be in host memory
            received = torch.empty_like(sent)
            peer = dist.get_global_rank(self.group, last if self.rank == first else first)
            # in one batch: if both ranks sent first, each would wait for the other (NCCL)
            messages = [
                dist.P2POp(dist.isend, sent.contiguous(), peer, self.group),
                dist.P2POp(dist.irecv, received, peer, self.group),
            ]
            for message in dist.batch_isend_irecv(messages):
                message.wait()
            total = sent + received
        for gradient in gradients:
            gradient.copy_(total)

    def _embeddings(self) -> list[nn.Parameter]:
        """Return the weights of the embedding and of its copy, if they are on this rank."""
        weights = []
        if 0 in self.stages:
            weights.append(self.stages[0].pair.student.pretrained.get_input_embeddings().weight)
        if self.count - 1 in self.stages:
            weights.append(self.stages[self.count - 1].pair.student.embedding_copy)
        return weights

    @property
    def embedding_copy(self) -> Tensor | None:
        """The last stage's trained copy of the first stage's embedding; None if this rank has no such copy."""
        is_here = self.copies_embedding and self.count - 1 in self.stages
        return self._embeddings()[-1] if is_here else None

    def _receive(self, micro_batch: MicroBatch, source: int, *, with_teacher: bool) -> tuple[Tensor, ...]:
        hidden = self._hidden(*micro_batch.shape_BS, with_teacher=with_teacher)
        received = tuple(torch.empty_like(meta, device=self.device, requires_grad=False) for meta in hidden)
        for buffer in received:
            dist.recv(buffer, group=self._message_group(source, self.rank), group_src=source)
        return received

    def _message_group(self, source: int, target: int) -> ProcessGroup:
        """Return the group for messages from `source` to `target`.

        Each direction has its own group. NCCL runs the messages of a group in the order in which each rank issues
        them, and two ranks may issue the messages of opposite directions in different orders.
        """
        return self.group if source < target else self.reverse_groups[0]

    def _schedule_for(self, inputs: Sequence[StageInputs], *, with_teacher: bool) -> Any:
        """Return torch's schedule for these shapes. A schedule fixes the shapes of its messages at construction."""
        shapes = {batch.micro_batch.shape_BS for batch in inputs}
        assert len(shapes) == 1, f"micro-batches of different shapes in one step: {shapes}"
        ((rows, tokens),) = shapes
        key = (len(inputs), rows, tokens, with_teacher)
        if key != self._schedule_key:
            hidden = self._hidden(rows, tokens, with_teacher=with_teacher)
            stages = [self._stage(number, hidden) for number in sorted(self.stages)]
            options = {"loss_fn": _sum, "scale_grads": False}
            chosen = stages if self.scheme.per_rank > 1 else stages[0]
            self._schedule_key = key
            self._schedule = self.scheme.schedule(chosen, len(inputs), **options)
        return self._schedule

    def _stage(self, number: int, hidden: tuple[Tensor, ...]) -> PipelineStage:
        number_input, loss = torch.empty(1, dtype=torch.int64, device="meta"), torch.empty(1, device="meta")
        return stage_class()(
            self.stages[number],
            number,
            self.count,
            self.device,
            input_args=hidden if number else (number_input,),
            output_args=hidden if number + 1 < self.count else (loss.requires_grad_(),),
            group=self.group,
        )

    def _hidden(self, rows: int, tokens: int, *, with_teacher: bool) -> tuple[Tensor, ...]:
        """Return what one stage sends to the next one, as meta tensors."""
        width = self.width
        student = torch.empty(rows, tokens, width.student, dtype=width.student_dtype, device="meta").requires_grad_()
        if not (with_teacher and width.teacher):
            return (student,)
        return student, torch.empty(rows, tokens, width.teacher, dtype=width.teacher_dtype, device="meta")


class _Step:
    """The micro-batches of one call. Every stage of this rank gets all of them, and the number of the one to run.

    inputs: by the micro-batch's number. results: by the numbers of the stage and of the micro-batch.
    prefetched: of a teacher that runs ahead, its last hidden states by micro-batch, on the last stage; None if the
        teacher runs with the student.
    """

    def __init__(self, inputs: Sequence[StageInputs]):
        self.inputs = inputs
        self.results: dict[tuple[int, int], StageResults] = {}
        self.prefetched: dict[int, Tensor] | None = None
        signals = [batch.signals.values() for batch in inputs]
        markers = [[signal for signal in of_batch if isinstance(signal, InStage)] for of_batch in signals]
        assert len({len(of_batch) for of_batch in markers}) == 1, (
            "a teacher in the stages for only some of the micro-batches"
        )
        self.in_stage = bool(markers[0])
        self.request = markers[0][0].request if self.in_stage else None


class _Stage(nn.Module):
    """A pair with the signature that torch's schedules call: the received hidden states, and a micro-batch's number
    in the step.
    """

    def __init__(self, number: int, count: int, pair: TeacherStudentPair):
        super().__init__()
        self.number, self.pair = number, pair
        self.is_last = number + 1 == count

    def teacher_forward(self, micro_batch: MicroBatch, *received: Tensor) -> Tensor:
        """Run the teacher's part alone. This calls `forward`, because its FSDP hooks gather the weights."""
        return self(*received, teacher_of=micro_batch)

    def forward(
        self,
        *received: Tensor,
        number: Tensor | None = None,
        step: _Step | None = None,
        teacher_of: MicroBatch | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        if teacher_of is not None:
            return self.pair.teacher_forward(teacher_of, *received)
        assert number is not None
        assert step is not None
        index = int(number)
        inputs = step.inputs[index]
        if step.prefetched is not None:
            inputs = replace(inputs, signals=self._prefetched(step.prefetched, index))
        result = self.pair(inputs, *(received if self.number else ()))
        if not self.is_last:
            step.results[self.number, index] = replace(result, output=None, teacher_BSE=None)
            return (result.output,) if result.teacher_BSE is None else (result.output, result.teacher_BSE)
        step.results[self.number, index] = replace(result, teacher_BSE=None)
        if not torch.is_grad_enabled():
            return ()
        # 1-D: the schedule cannot merge 0-D losses, and its error would leave the other ranks waiting
        return torch.stack([result.output.loss])

    def _prefetched(self, hidden: dict[int, Tensor], index: int) -> Signals:
        """The signals of a teacher that has run ahead; only the last stage needs them."""
        if not self.is_last:
            return {}
        head = self.pair.teacher_head
        assert head is not None
        return {TEACHER: TeacherHidden(hidden.pop(index).flatten(0, 1), head)}


def _sum(loss: Tensor, _: Tensor) -> Tensor:
    return loss.sum()
