"""How a model is run: in train or eval mode, with or without noise, and in which dtype."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel

from stillhouse.models.families import NOISE, SAMPLING, text_config

#: the name of variable-length attention (see `varlen.py`). Context parallelism adds a prefix and a suffix to it
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
    """Return the names of dropout and of routers' noise in the modules that are in train mode."""
    return sorted({path.removesuffix(".default").rpartition(".")[2] for path, _, _ in _noise(model)})


def remove_noise(model: nn.Module) -> list[str]:
    """Set the noise of a model in train mode to 0, and return the names of the noise. The configuration keeps its
    values. `require_no_noise` finds noise whose size is not an attribute of a module.
    """
    names = noise_of(model)
    for _, module, attribute in list(_noise(model)):
        if attribute == SAMPLING:
            module.eval()
        else:
            setattr(module, attribute, 0.0)
    return names


def _noise(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """For each size of noise that is not 0, yield a name, the module and the attribute with the size."""
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
    """Return bfloat16 for float32 weights with flash or variable-length attention, which needs 16 bits; else None."""
    needs_16_bits = uses_flash_attention(model) or VARLEN in attention_name(model)
    return torch.bfloat16 if needs_16_bits and model.dtype == torch.float32 else None


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Return a context in which matrix products are computed in `dtype`, or with None in the dtype of the weights."""
    # autocast's cache would keep bfloat16 copies of all weights, including gathered ones, until the end of a forward
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False)


def _grouped_mm_under_autocast(left: Tensor, right: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Torch's grouped product under autocast on a GPU. Transformers computes experts by this product.

    Autocast does not convert its inputs. For float32 there is no kernel on a GPU: torch would wait for the device to
    read where groups end, and launch a product for each group. The kernel for 16 bits needs widths that are multiples
    of 8.
    """
    if left.shape[-1] % 8 == 0 and right.shape[-1] % 8 == 0:
        dtype = torch.get_autocast_dtype("cuda")
        left, right = left.to(dtype), right.to(dtype)
    with torch.autocast("cuda", enabled=False):
        product: Tensor = torch.ops.aten._grouped_mm(left, right, *arguments, **options)
    return product


#: keeps the registration
_LIBRARY = torch.library.Library("aten", "IMPL")
# a later version of torch may already have such a function
if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", "AutocastCUDA"):
    _LIBRARY.impl("_grouped_mm", _grouped_mm_under_autocast, "AutocastCUDA")
