"""One training step, and three, under a layout and in one process: what differs.

Every rank makes the same models and batches for itself, runs the one-process reference alone, then its part under the
layout, and says how far each of its parameters' gradients is from the reference's.

T tokens, B rows, S tokens per row.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from families import build
from shard_ranks import Rank
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from stillhouse.data import Batch
from stillhouse.models import Decoder, add_lora, balance_routers, draw_lora
from stillhouse.models.processors import Taught, distillation
from stillhouse.objective import ObjectiveOutput, Signal, TopK
from stillhouse.objective.recipe import Recipe, parse_recipe
from stillhouse.parallel import Extent, Layout, Mesh, Origin, Runner, Work, lay_out
from stillhouse.parity import apart, whole
from stillhouse.train.step import (
    ROUTER_LOSS,
    make_optimizer,
    optimizer_step,
    router_balances,
    router_loss,
)

VOCABULARY, ROWS, TOKENS, STEPS = 251, 2, 36, 3
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "initializer_range": 0.2,
}
RECIPE = parse_recipe("0.3*cross_entropy + 0.7*jsd(0.5)")
LEARNING_RATE = 1e-3
Precision = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Case:
    """micro_batches: of each data rank in a step. family: qwen3, untied, llama, tied, or qwen3_moe, with experts on
    both sides, whose balance the student learns, or one of `families`. depth: the student's layers, if not its own.

    lora: the student trains one, beside a teacher ("teacher") or its own base ("base"); "": it trains itself.
    dtype: of the weights beside a LoRA, whose own are float32.
    """

    layout: Layout
    family: str = "qwen3"
    micro_batches: int = 2
    recipe: Recipe = RECIPE
    top_k: int = 0
    checkpointing: bool = False
    teacher: Layout | None = None  # of its own
    depth: int = 0
    lora: str = ""
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        kind = f"{self.family}-{self.layout.degrees}".replace(" × ", "-").replace(" ", "")
        schedule = f"-{self.layout.schedule}-{self.micro_batches}" if self.layout.degrees.pipeline > 1 else ""
        own = "" if self.teacher is None else f"-teacher-{self.teacher}".replace(" × ", "-").replace(" ", "")
        kept = "-bf16" if self.dtype == torch.bfloat16 else ""
        flags = {"top_k": self.top_k, "recomputed": self.checkpointing, "offload": self.layout.offload}
        asked = "" if self.recipe == RECIPE else f"-{self.recipe.divergence or 'cross_entropy'}"
        more = asked + own + "".join(f"-{flag}" for flag, given in flags.items() if given)
        return kind + schedule + more + (f"-lora-{self.lora}{kept}" if self.lora else "")


@dataclass
class Difference:
    """Of this rank's part from the reference.

    gradients, weights: by parameter, relative to its norm; to a thousandth of the whole gradient's, if that is more.
    """

    loss: float
    metrics: dict[str, float]
    norm: float
    gradients: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    evaluation: float = 0.0


def compare(rank: Rank, case: Case) -> Difference | None:
    """A job: None on a rank that the layout does not count."""
    mesh = mesh_of(case.layout)
    if rank.number >= case.layout.degrees.processes:
        return None
    teacher_apart = None if case.teacher is None else (case.teacher, mesh_of(case.teacher))
    alone, laid = lay_out(Layout(), None, *origins(case)), lay_out(case.layout, mesh, *origins(case), teacher_apart)
    steps = [batches(case, step) for step in range(STEPS)]
    # the reference's micro-batches are those of all data ranks
    everything = [works(case, each) for each in steps]
    own = [tell(laid, each, works(case, mine(each, mesh), normalizer(each), laid.context_group)) for each in steps]
    for student in (*alone.students(), *laid.students()):
        student.train()
        if case.checkpointing:
            student.gradient_checkpointing_enable()
    evaluated = abs(summed(laid, laid.forward(own[0]))["loss"] - total(alone.forward(everything[0]))["loss"])
    difference = first_step(case, alone, laid, everything[0], own)
    difference.evaluation = evaluated
    optimizers = [optimizer(each) for each in (alone, laid)]
    for step in range(STEPS):
        for runner, theirs, made in ((alone, everything, optimizers[0]), (laid, own, optimizers[1])):
            if step:
                runner.forward_backward(theirs[step], theirs[step + 1] if step + 1 < STEPS else ())
            runner.clip(1.0)
            optimizer_step(made, LEARNING_RATE)
    expected = dict(alone.named_parameters())
    difference.weights = {
        name: apart(whole(each), expected[alias(case, name)]) for name, each in laid.named_parameters()
    }
    return difference


def first_step(
    case: Case, alone: Runner, laid: Runner, everything: list[Work], steps: list[list[Work]]
) -> Difference:
    """Leaves the gradients where they are. steps: of the layout, announced one ahead."""
    own = steps[0]
    expected = total(alone.forward_backward(everything)) | router_loss(everything)
    found = summed(laid, laid.forward_backward(own, steps[1]), own)
    assert (ROUTER_LOSS in found) == (case.family == "qwen3_moe")
    norms = [float(each.clip(0.0)) for each in (alone, laid)]
    references = dict(alone.named_parameters())
    gradients = {}
    for name, parameter in laid.named_parameters():
        reference = references[alias(case, name)]
        if reference.grad is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        gradients[name] = apart(whole(parameter.grad), reference.grad, 1e-3 * norms[0])
    return Difference(
        loss=abs(found["loss"] / expected["loss"] - 1),
        metrics={name: abs(found[name] - value) / max(abs(value), 1.0) for name, value in expected.items()},
        norm=abs(norms[1] / norms[0] - 1),
        gradients=gradients,
    )


def alias(case: Case, name: str) -> str:
    """A tied head on a stage of its own is the reference's embedding."""
    tied = case.family == "llama" and name == "head.linear.weight"
    return "backbone.embed_tokens.weight" if tied else name


