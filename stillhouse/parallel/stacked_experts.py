"""Reads experts that have one tensor each in transformers' files but one stacked tensor in transformers' models.

Each process reads only its own rows. transformers' checkpoint conversions define which tensors form a stack.
"""

from collections.abc import Mapping, Sequence

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from stillhouse.models import Decoder


def parts_of_stack(decoder: Decoder, name: str) -> list[str]:
    """Return the names, in files, of the tensors that form the stack `name`, with a * for the expert's number.

    The list is empty if `name` is not a stack. If it has several names (gate and up projection), each expert of the
    stack has the rows of the first one, then those of the second one.
    """
    for conversion in get_model_conversion_mapping(decoder.pretrained):
        target = conversion.target_patterns[0]
        if isinstance(conversion, WeightConverter) and name.endswith(target) and _stacks(conversion):
            return [name.removesuffix(target) + source for source in conversion.source_patterns]
    return []


@torch.no_grad()
def read_stack(value_XRC: Tensor, parts: Sequence[str], files: Mapping[str, str]) -> None:
    """Read this process's part of a stack of X experts, R rows and C columns each, from files into `value_XRC`.

    files: by tensor name, the file that holds the tensor. Raises ValueError for an expert that is in no file.
    """
    local_XRC, offset = value_XRC, [0, 0]
    if isinstance(value_XRC, DTensor):
        local_XRC, mesh = value_XRC.to_local(), value_XRC.device_mesh
        offset[:] = compute_local_shape_and_global_offset(value_XRC.shape, mesh, value_XRC.placements)[1][:2]
    first, end = offset[1], offset[1] + local_XRC.shape[1]
    for number, expert_RC in enumerate(local_XRC, start=offset[0]):
        above = 0  # number of rows of the previous parts
        for part in parts:
            name = part.replace("*", str(number))
            if name not in files:
                raise ValueError(f"there is no tensor '{name}' among the model's files: expected all of its experts")
            with safe_open(files[name], framework="pt") as file:
                stored = file.get_slice(name)
                rows = stored.get_shape()[0]
                start, stop = max(first, above), min(end, above + rows)
                if start < stop:
                    expert_RC[start - first : stop - first] = stored[start - above : stop - above]
            above += rows


def _stacks(conversion: WeightConverter) -> bool:
    merge, *rest = conversion.operations
    if not isinstance(merge, MergeModulelist) or merge.dim != 0:
        return False
    return not rest or (len(rest) == 1 and isinstance(rest[0], Concatenate) and rest[0].dim == 1)
