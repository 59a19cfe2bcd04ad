"""Jobs for ranks: a real GPTModel of megatron-core under some layout against the same model on one rank.

The model is Megatron's own, from its local layer spec. The reference is that model's logits, at tensor size 1, and
the objective in plain autograd.

B rows, S tokens per row, T = B·S, D width, V vocabulary (padded to V' rows).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from largest import Largest
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.utils import set_streams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron_models import (
    CHUNK,
    ROWS_V,
    VOCABULARY,
    B,
    Layout,
    MicroBatch,
    S,
    build,
    context_rows,
    laid_out,
    load,
    micro_batch,
    shard_of,
    whole_name,
)
from shard_ranks import Rank
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from stillhouse.models import processors
from stillhouse.models.megatron import MegatronProcessor
from stillhouse.models.processors import DistillTargets, Targets, distillation
from stillhouse.objective import FullVocab, ObjectiveOutput, OutputHead, TopK
from stillhouse.objective.reference import dense_objective
from stillhouse.objective.spec import ObjectiveSpec, parse_objective
from stillhouse.parity import worst


@dataclass(frozen=True)
class Case:
    """objective: of the student; teacher: "full", "topk" or "" for none. micro_batches: of a step."""

    layout: Layout
    objective: str = "cross_entropy"
    teacher: str = ""
    micro_batches: int = 1

    @property
    def name(self) -> str:
        return "-".join(each for each in (self.layout.name, self.objective.replace(" ", ""), self.teacher) if each)

    @property
    def spec(self) -> ObjectiveSpec:
        return parse_objective(self.objective)


def micro_batches(case: Case) -> list[MicroBatch]:
    """The second has no label at all."""
    return [micro_batch(number, case.layout.packed) for number in range(case.micro_batches)]


def normalizer(given: Sequence[MicroBatch]) -> int:
    return sum(int((each.labels_BS >= 0).sum()) for each in given)


@dataclass
class Difference:
    """Of this rank's part from the reference, relative. loss: None where it is not known. largest: numbers in the
    largest tensor that the step made."""

    loss: float | None
    gradients: dict[str, float]
    largest: int


@dataclass
class Reference:
    loss: float
    weights: dict[str, Tensor]
    teacher_weights: dict[str, Tensor]
    gradients: dict[str, Tensor]


def compare(rank: Rank, case: Case) -> Difference:
    """A job."""
    whole = micro_batches(case)
    expected = reference(case, whole)
    layout = case.layout
    with laid_out(layout):
        model, teacher = build(layout, 0), build(layout, 1, width=48) if case.teacher == "full" else None
        load(model, expected.weights, layout)
        if teacher is not None:
            load(teacher, expected.teacher_weights, layout)
        place = parallel_state.get_context_parallel_rank()
        parts = whole
        if layout.context > 1:
            parts = [each.part(context_rows(layout.context, S)[place]) for each in whole]
        with Largest() as largest:
            made = step(case, model, teacher, parts, normalizer(whole))
        loss = torch.tensor(sum(float(each.loss) for each in made))
        dist.all_reduce(loss, group=parallel_state.get_context_parallel_group())
        scale = 1e-3 * torch.stack([each.norm() for each in expected.gradients.values()]).norm()
        gradients = sum_shared(model, layout)
        return Difference(
            abs(float(loss) / expected.loss - 1) if made else None,
            {name: apart(grad, expected.gradients[name], scale) for name, grad in gradients.items()},
            largest.numbers,
        )


def reference(case: Case, given: Sequence[MicroBatch]) -> Reference:
    """From logits of the whole models on this rank alone."""
    layout = Layout(tied=case.layout.tied, packed=case.layout.packed)
    with laid_out(layout):
        model, teacher = build(layout, 0), build(layout, 1, width=48)
        head, loss = OutputHead(torch.eye(ROWS_V), vocab_size=VOCABULARY), torch.zeros(())
        for each in given:
            inputs = {"packed_seq_params": each.packed}
            logits = model(each.input_ids_BS, each.position_ids_BS, None, **inputs).flatten(0, 1)
            with torch.no_grad():
                hidden = teacher(each.input_ids_BS, each.position_ids_BS, None, **inputs).flatten(0, 1)
            signal = top_k(each) if case.teacher == "topk" else FullVocab(hidden, head)
            labels_T = each.labels_BS.flatten()
            loss += dense_objective(
                logits,
                head,
                case.spec.terms(labels_T, signal),
                weights_T=(labels_T >= 0).float(),
                normalizer=normalizer(given),
            ).loss
        loss.backward()
    weights, teacher_weights = (
        {name: each.detach() for name, each in one.named_parameters()} for one in (model, teacher)
    )
    gradients = {name: each.grad for name, each in model.named_parameters()}
    return Reference(float(loss), weights, teacher_weights, gradients)


def step(
    case: Case, model: GPTModel, teacher: GPTModel | None, given: Sequence[MicroBatch], tokens: int
) -> list[ObjectiveOutput]:
    """Forward and backward by Megatron's own schedule. Nothing comes but from the last stage."""
    signals: list[Any] = [None] * len(given)
    if teacher is not None:
        hook = MegatronProcessor(teacher, processors.full_vocab, vocab_size=VOCABULARY)
        signals = schedule(teacher, hook, given, [None] * len(given), forward_only=True) or signals
    if case.teacher == "topk":
        signals = [top_k(each) for each in given]
    contexts = [
        DistillTargets(each.labels_BS, normalizer=tokens, signal=signal)
        for each, signal in zip(given, signals, strict=True)
    ]
    hook = MegatronProcessor(model, distillation(case.spec, chunk_tokens=CHUNK), vocab_size=VOCABULARY)
    return schedule(model, hook, given, contexts)


