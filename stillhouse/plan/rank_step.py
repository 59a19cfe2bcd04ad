"""Runs steps of one rank with the models, layout and engine of a run, but with fake tensors and without a device.

The weights are allocated and not read, the documents have a length but no text, and the signals of stores have no
values. Messages to other ranks go to torch's fake process group, which sends nothing. N: the tokens of all documents.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import unwrap
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from stillhouse.config import RunConfig, TeacherConfig
from stillhouse.data import DataReport, Documents, PackedSequences, StepMicroBatches
from stillhouse.data.media import MediaInputs
from stillhouse.dry_run import dry_run
from stillhouse.engine.engine import Engine
from stillhouse.engine.schedule import make_step_schedule
from stillhouse.models import Decoder
from stillhouse.models.dtensors import local
from stillhouse.models.lm_head import Head
from stillhouse.objective.metrics import ADVANTAGES, IS_SAMPLED, OLD_LOG_PROBS, POLICY_VERSION, SAMPLING
from stillhouse.parallel import (
    Layout,
    Mesh,
    ModelSource,
    Runner,
    ShardedMicroBatches,
    empty_decoder,
    shard_micro_batches,
)
from stillhouse.parallel.backbone_cut import cut_backbone
from stillhouse.parallel.pipeline import require_next
from stillhouse.parallel.ranks import FIRST_BYTES, LENGTH_BYTES, Ranks
from stillhouse.parallel.sharded_loading import allocate
from stillhouse.parallel.stages import cost_of
from stillhouse.plan.device_counts import DeviceCounts, StepCounts
from stillhouse.plan.fake_cuda import FakeCudaMode, fake_cuda
from stillhouse.run.models import ModelSources
from stillhouse.run.setup import RunSetup, configured_layout, with_precision
from stillhouse.signals import RequestedSteps, SignalSource, SignalStore, StoredTeacher
from stillhouse.signals.signal_source import PendingSignals
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

#: the device of every rank of a dry run
_DEVICE = torch.device("cuda", 0)
#: purposes of memory and kernels (`DeviceCounts.labelled`)
STUDENT, TEACHER, OPTIMIZER, GRADIENTS, CLIP = "student weights", "teacher weights", "optimizer", "gradients", "clip"
STUDENT_ACTIVATIONS, TEACHER_ACTIVATIONS, OBJECTIVE, BATCH = "activations", "teacher activations", "tile", "batch"


@dataclass(frozen=True)
class PlannedRank:
    """The rank of a job whose steps are run.

    config: the configuration, with `parallel.fsdp` set.
    document_tokens: the length of the documents that fill the packed rows.
    """

    config: RunConfig
    rank: int
    ranks: int
    device: str
    document_tokens: int

    @property
    def layout(self) -> Layout:
        return configured_layout(self.config.parallel, self.ranks)

    @property
    def models(self) -> dict[str, str]:
        """The models that are run, by the keys of their sections."""
        teachers = self.config.teacher_sections.items()
        models = {section: teacher.model for section, teacher in teachers if teacher.model is not None}
        return {"student": self.config.student.model} | models

    @property
    def operations_per_token(self) -> float:
        """The floating-point operations per token: two for each weight that a token uses, in each pass. A teacher has
        one pass. The student has three passes, or two if an adapter is trained.
        """
        student = self.config.student
        costs = [cost_of(empty_decoder(student.model), 3 if student.adapter is None else 2)]
        for teacher in self.config.teacher_sections.values():
            model = student.model if teacher.signals_from == "student" else teacher.model
            if model is not None:
                costs.append(cost_of(empty_decoder(model), 1))
        return sum(2 * cost.passes * (cost.layers * cost.layer + cost.head) for cost in costs)


def rank_steps(planned: PlannedRank, properties: SimpleNamespace, tokens: Sequence[int]) -> list[StepCounts]:
    """Run steps of a rank and return their counts. The environment must have the rank's `RANK` and `WORLD_SIZE`.

    properties: the device's properties, see `fake_cuda`. tokens: `train.tokens_per_step` of each step.
    Raises the errors of a run whose models do not fit their layout.
    """
    with dry_run(_ANSWERS), fake_cuda(properties), ExitStack() as stack:
        if planned.ranks > 1:  # the fake group stands in for the job's other ranks
            dist.init_process_group("fake", store=FakeStore(), rank=planned.rank, world_size=planned.ranks)
            stack.callback(dist.destroy_process_group)
            # the real functions read values of tensors, which fake tensors lack
            stack.enter_context(dry_run({Ranks.exchange: _exchange, require_next: lambda *arguments: None}))
        setup = _PlannedSetup(with_precision(planned.config))
        layout = setup.layout
        mesh = Mesh(layout.degrees, _DEVICE)
        mode = FakeCudaMode()
        device = DeviceCounts(mode, planned.document_tokens, _axes(mesh))
        counted: list[StepCounts] = []
        with mode, device:
            # a family may have one class for texts, without a vision tower, and another one for images
            sources = setup.models(mesh, multimodal=setup.config.data.image_pixels is not None)
            engine, source = setup.engine(_PlannedModels(**vars(sources), memory=device), layout)
            # as in a run, each step builds the micro-batches of the next step and requests their signals
            make = device.labelled(BATCH)(partial(setup.planned_micro_batches, mesh, planned.document_tokens))
            requests = RequestedSteps(source, map(make, [*tokens, *[tokens[-1]] * (1 + source.steps_ahead)]))
            with _labelled(engine, source, device):
                for _ in tokens:
                    device.restart()
                    _run(engine, requests, device)  # a function, so that its tensors are freed
                    counted.append(device.restart())
        return counted


def _run(engine: Engine, requests: RequestedSteps, device: DeviceCounts) -> None:
    """Run a step in the order of `loops/off_policy.py`."""
    with device.labelled(STUDENT_ACTIVATIONS):
        micro_batches, signals = next(requests)
        output = engine.forward_backward(micro_batches, signals.result(), micro_batches.all_ranks.normalizer)
    requests.build_next()
    with device.labelled(OPTIMIZER):
        engine.update(1e-5, output)
    _ = output.sums


class _PlannedSetup(RunSetup):
    """Builds the objects of a run with models and signals that have no values."""

    @cached_property
    def stores(self) -> dict[str, SignalStore]:
        temperature = self.config.objective.temperature
        return {
            section: _PlannedStore(teacher, temperature)
            for section, teacher in self.teachers.items()
            if teacher.source_kind.is_store
        }

    def planned_micro_batches(self, mesh: Mesh, document_tokens: int, tokens_per_step: int) -> ShardedMicroBatches:
        """Return the micro-batches of a step on this rank. The last document of a row is shorter if necessary."""
        layout, max_tokens = self.layout, self.config.data.max_tokens
        train = self.config.train.model_copy(update={"tokens_per_step": tokens_per_step})
        lengths = [document_tokens] * (max_tokens // document_tokens)
        if rest := max_tokens % document_tokens:
            lengths.append(rest)
        starts = np.cumsum([0, *lengths * max(1, tokens_per_step // max_tokens)]).astype(np.int64)
        targets_N = np.ones(starts[-1], dtype=bool)
        targets_N[starts[:-1]] = False
        count = len(starts) - 1
        sources = [f"planned:{number}" for number in range(count)]
        tokens_N, hashes = np.zeros(starts[-1], dtype=np.int32), np.arange(count, dtype=np.uint64)
        documents = Documents(tokens_N, targets_N, starts, hashes, sources, DataReport("planned"))
        if self.config.rollout is not None:
            zeros_N = np.zeros(starts[-1], dtype=np.float32)
            columns = (ADVANTAGES, OLD_LOG_PROBS, IS_SAMPLED, POLICY_VERSION, SAMPLING)
            documents = replace(documents, per_token=dict.fromkeys(columns, zeros_N), weights_N=zeros_N + 1)
        packed = PackedSequences(documents, max_tokens=max_tokens, seed=0)
        schedule = make_step_schedule(train, len(packed), max_tokens, layout.degrees.data, layout.stages)
        return _planned_shards(schedule.micro_batches(packed, 0), mesh, uniform_shapes=layout.stages > 1)


@dataclass(frozen=True)
class _PlannedModels(ModelSources):
    """Models on the device that have shapes but no values. memory: counts the memory of their weights."""

    memory: DeviceCounts | None = None

    @cached_property
    def student_source(self) -> ModelSource:
        source: ModelSource = super().student_source
        return replace(source, build=unset_fake_temporarily()(source.build))

    def _whole_student(self) -> ModelSource:
        return self._sharded_student()

    def whole_teacher(self, section: str) -> ModelSource:
        source = self.sharded(section)

        def build() -> Decoder:
            decoder = source.build()
            assert source.load_weights is not None
            source.load_weights(decoder)
            return decoder

        return replace(source, build=build, load_weights=None)

    def sharded(
        self, section: str, device: torch.device | None = None, *, offload: bool = False, **options: Any
    ) -> ModelSource:
        source = super().sharded(section, device, offload=offload, **options)
        purpose = STUDENT if section == "student" else TEACHER
        # models are built with meta tensors, because `allocate` cannot replace fake tensors, to which the mode refers
        load = partial(self._allocate, purpose, device or self.mesh.device, offload)
        return replace(source, build=unset_fake_temporarily()(source.build), load_weights=load, has_values=False)

    def _allocate(self, purpose: str, device: torch.device, offload: bool, decoder: Decoder) -> None:
        assert self.memory is not None
        with self.memory.labelled(purpose):
            allocate(decoder, device, offload=offload)
        shard = decoder.head.shard if isinstance(decoder.head, Head) else None
        if shard is not None and shard.group is not None:
            rows, ranks = decoder.vocabulary_rows, shard.group.size()
            sizes = [Shard.local_shard_size_and_offset(rows, ranks, rank) for rank in range(ranks)]
            # the borders of each rank's shard, which the ranks of a run exchange
            vars(shard)["borders"] = tuple(
                (start if size else rows, start + size if size else rows) for size, start in sizes
            )


class _PlannedStore(SignalStore):
    """Replaces the store of a server's signals by signals of the kind `teacher.signal` without values."""

    def __init__(self, teacher: TeacherConfig, temperature: float):
        if teacher.url is None or teacher.signal == "hidden":
            raise ValueError(
                "a store in a dry run: expected teacher.url with teacher.signal=top_k, chosen or sampled"
            )
        self.signal = SignalSpec(teacher.signal, "float32", teacher.top_k, temperature)
        self.identity = self.name = "planned"

    def require(self, documents: Documents, what: str, media_inputs: MediaInputs | None = None) -> None: ...

    def read(self, wanted: Sequence[DocumentRows]) -> Sequence[dict[str, Tensor]]:
        raise NotImplementedError


