"""All-gathers the full tensors of a pipeline stage, one at a time, from the blocks on its ranks (see `weights.py`).

    tensors = stage_tensors(table, empty)
    for name, weight in stage_weights(chunks, table, tensors).items():
        full = weight.gather()                              # on each rank of the stage

No process needs memory for more than two copies of one tensor. Each rank gathers from its tensor ranks, and the
tensors of experts from the ranks that share the experts of a layer. So replicas of a rank gather among themselves.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from stillhouse.megatron.weight_names import Index
from stillhouse.megatron.weights import WeightTable, index_key, local_blocks
from stillhouse.parallel import StageWeight

#: the places in a full tensor of the blocks of one rank, in the order of its table
Places = Sequence[Index]


@dataclass(frozen=True)
class StageTensor:
    """A full tensor without values, and the places of the blocks of each rank of the group, in the group's order."""

    name: str
    empty: Tensor
    group: dist.ProcessGroup
    places: Sequence[Places]

    def gathered(self, parts: Sequence[Tensor], device: torch.device) -> Tensor:
        """Return the full tensor. A collective of the group. parts: the blocks of this rank.

        Raises ValueError on all ranks of the group if the copies of a block differ.
        """
        full = torch.empty_like(self.empty, device=device)
        sizes = [sum(full[index].numel() for index in of_rank) for of_rank in self.places]
        sent = full.new_zeros(max(sizes))
        if parts:
            torch.cat([part.flatten().to(full.dtype) for part in parts], out=sent[: sizes[self.group.rank()]])
        received = sent
        if len(sizes) > 1:
            received = sent.new_empty(len(sizes) * len(sent))
            dist.all_gather_into_tensor(received, sent, group=self.group)
        seen: set[tuple[tuple[int, int], ...]] = set()
        for of_rank, flat in zip(self.places, received.view(len(sizes), len(sent)), strict=True):
            start = 0
            for index in of_rank:
                target = full[index]
                part = flat[start : start + target.numel()].view(target.shape)
                start += target.numel()
                if (key := index_key(index)) in seen and not torch.equal(
                    *(tensor.contiguous().flatten().view(torch.uint8) for tensor in (target, part))
                ):
                    raise ValueError(
                        f"tensor '{self.name}': the copies of its part {index} differ between ranks; expected equal "
                        "weights, so start the run again from its last checkpoint"
                    )
                seen.add(key)
                target.copy_(part)
        return full


def stage_tensors(table: WeightTable, empty: Mapping[str, Tensor]) -> list[StageTensor]:
    """Return the tensors of this rank's stages. A collective of all ranks.

    empty: all tensors of the full model, on the meta device. The last stage's copy of a tied embedding is left out.
    """
    dense, experts = dict[str, list[Index]](), dict[str, list[Index]]()
    for block in table.blocks:
        if not block.is_copy:
            of_kind = experts if ".experts." in block.parameter else dense
            of_kind.setdefault(block.name, []).append(block.index)
    groups = (
        (parallel_state.get_tensor_model_parallel_group(), dense),
        (parallel_state.get_expert_tensor_and_model_parallel_group(), experts),
    )
    tensors: dict[str, StageTensor] = {}
    for group, of_kind in groups:
        of_ranks: list[Any] = [None] * group.size()
        dist.all_gather_object(of_ranks, of_kind, group=group)
        # a tensor rank whose rows of the vocabulary are only padding has no block of it
        for name in dict.fromkeys(name for of_rank in of_ranks for name in of_rank):
            tensors[name] = StageTensor(name, empty[name], group, [of_rank.get(name, []) for of_rank in of_ranks])
    return [tensors[name] for name in empty if name in tensors]


def stage_weights(
    chunks: Sequence[nn.Module], table: WeightTable, tensors: Sequence[StageTensor]
) -> dict[str, StageWeight]:
    """Return the present weights for `DistributedStudent.stage_weights`."""
    parts: defaultdict[str, list[Tensor]] = defaultdict(list)
    for block, part in local_blocks(chunks, table, Tensor.detach):
        if not block.is_copy:
            parts[block.name].append(part)
    device = next(chunks[0].parameters()).device
    return {
        tensor.name: StageWeight(tensor.empty, partial(tensor.gathered, parts[tensor.name], device))
        for tensor in tensors
    }