def schedule(
    model: GPTModel, hook: MegatronProcessor, given: Sequence[MicroBatch], contexts: Sequence[Any], **options: Any
) -> list[Any]:
    """What the hook made of each micro-batch, on the last stage."""

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
        # the third as it is, whatever the number of micro-batches (calculate_per_token_loss)
        return made if non_loss_data else (made.loss.clone(), torch.tensor(1), made)

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(zip(given, contexts, strict=True)),
        model=model,
        num_microbatches=len(given),
        seq_length=S,
        micro_batch_size=B,
        collect_non_loss_data=bool(options),
        **{"forward_only": False} | options,
    )


def sum_shared(model: GPTModel, layout: Layout) -> dict[str, Tensor]:
    """Gradients by whole names, after the sums that Megatron's `finalize_model_grads` does."""
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
        if layout.tied and layout.pipeline > 1 and "embedding" in whole_name(name, layout) and "position" not in name:
            dist.all_reduce(grad, group=parallel_state.get_embedding_group())
        dist.all_reduce(grad, group=parallel_state.get_context_parallel_group())
        gradients[whole_name(name, layout)] = grad
    return gradients


def apart(found: Tensor, whole: Tensor, least: Tensor) -> float:
    expected = shard_of(whole, found.shape)
    return float((found - expected).norm() / torch.maximum(expected.norm(), least))


def top_k(batch: MicroBatch, count: int = 7) -> TopK:
    """Made of each place's own token, so that a context rank's part has the same."""
    ids_TK = (batch.input_ids_BS.flatten()[:, None] + 31 * torch.arange(count)) % VOCABULARY
    log_probs_K = torch.log_softmax(-torch.arange(count).float(), 0) + torch.tensor(0.9).log()
    return TopK(ids_TK, log_probs_K.repeat(len(ids_TK), 1))


# multi-token prediction


@dataclass
class MtpDifference:
    """Of each depth, Megatron's own mean cross-entropy and that of the processor; of each gradient, how far apart."""

    losses: list[tuple[float, float]]
    gradients: dict[str, float]


