"""The measurements of benchmarks/parallel.py on each rank: a small model's steps under a layout, traffic and memory.

Traffic is counted from the collectives that torch dispatches for FSDP2, DTensor, the pipeline and Stillhouse. Memory
between steps is that of all tensors that Python can reach; within a step it is that of PyTorch's allocator. Memory
that gloo or MKL allocate is not counted.
"""

import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.parallel_costs import Job, Shape
from stillhouse.config import TrainConfig
from stillhouse.data import MicroBatch
from stillhouse.engine.loss import StepLoss
from stillhouse.engine.optimizer import make_optimizer
from stillhouse.models import Decoder
from stillhouse.objective import TEACHER as TEACHER_NAME
from stillhouse.objective import OutputHead
from stillhouse.objective.spec import parse_objective
from stillhouse.parallel import (
    IN_STAGE,
    DecoderHead,
    Layout,
    Mesh,
    ModelSource,
    Runner,
    StageInputs,
    build_runner,
)

CPU = torch.device("cpu")
VOCABULARY, ROWS, TOKENS, CHUNK = 4096, 2, 128, 64
STUDENT = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TEACHER = {
    "hidden_size": 128,
    "num_hidden_layers": 12,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
#: temporary tiles of jsd and cross-entropy without compilation; the number was counted once at the peak
SCRATCH_TILES = 15
#: the number of steps whose memory is measured, and the seconds of waiting after each collective in these steps
MEMORY_STEPS, PATIENCE = 3, 0.002
LOSS = "0.3*cross_entropy + 0.7*jsd(0.5)"


@dataclass(frozen=True)
class Case:
    """bf16: autocast for the student, bfloat16 weights for the teacher. recomputed: activation checkpointing."""

    layout: Layout
    bf16: bool = False
    recomputed: bool = False

    def __str__(self) -> str:
        gathered = self.layout.gather_dtype is not None
        return (
            str(self.layout)
            + ", bf16" * self.bf16
            + ", gathered in bf16" * gathered
            + ", recomputed" * self.recomputed
        )

    @property
    def micro_batches(self) -> int:
        """The number per data rank. It is larger than the number of pipeline ranks, so that all of them are busy."""
        return max(4, 2 * self.layout.degrees.pipeline)

    @property
    def job(self) -> Job:
        half = 2 if self.bf16 else 4
        return Job(
            student=Shape.of(config(STUDENT)),
            teacher=Shape.of(config(TEACHER)),
            layout=self.layout,
            micro_batches=self.micro_batches,
            tokens=ROWS * TOKENS,
            chunk=CHUNK,
            scratch_tiles=SCRATCH_TILES,
            recomputed=self.recomputed,
            teacher_bytes=half,
            product_bytes=half,
        )


def run_cases(cases: list[Case]) -> dict[str, Any]:
    """Run all layouts that use this rank, one after another."""
    result = {}
    for case in cases:
        mesh = Mesh(case.layout.degrees, CPU)
        if dist.get_rank() < case.layout.degrees.processes:
            result[str(case)] = run_case(case, mesh)
        dist.barrier()
    return result


def run_case(case: Case, mesh: Mesh) -> dict[str, Any]:
    """Run one step in which the ranks exchange shapes, one to count traffic, and some to measure memory."""
    before = live_bytes()
    single_process = case.layout.degrees.processes == 1
    mesh = Mesh(case.layout.degrees, CPU, single_process=True) if single_process else mesh
    runner = build_runner(case.layout, mesh, *model_sources(case))
    for student in runner.decoders:
        student.train()
        if case.recomputed:
            student.gradient_checkpointing_enable()
    forward_backward = partial(runner.forward_backward, inputs(case, mesh))
    optimizer = make_optimizer(runner.decoders, TrainConfig(learning_rate=1e-3, betas=(0.9, 0.999)))

    def step() -> None:
        forward_backward()
        runner.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    with Traffic(runner, mesh) as traffic, order_of_stages() as order:
        step()
    held = live_bytes() - before
    peaks = [allocations(runner, forward_backward) for _ in range(MEMORY_STEPS)]
    return {
        "pipeline_rank": mesh.coordinate("pipeline"),
        "sent": dict(traffic.sent),
        "between_steps": held,
        "within_step": min(peak for peak, _ in peaks),
        "largest_allocation": max(largest for _, largest in peaks),
        "order": order,
    }


# models and data


def config(sizes: dict[str, int]) -> Qwen3Config:
    return Qwen3Config(**sizes, vocab_size=VOCABULARY, head_dim=16, tie_word_embeddings=False)


def model_sources(case: Case) -> tuple[ModelSource, ModelSource]:
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    return ModelSource(partial(decoder, STUDENT, torch.float32)), ModelSource(partial(decoder, TEACHER, dtype))


def decoder(sizes: dict[str, int], dtype: torch.dtype) -> Decoder:
    torch.manual_seed(0)
    return Decoder(AutoModelForCausalLM.from_config(config(sizes), dtype=dtype), verify=False)


def inputs(case: Case, mesh: Mesh) -> list[StageInputs]:
    """Return the inputs of a step of random tokens, all of which are targets. The engine is not used, because its
    sums of metrics would be counted as traffic.
    """
    parts = [batch(seed).part(mesh.coordinate("context"), mesh.degrees.context) for seed in range(case.micro_batches)]
    normalizer = case.micro_batches * ROWS * TOKENS * mesh.degrees.data
    loss = StepLoss(parse_objective(LOSS), normalizer, CHUNK)
    autocast = torch.bfloat16 if case.bf16 else None
    return [StageInputs(part, {TEACHER_NAME: IN_STAGE}, loss, autocast=autocast) for part in parts]


def batch(seed: int) -> MicroBatch:
    ids_BS = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed))
    count = ids_BS.numel()
    return MicroBatch(
        inputs={"input_ids": ids_BS, "position_ids": torch.arange(TOKENS).repeat(ROWS, 1)},
        labels_T=ids_BS.flatten().roll(-1),
        weights_T=torch.ones(count),
        valid_index=torch.arange(count),
        document_T=torch.zeros(count, dtype=torch.int64),
    )


