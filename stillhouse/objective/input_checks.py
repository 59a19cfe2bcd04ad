"""Checks of a pass's inputs: shapes, devices, and constants that wrongly require grad. Each failure is a ValueError.

The values of a tensor are checked only on a CPU: on a GPU, the check would have to wait for the GPU.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from stillhouse.objective.signals import check_per_token
from stillhouse.objective.terms import Term, require_terms

#: the tensors of a pass that receive a gradient, by their names in error messages. The first tensor, hidden states or
#: logits, has one row per token
Leaves: TypeAlias = dict[str, Tensor | None]


def first_leaf(leaves: Leaves) -> tuple[str, Tensor]:
    name, tensor = next(iter(leaves.items()))
    assert tensor is not None
    return name, tensor


def check_leaves(leaves: Leaves) -> None:
    """Require that all leaves are on one device and have no forward-mode tangent."""
    for name, tensor in leaves.items():
        if tensor is None:
            continue
        check_device(name, tensor, *first_leaf(leaves))
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise ValueError(
                f"{name} carries a forward-mode tangent (torch.func.jvp): expected none, since an objective's "
                "gradients are computed in reverse mode only; use torch.autograd.grad or backward"
            )


def check_pass(
    leaves: Leaves,
    terms: Sequence[Term],
    weights_T: Tensor | None,
    normalizer: float | Tensor,
    valid_index: Tensor | None,
    chunk_tokens: int | None,
) -> None:
    """Raise ValueError for invalid arguments of `linear_objective`."""
    first, leaf = first_leaf(leaves)
    tokens = len(leaf)
    require_terms(terms)
    if not terms:
        raise ValueError("no terms: expected at least one of CrossEntropy, Distill, Entropy")
    for at, term in enumerate(terms):
        if term.tokens not in (None, tokens):
            raise ValueError(
                f"terms[{at}] ({term.name}) has {term.tokens} tokens, the student {tokens}; expected one row per "
                "token on all sides"
            )
        for name, tensor in _tensors(f"terms[{at}]", term):
            check_device(name, tensor, first, leaf)
    weights = {"weights_T": weights_T} | {f"terms[{at}].weights_T": term.weights_T for at, term in enumerate(terms)}
    check_per_token(tokens, **weights)
    for name, tensor_or_none in weights.items():
        if tensor_or_none is None:
            continue
        _check_constant(name, tensor_or_none)
        if tensor_or_none.device.type == "cpu" and not tensor_or_none.isfinite().all():
            raise ValueError(f"{name} holds NaN or infinity: expected finite weights, 0 for rows that do not count")
    if valid_index is not None:
        _check_index(valid_index, tokens)
    is_on_device = isinstance(normalizer, Tensor) and normalizer.device.type != "cpu"
    if isinstance(normalizer, Tensor):
        _check_constant("normalizer", normalizer)
    if not is_on_device and not 0 < float(normalizer) < math.inf:
        raise ValueError(f"normalizer={normalizer}: expected the positive number of valid tokens of the whole step")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: expected 1 or more, or None to pick by memory")


def _check_index(valid_index: Tensor, tokens: int) -> None:
    if valid_index.dim() != 1 or valid_index.dtype != torch.int64:
        raise ValueError(
            f"valid_index of shape {tuple(valid_index.shape)} and dtype {valid_index.dtype}: expected row numbers, "
            "one dim of int64 (a mask's are mask.nonzero()[:, 0])"
        )
    _check_has_data("valid_index", valid_index)
    if valid_index.device.type != "cpu" or not len(valid_index):
        return
    first, last = int(valid_index.min()), int(valid_index.max())
    if first < 0 or last >= tokens:
        raise ValueError(f"valid_index holds rows {first} to {last}: expected rows from 0 to {tokens - 1}")
    # a repeated row would count twice in the loss and the head's gradient, but once in the hidden states' gradient
    if repeated := len(valid_index) - len(valid_index.unique()):
        raise ValueError(f"valid_index holds {repeated} of its {len(valid_index)} rows again: expected each row once")


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a term, its signals and their heads, with their names."""
    if isinstance(value, Tensor):
        yield name, value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, tuple):
        for at, element in enumerate(value):
            yield from _tensors(f"{name}[{at}]", element)


def check_device(name: str, tensor: Tensor, first: str, leaf: Tensor) -> None:
    """Raise ValueError unless the tensor has data and is on the device of `leaf`. first: the name of `leaf`."""
    _check_has_data(name, tensor)
    if tensor.device != leaf.device:
        raise ValueError(
            f"{name} is on {tensor.device}, {first} on {leaf.device}: expected both on one device; move it with "
            f".to({str(leaf.device)!r})"
        )


def _check_has_data(name: str, tensor: Tensor) -> None:
    if tensor.device.type == "meta":
        raise ValueError(
            f"{name} is on the meta device, which holds no numbers: expected a tensor with its data (load the "
            "weights of a model that was built on meta before the first pass)"
        )


def _check_constant(name: str, tensor: Tensor) -> None:
    _check_has_data(name, tensor)
    if tensor.requires_grad:
        raise ValueError(f"{name} requires grad: expected a constant; detach it")
