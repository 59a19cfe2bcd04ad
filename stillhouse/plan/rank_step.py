"""One step of one rank, with fake tensors: the run's own models, layout and engine, but no values and no device.

The weights are allocated and never read, and the documents have a length and no text. A process runs the steps of one
rank; the messages to other ranks go to torch's fake process group, which sends nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import unwrap
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from stillhouse.config import ParallelConfig, RunConfig, StudentConfig, TeacherConfig
from stillhouse.dry_run import dry_run
from stillhouse.engine.engine import Engine
from stillhouse.models import Decoder
from stillhouse.models.dtensors import local
from stillhouse.models.lm_head import Head
from stillhouse.parallel import (
    Degrees,
    Mesh,
    ModelSource,
    Runner,
    shard_micro_batches,
)
from stillhouse.parallel.backbone_cut import cut_backbone
from stillhouse.parallel.pipeline import require_next
from stillhouse.parallel.ranks import FIRST_BYTES, LENGTH_BYTES, Ranks
from stillhouse.parallel.sharded_loading import allocate
from stillhouse.plan.device_counts import DeviceCounts, StepCounts
from stillhouse.plan.fake_cuda import FakeCudaMode, fake_cuda, with_real_tensors
from stillhouse.plan.planned_data import PlannedStore, planned_micro_batches, planned_shards, planned_signals
from stillhouse.run.models import ModelSources
from stillhouse.run.setup import RunSetup, with_precision
from stillhouse.signals import RequestedSteps, SignalSource, SignalStore, StoredTeacher

#: the device of every rank of a dry run
_DEVICE = torch.device("cuda", 0)
#: purposes of memory and kernels (`DeviceCounts.labelled`)
STUDENT, TEACHER, OPTIMIZER, GRADIENTS, CLIP = "student weights", "teacher weights", "optimizer", "gradients", "clip"
STUDENT_ACTIVATIONS, TEACHER_ACTIVATIONS, OBJECTIVE, BATCH = "activations", "teacher activations", "tile", "batch"


@dataclass(frozen=True)
class RankStep:
    """What was counted of a rank's steady step, and the memory in use before it."""

    counts: StepCounts
    before: dict[str, int]


def rank_steps(
    config: RunConfig, rank: int, properties: SimpleNamespace, document_tokens: int, tokens: Sequence[int]
) -> list[RankStep]:
    """Run steps of a rank and return what was counted in each of them.

    config: with `parallel.fsdp` set. properties: of the device, see `fake_cuda`. document_tokens: the length of
    the documents; a packed row is filled with them. tokens: `train.tokens_per_step` of each step. The environment of
    the process must be that of the rank (`RANK`, `WORLD_SIZE`).

    Raises the errors of a run whose models do not fit their layout.
    """
    processes = _degrees(config.parallel).processes
    with dry_run(_ANSWERS), fake_cuda(properties), _fake_processes(rank, processes):
        setup = _PlannedSetup(with_precision(config))
        layout = setup.layout
        mesh = Mesh(layout.degrees, _DEVICE)
        mode = FakeCudaMode()
        device = DeviceCounts(mode, document_tokens, _axes(mesh))
        counted: list[RankStep] = []
        with mode, device:
            engine, source = setup.engine(setup.planned_models(mesh, device), layout)
            _label_gradients(engine, device)
            # as a run does, each step builds the next one's micro-batches and requests their signals
            make = partial(planned_micro_batches, config, layout, mesh, document_tokens)
            steps = (device.call(BATCH, make, count) for count in [*tokens, *[tokens[-1]] * (1 + source.steps_ahead)])
            requests = RequestedSteps(source, steps)
            with _labelled(engine, source, device):
                for _ in tokens:
                    before = dict(device.now)
                    device.restart()
                    _run(engine, requests, device)
                    counted.append(RankStep(device.restart(), before))
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
            section: PlannedStore(teacher, temperature)
            for section, teacher in self.teachers.items()
            if teacher.source_kind.is_store
        }

    def planned_models(self, mesh: Mesh, device: DeviceCounts) -> "_PlannedModels":
        # a family may have a class for texts, without a vision tower, and one for images
        images = self.config.data.image_pixels is not None
        return _PlannedModels(**vars(self.models(mesh, multimodal=images)), memory=device)


