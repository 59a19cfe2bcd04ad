"""Jobs for ranks: steps of `MegatronEngine` against those of `TorchEngine` in one process, from the same weights.

B rows, S tokens per row.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from kit import NamedCase, varlen_reference
from kit.causal_families import of_config
from kit.megatron_weights_jobs import Case, laid_out, model_config
from kit.parity_models import top_k
from kit.shard_ranks import Rank, message_of
from torch import Tensor

from stillhouse.config import TrainConfig
from stillhouse.data import MicroBatch, StepMicroBatches
from stillhouse.engine.engine import Engine
from stillhouse.engine.losses import LossPart, RouterBalancing
from stillhouse.engine.losses.mtp import MtpLoss
from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.megatron.build import build_megatron_student, megatron_logits
from stillhouse.megatron.chunks import Chunks
from stillhouse.megatron.engine import MegatronEngine
from stillhouse.megatron.model_config import transformer_config
from stillhouse.megatron.state import trained_parameters
from stillhouse.megatron.weights import gather
from stillhouse.models import Decoder, add_lora, balance_routers, initialize_lora
from stillhouse.models.adapter import is_lora
from stillhouse.models.document_packing import AUTO
from stillhouse.models.processors import full_vocab
from stillhouse.objective import TEACHER
from stillhouse.objective.metrics import CHUNK_TOKENS
from stillhouse.objective.spec import ObjectiveSpec, parse_objective
from stillhouse.parallel import (
    Degrees,
    DistributedStudent,
    Layout,
    Mesh,
    ModelSource,
    Runner,
    StageInputs,
    single_process_runner,
)
from stillhouse.proofs.layouts import build_proven_runner
from stillhouse.signals import InStageTeacher
from stillhouse.tools.parity import relative_difference


def distance(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    squares = [float((gradients[name].double() - gradient).square().sum()) for name, gradient in exact.items()]
    return (sum(squares) / sum(float(gradient.square().sum()) for gradient in exact.values())) ** 0.5


def one_process(student: Decoder, teacher: Decoder | None) -> Runner:
    """Return the runner of a single process. teacher: None if it is the base of the student's adapter."""
    if teacher is not None:
        return single_process_runner(student, teacher)
    source = ModelSource(lambda: student, is_proven=True, teacher_is_base=True)
    return build_proven_runner(Layout(), Mesh(Degrees(), torch.device("cpu"), single_process=True), source, None)


def require_frozen_base(engine: MegatronEngine, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Of all weights but an adapter's, the bytes stay, and there is no gradient and no state of the optimizer."""
    for name, tensor in before.items():
        assert is_lora(name) or tensor.equal(after[name]), name
    entries = trained_parameters(engine.student.student, engine.optimizer)
    trained = {entry.parameter for entry in entries}
    for name, parameter in engine.student.named_parameters():
        assert (parameter in trained) == parameter.requires_grad == hasattr(parameter, "main_grad"), name
        assert parameter.requires_grad == (".lora." in name), name
    assert not engine.student.student.unrounded


B, S, STEPS, LEARNING_RATE = 2, 12, 2, 1e-4
TRAIN = TrainConfig(learning_rate=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.95), clip=0.5)


@dataclass(frozen=True)
class Job(NamedCase):
    """case: the student and its layout. loss: the objective. top_k: entries of a stored signal; 0: a teacher that
    runs in the stages, if the objective needs one. uneven: whether rows of odd length have several documents of other
    lengths, and padding; otherwise, each row is a document. router_aux: the factor of the routers' load balancing.
    recompute, options: of the layout. depths: the number of the student's MTP layers. fixed_experts: whether all
    tokens choose the same experts of a layer, by margins that rounding does not reach. packing: `data.packing`.
    kernel: whether Megatron-Core's layers have variable-length attention, by the reference of `varlen_reference`.
    adapter: the targets of a LoRA on the student, whose base is then the teacher.
    """

    case: Case
    loss: str = "0.3*cross_entropy + 0.7*jsd(0.5)"
    top_k: int = 0
    uneven: bool = False
    router_aux: float = 0.0
    recompute: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    depths: int = 0
    fixed_experts: bool = False
    packing: str = AUTO
    kernel: bool = False
    adapter: str | list[str] = ""