# models and data, the same on every rank


def origins(case: Case) -> tuple[Origin, Origin | None]:
    student, teacher = configurations(case.family, case.depth)
    needs = case.recipe.needs_teacher and not case.top_k and case.lora != "base"
    made = Origin(partial(learner, student))
    if case.lora:
        # A and B are drawn where they lie, and B too, or A would have no gradient
        draw = partial(draw_lora, seed=2, fresh=False)
        made = Origin(partial(with_lora, student, case.dtype), draw, own_base=case.lora == "base")
    return made, Origin(partial(decoder, teacher, 1)) if needs else None


def configurations(family: str, depth: int = 0) -> tuple[PreTrainedConfig, PreTrainedConfig]:
    """Other depths and widths on both sides."""
    if family == "llama":
        small = LlamaConfig(**SHAPE, hidden_size=48, num_hidden_layers=depth or 5, tie_word_embeddings=True)
        return small, LlamaConfig(**SHAPE, hidden_size=64, num_hidden_layers=6)
    if family == "qwen3_moe":
        experts = SHAPE | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 16}
        small = Qwen3MoeConfig(**experts, hidden_size=48, num_hidden_layers=4, mlp_only_layers=[1])
        return small, Qwen3MoeConfig(**experts, hidden_size=64, num_hidden_layers=4, norm_topk_prob=True)
    if family != "qwen3":
        other = [build(family).config, build(family).config]
        for config in other:
            # dropout draws otherwise on every layout, and the norm of all heads together is in no plan
            config.resid_pdrop, config.use_qk_norm = 0.0, False
        return other[0], other[1]
    layers = depth or 4
    small = Qwen3Config(**SHAPE, hidden_size=48, num_hidden_layers=layers, head_dim=16, tie_word_embeddings=False)
    return small, Qwen3Config(**SHAPE, hidden_size=64, num_hidden_layers=6, head_dim=16, tie_word_embeddings=False)


def learner(config: PreTrainedConfig) -> Decoder:
    student = decoder(config, 0)
    if config.model_type == "qwen3_moe":
        balance_routers(student)
    return student


def decoder(config: PreTrainedConfig, seed: int) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(AutoModelForCausalLM.from_config(config), verify=False)


def with_lora(config: PreTrainedConfig, dtype: torch.dtype) -> Decoder:
    """Of a rank that no layout divides."""
    made = learner(config).to(dtype)
    # peft takes a dense layer's names for those of experts, where a family has both
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if config.model_type == "qwen3_moe" else "all-linear"
    add_lora(made, r=5, alpha=10.0, targets=targets)
    return made


def batches(case: Case, step: int) -> list[Batch]:
    """Of all data ranks. Rows hold two documents and padding; a third of the targets is masked, one micro-batch in
    three has none."""
    count = case.micro_batches * case.layout.degrees.data
    return [batch(1000 * step + number, empty=number % 3 == 1) for number in range(count)]


