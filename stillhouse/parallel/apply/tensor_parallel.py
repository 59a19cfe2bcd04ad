"""Tensor and expert parallelism: shards a decoder by its family's plans in transformers.

Tensor parallelism uses torch's parallel styles. The layers' matrices are sharded according to the plan. The input
embedding and the output head are sharded by vocabulary rows (`Head.shard`). Hidden states are replicated.

Under expert parallelism, each process has some complete experts of a layer. An all-to-all dispatches each token to
the processes of its experts, and another all-to-all sends the results back. Tensor ranks have the same tokens, so
each of them dispatches one slice of these tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from stillhouse.models import Decoder
from stillhouse.models.adapter import lora_parts
from stillhouse.models.families import HEADS, MATRIX_SIZES, ModelFacts, is_of_experts, plan_name, text_config
from stillhouse.models.lm_head import Head, input_embedding
from stillhouse.objective import VocabShard

#: torch's styles by their names in transformers
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": lambda: RowwiseParallel(use_local_output=False),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate(), use_local_output=False),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate(), use_local_output=False),
    # a norm of each attention head: every rank has the full weight, but the gradient comes only from its own heads
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}


def apply_tensor_parallel(decoder: Decoder, mesh: DeviceMesh) -> None:
    """Shard a decoder's weights over a 1-D mesh. Raises ValueError for a model that cannot be sharded."""
    # a decoder without layers needs no plan, because a head is always sharded by rows
    plan = tensor_plan(decoder, mesh.size()) if decoder.layers() else {}
    frozen = {name for name, parameter in decoder.named_parameters() if not parameter.requires_grad}
    if plan and not any(plan_name(name) in plan for name, _ in decoder.language_model.named_modules()):
        raise ValueError(
            f"the tensor-parallel plan of model type '{decoder.config.model_type}' names no module of the model: "
            "expected parallel.tensor=1"
        )
    modules = list(decoder.language_model.named_modules())
    for number, layer in enumerate(decoder.mtp_layers()):
        # the block in an MTP layer has the same module names as a layer of the model
        block = list(layer.get_submodule("mtp_block").named_modules(prefix=f"layers.{number}"))
        if any(is_of_experts(name) for name, _ in block):
            raise ValueError(
                "tensor parallelism cannot distribute the experts of MTP layers: expected parallel.tensor=1"
            )
        modules += block
    for name, module in modules:
        if style := plan.get(plan_name(name)):
            parts = lora_parts(module)
            # only one matrix of an adapter, A or B, has the sharded dim
            factor = "lora_A" if style.startswith("rowwise") else "lora_B"
            for matrix in [parts["base_layer"], parts[factor]] if parts else [module]:
                parallelize_module(matrix, mesh, STYLES[style]())
                if style.startswith("rowwise"):  # a family may add to this output in place (Llama 4)
                    matrix.register_forward_hook(lambda module, inputs, output: _LocalTensor.apply(output))
            continue
        named = list(module.named_children())
        children = {path: child for path, child in named if next(child.parameters(), None) is not None}
        styles = [plan.get(plan_name(f"{name}.{path}"), "") for path in children]
        # the gradient of the module's input is all-reduced once if all children are sharded, at least two of them by
        # columns, and none has an adapter (one of an adapter's two matrices is not sharded)
        if all(styles) and styles.count("colwise") > 1 and not any(map(lora_parts, children.values())):
            module.register_forward_pre_hook(partial(_replicate_input, mesh), with_kwargs=True)
    _cut_vocabulary(decoder, mesh)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(name not in frozen)  # SequenceParallel sets requires_grad=True


def tensor_plan(decoder: Decoder, degree: int) -> dict[str, str]:
    """Return the family's plan: a style for each generic module name (`plan_name`).

    Raises ValueError if the family has no plan, if `STYLES` lacks a style of the plan, or if the model's sizes or
    parts do not allow the degree.
    """
    config = text_config(decoder.config)
    facts, model_type = ModelFacts(config), f"model type '{config.model_type}'"
    if not (plan := facts.parallel_plan("tp")):
        raise ValueError(f"{model_type} has no tensor-parallel plan in transformers: expected parallel.tensor=1")
    # leave out the plan's entries for experts (each rank gets some complete experts) and for the embedding, which
    # `_cut_vocabulary` shards together with the head (transformers 5.17 has such an entry)
    plan = {name: style for name, style in plan.items() if not is_of_experts(name) and style != "embedding_rowwise"}
    if unknown := sorted(set(plan.values()) - STYLES.keys()):
        raise ValueError(
            f"the tensor-parallel plan of {model_type} uses {', '.join(unknown)}, but this package "
            f"supports only {', '.join(STYLES)}: expected parallel.tensor=1"
        )
    require_divisor(config, degree)
    if facts.mixes_columns:
        raise ValueError(
            f"{model_type} chooses activations by their mean over all columns of a matrix "
            "(activation_sparsity_pattern), of which a tensor rank has a part: expected parallel.tensor=1"
        )
    embedding = input_embedding(decoder.pretrained)
    if embedding is not None and (inner := [name for name, _ in embedding.named_children()]):
        raise ValueError(
            f"the embedding of {model_type} contains {', '.join(inner)}, which cannot run on a part of the "
            "vocabulary: expected parallel.tensor=1"
        )
    _require_planned_heads(decoder, plan)
    return plan


