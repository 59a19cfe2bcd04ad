"""A student in Megatron-Core's GPTModels, with the teacher's GPTModels in the same stages.

The teacher's forward runs before the student's forward; the teacher's hidden states stay on the last stage. The full
tensors of a stage are all-gathered one at a time from the blocks on its ranks (`weights.py`), so that no process
needs memory for more than two copies of one tensor. A gather is a collective of the tensor ranks or, for tensors of
experts, of the ranks that share a layer's experts. So each replica gathers separately.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from stillhouse.data import StepMicroBatches
from stillhouse.megatron.adapter import without_adapter
from stillhouse.megatron.chunks import Chunks
from stillhouse.megatron.families import Index
from stillhouse.megatron.weights import index_key, local_blocks
from stillhouse.models.adapter import initial_matrix
from stillhouse.models.processors import full_vocab
from stillhouse.parallel import (
    DistributedStudent,
    Layout,
    Mesh,
    ShardedMicroBatches,
    StageInputs,
    StageWeight,
    shard_micro_batches,
)
from stillhouse.parallel.teacher_student_pair import DecoderHead, InStage, distill_targets


class MegatronStudent(DistributedStudent):
    """A student on Megatron-Core, with its teacher if the teacher runs in the same stages.

    teacher: the teacher in the same stages.
    teacher_head: the head of a teacher outside the stages, on ranks with the last stage.
    teacher_is_base: whether the teacher is the student without its adapter.
    data_parallel: fields of `DistributedDataParallelConfig`.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: Mesh,
        student: Chunks,
        *,
        teacher: Chunks | None = None,
        teacher_head: DecoderHead | None = None,
        teacher_is_base: bool = False,
        data_parallel: Mapping[str, Any],
    ):
        decoder, with_teacher = student.decoder, teacher if teacher_head is None else teacher_head
        self.layout, self.mesh, self.decoders, self.teacher_head = layout, mesh, [decoder], teacher_head
        self.teacher = None if with_teacher is None else with_teacher.decoder
        self.has_last_stage = mesh.coordinate("pipeline") == layout.degrees.pipeline - 1
        self.teacher_is_base = teacher_is_base
        self.student = student.trained(layout.degrees.replicate, **data_parallel)
        self.teacher_chunks = teacher
        if teacher is not None:
            teacher.unrounded.clear()
            for model in teacher.models:
                model.eval().requires_grad_(False)
        tensors, shared = decoder.state_dict(), decoder.shared_names()
        self.has_gradient = False  # whether a pass has added to the gradients since they were set to zero
        #: the shapes of the full model's tensors, by name; a tied head has the embedding's name
        self.shapes = {name: tensor.shape for name, tensor in tensors.items() if name not in shared}
        parameters = {name: parameter for name, parameter in decoder.named_parameters() if name not in shared}
        #: the names of the trained tensors; and the names of a checkpoint's tensors, which also include buffers
        self.trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        self.saved = [name for name in self.shapes if name in self.trained or name not in parameters]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the chunks with their names in Megatron-Core."""
        return ((f"{number}.{name}", parameter) for (number, name), parameter in self.student.named_parameters())

    def initialize_adapter(self, seed: int, *, fresh: bool = True) -> None:
        """Initialise the adapter's matrices on this rank. Must precede the optimizer, which copies them."""
        matrices = self.student.matrices.items()
        self.student.set_adapter((name, initial_matrix(name, shape, seed, fresh=fresh)) for name, shape in matrices)

    def stage_weights(self) -> dict[str, StageWeight]:
        chunks = self.student
        parts: defaultdict[str, list[Tensor]] = defaultdict(list)
        for block, part in local_blocks(chunks.models, chunks.table, Tensor.detach):
            if not block.is_copy:
                parts[block.name].append(part)
        device = next(chunks.models[0].parameters()).device
        return {
            tensor.name: StageWeight(tensor.empty, partial(tensor.gathered, parts[tensor.name], device))
            for tensor in self._stage_tensors
        }

    @cached_property
    def _stage_tensors(self) -> "list[StageTensor]":
        """The tensors of this rank's stages, without the last stage's copy of a tied embedding. A collective."""
        dense, experts = dict[str, list[Index]](), dict[str, list[Index]]()
        for block in self.student.table.blocks:
            if not block.is_copy:
                places = experts if ".experts." in block.parameter else dense
                places.setdefault(block.name, []).append(block.index)
        groups = (
            (parallel_state.get_tensor_model_parallel_group(), dense),
            (parallel_state.get_expert_tensor_and_model_parallel_group(), experts),
        )
        tensors, empty = dict[str, StageTensor](), self.decoders[0].state_dict()
        for group, places in groups:
            rank_places: list[Any] = [None] * group.size()
            dist.all_gather_object(rank_places, places, group=group)
            # a tensor rank whose vocabulary rows are all padding has no block of the tensor
            for name in dict.fromkeys(name for places in rank_places for name in places):
                ranks = [places.get(name, []) for places in rank_places]
                tensors[name] = StageTensor(name, empty[name], group, ranks)
        return [tensors[name] for name in self.shapes if name in tensors]

    def shard(self, micro_batches: StepMicroBatches, *, training: bool = True) -> ShardedMicroBatches:
        """Return this process's share of the micro-batches. Under a pipeline, their number is a multiple of the
        pipeline's ranks, also in evaluations.
        """
        return shard_micro_batches(micro_batches, self.mesh, uniform_shapes=self.layout.stages > 1)

    def forward(self, inputs: Sequence[StageInputs]) -> list[Any]:
        with torch.no_grad():
            return self._run(inputs, backward=False)

    def forward_backward(self, inputs: Sequence[StageInputs]) -> tuple[list[Any], list[tuple[str, Tensor]]]:
        """Add the gradients of the losses. Returns the processor's results, and the losses in this rank's routers."""
        losses = [
            part.start(entry.micro_batch, self.decoders[0], entry.normalizer)
            for entry in inputs
            for part in entry.losses
        ]
        results = self._run(inputs, backward=True, losses=losses)
        return results, [named for loss in losses for named in loss.losses()]

    def _run(self, inputs: Sequence[StageInputs], **options: Any) -> list[Any]:
        """Run the student. If a signal is a placeholder (`InStage`), first run the teacher to get the real signal."""
        signals: list[dict[str, Any]] = [dict(entry.signals) for entry in inputs]
        name = next((name for name, signal in signals[0].items() if isinstance(signal, InStage)), None)
        if name is not None:
            teacher = self.student if self.teacher_is_base else self.teacher_chunks
            assert teacher is not None
            read = [replace(entry, micro_batch=entry.micro_batch.as_read_by_teacher) for entry in inputs]
            base = without_adapter(teacher.models) if self.teacher_is_base else nullcontext()
            with torch.no_grad(), base:
                exact = teacher.run(read, [None] * len(read), full_vocab, backward=False)
            for named, signal in zip(signals, exact, strict=bool(exact)):  # only the last stage has results
                named[name] = signal
        contexts = [distill_targets(entry.micro_batch, named) for entry, named in zip(inputs, signals, strict=True)]
        return self.student.run(inputs, contexts, inputs[0].processor, **options)

    @property
    def gradients(self) -> list[Tensor]:
        """The buffers that contain the gradients on this rank."""
        return [
            buffer.grad_data
            for model in self.student.wrapped
            for buffer in (*model.buffers, *model.expert_parallel_buffers)
        ]