def batch(seed: int, empty: bool) -> Batch:
    random = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=random)
    borders = (17, 31)  # of the second document and of the padding: inside a context rank's part
    positions_S = torch.cat([torch.arange(b - a) for a, b in zip((0, *borders), (*borders, TOKENS), strict=True)])
    has_BS = torch.rand(ROWS, TOKENS, generator=random) > 0.3
    has_BS[:, [borders[0] - 1, *range(borders[1] - 1, TOKENS)]] = False
    has_BS &= torch.tensor(not empty)
    labels_T = torch.where(has_BS, ids_BS.roll(-1, 1), -1).flatten()
    return Batch(
        input_ids_BS=ids_BS,
        position_ids_BS=positions_S.repeat(ROWS, 1),
        labels_T=labels_T,
        weights_T=(labels_T >= 0).float(),
        valid_index=(labels_T >= 0).nonzero()[:, 0],
        document_T=torch.zeros(ROWS * TOKENS, dtype=torch.int64),
        valid_tokens=int((labels_T >= 0).sum()),
    )


def mine(given: list[Batch], mesh: Mesh) -> list[Batch]:
    """This data rank's micro-batches, and of them its context rank's part."""
    dealt = given[mesh.place("data") :: mesh.degrees.data]
    return [each.part(mesh.place("context"), mesh.degrees.context) for each in dealt]


def normalizer(given: list[Batch]) -> int:
    return sum(each.valid_tokens for each in given)


def works(
    case: Case,
    given: list[Batch],
    tokens: int | None = None,
    group: Any = None,
    precision: Precision = nullcontext,
) -> list[Work]:
    tokens = tokens or normalizer(given)
    asks = case.recipe.needs_teacher and not case.top_k
    coefficient = 0.5 if case.family == "qwen3_moe" else 0.0
    processor = distillation(case.recipe)
    balances = router_balances(given, coefficient, tokens, group) or [None] * len(given)
    return [
        Work(each, processor, partial(context, case, each, tokens), asks, precision, balance)
        for each, balance in zip(given, balances, strict=True)
    ]


def tell(runner: Runner, everything: list[Batch], own: list[Work]) -> list[Work]:
    """The works with what a teacher in a layout of its own says of them."""
    if runner.separate is None:
        return own
    shape_BS = (ROWS, TOKENS)
    extents = [Extent(*shape_BS, teacher_BS=shape_BS, student_BS=shape_BS)] * len(everything)
    heard = runner.separate.hear(mine(everything, runner.separate.mesh), extents)
    return [replace(work, heard_BSE=hidden_BSE) for work, hidden_BSE in zip(own, heard, strict=True)]


def context(case: Case, given: Batch, tokens: int, signal: Signal | None) -> Taught:
    if case.top_k:
        signal = top_k(case, given)
    return Taught(given.labels_T, given.weights_T, tokens, given.valid_index, signal=signal)


def top_k(case: Case, given: Batch) -> TopK:
    """Made of each row's own token, so that a context rank's part has the same."""
    ids_T1 = given.input_ids_BS.flatten()[:, None]
    ids_TK = (ids_T1 + torch.arange(case.top_k) * 31) % VOCABULARY
    log_probs_K = torch.log_softmax(-torch.arange(case.top_k, dtype=torch.float32), 0) + torch.tensor(0.9).log()
    return TopK(ids_TK, log_probs_K.repeat(len(ids_TK), 1))


def optimizer(runner: Runner) -> torch.optim.Optimizer:
    parameters = (parameter for _, parameter in runner.named_parameters())
    return make_optimizer(parameters, learning_rate=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)


# sums over ranks


@cache
def mesh_of(layout: Layout) -> Mesh:
    """Groups are made once for all cases of the same degrees."""
    return _mesh(layout.degrees)


@cache
def _mesh(degrees: Any) -> Mesh:
    return Mesh(degrees, torch.device("cpu"))


def total(made: list[ObjectiveOutput]) -> dict[str, float]:
    sums = {"loss": sum(float(each.loss) for each in made)}
    for name in made[0].metrics if made else ():
        sums[name] = sum(float(each.metrics[name]) for each in made)
    sums.pop("chunk_tokens", None)
    return sums


def summed(runner: Runner, made: list[ObjectiveOutput], given: Sequence[Work] = ()) -> dict[str, float]:
    """Over the ranks that have different tokens: not over those that share a head's rows."""
    assert runner.mesh is not None
    own = (total(made) if runner.has_results else {}) | (router_loss(given) if runner.is_counted else {})
    every: list[Any] = [None] * runner.mesh.degrees.processes
    dist.all_gather_object(every, own, group=runner.mesh.everyone)
    return {name: sum(each.get(name, 0.0) for each in every) for name in {name for each in every for name in each}}
