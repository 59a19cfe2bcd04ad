"""Settings for running a model: train or eval mode, removal of noise, and the dtype of the computation."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from stillhouse.models.families import NOISE, SAMPLING, text_config

#: the name of variable-length attention (see `varlen.py`). Context parallelism adds a prefix and a suffix to the name
VARLEN = "varlen"


@contextmanager
def in_mode(*modules: nn.Module, training: bool) -> Iterator[None]:
    """Set all submodules to train or eval mode; afterwards restore each submodule's previous mode."""
    submodules = {submodule for module in modules for submodule in module.modules()}
    changed = [submodule for submodule in submodules if submodule.training != training]
    for submodule in changed:
        submodule.training = training
    try:
        yield
    finally:
        for submodule in changed:
            submodule.training = not training


def evaluating(*modules: nn.Module) -> AbstractContextManager[None]:
    """Set all submodules to eval mode; afterwards restore each submodule's previous mode."""
    return in_mode(*modules, training=False)


def noise_of(model: nn.Module) -> list[str]:
    """Return the names of dropout modules and of noise attributes whose value is not 0, in modules in train mode."""
    return sorted({path.removesuffix(".default").rpartition(".")[2] for path, _, _ in _noise(model)})


def remove_noise(model: nn.Module) -> list[str]:
    """Remove the noise of a model in train mode, and return its names (see `noise_of`). The configuration does not
    change. `require_no_noise` finds noise whose size is not an attribute of a module.
    """
    names = noise_of(model)
    for _, module, attribute in list(_noise(model)):
        if attribute == SAMPLING:
            module.eval()
        else:
            setattr(module, attribute, 0.0)
    return names


def _noise(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the name, the module and the attribute of each probability or size of noise that is not 0."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items() if module.training else ():
            is_dropout = isinstance(module, _DropoutNd) and attribute == "p"
            if (is_dropout or NOISE.fullmatch(attribute)) and isinstance(value, float) and value > 0:
                yield name if is_dropout else attribute, module, attribute


def attention_name(model: PreTrainedModel) -> str:
    return text_config(model.config)._attn_implementation or ""


def uses_flash_attention(model: PreTrainedModel) -> bool:
    return "flash" in attention_name(model)


def autocast_dtype(model: PreTrainedModel) -> torch.dtype | None:
    """Return the dtype for `autocast`: bfloat16 if the attention function needs 16 bits (flash or variable-length
    attention) and the weights are in float32, otherwise None.
    """
    needs_16_bits = uses_flash_attention(model) or VARLEN in attention_name(model)
    return torch.bfloat16 if needs_16_bits and model.dtype == torch.float32 else None


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Return a context in which matrix products are computed in `dtype`; None leaves them in the weights' dtype."""
    # autocast's cache would keep bfloat16 copies of all weights, including gathered ones, until the end of a forward
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False)


def _grouped_mm_under_autocast(left: Tensor, right: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Return torch's grouped matrix product, with which transformers computes experts, under autocast on a GPU.

    torch's autocast does not convert the inputs of this product, and GPUs have no kernel for it in float32: torch
    would wait for the device to read where groups end, and launch a product for each group. The kernel for 16 bits
    needs widths that are multiples of 8.
    """
    if left.shape[-1] % 8 == 0 and right.shape[-1] % 8 == 0:
        dtype = torch.get_autocast_dtype("cuda")
        left, right = left.to(dtype), right.to(dtype)
    with torch.autocast("cuda", enabled=False):
        product: Tensor = torch.ops.aten._grouped_mm(left, right, *arguments, **options)
    return product


#: torch removes the registered function when this object is deleted
_LIBRARY = torch.library.Library("aten", "IMPL")
# a later version of torch may already register a function for autocast
if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", "AutocastCUDA"):
    _LIBRARY.impl("_grouped_mm", _grouped_mm_under_autocast, "AutocastCUDA")
