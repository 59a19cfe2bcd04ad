"""Jobs for ranks: output processors other than the distillation objective, Megatron's wrappers, and refusals."""

import torch
import torch.distributed as dist
from kit.megatron_jobs import apart, sum_shared
from kit.megatron_models import (
    B,
    Layout,
    S,
    build,
    laid_out,
    load,
    micro_batch,
)
from kit.shard_ranks import Rank
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from stillhouse.megatron.processor import MegatronProcessor
from stillhouse.models import processors
from stillhouse.models.processor_targets import Targets
from stillhouse.tools.parity import worst


def compare_log_probs(rank: Rank, layout: Layout) -> tuple[float, float]:
    """A job: differences from plain logits in log-probabilities, entropies and gradients of a sequence loss."""
    batch = micro_batch(0, layout.packed)
    tokens_BS = batch.labels_BS.clamp(min=0)

    def ratio(log_probs_BS: Tensor, entropy_BS: Tensor) -> Tensor:
        return ((0.1 * log_probs_BS).sum(1).exp() + 0.01 * entropy_BS.square().sum(1)).sum()

    with laid_out(Layout()):
        model = build(Layout(), 0)
        log_q = torch.log_softmax(model(batch.input_ids_BS, batch.position_ids_BS, None) / 0.7, -1)
        expected = log_q.gather(-1, tokens_BS[..., None])[..., 0], -(log_q.exp() * log_q).sum(-1)
        ratio(*expected).backward()
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
    with laid_out(layout):
        model = build(layout, 0)
        load(model, weights, layout)
        hook = MegatronProcessor(model, processors.selected_log_probs(temperature=0.7))
        options = {"output_processor": hook, "output_processor_context": Targets(tokens_BS)}
        actual = model(batch.input_ids_BS, batch.position_ids_BS, None, **options)
        ratio(*actual).backward()
        scale = 1e-3 * torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        apart_by = [apart(grad, gradients[name], scale) for name, grad in sum_shared(model, layout).items()]
    values = [float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True)]
    return worst(enumerate(values))[1], worst(enumerate(apart_by))[1]


def compare_tap(rank: Rank, layout: Layout) -> float:
    """A job: the difference from one rank in the gradients of a function of the hidden states."""
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
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        # the head has no gradient
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    with laid_out(layout):
        model = tapped(layout, weights)
        model.output_layer.weight.grad = torch.zeros_like(model.output_layer.weight)
        scale = 1e-3 * torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        actual = sum_shared(model, layout)
        return worst((name, apart(actual[name], grad, scale)) for name, grad in gradients.items())[1]


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
    batch, messages = micro_batch(0, False), []
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

        def dtensor_weight() -> None:
            model.output_layer.weight = nn.Parameter(weight)
            model(*inputs, output_processor=hook)

        for mistake in (lambda: model(*inputs, output_processor=print), dtensor_weight, deferred):
            try:
                mistake()
            except ValueError as error:
                messages.append(str(error))
    return messages