@dataclass
class Step:
    sums: dict[str, float]
    norm: float


@dataclass
class Trained:
    """What the steps log, the held-out sums before the last one, the full gradients of the first one, the weights
    after the last one, and the names of this rank's weights without weight decay.
    """

    steps: list[Step]
    evaluation: dict[str, float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor] = field(default_factory=dict)
    without_decay: set[str] = field(default_factory=set)


@dataclass
class Difference:
    """Relative differences: of each step's metric sums, by name; the largest of the gradient's norm; of the held-out
    sums, the first step's gradients and the last weights, by name. decay: the weights of which only one engine has
    weight decay.
    """

    sums: list[dict[str, float]]
    norm: float
    evaluation: dict[str, float]
    gradients: dict[str, float]
    weights: dict[str, float]
    decay: set[str]


def compare(rank: Rank, job: Job) -> Difference:
    spec = parse_objective(job.loss)
    sent = [reference(job, spec) if rank.number == 0 else None]
    dist.broadcast_object_list(sent)
    (expected,) = sent
    assert expected is not None
    with laid_out(job.case), varlen_reference.reference() if job.kernel else nullcontext():
        engine = megatron_engine(job, spec)
        trained = run(engine, job)
        trained.weights = values(engine)
        decay, without_decay = decays(engine)
        if job.adapter:
            require_frozen_base(engine, decoder(job, 0).state_dict(), trained.weights)
    pairs = [*zip(trained.steps, expected.steps, strict=True)]
    least = 1e-3 * expected.steps[0].norm
    return Difference(
        [apart(one.sums, other.sums) for one, other in pairs],
        max(abs(one.norm / other.norm - 1) for one, other in pairs),
        apart(trained.evaluation, expected.evaluation),
        {
            name: relative_difference(trained.gradients[name], gradient, least)
            for name, gradient in expected.gradients.items()
        },
        {name: relative_difference(weight, expected.weights[name]) for name, weight in trained.weights.items()},
        (decay & expected.without_decay) | (without_decay - expected.without_decay),
    )


def decays(engine: MegatronEngine) -> tuple[set[str], set[str]]:
    """Return the names of weights of which this rank's optimizer has elements: with weight decay, and without it."""
    with_decay: set[str] = set()
    without_decay: set[str] = set()
    for entry in trained_parameters(engine.student.student, engine.optimizer):
        for group in [] if entry.optimizer is None else entry.optimizer.param_groups:
            if any(weight is entry.master for weight in group["params"]):
                names = with_decay if group["weight_decay"] else without_decay
                names.update(block.name for block in entry.blocks)
    assert with_decay
    return with_decay, without_decay


def reference(job: Job, spec: ObjectiveSpec) -> Trained:
    """Train by the other engine in this process."""
    student, teacher = (decoder(job, seed, verify=job.uneven) for seed in range(2))
    runner = one_process(student, None if job.adapter else teacher)
    engine = TorchEngine(runner, spec, train=TRAIN, parts=parts(job, runner))
    trained = run(engine, job)
    trained.weights = {name: tensor.detach() for name, tensor in student.state_dict().items()}
    groups = [group for group in engine.optimizer.param_groups if not group["weight_decay"]]
    vectors = {weight for group in groups for weight in group["params"]}
    trained.without_decay = {name for name, weight in student.named_parameters() if weight in vectors}
    return trained


def apart(sums: dict[str, float], expected: dict[str, float]) -> dict[str, float]:
    """Return the differences of metric sums, relative to those larger than 1."""
    assert sums.keys() == expected.keys()
    return {
        name: abs(sums[name] - value) / max(abs(value), 1.0)
        for name, value in expected.items()
        if name != CHUNK_TOKENS
    }


