"""Frozen models whose linear layers have weights of 8 or 4 bits, through libraries that quantize while they load.

    int8    one scale per row of a weight; inputs and products keep the model's dtype (torchao)
    nf4     four bits per weight, one scale per 64 of them: QLoRA's NormalFloat, arXiv:2305.14314 (bitsandbytes)
    fp8     8-bit floating point, also for the inputs of products; after loading (`float8.py`)

The embedding, the norms and the output head keep the model's dtype, so that the objective uses the head's saved
weight.
"""

import importlib.util
import logging
import math
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from stillhouse.libraries import reading
from stillhouse.models.float8 import FP8, float8_problem

#: bitsandbytes lays the weights out anew at their first evaluation on some CPUs, for kernels without gradients
_REPACKS = "support_avx512bf16_for_cpu"
#: the library of each kind
LIBRARIES = {"int8": "torchao", "nf4": "bitsandbytes", FP8: "torchao"}


def require_library(kind: str) -> None:
    """Raise ValueError for a kind whose library is not installed."""
    if importlib.util.find_spec(LIBRARIES[kind]) is None:
        raise ValueError(f"{kind} needs {LIBRARIES[kind]}, which is not installed; pip install 'stillhouse[low-bit]'")


def quantized_loading(
    config: PreTrainedConfig, kind: str, dtype: torch.dtype | str, device: str | torch.device | None
) -> dict[str, Any]:
    """Return the arguments of transformers' `from_pretrained` that quantize a model while it is loaded; none for fp8.

    config: the model's configuration. dtype: the model's dtype, or "auto" for the dtype of the saved weights. Raises
    ValueError if the library is not installed or the device cannot run the kind, and for a model that is already
    quantized.
    """
    require_library(kind)
    if kind == FP8 and (problem := float8_problem(device)):
        raise ValueError(problem)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"its weights are quantized already: expected no further quantization, got {kind}")
    if kind == FP8:
        return {}
    saved = config.dtype or torch.float32
    product_dtype = saved if isinstance(dtype, str) else dtype
    with reading(f"{LIBRARIES[kind]} cannot be used"):
        configuration = _configuration(kind, product_dtype)
    return {"quantization_config": configuration, "device_map": {"": device or "cpu"}}


def _configuration(kind: str, product_dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig, TorchAoConfig

    # both libraries warn if some of their kernels cannot run on this machine
    logging.getLogger(LIBRARIES[kind]).setLevel(logging.ERROR)
    if kind == "nf4":
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=product_dtype)
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def require_quantized(
    model: PreTrainedModel, kind: str, name_or_path: str | os.PathLike[str], revision: str | None
) -> None:
    """Raise ValueError if no weight of a loaded model was quantized, or if a saved weight is not finite.

    Quantizing turns a NaN into a finite value, so the files are checked, not the loaded weights.
    """
    if not any(is_quantized(weight) for weight in model.parameters()):
        raise ValueError(f"none of its weights was quantized to {kind}, which takes torch.nn.Linear layers alone")
    folder = name_or_path
    if not os.path.isdir(folder):
        with reading("its files cannot be read again"):
            folder = snapshot_download(str(name_or_path), revision=revision, allow_patterns=["*.safetensors"])
    for path in sorted(Path(folder).glob("*.safetensors")):
        _check_finite_file(path)


def keep_gradients(model: PreTrainedModel) -> None:
    """Let gradients flow through quantized layers, before their first use."""
    for module in model.modules():
        if hasattr(module, _REPACKS):
            setattr(module, _REPACKS, False)


def quantized_identity(fingerprint: str, kind: str | None) -> str:
    """Return an identity from the fingerprint of a model's files and the kind of its quantization."""
    return fingerprint if kind is None else f"{fingerprint}-{kind}"


def is_quantized(weight: Tensor) -> bool:
    """Whether a weight is stored in 8 or 4 bits, which its `dtype` does not show."""
    return hasattr(weight, "qdata") or hasattr(weight, "quant_state")


def element_count(weight: Tensor) -> int:
    """Return the number of a weight's values; four bits of nf4 are one."""
    state = getattr(weight, "quant_state", None)
    return weight.numel() if state is None else math.prod(state.shape)


def weight_bytes(module: nn.Module) -> int:
    """Return the memory of a module's parameters, in bytes; a quantized weight counts with its bits and scales."""
    parts = [part for weight in module.parameters() for part in _parts(weight)]
    return sum(part.numel() * part.element_size() for part in parts)


def _parts(weight: Tensor) -> list[Tensor]:
    """Return the plain tensors in which a weight is stored."""
    if hasattr(weight, "qdata"):
        return [getattr(weight, name) for name in ("qdata", "scale")]
    if (state := getattr(weight, "quant_state", None)) is not None:
        return [weight.data, state.absmax]
    return [weight]


def _check_finite_file(path: Path) -> None:
    unreadable = reading(f"{path} cannot be read")
    with unreadable:
        file = safe_open(path, framework="pt")
    with file:
        for name in file.keys():  # noqa: SIM118  (a handle of safetensors is no mapping)
            with unreadable:
                tensor = file.get_tensor(name)
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise ValueError(
                    f"'{name}' in {path} has values that are NaN or infinite: expected finite weights; the "
                    "checkpoint is damaged"
                )