@dataclass(frozen=True)
class _PlannedModels(ModelSources):
    """Models on the device that have shapes and no values. memory: counts them under the purpose of weights."""

    memory: DeviceCounts | None = None

    @cached_property
    def student_source(self) -> ModelSource:
        source: ModelSource = super().student_source
        return replace(source, build=with_real_tensors(source.build))

    def _whole_student(self) -> ModelSource:
        return self._sharded_student()

    def whole_teacher(self, section: str) -> ModelSource:
        source = self.teacher(section)
        return replace(source, build=lambda: self._loaded(source), load_weights=None)

    def _source(
        self,
        section: str,
        name: str,
        model: StudentConfig | TeacherConfig,
        device: torch.device | None,
        offload: bool,
        autocast: torch.dtype | None = None,
        weights_folder: str | None = "",
    ) -> ModelSource:
        source = super()._source(section, name, model, device, offload, autocast, weights_folder)
        purpose = STUDENT if section == "student" else TEACHER
        # a module cannot replace its fake tensors, because their mode refers to them; meta tensors have no such mode
        load = partial(self._allocate, purpose, device or self.mesh.device, offload)
        return replace(source, build=with_real_tensors(source.build), load_weights=load, has_values=False)

    def _allocate(self, purpose: str, device: torch.device, offload: bool, decoder: Decoder) -> None:
        assert self.memory is not None
        with self.memory.labelled(purpose):
            allocate(decoder, device, offload=offload)
        shard = decoder.head.shard if isinstance(decoder.head, Head) else None
        if shard is not None and shard.group is not None:
            # a run exchanges them
            vars(shard)["borders"] = _borders(decoder.vocabulary_rows, shard.group.size())

    @staticmethod
    def _loaded(source: ModelSource) -> Decoder:
        decoder = source.build()
        assert source.load_weights is not None
        source.load_weights(decoder)
        return decoder


def _borders(rows: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Return the first and last row of each rank's shard of an output head."""
    sizes = [Shard.local_shard_size_and_offset(rows, ranks, rank) for rank in range(ranks)]
    return tuple((start if size else rows, start + size if size else rows) for size, start in sizes)


def _label_gradients(engine: Engine, device: DeviceCounts) -> None:
    """Count each gradient under its purpose from the moment when it is added to its parameter."""

    def relabel(parameter: nn.Parameter) -> None:
        device.relabel([] if parameter.grad is None else [local(parameter.grad)], GRADIENTS)

    for _, parameter in engine.student.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(relabel)


@contextmanager
def _labelled(engine: Engine, source: SignalSource, device: DeviceCounts) -> Iterator[None]:
    """Count what teachers and heads allocate in their forward passes under their purposes."""
    teachers = [engine.student.teacher, *source.decoders.values()]
    modules: list[tuple[nn.Module, str]] = [
        (teacher, TEACHER_ACTIVATIONS) for teacher in teachers if teacher is not None
    ]
    modules += [(decoder.head, OBJECTIVE) for decoder in engine.student.decoders if decoder.has_head]
    handles: list[Any] = []
    for module, purpose in modules:
        contexts: list[Any] = []

        def enter(module: nn.Module, args: Any, purpose: str = purpose, contexts: list[Any] = contexts) -> None:
            contexts.append(device.labelled(purpose))
            contexts[-1].__enter__()

        def leave(module: nn.Module, args: Any, output: Any, contexts: list[Any] = contexts) -> None:
            contexts.pop().__exit__(None, None, None)

        handles += [module.register_forward_pre_hook(enter, prepend=True), module.register_forward_hook(leave)]

    try:
        with dry_run({Runner.clip: partial(device.call, CLIP, unwrap(Runner.clip))}):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _fake_processes(rank: int, processes: int) -> Iterator[None]:
    """Within the block, this process is a rank of a job whose other ranks do not exist."""
    if processes == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=processes)
    try:
        # the number of a micro-batch has no value
        with dry_run({Ranks.exchange: _exchange, require_next: lambda *arguments: None}):
            yield
    finally:
        dist.destroy_process_group()


def _exchange(ranks: Ranks, content: bytes) -> list[bytes]:
    """Send the messages of a real exchange. The other ranks answer what this rank says."""
    ranks.exchange_padded(content[:FIRST_BYTES], LENGTH_BYTES + FIRST_BYTES)
    if rest := content[FIRST_BYTES:]:
        ranks.exchange_padded(rest, len(rest))
    return [content] * ranks.size


#: what computes with few numbers, and what reads values
_ANSWERS: dict[Callable[..., Any], Callable[..., Any]] = {
    cut_backbone: with_real_tensors(unwrap(cut_backbone)),
    Mesh.__init__: with_real_tensors(unwrap(Mesh.__init__)),
    shard_micro_batches: planned_shards,
    StoredTeacher.request: planned_signals,
}


def _axes(mesh: Mesh) -> dict[str, str]:
    """Return the axes with several processes, by the names of their groups."""
    if not mesh.has_groups:
        return {}
    assert mesh.ranks.group is not None
    axes = {mesh.ranks.group.group_name: ["all"]} | {group.group_name: ["pipeline"] for group in mesh.pipelines}
    for grid in (mesh.weights, mesh.experts, mesh.tokens):
        for axis, size in zip(grid.mesh_dim_names or (), grid.shape, strict=True):
            names = axes.setdefault(grid.get_group(axis).group_name, [])
            if size > 1 and axis not in names:
                names.append(axis)
    return {group: "/".join(names) for group, names in axes.items() if names}


def _degrees(parallel: ParallelConfig) -> Degrees:
    return Degrees(
        parallel.pipeline, parallel.replicate, parallel.fsdp or 1, parallel.context, parallel.tensor, parallel.expert
    )