def decoder(job: Job, seed: int, *, verify: bool = False) -> Decoder:
    """verify: choose by a proof how documents are packed. Seed 0 is the student's."""
    made = Decoder(of_config(model_config(job.case), seed=seed), packing=job.packing, verify=verify)
    if job.fixed_experts:
        _fix_experts(made)
    if job.router_aux and seed == 0:
        balance_routers(made)
    if job.depths and seed == 0:
        _add_mtp(made, job.depths)
    if job.adapter and seed == 0:
        add_lora(made, r=4, alpha=6.0, targets=job.adapter)
        initialize_lora(made, 0, fresh=False)
    return made


@torch.no_grad()
def _fix_experts(decoder: Decoder) -> None:
    """Give all tokens a large equal element, to which the routers' experts react in different ways."""
    weights = decoder.state_dict()
    embedding_VD = weights["backbone.embed_tokens.weight"]
    embedding_VD[:, 0] = 2 * embedding_VD.norm(dim=1).mean()
    for name, weight_XD in weights.items():
        if name.endswith((".mlp.gate.weight", ".mlp.router.weight")):
            weight_XD[:, 0] = torch.linspace(1, -1, len(weight_XD))


def _add_mtp(decoder: Decoder, depths: int) -> None:
    """Add MTP layers whose weights are large enough that a mistake changes the result."""
    from stillhouse.models.mtp import add_mtp

    add_mtp(decoder, depths, is_new=True)
    assert decoder.mtp is not None
    decoder.mtp.initialize(decoder.pretrained, 0)
    random = torch.Generator().manual_seed(0)
    for tensor in decoder.mtp.state_dict().values():
        tensor.add_(0.2 * torch.randn(tensor.shape, generator=random))


def parts(job: Job, student: DistributedStudent) -> list[LossPart]:
    balancing: list[LossPart] = [RouterBalancing(job.router_aux)] if job.router_aux else []
    mtp: list[LossPart] = [MtpLoss(parse_objective(job.loss), job.depths, scale=0.3)] if job.depths else []
    return [part.distributed(student) for part in (*balancing, *mtp)]


def megatron_engine(job: Job, spec: ObjectiveSpec, **precision: torch.dtype) -> MegatronEngine:
    """precision: further fields of the layout."""
    case = job.case
    layout = Layout(
        case.degrees,
        "interleaved" if case.chunks > 1 else "1f1b",
        **precision,
        sequence=case.sequence,
        recompute=job.recompute,
        options=job.options,
    )
    mesh = Mesh(case.degrees, torch.device("cpu"))
    is_base = bool(job.adapter)
    source, teacher = (ModelSource(partial(decoder, job, seed), name="model") for seed in range(2))
    source = replace(source, teacher_is_base=is_base)
    student = build_megatron_student(layout, mesh, source, None if is_base else teacher)
    return MegatronEngine(student, spec, train=TRAIN, parts=parts(job, student))


def build_chunks(case: Case, mesh: Mesh, source: ModelSource) -> Chunks:
    sends_shapes = case.pipeline > 1 and case.chunks == 1
    options = case.sizes | {"sequence_parallel": case.sequence, "variable_seq_lengths": sends_shapes}
    empty = source.build()
    transformer = transformer_config(empty.config, dtype=next(empty.parameters()).dtype, **options)
    return Chunks.build(source, empty, transformer, mesh)


def values(engine: MegatronEngine) -> dict[str, Tensor]:
    """Return the full weights. A collective of all ranks."""
    chunks = engine.student.student
    shapes = {name: tensor.shape for name, tensor in engine.student.decoders[0].state_dict().items()}
    return gather(chunks.models, chunks.table, shapes, lambda parameter: parameter)


def run(engine: Engine, job: Job, steps: int = STEPS) -> Trained:
    trained = Trained([], {}, {})
    for number in range(steps):
        step = StepMicroBatches(micro_batches(number, job.uneven))
        shards = engine.student.shard(step)
        if number == steps - 1:
            held_out = engine.student.shard(step, training=False)
            trained.evaluation = engine.evaluate([(held_out, signals(engine, held_out, job))])
        output = engine.forward_backward(shards, signals(engine, shards, job), step.normalizer)
        sums = dict(output.sums)
        if number == 0:
            gradients = ((name, gradient) for name, gradient in engine.gradients() if gradient is not None)
            trained.gradients = {name: gradient.clone() for name, gradient in gradients}
        trained.steps.append(Step(sums, engine.update(LEARNING_RATE, output)))
    return trained


