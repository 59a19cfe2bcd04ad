"""An adapter (LoRA) in Megatron-Core's chunks, whose own weights stay frozen: W x becomes W x + (alpha / r) B A x.

A linear layer of Megatron-Core may combine several projections of transformers (queries, keys and values; gate and up
projection). Each projection has a separate A and B; B A x is added to the projection's rows of the layer's output.
The blocks of A and B are derived from the blocks of the layer's weight, so A and B are handled like other parameters.

S tokens of a row on this rank, B rows, I input width and O output width of a layer on this rank, R rank of A and B.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn
from torch.nn import functional as F

from stillhouse.megatron.weights import Block, WeightTable
from stillhouse.models import Decoder
from stillhouse.models.adapter import Lora, base_name

_A, _B = "lora_A.default.weight", "lora_B.default.weight"


class LoraBranch(nn.Module):
    """Computes the tensor that an adapter adds to a linear layer's output. `add` is a forward hook of the layer.

    rows: (projection, number of rows) for each part of the layer's output on this rank, in order; the projection is
        None if it has no adapter.

    If the layer's output is sharded over the tensor ranks (column parallel), the rows of B are sharded, too, and each
    rank has the full A. If the layer's input is sharded (row parallel), the columns of A are sharded, and each rank
    has the full B. Tensor ranks communicate only A x, [S, B, R] for each projection. With sequence parallelism, each
    rank computes the gradient of its unsharded matrix from its own tokens, and Megatron-Core sums these gradients.
    """

    def __init__(self, layer: Any, rows: Sequence[tuple[str | None, int]], lora: Lora):
        super().__init__()
        self.rows, self.scale, self.is_on = rows, lora.alpha / lora.r, True
        self.is_column = isinstance(layer, ColumnParallelLinear)
        self.sequence, self.group = layer.sequence_parallel, layer.tp_group
        names = dict.fromkeys(name for name, _ in rows if name is not None)
        heights = {name: sum(count for other, count in rows if other == name) for name in names}
        weight_OI: Tensor = layer.weight
        self.A = nn.ParameterDict({name: weight_OI.new_empty(lora.r, weight_OI.shape[1]) for name in names})
        self.B = nn.ParameterDict({name: weight_OI.new_empty(height, lora.r) for name, height in heights.items()})
        sharded, full, dim = (self.B, self.A, 0) if self.is_column else (self.A, self.B, 1)
        # Megatron-Core reads these attributes to decide which gradients a tensor rank counts in the norm, and which
        # gradients are summed over the tensor ranks
        for matrix in sharded.values():
            set_tensor_model_parallel_attributes(matrix, True, dim, 1)
        for matrix in full.values():
            matrix.sequence_parallel = self.sequence

    def add(self, layer: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        output, bias = outputs
        return (output + self(inputs[0]), bias) if self.is_on else outputs

    def forward(self, input_SBI: Tensor) -> Tensor:
        # each tensor rank gets A x for the tokens in its part of the layer's output; backward sums the gradients
        if self.is_column:
            region = gather_from_sequence_parallel_region if self.sequence else copy_to_tensor_model_parallel_region
        elif self.sequence:
            region = reduce_scatter_to_sequence_parallel_region
        else:
            region = reduce_from_tensor_model_parallel_region
        hidden_SBR = region(F.linear(input_SBI, torch.cat([*self.A.values()])), group=self.group)
        by_name = zip(self.B.items(), hidden_SBR.chunk(len(self.B), -1), strict=True)
        added = {name: self.scale * F.linear(part_SBR, matrix_OR) for (name, matrix_OR), part_SBR in by_name}
        parts = {
            name: iter(output_SBO.split([count for other, count in self.rows if other == name], -1))
            for name, output_SBO in added.items()
        }
        parts_SBO = [
            hidden_SBR.new_zeros(*hidden_SBR.shape[:-1], count) if name is None else next(parts[name])
            for name, count in self.rows
        ]
        return torch.cat(parts_SBO, -1)


def add_adapter(chunks: Sequence[Any], table: WeightTable, decoder: Decoder) -> WeightTable:
    """Add the matrices of the decoder's adapter to the chunks, and freeze all other parameters.

    table: the blocks of the chunks' own weights.

    Returns `table` with the blocks of the matrices, which have no values yet. Without an adapter, returns `table` and
    changes nothing. Raises ValueError for an adapter with dropout or on a layer that cannot have one, and if no
    parameter of a chunk is trained.
    """
    lora = decoder.lora
    if lora is None:
        return table
    if dropout := decoder.pretrained.peft_config["default"].lora_dropout:
        raise ValueError(f"student.adapter.dropout {dropout}: expected 0.0 with parallel.engine: megatron")
    names = {base_name(name): name for name in decoder.state_dict()}
    adapted = {name.removesuffix(f".{_A}") for name in names if name.endswith(f".{_A}")}
    blocks = [replace(block, name=names.get(block.name, block.name)) for block in table.blocks]
    shapes = dict(table.shapes)
    for chunk in chunks:
        chunk.requires_grad_(False)
    for (number, parameter), layer_blocks in table.by_parameter().items():
        path = parameter.removesuffix(".weight")
        if any(block.name.removesuffix(".weight") in adapted for block in layer_blocks) and path != parameter:
            layer = chunks[number].get_submodule(path)
            blocks += _add_branch(layer, number, path, layer_blocks, adapted, lora)
            shapes |= {
                (number, f"{path}.lora.{name}"): tuple(matrix.shape) for name, matrix in layer.lora.named_parameters()
            }
    for chunk in chunks:
        if not any(parameter.requires_grad for parameter in chunk.parameters()):
            first, last = (chunk.decoder.layers[at].layer_number - 1 for at in (0, -1))  # numbers begin with 1
            raise ValueError(
                f"no parameter is trained in layers {first} to {last} of the student, which are on one stage: "
                "expected an adapter in layers of every stage, or fewer stages"
            )
        if chunk.pre_process and chunk.config.recompute_granularity is not None:
            # parameters in recomputed layers get gradients only if the layers' input requires a gradient
            chunk.embedding.register_forward_hook(
                lambda embedding, inputs, hidden_SBD: hidden_SBD.requires_grad_() if torch.is_grad_enabled() else None
            )
    return replace(table, blocks=tuple(blocks), shapes=shapes)


@contextmanager
def without_adapter(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Within the block, switch the adapter off. Only for forward passes without gradients."""
    branches = [module for chunk in chunks for module in chunk.modules() if isinstance(module, LoraBranch)]
    for branch in branches:
        branch.is_on = False
    try:
        yield
    finally:
        for branch in branches:
            branch.is_on = True


