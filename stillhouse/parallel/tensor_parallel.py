"""Tensor parallelism, applied to a decoder from outside: by its family's plan in transformers, with torch's styles.

The layers' matrices are cut as the plan says, the input embedding and the output head by vocabulary rows. Hidden
states between the layers are whole on every rank; of the head, the objective is told which rows are here.
"""

import re
from collections.abc import Callable
from typing import Any

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
from stillhouse.models.head import Head
from stillhouse.objective import VocabShard

#: transformers' names for what torch has
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    # a norm per attention head, whose weight every rank has and learns from its own heads alone
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}


def apply_tensor_parallel(decoder: Decoder, mesh: DeviceMesh) -> None:
    """Cut a decoder's weights over a mesh of one dim. Raises ValueError for a model that cannot be cut so."""
    # a head alone is cut by rows, whatever the layers would allow
    plan = tensor_plan(decoder, mesh.size()) if decoder.layers() else {}
    frozen = {name for name, each in decoder.named_parameters() if not each.requires_grad}
    for name, module in list(decoder.backbone.named_modules()):
        if style := plan.get(_generic(name)):
            for each in _matrices(module, style):
                parallelize_module(each, mesh, STYLES[style]())
        elif _reads_once(name, module, plan):
            module.register_forward_pre_hook(_whole_input(mesh), with_kwargs=True)
    _cut_vocabulary(decoder, mesh)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(name not in frozen)  # torch's SequenceParallel makes parameters that train


def tensor_plan(decoder: Decoder, degree: int) -> dict[str, str]:
    """The family's plan, by generic module names. Raises ValueError where it or the sizes do not allow the degree."""
    config = decoder.config.get_text_config()
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(
            f"model type '{config.model_type}' has no tensor-parallel plan in transformers: "
            "expected parallel.tensor=1"
        )
    # experts are dealt out whole (expert_parallel.py)
    plan = {name: style for name, style in plan.items() if ".experts" not in name}
    if unknown := sorted(set(plan.values()) - STYLES.keys()):
        raise ValueError(
            f"the tensor-parallel plan of model type '{config.model_type}' uses {', '.join(unknown)}, which is not "
            f"supported here (but {', '.join(STYLES)} are): expected parallel.tensor=1"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(config, name, None)
        if size is not None and size % degree:
            raise ValueError(
                f"parallel.tensor={degree} does not divide the model's {name}={size} (model type "
                f"'{config.model_type}'): expected a divisor of it"
            )
    return plan


def _reads_once(name: str, module: nn.Module, plan: dict[str, str]) -> bool:
    """Whether a module's input goes to several matrices that are cut by columns, and as far as its weights tell to
    nothing else.
    """
    children = [(child, each) for child, each in module.named_children() if next(each.parameters(), None) is not None]
    styles = [plan.get(_generic(f"{name}.{child}"), "") for child, _ in children]
    whole = [each for _, each in children if lora_parts(each)]  # of an adapter, one matrix is not cut
    return all(styles) and not whole and styles.count("colwise") > 1


def _whole_input(mesh: DeviceMesh) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[Any, Any]]:
    """Makes a module's hidden states one distributed tensor for all matrices that read them: the ranks then sum its
    gradient once, where each matrix would have its own part summed.
    """

    def shared(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        if "hidden_states" in options:
            return arguments, options | {"hidden_states": whole(options["hidden_states"])}
        first, *rest = arguments
        return (whole(first), *rest), options

    def whole(hidden_BSD: Tensor) -> DTensor:
        return DTensor.from_local(hidden_BSD, mesh, [Replicate()], run_check=False)

    return shared


def _matrices(layer: nn.Module, style: str) -> list[nn.Module]:
    """What is cut of a layer; with an adapter the weight, and of A and B the one that has the dim which is cut."""
    parts = lora_parts(layer)
    if not parts:
        return [layer]
    return [parts["base_layer"], parts["lora_A" if style.startswith("rowwise") else "lora_B"]]


def _cut_vocabulary(decoder: Decoder, mesh: DeviceMesh) -> None:
    """The embedding and the head, as far as they are here."""
    embedding, head = decoder.pretrained.get_input_embeddings(), decoder.head
    if embedding is not None:
        parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()))
    if not isinstance(head, Head):
        return
    linear = head.linear
    if embedding is not None and decoder.tied:
        linear.weight = embedding.weight
    else:
        linear.weight = _by_rows(linear.weight, mesh)
    if linear.bias is not None:
        linear.bias = _by_rows(linear.bias, mesh)
    (rows, _), (start, _) = compute_local_shape_and_global_offset(linear.weight.shape, mesh, [Shard(0)])
    start = start if rows else len(linear.weight)
    head.shard = VocabShard(start, start + rows, mesh.get_group())


def _by_rows(parameter: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)]), requires_grad=parameter.requires_grad)


def _generic(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
