"""Jobs for ranks: a real GPTModel of megatron-core under some layout against the same model on one rank.

The model is Megatron's own, from its local layer spec. The reference is that model's logits, at tensor size 1, and
the objective in plain autograd.

B rows, S tokens per row, T = B·S, D width, V vocabulary (padded to V' rows).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from kit import NamedCase, parity_models
from kit.megatron_models import (
    CHUNK,
    ROWS_V,
    VOCABULARY,
    B,
    Layout,
    MicroBatch,
    S,
    build,
    context_rows,
    full_name,
    laid_out,
    load,
    micro_batch,
    shard_of,
)
from kit.shard_ranks import Rank, message_of
from kit.tensors import Largest
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from stillhouse.engine.loss import StepLoss
from stillhouse.megatron.processor import MegatronProcessor
from stillhouse.models import processors
from stillhouse.models.processors import DistillTargets, Targets
from stillhouse.objective import TEACHER, FullVocab, ObjectiveOutput, OutputHead, TopK
from stillhouse.objective.reference import dense_objective
from stillhouse.objective.spec import ObjectiveSpec, parse_objective
from stillhouse.tools.parity import worst


def against_one_rank(
    layout: Layout, expected: Callable[[GPTModel], Any], actual: Callable[[GPTModel], Any]
) -> tuple[Any, Any, dict[str, float]]:
    """Return the results of both functions, and the differences between their gradients.

    expected, actual: run forward and backward of a model, on one rank and of this rank's part under the layout.
    """
    alone = Layout(tied=layout.tied, packed=layout.packed)
    with laid_out(alone):
        model = build(alone, 0)
        wanted = expected(model)
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    with laid_out(layout):
        model = build(layout, 0)
        load(model, weights, layout)
        made = actual(model)
        least = 1e-3 * torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        assert weights.keys() - gradients.keys() <= {"output_layer.weight"}
        errors = {}
        for name, grad in sum_shared(model, layout).items():
            errors[name] = apart(grad, gradients.get(name, torch.zeros_like(weights[name])), least)
        return wanted, made, errors


def compare_log_probs(rank: Rank, layout: Layout) -> tuple[float, float]:
    """A job: differences from plain logits in log-probabilities, entropies and gradients of a sequence loss."""
    batch = micro_batch(0, layout.packed)
    tokens_BS = batch.labels_BS.clamp(min=0)

    def with_backward(log_probs_BS: Tensor, entropy_BS: Tensor) -> tuple[Tensor, Tensor]:
        ((0.1 * log_probs_BS).sum(1).exp() + 0.01 * entropy_BS.square().sum(1)).sum().backward()
        return log_probs_BS, entropy_BS

    def plain(model: GPTModel) -> tuple[Tensor, Tensor]:
        log_q = torch.log_softmax(model(batch.input_ids_BS, batch.position_ids_BS, None) / 0.7, -1)
        return with_backward(log_q.gather(-1, tokens_BS[..., None])[..., 0], -(log_q.exp() * log_q).sum(-1))

    def processed(model: GPTModel) -> tuple[Tensor, Tensor]:
        hook = MegatronProcessor(model, processors.selected_log_probs(temperature=0.7))
        options = {"output_processor": hook, "output_processor_context": Targets(tokens_BS)}
        return with_backward(*model(batch.input_ids_BS, batch.position_ids_BS, None, **options))

    expected, actual, errors = against_one_rank(layout, plain, processed)
    values = [float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True)]
    return worst(enumerate(values))[1], worst(errors.items())[1]


def compare_tap(rank: Rank, layout: Layout) -> float:
    """A job: the difference from one rank in the gradients of a function of the hidden states."""
    batch = micro_batch(0, layout.packed)

    def tapped(model: GPTModel) -> None:
        hook = MegatronProcessor(model, processors.hidden_states)
        hidden_BSD = model(batch.input_ids_BS, batch.position_ids_BS, None, output_processor=hook)
        assert hidden_BSD.shape == (B, S, 32)
        (hidden_BSD.sin() * torch.arange(S)[:, None]).sum().backward()

    return worst(against_one_rank(layout, tapped, tapped)[2].items())[1]


def half(rank: Rank, layout: Layout) -> tuple[str, str, float]:
    """A job: run Megatron's wrapper of bfloat16 models. Return the result's dtype and difference from logits."""
    batch = micro_batch(0, False)
    with laid_out(layout):
        model = build(layout, 0)
        model.config.bf16 = True
        wrapped = Float16Module(model.config, model)
        hook = MegatronProcessor(wrapped, processors.selected_log_probs())
        inputs = (batch.input_ids_BS, batch.position_ids_BS, None)
        context = Targets(batch.labels_BS.clamp(min=0))
        made = wrapped(*inputs, output_processor=hook, output_processor_context=context)
        logits = wrapped(*inputs).float()
        expected = logits.log_softmax(-1).gather(-1, batch.labels_BS.clamp(min=0)[..., None])[..., 0]
        distance = float((made.log_probs_BS - expected).abs().max())
        return type(made).__name__, str(made.log_probs_BS.dtype), distance


def gather_of_weights(rank: Rank, layout: Layout) -> tuple[bool, float]:
    """A job: weights are gathered while layers run, as with a distributed optimizer. Return whether the processor
    waited for the output layer's weight, and the log-probabilities' difference from those of whole weights.
    """
    batch = micro_batch(0, False)
    with laid_out(layout):
        model = build(layout, 0)
        context, inputs = Targets(batch.labels_BS.clamp(min=0)), (batch.input_ids_BS, batch.position_ids_BS, None)
        options = {"output_processor": MegatronProcessor(model, processors.selected_log_probs())}
        options["output_processor_context"] = context
        with torch.no_grad():
            expected = model(*inputs, **options).log_probs_BS
        made = DistributedDataParallelConfig(
            overlap_grad_reduce=True, overlap_param_gather=True, use_distributed_optimizer=True, bucket_size=1
        )
        wrapped = DistributedDataParallel(model.config, made, model)
        for group in wrapped.bucket_groups:
            for bucket in group.buckets:
                # until the all-gather, this rank does not have the other ranks' parts
                size = len(bucket.param_data) // dist.get_world_size()
                for other in range(dist.get_world_size()):
                    if other != rank.number:
                        bucket.param_data[other * size : (other + 1) * size] = torch.nan
        wrapped.start_param_sync()
        with torch.no_grad():
            actual = wrapped(*inputs, **options).log_probs_BS
        waited = all(group.param_gather_handle is None for group in wrapped.bucket_groups)
        return waited, float((actual - expected).abs().max())


def plain_with_depths(rank: Rank, _: None) -> None:
    """A job that must fail: a plain GPTModel with layers for multi-token prediction."""
    with laid_out(Layout()):
        model = build(Layout(depths=1), 0)
        model.__class__ = GPTModel
        MegatronProcessor(model, processors.cross_entropy())


def refusals(rank: Rank, _: None) -> list[str]:
    """A job: the errors for a bare function as processor, a DTensor as weight, and deferred weight gradients."""
    batch = micro_batch(0, False)
    with laid_out(Layout()):
        model = build(Layout(depths=1), 0)
        inputs = (batch.input_ids_BS, batch.position_ids_BS, None)
        hook = MegatronProcessor(model, processors.hidden_states)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        weight = distribute_tensor(model.output_layer.weight.detach(), mesh)

        def deferred() -> None:
            model.config.defer_embedding_wgrad_compute = True
            MegatronProcessor(model, processors.hidden_states)

        def dtensor_weight() -> None:
            model.output_layer.weight = nn.Parameter(weight)
            model(*inputs, output_processor=hook)

        mistakes = (lambda: model(*inputs, output_processor=print), dtensor_weight, deferred)
        return [message_of(mistake) for mistake in mistakes]


@dataclass(frozen=True)
class Case(NamedCase):
    """teacher: "full", "topk" or "" (no teacher). micro_batches: the number of micro-batches in a step."""

    layout: Layout
    objective: str = "cross_entropy"
    teacher: str = ""
    micro_batches: int = 1

    @property
    def spec(self) -> ObjectiveSpec:
        return parse_objective(self.objective)


def micro_batches(case: Case) -> list[MicroBatch]:
    """Return the micro-batches of a step. The second one has no label."""
    return [micro_batch(number, case.layout.packed) for number in range(case.micro_batches)]


def normalizer(batches: Sequence[MicroBatch]) -> int:
    return sum(int((batch.labels_BS >= 0).sum()) for batch in batches)


@dataclass
class Difference:
    """Relative differences between this rank's results and the reference.

    loss: None on ranks that do not compute it. largest: elements of the largest tensor of the step.
    """

    loss: float | None
    gradients: dict[str, float]
    largest: int


def compare(rank: Rank, case: Case) -> Difference:
    """A job: one step under a layout, compared with plain autograd of the whole model's logits."""
    batches, layout = micro_batches(case), case.layout
    tokens, largest = normalizer(batches), Largest()
    teacher_weights: dict[str, Tensor] = {}

    def plain(model: GPTModel) -> float:
        teacher = build(Layout(tied=layout.tied, packed=layout.packed), 1, width=48)
        teacher_weights.update((name, weight.detach()) for name, weight in teacher.named_parameters())
        head, loss = OutputHead(torch.eye(ROWS_V), vocab_size=VOCABULARY), torch.zeros(())
        for batch in batches:
            inputs = {"packed_seq_params": batch.packed}
            logits = model(batch.input_ids_BS, batch.position_ids_BS, None, **inputs).flatten(0, 1)
            with torch.no_grad():
                hidden = teacher(batch.input_ids_BS, batch.position_ids_BS, None, **inputs).flatten(0, 1)
            signal = top_k(batch) if case.teacher == "topk" else FullVocab(hidden, head)
            labels_T = batch.labels_BS.flatten()
            terms, weights_T = case.spec.terms(labels_T, {TEACHER: signal}), (labels_T >= 0).float()
            loss += dense_objective(logits, head, terms, weights_T=weights_T, normalizer=tokens).loss
        loss.backward()
        return float(loss)

    def stepped(model: GPTModel) -> float | None:
        teacher = build(layout, 1, width=48) if case.teacher == "full" else None
        if teacher is not None:
            load(teacher, teacher_weights, layout)
        parts = batches
        if layout.context > 1:
            rows_S = context_rows(layout.context, S)[parallel_state.get_context_parallel_rank()]
            parts = [batch.part(rows_S) for batch in batches]
        with largest:
            made = step(case, model, teacher, parts, tokens)
        loss = torch.tensor(sum(float(output.loss) for output in made))
        dist.all_reduce(loss, group=parallel_state.get_context_parallel_group())
        return float(loss) if made else None

    expected, loss, gradients = against_one_rank(layout, plain, stepped)
    return Difference(None if loss is None else abs(loss / expected - 1), gradients, largest.numbers)


