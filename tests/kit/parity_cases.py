"""Compare one training step, and two, under a layout with the same steps in one process.

Every rank makes the same models and batches. Rank 0 runs the reference, and sends its results to the other ranks.
Then every rank runs its part of the layout, and returns the distance between the gradient of each of its parameters
and the reference's gradient.

T tokens, B rows, S tokens per row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from kit import NamedCase
from kit.parity_models import VOCABULARY, build_student, configurations, decoder, top_k, with_hidden, with_lora
from kit.shard_ranks import Rank
from torch import Tensor

from stillhouse.config import TrainConfig
from stillhouse.data import MicroBatch, StepMicroBatches
from stillhouse.engine.losses import ROUTER_LOSS, HiddenStates, LossPart, MtpLoss, RouterBalancing
from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.models import HiddenPair, initialize_lora
from stillhouse.models.decoder import HEAD_WEIGHT
from stillhouse.models.dtensors import gathered_tensor, local
from stillhouse.models.hidden_states import HIDDEN
from stillhouse.objective import TEACHER
from stillhouse.objective.metrics import CHUNK_TOKENS
from stillhouse.objective.spec import ObjectiveSpec, parse_objective
from stillhouse.parallel import Degrees, Layout, Mesh, ModelSource, Runner, ShardedMicroBatches
from stillhouse.proofs.layouts import build_proven_runner
from stillhouse.signals import (
    InStageTeacher,
    NoTeacher,
    PendingSignals,
    RequestedSteps,
    SeparateTeacher,
    SignalSource,
)
from stillhouse.tools.parity import relative_difference

ROWS, TOKENS, STEPS = 2, 36, 2
SPEC = parse_objective("0.3*cross_entropy + 0.7*jsd(0.5)")
LEARNING_RATE = 1e-3
TRAIN = TrainConfig(learning_rate=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.95), clip=1.0)


@dataclass(frozen=True)
class Case(NamedCase):
    """A layout, a pair of models and an objective.

    micro_batches: the number per data rank and step. family: qwen3 (untied), llama (tied), qwen3_moe (student and
    teacher have experts, and the loss has the router term), or one of `families`. depth: number of student layers;
    0 stands for the family's default, which is small if no pipeline shards the layers.
    lora: "" trains all weights; otherwise the student trains a LoRA, and the teacher is another model ("teacher") or
    the student without its adapter ("base"). dtype: of the base weights; the LoRA's weights are always float32.
    mtp: "": the student has no MTP layers; otherwise it has two, which learn from the teacher or from the student;
    "heads": from the student, whose other weights are frozen.
    """

    layout: Layout
    family: str = "qwen3"
    micro_batches: int = 2
    spec: ObjectiveSpec = SPEC
    top_k: int = 0
    checkpointing: bool = False
    teacher: Layout | None = None  # the layout of a separate teacher
    depth: int = 0
    lora: str = ""
    dtype: torch.dtype = torch.float32
    hidden: tuple[HiddenPair, ...] = ()
    other_tokens: bool = False  # the teacher reads other tokens than the student
    waiting_teacher: bool = False  # FSDP keeps the teacher's shards in host memory
    mtp: Literal["", "teacher", "student", "heads"] = ""
    optimizer: str = "adamw"


@dataclass
class Difference:
    """The relative differences between this rank's part and the reference.

    gradients, weights: by parameter, relative to the norm of the parameter's reference. For gradients, the divisor is
    at least a thousandth of the whole gradient's norm. Elements of weights whose gradient is rounding alone are left
    out, because AdamW divides a gradient by its own size. groups: the parameters that another optimizer steps, or
    that have another weight decay.
    """

    loss: float
    metrics: dict[str, float]
    norm: float
    gradients: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    evaluation: float = 0.0
    groups: list[str] = field(default_factory=list)


def compare(rank: Rank, case: Case) -> Difference:
    """A job: return the differences on this rank."""
    mesh = mesh_of(case.layout.degrees)
    if case.teacher is not None:
        mesh_of(case.teacher.degrees)  # all ranks must call this, because it creates groups
    # the reference takes the micro-batches of all data ranks
    steps = [StepMicroBatches(batches(case, step)) for step in range(STEPS)]
    reference = Reference.on_rank_0(rank, case, steps)
    sharded = Side.of(case, case.layout, mesh).train(case)
    evaluation = sharded.evaluate(steps[0])
    requests = sharded.requests(steps)
    difference = first_step(case, reference, sharded, *next(requests))
    difference.evaluation = abs(evaluation["loss"] / reference.evaluation - 1)
    sharded.engine.update(LEARNING_RATE)
    for micro_batches, signals in requests:
        sharded.step(micro_batches, signals)
        sharded.engine.update(LEARNING_RATE)
    groups = sharded.groups().items()
    difference.groups = [name for name, kind in groups if reference.groups[alias(name, reference.groups)] != kind]
    for name, parameter in sharded.runner.named_parameters():
        expected = reference.weights[alias(name, reference.weights)]
        elements = reference.exact_elements(alias(name, reference.weights))
        if not elements.any():
            continue
        difference.weights[name] = relative_difference(gathered_tensor(parameter)[elements], expected[elements])
    return difference


@dataclass
class Reference:
    """The results of one process: of the first step (sums, gradient norm, gradients; None without a gradient), the
    weights after the last step, the loss of an evaluation before the first step, and `Side.groups`.
    """

    sums: dict[str, float]
    norm: float
    gradients: dict[str, Tensor | None]
    weights: dict[str, Tensor]
    evaluation: float
    groups: dict[str, tuple[bool, float]]

    @classmethod
    def on_rank_0(cls, rank: Rank, case: Case, steps: list[StepMicroBatches]) -> "Reference":
        """Compute the reference on rank 0, and return it on all ranks of the layout. A collective of these ranks."""
        result = [cls.of(case, steps) if rank.number == 0 else None]
        dist.broadcast_object_list(result, src=0, group=rank.groups[case.layout.degrees.processes])
        assert result[0] is not None
        return result[0]

    @classmethod
    def of(cls, case: Case, steps: list[StepMicroBatches]) -> "Reference":
        side = Side.of(case, Layout(), ONE).train(case)
        evaluation = side.evaluate(steps[0])["loss"]
        requests = side.requests(steps)
        sums, norm = side.step(*next(requests)), side.engine.gradient_norm()
        parameters = dict(side.runner.named_parameters())
        found = {name: parameter.grad for name, parameter in parameters.items()}
        gradients = {name: None if gradient is None else gradient.clone() for name, gradient in found.items()}
        side.engine.update(LEARNING_RATE)
        for micro_batches, signals in requests:
            side.step(micro_batches, signals)
            side.engine.update(LEARNING_RATE)
        weights = {name: parameter.detach() for name, parameter in parameters.items()}
        return cls(sums, norm, gradients, weights, evaluation, side.groups())

    def exact_elements(self, name: str) -> Tensor:
        """Return which elements of a parameter have a gradient that is more than rounding."""
        gradient = self.gradients[name]
        if gradient is None:
            return torch.ones_like(self.weights[name], dtype=torch.bool)
        return (gradient == 0) | (gradient.abs() > 1e-6 * self.norm)


@dataclass
class Side:
    """An engine and its teacher, either of the reference or of a layout."""

    engine: TorchEngine
    source: SignalSource
    runner: Runner

    @classmethod
    def of(cls, case: Case, layout: Layout, mesh: Mesh, *, bf16: bool = False) -> "Side":
        student, teacher = model_sources(case)
        separate = case.teacher if mesh is not ONE and teacher is not None else None
        runner = build_proven_runner(layout, mesh, student, teacher, teacher_head_only=separate is not None)
        source: SignalSource = InStageTeacher()
        if separate is not None:
            teacher_mesh = mesh_of(separate.degrees)
            source = SeparateTeacher(teacher, separate, teacher_mesh, layout, mesh, head=runner.teacher_head)
        if case.top_k:
            source = TopKSource(case, runner)
        elif not case.spec.needs_teacher:
            source = NoTeacher()
        parts: list[LossPart] = []
        if case.mtp:
            of_student = case.mtp != "teacher"
            parts.append(MtpLoss(case.spec, 2, 0.7, from_student=of_student))
        elif case.family == "qwen3_moe":
            parts.append(RouterBalancing(0.5))
        if case.hidden:
            parts.append(HiddenStates())
        parts = [part.distributed(runner) for part in parts]
        train = TRAIN.model_copy(update={"optimizer": case.optimizer})
        autocast = torch.bfloat16 if bf16 else None
        return cls(TorchEngine(runner, case.spec, train=train, autocast=autocast, parts=parts), source, runner)

    def train(self, case: Case) -> "Side":
        """Set the student's train mode, and enable activation checkpointing if the case has it."""
        for student in self.engine.student.decoders:
            student.train()
            if case.checkpointing:
                student.gradient_checkpointing_enable()
        return self

    def groups(self) -> dict[str, tuple[bool, float]]:
        """Return for each trained parameter whether Muon trains it, and its weight decay."""
        groups = self.engine.optimizer.param_groups
        kinds = {each: ("momentum" in group, group["weight_decay"]) for group in groups for each in group["params"]}
        named = self.runner.named_parameters()
        return {name: kinds[parameter] for name, parameter in named if parameter.requires_grad}

    def shard(self, step: StepMicroBatches, *, training: bool = True) -> ShardedMicroBatches:
        return self.engine.student.shard(step, training=training)

    def requests(self, steps: list[StepMicroBatches]) -> Iterator[tuple[ShardedMicroBatches, PendingSignals]]:
        return RequestedSteps(self.source, (self.shard(step) for step in steps))

    def step(self, micro_batches: ShardedMicroBatches, signals: PendingSignals) -> dict[str, float]:
        normalizer = micro_batches.all_ranks.normalizer
        sums = self.engine.forward_backward(micro_batches, signals.result(), normalizer).sums
        return {name: value for name, value in sums.items() if name != CHUNK_TOKENS}

    def evaluate(self, step: StepMicroBatches) -> dict[str, float]:
        micro_batches = self.shard(step, training=False)
        return self.engine.evaluate([(micro_batches, self.source.request(micro_batches).result())])