def _planned_signals(source: StoredTeacher, micro_batches: ShardedMicroBatches) -> PendingSignals:
    # replaces `StoredTeacher.request`, whose threads read the store; the tensors are copied to the device as in a run
    tensors = [source._empty(batch, "cpu") for batch in micro_batches] if source._student.has_results else []
    return PendingSignals(partial(source.on_device, tensors, micro_batches))


def _planned_shards(step: StepMicroBatches, mesh: Mesh, *, uniform_shapes: bool = False) -> ShardedMicroBatches:
    """Shard micro-batches with values in host memory, because `shard_micro_batches` reads values; the copies on the
    device have none.
    """
    host: Any = SimpleNamespace(degrees=mesh.degrees, coordinate=mesh.coordinate, device=torch.device("cpu"))
    with unset_fake_temporarily():
        on_cpu = unwrap(shard_micro_batches)(step, host, uniform_shapes=uniform_shapes)
    moved = [part.to(mesh.device) for part in on_cpu]
    return ShardedMicroBatches(moved, step, uniform_shapes=uniform_shapes, on_cpu=list(on_cpu))


@contextmanager
def _labelled(engine: Engine, source: SignalSource, device: DeviceCounts) -> Iterator[None]:
    """Count memory under its purpose: the memory that teachers and heads allocate in forward passes, and each
    gradient from the time when it is added to its parameter.
    """

    def relabel(parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            device.relabel(local(parameter.grad), GRADIENTS)

    for _, parameter in engine.student.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(relabel)
    teachers = [engine.student.teacher, *source.decoders.values()]
    modules: list[tuple[nn.Module, str]] = [
        (teacher, TEACHER_ACTIVATIONS) for teacher in teachers if teacher is not None
    ]
    modules += [(decoder.head, OBJECTIVE) for decoder in engine.student.decoders if decoder.has_head]
    with ExitStack() as hooks, dry_run({Runner.clip: device.labelled(CLIP)(unwrap(Runner.clip))}):
        for module, purpose in modules:
            stack = ExitStack()

            def enter(module: nn.Module, args: Any, stack: ExitStack = stack, purpose: str = purpose) -> None:
                stack.enter_context(device.labelled(purpose))

            def leave(module: nn.Module, args: Any, output: Any, stack: ExitStack = stack) -> None:
                stack.close()

            hooks.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        yield


def _exchange(ranks: Ranks, content: bytes) -> list[bytes]:
    """Send the messages of `Ranks.exchange`, and return a copy of this rank's content for each rank."""
    ranks.exchange_padded(content[:FIRST_BYTES], LENGTH_BYTES + FIRST_BYTES)
    if rest := content[FIRST_BYTES:]:
        ranks.exchange_padded(rest, len(rest))
    return [content] * ranks.size


#: the replacements of functions that compute with a few numbers or read values
_ANSWERS: dict[Callable[..., Any], Callable[..., Any]] = {
    cut_backbone: unset_fake_temporarily()(unwrap(cut_backbone)),
    Mesh.__init__: unset_fake_temporarily()(unwrap(Mesh.__init__)),
    shard_micro_batches: _planned_shards,
    StoredTeacher.request: _planned_signals,
}


def _axes(mesh: Mesh) -> dict[str, str]:
    """Return a dict from the name of each group to the names of its axes with several processes, joined by "/"."""
    if not mesh.has_groups:
        return {}
    assert mesh.ranks.group is not None
    axes = {mesh.ranks.group.group_name: ["all"]}
    if mesh.reverse_pipeline is not None:
        axes[mesh.reverse_pipeline.group_name] = ["pipeline"]
    for grid in (mesh.weights, mesh.experts, mesh.tokens):
        for axis, size in zip(grid.mesh_dim_names or (), grid.shape, strict=True):
            names = axes.setdefault(grid.get_group(axis).group_name, [])
            if size > 1 and axis not in names:
                names.append(axis)
    return {group: "/".join(names) for group, names in axes.items() if names}