def compare_mtp(rank: Rank, layout: Layout) -> MtpDifference:
    """A job: cross-entropy at every depth, by Megatron itself and by a processor, in the same layout."""
    with laid_out(layout):
        model = build(layout, 0)
        batch = micro_batch(0, layout.packed)
        # Megatron takes labels of any kind, and a mask
        mask_BS = (batch.labels_BS >= 0).float()
        starts_BS = batch.position_ids_BS
        if batch.packed is not None:
            borders = batch.packed.cu_seqlens_q.long()
            starts_BS = torch.cat([torch.arange(stop - start) for start, stop in pairwise(borders)])[None]
        targets = Targets(batch.labels_BS, mask_BS).shift_for_mtp(starts_BS, layout.depths)
        if layout.context > 1:
            rows_S = context_rows(layout.context, S)[parallel_state.get_context_parallel_rank()]
            batch, mask_BS = batch.part(rows_S), mask_BS[:, rows_S]
            targets = targets.rows((S * torch.arange(B)[:, None] + rows_S).flatten())
        MTPLossLoggingHelper.tracker.clear()
        inputs = {"input_ids": batch.input_ids_BS, "position_ids": batch.position_ids_BS, "attention_mask": None}
        inputs |= {"packed_seq_params": batch.packed}
        loss_BS = model(**inputs, labels=batch.labels_BS.clamp(min=0), loss_mask=mask_BS)
        (loss_BS * mask_BS).sum().backward()
        expected = {name: each.grad.clone() for name, each in model.named_parameters()}
        theirs = [(loss_BS * mask_BS).sum() / mask_BS.sum(), *MTPLossLoggingHelper.tracker["loss_values"]]
        model.zero_grad()
        hook = MegatronProcessor(model, processors.cross_entropy())
        made = model(**inputs, output_processor=hook, output_processor_context=targets)
        counts = [(targets.at(depth).labels_T >= 0).sum() for depth in range(1 + layout.depths)]
        # as with calculate_per_token_loss: a depth's mean, times the main head's tokens
        scales = [1.0] + [counts[0] / count / layout.depths for count in counts[1:]]
        sum(scale * each.loss for scale, each in zip(scales, made, strict=True)).backward()
        whole = torch.stack([each.norm() for each in expected.values()]).norm()
        return MtpDifference(
            [(float(a), float(b.loss / count)) for a, b, count in zip(theirs, made, counts, strict=True)],
            {
                name: float((each.grad - expected[name]).norm() / torch.maximum(expected[name].norm(), 1e-3 * whole))
                for name, each in model.named_parameters()
            },
        )


# the combined schedule's plan


def plan(rank: Rank, case: Case) -> float:
    """A job: how far the gradient of the last node's input, which comes back through a flat result, is from that of
    a structured one.
    """
    with laid_out(case.layout):
        return _flat_against_structured(case, torch.device("cpu"))


def plan_on_a_gpu(case: Case, store: str) -> float:
    """The same with the node's own backward, on streams. In a process of its own."""
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    set_streams()
    return _flat_against_structured(case, torch.device("cuda"))


def _flat_against_structured(case: Case, device: torch.device) -> float:
    model, (batch,) = build(case.layout, 0).to(device), micro_batches(case)
    batch = MicroBatch(*(each.to(device) for each in (batch.input_ids_BS, batch.position_ids_BS, batch.labels_BS)))
    context = DistillTargets(batch.labels_BS, normalizer=normalizer([batch]), signal=top_k(batch))
    context = context.shift_for_mtp(batch.position_ids_BS, case.layout.depths)
    depths = 1 + case.layout.depths
    hidden = torch.randn(depths * S, B, 32, generator=torch.Generator().manual_seed(0)).to(device)
    gradients, names = [], []
    for flat in (False, True):
        hook = MegatronProcessor(model, distillation(case.spec), flat=flat)
        node, given = last_node(model, batch, hook, context), hidden.clone().requires_grad_()
        if flat:
            made = node.forward_impl(given) if device.type == "cpu" else node.forward(given)
            assert isinstance(made, tuple)
            outputs = hook.unpack(made[0]) if depths > 1 else [hook.unpack(made[0])]
            grad = torch.autograd.grad(sum(each.loss for each in outputs), made)
            back = node.default_backward_func(made, grad) if device.type == "cpu" else node.backward(grad)
            gradients.append(given.grad if device.type == "cpu" else back)
        else:
            made = node.forward_impl(given)
            outputs = made if depths > 1 else [made]
            sum(each.loss for each in outputs).backward()
            gradients.append(given.grad)
        names.append([list(each.metrics) for each in outputs])
    assert names[0] == names[1]
    return float((gradients[0] - gradients[1]).norm() / gradients[0].norm())


def last_node(model: GPTModel, batch: MicroBatch, hook: MegatronProcessor, context: Any) -> Any:
    options = {"output_processor": hook, "output_processor_context": context}
    whole = model.build_schedule_plan(batch.input_ids_BS, batch.position_ids_BS, None, **options)
    whole.pre_process.forward_impl()
    return whole.post_process


# other processors


