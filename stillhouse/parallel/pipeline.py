"""The pipeline: student and teacher run in the same stages, under torch's schedules.

A stage has some layers of both models, and sends the hidden states of both models, never logits, to the next stage.
The teacher's hidden states have no gradient. The last stage has the heads, and runs the output processor as a run
without a pipeline does. Every rank has all micro-batches, and finds a micro-batch by its number.

B rows, S tokens per row of a micro-batch; D width of the student, E width of the teacher.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage

from stillhouse.dry_run import replaceable
from stillhouse.libraries import is_at_least
from stillhouse.models.dtensors import local
from stillhouse.models.lm_head import input_embedding
from stillhouse.parallel.gradients import reduce_partial_grads
from stillhouse.parallel.mesh import Mesh
from stillhouse.parallel.older_torch_stage import StageWithConstants
from stillhouse.parallel.run_layout import Scheme
from stillhouse.parallel.stages import StagePlan
from stillhouse.parallel.teacher_student_pair import InStage, StageInputs, StageResults, TeacherStudentPair


class Pipeline:
    """The stages of this rank and their schedule.

    pairs: the models of each stage, by the stage's number.

    If the last stage trains a copy of the embedding, the gradients of embedding and copy are both set to their sum
    after the backward of each step. So embedding and copy stay equal.
    """

    def __init__(self, pairs: dict[int, TeacherStudentPair], scheme: Scheme, plan: StagePlan, mesh: Mesh):
        group, reverse_group = mesh.group("pipeline"), mesh.reverse_pipeline
        assert group is not None
        assert reverse_group is not None
        self.ranks, self.rank = group.size(), group.rank()
        self.count = self.ranks * scheme.per_rank
        self.stages = {number: _Stage(number, self.count, pair) for number, pair in pairs.items()}
        if mesh.is_sharded:
            # `_Stage` itself has no weights, but it must be an FSDP module: otherwise torch's schedule would not keep
            # gathered weights, and would reduce gradients more than once per step
            for stage in self.stages.values():
                fully_shard(stage, mesh=mesh.sharding(mesh.weights))
        self.scheme, self.plan, self.device = scheme, plan, mesh.device
        self.group, self.reverse_group = group, reverse_group
        # FSDP moves a stage's inputs to the device, and the host would wait for each number that is in host memory
        self._device_of_numbers = mesh.device if mesh.is_sharded else torch.device("cpu")
        self._schedule_key: tuple[Any, ...] = ()
        self._schedule: Any = None

    def forward_backward(self, inputs: Sequence[StageInputs]) -> list[StageResults]:
        """Add the gradients of the micro-batches' losses to the parameters, and return the results of this rank's
        stages, stage by stage. Only the results of the last stage have an output.

        All micro-batches must have the same shape. Raises ValueError for a number of micro-batches that the schedule
        does not support.
        """
        numbers = torch.arange(len(inputs), device=self._device_of_numbers)
        first = (numbers,) if 0 in self.stages else ()
        target = numbers if self.count - 1 in self.stages else None
        with self._running(inputs) as in_stage:
            schedule = self._schedule_for(inputs, with_teacher=in_stage)
            schedule.step(*first, target=target, number=numbers, return_outputs=False)
            results = [result for _, stage in sorted(self.stages.items()) for result in stage.results]
        if self.plan.copies_embedding:
            self._sum_embedding_gradient()
        return results

    @torch.no_grad()
    def forward(self, inputs: Sequence[StageInputs]) -> list[StageResults]:
        """Run any number of micro-batches of any shapes without gradients. Returns the results of the last stage; the
        list is empty on a rank without this stage. Torch's schedules are not used, because ZBV cannot run without
        backward (torch 2.13).
        """
        outputs: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # only for stages whose next stage is on this rank
        sends: list[tuple[Any, Tensor]] = []  # a tensor must stay alive until its message is complete
        with self._running(inputs) as in_stage:
            for number, stage in sorted(self.stages.items()):
                source, target = (self.scheme.rank_of(other, self.ranks) for other in (number - 1, number + 1))
                for index, batch in enumerate(inputs):
                    received: tuple[Tensor, ...] = ()
                    if number and source == self.rank:
                        received = outputs.pop((number - 1, index))
                    elif number:
                        shape_BS = batch.micro_batch.shape_BS
                        received = self._hidden(shape_BS, self.device, with_teacher=in_stage)
                        for buffer in received:
                            dist.recv(buffer, group=self._message_group(source, self.rank), group_src=source)
                    passed = stage(*received, number=torch.full((1,), index, device=self._device_of_numbers))
                    if target == self.rank and number + 1 < self.count:
                        outputs[number, index] = passed
                    elif number + 1 < self.count:
                        sends = [message for message in sends if not message[0].is_completed()]
                        for hidden in passed:
                            group = self._message_group(self.rank, target)
                            sends.append((dist.isend(hidden, group=group, group_dst=target), hidden))
            results = [result for stage in self.stages.values() if stage.is_last for result in stage.results]
        for message, _ in sends:
            message.wait()
        return results

    @contextmanager
    def _running(self, inputs: Sequence[StageInputs]) -> Iterator[bool]:
        """Give a step's inputs to the stages, and yield whether a teacher runs in the stages. The inputs are not
        an argument of a stage's forward, because torch 2.11 requires that all arguments of forward are tensors.
        """
        markers = [signal for batch in inputs for signal in batch.signals.values() if isinstance(signal, InStage)]
        assert len(markers) in (0, len(inputs)), "a teacher in the stages for only some of the micro-batches"
        for stage in self.stages.values():
            stage.inputs = inputs
            stage.results = []
        try:
            yield bool(markers)
        finally:
            for stage in self.stages.values():
                stage.inputs = ()
                stage.results = []

    def _sum_embedding_gradient(self) -> None:
        first, last = 0, self.scheme.rank_of(self.count - 1, self.ranks)
        if self.rank not in (first, last):
            return
        weights: list[Any] = [] if self.embedding_copy is None else [self.embedding_copy]
        if 0 in self.stages:
            weights.insert(0, self.stages[0].pair.student.pretrained.get_input_embeddings().weight)
        gradients = [local(weight.grad) for weight in reduce_partial_grads(weights)]
        if first == last:
            total = gradients[0] + gradients[1]
        else:
            sent = gradients[0].to(self.device)  # the gradient can be in host memory
            received = torch.empty_like(sent)
            peer = dist.get_global_rank(self.group, last if self.rank == first else first)
            # send and receive in one batch: two ranks that both send first would deadlock (NCCL)
            messages = [
                dist.P2POp(dist.isend, sent.contiguous(), peer, self.group),
                dist.P2POp(dist.irecv, received, peer, self.group),
            ]
            for message in dist.batch_isend_irecv(messages):
                message.wait()
            total = sent + received
        for gradient in gradients:
            gradient.copy_(total)

    @property
    def embedding_copy(self) -> Tensor | None:
        """The last stage's trained copy of the embedding. It is None if this rank has no such copy."""
        if not (self.plan.copies_embedding and self.count - 1 in self.stages):
            return None
        student = self.stages[self.count - 1].pair.student
        embedding = input_embedding(student.pretrained)
        return student.output_weight if embedding is None else embedding.weight  # a tied head, or MTP's embedding

    def _message_group(self, source: int, target: int) -> ProcessGroup:
        # NCCL runs a group's messages in the order in which each rank issues them. With one group for both
        # directions, two ranks that issue their messages in different orders would deadlock
        return self.group if source < target else self.reverse_group

    def _schedule_for(self, inputs: Sequence[StageInputs], *, with_teacher: bool) -> Any:
        """Return torch's schedule for the inputs' shape. Another shape needs another schedule."""
        shapes = {batch.micro_batch.shape_BS for batch in inputs}
        assert len(shapes) == 1, f"micro-batches of different shapes in one step: {shapes}"
        (shape_BS,) = shapes
        key = (len(inputs), shape_BS, with_teacher)
        if key != self._schedule_key:
            hidden = self._hidden(shape_BS, torch.device("meta"), with_teacher=with_teacher)
            hidden[0].requires_grad_()  # the student's hidden states
            number_input = torch.empty(1, dtype=torch.int64, device="meta")
            loss = torch.empty(1, device="meta", requires_grad=True)
            stage_class = PipelineStage if is_at_least("torch", "2.13") else StageWithConstants
            stages = []
            for number, stage in sorted(self.stages.items()):
                received, sent = hidden if number else (number_input,), hidden if number + 1 < self.count else (loss,)
                place = number, self.count, self.device
                stages.append(stage_class(stage, *place, input_args=received, output_args=sent, group=self.group))
            chosen = stages if self.scheme.per_rank > 1 else stages[0]
            self._schedule_key = key
            self._schedule = self.scheme.schedule(
                chosen, len(inputs), loss_fn=lambda loss, _: loss.sum(), scale_grads=False
            )
        return self._schedule

    def _hidden(self, shape_BS: tuple[int, int], device: torch.device, *, with_teacher: bool) -> tuple[Tensor, ...]:
        sizes = (self.plan.student, self.plan.teacher if with_teacher else None)
        return tuple(
            torch.empty(*shape_BS, size.width, dtype=size.dtype, device=device) for size in sizes if size is not None
        )