@dataclass
class TopKSource(SignalSource):
    """A teacher that returns top-k signals made from the input ids, on the ranks of the last stage."""

    case: Case
    runner: Runner

    def request(self, micro_batches: ShardedMicroBatches) -> PendingSignals:
        signals = [{TEACHER: top_k(micro_batch.input_ids_BS, self.case.top_k)} for micro_batch in micro_batches]
        return PendingSignals.ready(signals if self.runner.has_last_stage else [{} for _ in signals])


def first_step(
    case: Case, reference: Reference, sharded: Side, micro_batches: ShardedMicroBatches, signals: PendingSignals
) -> Difference:
    """Run the first step, and compare its loss, metrics and gradients. The gradients are not cleared."""
    sums = sharded.step(micro_batches, signals)
    assert (ROUTER_LOSS in sums) == (case.family == "qwen3_moe" and not case.mtp)
    assert ("mtp_2/tokens" in sums) == bool(case.mtp)
    assert sum(name.startswith(HIDDEN) for name in sums) == len(case.hidden)
    if case.mtp and case.layout.degrees.tensor > 1:
        named = dict(sharded.runner.named_parameters())
        weights = [named[name] for name in named if name.startswith("mtp.") and name.endswith("up_proj.weight")]
        assert weights or not sharded.runner.has_last_stage
        assert all(len(local(weight)) < len(weight) for weight in weights), "MTP layers are not sharded"
    norm = sharded.engine.gradient_norm()
    gradients = {}
    for name, parameter in sharded.runner.named_parameters():
        expected = reference.gradients[alias(name, reference.gradients)]
        if expected is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        gradients[name] = relative_difference(gathered_tensor(parameter.grad), expected, 1e-3 * reference.norm)
    return Difference(
        loss=abs(sums["loss"] / reference.sums["loss"] - 1),
        metrics={name: abs(sums[name] - value) / max(abs(value), 1.0) for name, value in reference.sums.items()},
        norm=abs(norm / reference.norm - 1),
        gradients=gradients,
    )


