"""Joins the tensors that a processor makes of the images of several documents."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def concatenated(parts: Sequence[Mapping[str, Tensor]], stacked: frozenset[str]) -> dict[str, Tensor]:
    """The tensors of several documents' images as those of one call.

    Images are concatenated along their dim. Other dims that differ are padded with zeros at their ends. stacked: the
    names of tensors whose first dim is documents and whose second dim is their images.
    """
    return {
        name: _joined([part[name][0] for part in parts])[None]
        if name in stacked
        else _joined([part[name] for part in parts])
        for name in parts[0]
    }


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    sizes = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        whole = tensor.new_zeros(len(tensor), *sizes)
        whole[(slice(None), *(slice(size) for size in tensor.shape[1:]))] = tensor
        padded.append(whole)
    return torch.cat(padded)