def step(
    case: Case, model: GPTModel, teacher: GPTModel | None, batches: Sequence[MicroBatch], tokens: int
) -> list[ObjectiveOutput]:
    """Run forward and backward with Megatron's schedule. Only the last stage returns outputs."""
    signals: list[Any] = []  # empty on all other stages than the last
    if teacher is not None:
        hook = MegatronProcessor(teacher, processors.full_vocab, vocab_size=VOCABULARY)
        signals = schedule(teacher, hook, batches, [None] * len(batches), forward_only=True)
    if case.teacher == "topk":
        signals = [top_k(batch) for batch in batches]
    named = [{TEACHER: signal} for signal in signals] or [{} for _ in batches]
    contexts = [DistillTargets(batch.labels_BS, signals=its) for batch, its in zip(batches, named, strict=True)]
    hook = MegatronProcessor(model, StepLoss(case.spec, tokens, chunk_tokens=CHUNK), vocab_size=VOCABULARY)
    return schedule(model, hook, batches, contexts)


def schedule(
    model: GPTModel, hook: MegatronProcessor, batches: Sequence[MicroBatch], contexts: Sequence[Any], **options: Any
) -> list[Any]:
    """Run Megatron's schedule. Return the hook's result of each micro-batch on the last stage."""

    def forward_step(data: Iterator[tuple[MicroBatch, Any]], model: GPTModel) -> tuple[Any, Callable[[Any], Any]]:
        batch, context = next(data)
        made = model(
            batch.input_ids_BS,
            batch.position_ids_BS,
            None,
            packed_seq_params=batch.packed,
            output_processor=hook,
            output_processor_context=context,
        )
        return made, keep

    def keep(made: Any, non_loss_data: bool = False) -> Any:
        # Megatron returns the third value unchanged, because of calculate_per_token_loss
        return made if non_loss_data else (made.loss.clone(), torch.tensor(1), made)

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(zip(batches, contexts, strict=True)),
        model=model,
        num_microbatches=len(batches),
        seq_length=S,
        micro_batch_size=B,
        collect_non_loss_data=bool(options),
        **{"forward_only": False} | options,
    )


def sum_shared(model: GPTModel, layout: Layout) -> dict[str, Tensor]:
    """Return gradients by the whole model's names, summed over ranks as `finalize_model_grads` of Megatron does."""
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is None:
            assert name == "output_layer.weight", name  # a function of the hidden states does not use the head
            grad = torch.zeros_like(parameter)
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
        if layout.tied and layout.pipeline > 1 and "embedding" in full_name(name, layout) and "position" not in name:
            dist.all_reduce(grad, group=parallel_state.get_embedding_group())
        dist.all_reduce(grad, group=parallel_state.get_context_parallel_group())
        gradients[full_name(name, layout)] = grad
    return gradients


def apart(actual: Tensor, weight: Tensor, least: Tensor) -> float:
    expected = shard_of(weight, actual.shape)
    return float((actual - expected).norm() / torch.maximum(expected.norm(), least))


def top_k(batch: MicroBatch) -> TopK:
    return parity_models.top_k(batch.input_ids_BS, 7)