def _add_branch(
    layer: Any, number: int, path: str, blocks: Sequence[Block], adapted: set[str], lora: Lora
) -> Iterator[Block]:
    """Add the branch of one layer, and yield the blocks of its matrices.

    number: the chunk's number.
    path: the layer's name in the chunk.
    blocks: the blocks of the layer's weight.
    """
    # tensor ranks of (shared) experts can communicate outside of a layer; the layer's output is then incomplete
    if not isinstance(layer, ColumnParallelLinear | RowParallelLinear) or layer.explicit_expert_comm:
        raise ValueError(
            f"student.adapter: {path} is a {type(layer).__name__}, which cannot have a LoRA with parallel.engine: "
            "megatron; expected targets that name other layers, or parallel.engine: torch"
        )
    rows: list[tuple[str | None, int]] = []
    matrices: dict[str, Block] = {}
    heights: defaultdict[str, int] = defaultdict(int)
    ranks = slice(0, lora.r)
    regions: list[tuple[Any, Any, Block]] = [(block.local, block.index, block) for block in blocks]
    for (local_rows, local_columns), (full_rows, full_columns), block in sorted(
        regions, key=lambda region: region[0][0].start
    ):
        module, count = block.name.removesuffix(".weight"), local_rows.stop - local_rows.start
        name = module.rpartition(".")[2]
        rows.append((name if module in adapted else None, count))
        if module not in adapted:
            continue
        a = Block(number, f"{path}.lora.A.{name}", (ranks, local_columns), f"{module}.{_A}", (ranks, full_columns))
        matrices.setdefault(name, a)
        local = slice(heights[name], heights[name] + count)
        heights[name] += count
        yield Block(number, f"{path}.lora.B.{name}", (local, ranks), f"{module}.{_B}", (full_rows, ranks))
    yield from matrices.values()
    layer.lora = LoraBranch(layer, rows, lora)
    # this hook must run before a norm of the layer's output, which is also a hook
    layer.register_forward_hook(layer.lora.add, prepend=True)