@dataclass(frozen=True)
class StageTensor:
    """A full tensor without values, and the places of the blocks that each rank of the group has."""

    name: str
    empty: Tensor
    group: dist.ProcessGroup
    places: Sequence[Sequence[Index]]

    def gathered(self, parts: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the full tensor. A collective of the group. Raises ValueError if the copies of a block differ."""
        full = torch.empty_like(self.empty, device=device)
        sizes = [sum(full[index].numel() for index in places) for places in self.places]
        sent = full.new_zeros(max(sizes))
        if parts:
            torch.cat([part.flatten().to(full.dtype) for part in parts], out=sent[: sizes[self.group.rank()]])
        received = sent
        if len(sizes) > 1:
            received = sent.new_empty(len(sizes) * len(sent))
            dist.all_gather_into_tensor(received, sent, group=self.group)
        seen: set[tuple[tuple[int, int], ...]] = set()
        for places, flat in zip(self.places, received.view(len(sizes), len(sent)), strict=True):
            start = 0
            for index in places:
                target = full[index]
                part = flat[start : start + target.numel()].view(target.shape)
                start += target.numel()
                if (key := index_key(index)) in seen and not torch.equal(
                    *(tensor.contiguous().flatten().view(torch.uint8) for tensor in (target, part))
                ):
                    raise ValueError(
                        f"tensor '{self.name}': the copies of its part {index} differ between ranks; expected equal "
                        "weights, so start the run again from its last checkpoint"
                    )
                seen.add(key)
                target.copy_(part)
        return full