def alias(name: str, references: Mapping[str, Any]) -> str:
    """Return the name of a parameter among the reference's parameters, by name.

    A tied head on another stage than the embedding is the reference's embedding, which is its first parameter.
    """
    return next(iter(references)) if name == HEAD_WEIGHT and name not in references else name


# models, which are the same on every rank


def model_sources(case: Case) -> tuple[ModelSource, ModelSource | None]:
    layouts = [case.layout, *([] if case.teacher is None else [case.teacher])]
    has_stages = any(layout.degrees.pipeline > 1 for layout in layouts)
    student, teacher = configurations(case.family, case.depth, few_layers=not has_stages)
    needs = case.spec.needs_teacher and not case.top_k and case.lora != "base"
    source = ModelSource(partial(build_student, student, case.mtp))
    if case.lora:
        # A and B are initialised on this rank; B must not be zero, or A would have no gradient
        draw = partial(initialize_lora, seed=2, fresh=False)
        source = ModelSource(partial(with_lora, student, case.dtype), draw, teacher_is_base=case.lora == "base")
    if case.hidden:
        matched = student if case.lora == "base" else teacher
        source = replace(source, build=partial(with_hidden, source.build, matched, case.hidden))
    return source, ModelSource(partial(decoder, teacher, 1), offload=case.waiting_teacher) if needs else None