def require_divisor(config: Any, degree: int) -> None:
    """Raise ValueError unless the tensor degree divides the heads and widths of a model.

    config: the configuration of its language model.
    """
    if size := ModelFacts(config).indivisible_size(MATRIX_SIZES, degree):
        raise ValueError(
            f"tensor={degree} does not divide the model's {size[0]}={size[1]} (model type '{config.model_type}'): "
            "expected a divisor of this size"
        )


def _require_planned_heads(decoder: Decoder, plan: dict[str, str]) -> None:
    """Raise ValueError if attention has weights per head that the plan does not name, as in Cohere and Doge."""
    config, counts = text_config(decoder.config), set[int | None]()
    for heads_name in HEADS:
        size = ModelFacts(config).sizes(heads_name)
        counts.update(size if isinstance(size, list) else [size])
    for name, module in decoder.language_model.named_modules():
        if ".self_attn" not in name or isinstance(module, nn.Linear) or plan_name(name) in plan:
            continue
        styles = [plan.get(plan_name(f"{name}.{child}")) for child, _ in module.named_children()]
        # ignore vectors as wide as a head, which apply to all heads, and plans that do not shard attention (Flint)
        heads = counts - {getattr(module, "head_dim", None)} if "colwise" in styles else set()
        for key, weight in module.named_parameters(recurse=False):
            is_attention = name.endswith(".self_attn")
            by_head = weight.dim() == 1 and len(weight) in heads if is_attention else weight.dim() == 2
            if by_head and plan_name(f"{name}.{key}") not in plan:
                raise ValueError(
                    f"'{name}' has weights for each attention head, and the tensor-parallel plan of model type "
                    f"'{config.model_type}' does not name it: expected parallel.tensor=1"
                )


def _replicate_input(
    mesh: DeviceMesh, _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, Any]:
    """Make a module's hidden states a replicated DTensor. Then the ranks all-reduce the gradient of the hidden states
    once, instead of once for each matrix that reads them.
    """
    replicated = partial(DTensor.from_local, device_mesh=mesh, placements=[Replicate()], run_check=False)
    if "hidden_states" in options:
        return arguments, options | {"hidden_states": replicated(options["hidden_states"])}
    first, *rest = arguments
    return (replicated(first), *rest), options


class _LocalTensor(torch.autograd.Function):
    """Converts a replicated DTensor to a tensor that can be changed in place, which `to_local` does not allow."""

    @staticmethod
    def forward(ctx: Any, replicated: DTensor) -> Tensor:
        ctx.mesh = replicated.device_mesh
        return replicated.to_local().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        return DTensor.from_local(gradient, ctx.mesh, [Replicate()], run_check=False)


def _cut_vocabulary(decoder: Decoder, mesh: DeviceMesh) -> None:
    embedding, head = input_embedding(decoder.pretrained), decoder.head
    if embedding is not None:
        parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()))
    if not isinstance(head, Head):
        return

    def by_rows(parameter: Tensor) -> nn.Parameter:
        sharded = distribute_tensor(parameter.data, mesh, [Shard(0)])
        return nn.Parameter(sharded, requires_grad=parameter.requires_grad)

    linear = head.linear
    weight_VD = linear.weight = embedding.weight if decoder.tied else by_rows(linear.weight)
    if linear.bias is not None:
        linear.bias = by_rows(linear.bias)
    (rows, _), (start, _) = compute_local_shape_and_global_offset(weight_VD.shape, mesh, [Shard(0)])
    start = start if rows else len(weight_VD)
    head.shard = VocabShard(start, start + rows, mesh.get_group())


def apply_expert_parallel(decoder: Decoder, experts: DeviceMesh, tensor: DeviceMesh) -> None:
    """Distribute a decoder's experts. Raises ValueError for a degree that does not divide their number.

    experts: the mesh over which the experts are distributed. tensor: the mesh of the ranks with the same tokens.
    """
    degree = experts.size()
    # configurations have different names for the number of experts, but all modules of experts have `num_experts`
    for count in {int(module.num_experts) for module in dispatched_experts(decoder)}:  # type: ignore[arg-type]
        if count % degree:
            name = "tensor" if degree == tensor.size() else "expert"  # the degree is at least the tensor degree
            raise ValueError(
                f"{name}={degree} does not divide the {count} experts of model type '{decoder.config.model_type}': "
                f"expected a divisor of {count}"
            )
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    apply_expert_parallelism(decoder.language_model, experts, tensor, _local_plan(decoder))


def dispatched_experts(decoder: Decoder) -> list[nn.Module]:
    """Return the modules of experts in this stage's layers."""
    # ep_dispatch_experts: transformers' style for a module of experts with token dispatch
    dispatched = [name for name, style in _local_plan(decoder).items() if style == "ep_dispatch_experts"]
    return [decoder.language_model.get_submodule(name) for name in dispatched]


def _local_plan(decoder: Decoder) -> dict[str, str]:
    plan, model = ModelFacts(decoder.config).parallel_plan("ep"), decoder.language_model
    # parameters first, because they are sharded before the modules' forwards are wrapped
    parts = [*model.named_parameters(), *model.named_modules()]
    return {name: plan[plan_name(name)] for name, _ in parts if plan_name(name) in plan}