# sent bytes

#: the sent bytes per byte of a rank's input; collectives are counted as rings over n ranks
SENT: dict[str, Callable[[int], float]] = {
    "allgather_base": lambda n: n - 1,
    "allgather": lambda n: n - 1,
    "reduce_scatter_base": lambda n: (n - 1) / n,
    "alltoall_base": lambda n: (n - 1) / n,
    "allreduce": lambda n: 2 * (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,  # the collective of DTensor
    "send": lambda n: 1.0,
}
#: collectives whose first argument is the output
GIVEN_SECOND = ("allgather_base", "allgather", "reduce_scatter_base", "alltoall_base")
NO_SENDING = ("recv", "wait_tensor", "wrap_tensor_autograd")
#: the purpose of a collective over an axis of the mesh
PURPOSES = {
    ("shard", "allgather_base"): "{who} weights, {way}",
    ("shard", "reduce_scatter_base"): "gradients to their shards",
    ("replicate", "allreduce"): "gradients between copies",
    ("tensor", "all_reduce"): "{who} layers, {way}",
    ("tensor", "allgather_base"): "objective's statistics",
    ("tensor", "allreduce"): "objective's gradient",
    ("context", "alltoall_base"): "{who} heads, {way}",
    ("context", "allgather"): "positions",
    ("everyone", "allreduce"): "norm of the gradient",
}


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank sends, under the names of `parallel_costs.traffic`."""

    def __init__(self, runner: Runner, mesh: Mesh):
        super().__init__()
        self.sent: Counter[str] = Counter()
        self._axes: dict[str, str] = {}
        if mesh.ranks.group is not None:
            self._axes[mesh.ranks.group.group_name] = "everyone"
            for grid in (mesh.tokens, mesh.weights):
                self._axes |= {grid.get_group(axis).group_name: axis for axis in grid.mesh_dim_names or ()}
        self._inside: list[str] = []
        for pair in runner.pairs.values():
            self._track_forward(pair.student, "student's")
            if pair.teacher is not None:
                self._track_forward(pair.teacher, "teacher's")
        self._track_teacher_head()

    def _track_teacher_head(self) -> None:
        """Track the gather of the teacher's head, which is within the student's forward."""
        gather = DecoderHead.opened

        @contextmanager
        def tracked(teacher: DecoderHead) -> Iterator[OutputHead]:
            self._inside.append("teacher's")
            with gather(teacher) as head:
                self._inside.pop()
                yield head

        self._tracked = mock.patch.object(DecoderHead, "opened", tracked)

    def __enter__(self) -> "Traffic":
        self._tracked.start()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._tracked.stop()

    def _track_forward(self, module: nn.Module, whose: str) -> None:
        # prepended, so that it runs before FSDP's hook, which gathers
        module.register_forward_pre_hook(lambda *_: self._inside.append(whose), prepend=True)
        module.register_forward_hook(lambda *_: self._inside.remove(whose))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_")
        if "c10d" in func.namespace and name not in NO_SENDING:
            group = group_of(args)
            tensors = args[1] if name in GIVEN_SECOND else args[0]
            if sent := round(SENT[name](group.size()) * byte_count(tensors)):
                self.sent[self._purpose(name, self._axes[group.group_name], tensors)] += sent
        return func(*args, **(kwargs or {}))

    def _purpose(self, name: str, axis: str, tensors: Any) -> str:
        if name == "send":
            of_teacher = tensors[0].shape[-1] == TEACHER["hidden_size"]
            return "teacher's hidden states" if of_teacher else "student's hidden states and their gradients"
        if torch._C._current_graph_task_id() != -1:
            who, way = "student's", "backward"
        elif not self._inside:
            who, way = "student's", "update"
        else:
            who, way = self._inside[-1], "forward"
        return PURPOSES.get((axis, name), f"{axis} {name}").format(who=who, way=way)


def group_of(args: Any) -> ProcessGroup:
    """Return the group among a collective's arguments; DTensor's collectives have the group's name."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return ProcessGroup.unbox(arg)
    return dist.distributed_c10d._resolve_process_group(args[-1])


def byte_count(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else sum(map(byte_count, value))


# held bytes


def live_bytes() -> int:
    """Return the bytes of all tensors that Python can reach; each storage counts once."""
    gc.collect()
    storages: dict[int, int] = {}
    for instance in gc.get_objects():
        if type(instance) in (Tensor, nn.Parameter, DTensor):
            storage = (instance._local_tensor if isinstance(instance, DTensor) else instance).untyped_storage()
            if storage.device == CPU:
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def allocations(runner: Runner, forward_backward: Callable[[], Any]) -> tuple[int, int]:
    """Run forward and backward. Return the peak of the bytes allocated during it, and the largest allocation."""
    runner.zero_grad()
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile, WaitAfterCollectives():
        forward_backward()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes)), max(sizes)