# data, which are the same on every rank


def batches(case: Case, step: int) -> list[MicroBatch]:
    """Return a step's micro-batches of all data ranks.

    Each row holds two documents and padding. A third of the targets is masked, and every third micro-batch has none.
    """
    count = case.micro_batches * case.layout.degrees.data
    step_batches = [batch(1000 * step + number, empty=number % 3 == 1) for number in range(count)]
    if not case.other_tokens:
        return step_batches
    return [
        replace(micro_batch, teacher_inputs=micro_batch.inputs | {"input_ids": micro_batch.input_ids_BS.flip(1)})
        for micro_batch in step_batches
    ]


def batch(seed: int, empty: bool) -> MicroBatch:
    random = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=random)
    borders = (17, 31)  # starts of the second document and of the padding, both inside a context rank's part
    positions_S = torch.cat([torch.arange(b - a) for a, b in zip((0, *borders), (*borders, TOKENS), strict=True)])
    has_BS = torch.rand(ROWS, TOKENS, generator=random) > 0.3
    has_BS[:, [borders[0] - 1, *range(borders[1] - 1, TOKENS)]] = False
    has_BS &= torch.tensor(not empty)
    labels_T = torch.where(has_BS, ids_BS.roll(-1, 1), -1).flatten()
    return MicroBatch(
        inputs={"input_ids": ids_BS, "position_ids": positions_S.repeat(ROWS, 1)},
        labels_T=labels_T,
        weights_T=(labels_T >= 0).float(),
        valid_index=(labels_T >= 0).nonzero()[:, 0],
        document_T=torch.zeros(ROWS * TOKENS, dtype=torch.int64),
    )


# meshes

ONE = Mesh(Degrees(), torch.device("cpu"), single_process=True)


@cache
def mesh_of(degrees: Degrees) -> Mesh:
    """Return a mesh. Its groups are created once for all cases of the same degrees."""
    return Mesh(degrees, torch.device("cpu"))