def signals(engine: Engine, micro_batches: Sequence[MicroBatch], job: Job) -> Any:
    if not engine.needs_teacher:
        return [{}] * len(micro_batches)
    if not job.top_k:
        return InStageTeacher().request(micro_batches).result()  # type: ignore[arg-type]
    if not engine.student.has_last_stage:
        return [{}] * len(micro_batches)
    return [{TEACHER: top_k(batch.input_ids_BS, job.top_k)} for batch in micro_batches]


def micro_batches(step: int, uneven: bool) -> list[MicroBatch]:
    """Return four micro-batches, the second of them without targets."""
    return [micro_batch(10 * step + number, empty=number == 1, uneven=uneven) for number in range(4)]


def micro_batch(seed: int, *, empty: bool, uneven: bool) -> MicroBatch:
    # where the documents of each row end; the rest is padding
    ends = ((5, 6, 11), (2, 12)) if uneven else ((S,), (S,))
    tokens = S + uneven
    random = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(200, (B, tokens), generator=random)
    has_BS = (torch.rand(B, tokens, generator=random) > 0.3) & torch.tensor(not empty)
    positions_BS, document_BS = torch.zeros_like(ids_BS), torch.full_like(ids_BS, -1)
    for row, borders in enumerate(ends):
        for number, (start, end) in enumerate(pairwise((0, *borders, tokens))):
            positions_BS[row, start:end] = torch.arange(end - start)
            has_BS[row, end - 1 : end] = False
            if number < len(borders):
                document_BS[row, start:end] = 10 * row + number
    labels_T = torch.where(has_BS & (document_BS >= 0), ids_BS.roll(-1, 1), -1).flatten()
    return MicroBatch(
        inputs={"input_ids": ids_BS, "position_ids": positions_BS},
        labels_T=labels_T,
        weights_T=(labels_T >= 0).float(),
        valid_index=(labels_T >= 0).nonzero()[:, 0],
        document_T=document_BS.flatten(),
    )


def reordered(rank: Rank, job: Job) -> tuple[float, dict[str, float]]:
    """A job: how far the last hidden states and the gradients, by name, of documents in another order are apart."""
    batch = micro_batch(0, empty=False, uneven=True)
    document_T = batch.document_T
    numbers = [number for number in document_T.unique().tolist() if number >= 0]
    made = []
    with laid_out(job.case):
        engine = megatron_engine(job, parse_objective(job.loss))
        for order in (numbers, numbers[::-1]):
            place_T = torch.cat([(document_T == number).nonzero()[:, 0] for number in order])
            one_row = batch.select(place_T[None]).to("cpu")
            inputs = StageInputs(one_row, {}, full_vocab, [])
            (signal,) = engine.student.forward([inputs])
            engine.forward_backward([one_row], [{}], 1.0)
            gradients = {name: gradient.clone() for name, gradient in engine.gradients() if gradient is not None}
            engine.zero_grad()
            made.append((signal.hidden_TE[place_T.argsort()], gradients))
    (hidden, gradients), (other_hidden, other_gradients) = made
    least = 1e-3 * float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    return relative_difference(other_hidden, hidden), {
        name: relative_difference(other_gradients[name], gradient, least) for name, gradient in gradients.items()
    }


def silent_model(rank: Rank, case: Case) -> str:
    """A job: the message for a model that drops the output processor, at the first pass of the proof."""
    with laid_out(case):
        mesh = Mesh(case.degrees, torch.device("cpu"))
        chunks = build_chunks(case, mesh, ModelSource(partial(decoder, Job(case), 0)))
        model = chunks.models[-1]
        called = model.forward
        model.forward = lambda *inputs, **hook: called(*inputs)
        return message_of(megatron_logits, chunks, *2 * [torch.arange(S).expand(B, S)], 2)