class _Stage(nn.Module):
    """Adapts a pair to torch's schedules, which call a stage with hidden states and the number of a micro-batch.

    inputs: the inputs of the step's micro-batches.
    results: the results of the micro-batches that have run.
    """

    def __init__(self, number: int, count: int, pair: TeacherStudentPair):
        super().__init__()
        self.number, self.pair = number, pair
        self.is_last = number + 1 == count
        self.inputs: Sequence[StageInputs] = ()
        self.results: list[StageResults] = []

    def forward(self, *received: Tensor, number: Tensor) -> Tensor | tuple[Tensor, ...]:
        index = len(self.results)  # every schedule runs a stage's micro-batches in order
        if number.device.type == "cpu":  # reading a number on a GPU would wait for all earlier work
            require_next(self.number, index, number)
        result = self.pair(self.inputs[index], *(received if self.number else ()))
        output: Any = result.output if self.is_last else None
        self.results.append(replace(result, output=output, teacher_BSE=None))
        if self.is_last:
            # 1-D, because the schedule cannot merge 0-D losses
            return torch.stack([output.loss]) if torch.is_grad_enabled() else ()
        passed = (result.output,) if result.teacher_BSE is None else (result.output, result.teacher_BSE)
        # if the next stage is on the same rank (ZBV), torch detaches these tensors in place; views do not allow this
        return tuple(hidden if hidden._base is None else hidden.clone() for hidden in passed)


@replaceable
def require_next(stage: int, index: int, number: Tensor) -> None:
    """Raise RuntimeError if the schedule does not run the next micro-batch."""
    if int(number) != index:
        raise RuntimeError(f"stage {stage} runs micro-batch {int(number)}: expected the next one, {index}")