class WaitAfterCollectives(TorchDispatchMode):
    """Waits after every collective until gloo's threads have released its tensors. The profiler does not see memory
    that these threads free. It still happens sometimes, so the smallest peak of several steps is the right one.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "c10d" in func.namespace:
            time.sleep(PATIENCE)
        return result


@contextmanager
def order_of_stages() -> Iterator[list[tuple[int, str, int]]]:
    """Record the computations of this rank's pipeline stages in their order, as fields of `pipeline_idle.Move`."""
    order: list[tuple[int, str, int]] = []

    def noting(compute: Callable[..., Any], kind: Callable[[dict[str, Any]], str]) -> Callable[..., Any]:
        def noted(stage: PipelineStage, micro_batch: int, *arguments: Any, **options: Any) -> Any:
            order.append((stage.stage_index, kind(options), micro_batch))
            return compute(stage, micro_batch, *arguments, **options)

        return noted

    kinds: dict[str, Callable[[dict[str, Any]], str]] = {
        "forward_one_chunk": lambda _: "F",
        "backward_one_chunk": lambda options: "B" if options.get("full_backward", True) else "I",
        "backward_weight_one_chunk": lambda _: "W",
    }
    noted = {name: noting(getattr(PipelineStage, name), kind) for name, kind in kinds.items()}
    with mock.patch.multiple(PipelineStage, **noted):
        yield order