def compare_log_probs(rank: Rank, layout: Layout) -> tuple[float, float]:
    """A job: how far log-probabilities and entropies are from logits', and the gradients of a loss over sequences."""
    batch = micro_batch(0, layout.packed)
    drawn_BS = batch.labels_BS.clamp(min=0)

    def ratio(log_probs_BS: Tensor, entropy_BS: Tensor) -> Tensor:
        return ((0.1 * log_probs_BS).sum(1).exp() + 0.01 * entropy_BS.square().sum(1)).sum()

    with laid_out(Layout()):
        model = build(Layout(), 0)
        log_q = torch.log_softmax(model(batch.input_ids_BS, batch.position_ids_BS, None) / 0.7, -1)
        expected = log_q.gather(-1, drawn_BS[..., None])[..., 0], -(log_q.exp() * log_q).sum(-1)
        ratio(*expected).backward()
        weights = {name: each.detach() for name, each in model.named_parameters()}
        gradients = {name: each.grad for name, each in model.named_parameters()}
    with laid_out(layout):
        model = build(layout, 0)
        load(model, weights, layout)
        hook = MegatronProcessor(model, processors.selected_log_probs(temperature=0.7))
        options = {"output_processor": hook, "output_processor_context": Targets(drawn_BS)}
        found = model(batch.input_ids_BS, batch.position_ids_BS, None, **options)
        ratio(*found).backward()
        scale = 1e-3 * torch.stack([each.norm() for each in gradients.values()]).norm()
        apart_by = [apart(grad, gradients[name], scale) for name, grad in sum_shared(model, layout).items()]
    values = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
    return worst(enumerate(values))[1], worst(enumerate(apart_by))[1]


def compare_tap(rank: Rank, layout: Layout) -> float:
    """A job: how far the gradients of a function of the hidden states are from those on one rank."""
    batch = micro_batch(0, layout.packed)

    def tapped(layout: Layout, weights: dict[str, Tensor] | None) -> GPTModel:
        model = build(layout, 0)
        if weights is not None:
            load(model, weights, layout)
        hook = MegatronProcessor(model, processors.hidden_states)
        hidden_BSD = model(batch.input_ids_BS, batch.position_ids_BS, None, output_processor=hook)
        assert hidden_BSD.shape == (B, S, 32)
        (hidden_BSD.sin() * torch.arange(S)[:, None]).sum().backward()
        return model

    with laid_out(Layout()):
        model = tapped(Layout(), None)
        weights = {name: each.detach() for name, each in model.named_parameters()}
        # the head has no part in it
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    with laid_out(layout):
        model = tapped(layout, weights)
        model.output_layer.weight.grad = torch.zeros_like(model.output_layer.weight)
        scale = 1e-3 * torch.stack([each.norm() for each in gradients.values()]).norm()
        found = sum_shared(model, layout)
        return worst((name, apart(found[name], grad, scale)) for name, grad in gradients.items())[1]


def half(rank: Rank, layout: Layout) -> tuple[str, str, float]:
    """A job: what Megatron's wrapper of bfloat16 models hands on, and how far log-probabilities are from logits'."""
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
    """A job: under a distributed optimizer whose weights come while layers run, whether the output layer's had been
    waited for; and how far the log-probabilities are from those of whole weights.
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
                # what other ranks have is not here until it is gathered
                size = len(bucket.param_data) // dist.get_world_size()
                for other in range(dist.get_world_size()):
                    if other != rank.number:
                        bucket.param_data[other * size : (other + 1) * size] = torch.nan
        wrapped.start_param_sync()
        with torch.no_grad():
            found = wrapped(*inputs, **options).log_probs_BS
        waited = all(group.param_gather_handle is None for group in wrapped.bucket_groups)
        return waited, float((found - expected).abs().max())


def plain_with_depths(rank: Rank, _: None) -> None:
    """A job that is to fail."""
    with laid_out(Layout()):
        model = build(Layout(depths=1), 0)
        model.__class__ = GPTModel
        MegatronProcessor(model, processors.cross_entropy())


def refusals(rank: Rank, _: None) -> list[str]:
    """A job: what is said of a weight that others gather, of a head that is not called, and of a bare function."""
    batch, said = micro_batch(0, False), []
    with laid_out(Layout()):
        model = build(Layout(depths=1), 0)
        inputs = (batch.input_ids_BS, batch.position_ids_BS, None)
        hook = MegatronProcessor(model, processors.hidden_states)
        weight = distribute_tensor(
            model.output_layer.weight.detach(), init_device_mesh("cpu", (dist.get_world_size(),))
        )

        def deferred() -> None:
            model.config.defer_embedding_wgrad_compute = True
            MegatronProcessor(model, processors.hidden_states)

        def dealt_out() -> None:
            model.output_layer.weight = nn.Parameter(weight)
            model(*inputs, output_processor=hook)

        for mistake in (lambda: model(*inputs, output_processor=print), dealt_out, deferred):
            try:
                mistake()
            except ValueError as error:
                said.append(str(error))
    return said
