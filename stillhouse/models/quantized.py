"""Frozen models whose linear layers have weights of 8 or 4 bits. Libraries quantize the weights.

    int8    one scale per row of a weight; inputs and products keep the model's dtype (torchao)
    nf4     four bits per element, one scale per 64 elements: QLoRA's NormalFloat, arXiv:2305.14314 (bitsandbytes)
    fp8     8-bit floating point (e4m3) for weights and inputs, one scale per row and per token (torchao)

The embedding, the norms and the output head keep the model's dtype, so that the objective uses the head's saved
weight. For fp8, the model is loaded in bfloat16 and then rounded, except for the routers of experts. Its logits
before and after rounding are compared, because a wrong kernel would give plausible but wrong teacher signals.

N products or tokens, D width, R rows of a weight, V vocabulary.
"""

import copy
import importlib.util
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from stillhouse.libraries import reading
from stillhouse.models.families import ROUTERS
from stillhouse.models.forward_modes import evaluating
from stillhouse.models.weight_files import weight_files

FP8 = "fp8"
#: torchao's products need matrices whose numbers of rows and columns are multiples of this
_MULTIPLE = 16
#: the lowest compute capability of CUDA devices that multiply in fp8
_CAPABILITY = (8, 9)
#: the largest allowed change of the logits by rounding: the median over tokens, relative to the logits' deviation
#: from their mean over the vocabulary. The change was 0.05 for a trained model, and 0.2 with random weights
_LARGEST_CHANGE = 0.5
_TOKENS = 64
#: torchao computes the scale of an input row from the row's largest absolute value, but at least from this value
_LEAST = 1e-12
#: if this attribute of a layer is true, bitsandbytes changes the weight's layout in the first forward on some CPUs,
#: for kernels without gradients
REPACKS = "support_avx512bf16_for_cpu"
#: the library of each kind
LIBRARIES = {"int8": "torchao", "nf4": "bitsandbytes", FP8: "torchao"}
#: the number of random sign vectors by which a layer is multiplied for a check, and the number of rows of the weight
#: that are checked at its beginning, in its middle and at its end
PROBES, ROWS = 16, 16
#: the largest allowed error of a layer: LARGEST_ERROR · error of correct rounding + PRODUCT_ERROR · norm of weights
LARGEST_ERROR, PRODUCT_ERROR = 1.5, 0.01


def quantized_loading(
    config: PreTrainedConfig, kind: str, dtype: torch.dtype | str, device: str | torch.device | None
) -> dict[str, Any]:
    """Return the arguments of transformers' `from_pretrained` that quantize a model during loading. For fp8, the
    result is empty.

    Raises ValueError if the library is not installed or the device cannot run the kind, and for a model that is
    already quantized. dtype: the model's dtype, or "auto" for the dtype of the saved weights.
    """
    library = LIBRARIES[kind]
    if importlib.util.find_spec(library) is None:
        raise ValueError(f"{kind} needs {library}, which is not installed; pip install 'stillhouse[low-bit]'")
    if kind == FP8 and (problem := float8_problem(device)):
        raise ValueError(problem)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"its weights are already quantized: expected no second quantization, got {kind}")
    if kind == FP8:
        return {}
    from transformers import BitsAndBytesConfig, TorchAoConfig

    # both libraries warn if some of their kernels cannot run on this machine
    logging.getLogger(library).setLevel(logging.ERROR)
    configuration: Any
    with reading(f"{library} cannot be used"):
        if kind == "nf4":
            product_dtype = (config.dtype or torch.float32) if isinstance(dtype, str) else dtype
            configuration = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=product_dtype
            )
        else:
            from torchao.quantization import Int8WeightOnlyConfig

            configuration = TorchAoConfig(Int8WeightOnlyConfig())
    return {"quantization_config": configuration, "device_map": {"": device or "cpu"}}


def require_quantized(
    model: PreTrainedModel, kind: str, name_or_path: str | os.PathLike[str], revision: str | None
) -> None:
    """Raise ValueError if no weight of a loaded model was quantized, if a saved weight is not finite, or if a layer's
    products are wrong (`require_rounding`). NaN is checked in the files, because quantizing makes NaN finite.
    """
    if not any(is_quantized(weight) for weight in model.parameters()):
        raise ValueError(f"none of its weights was quantized to {kind}: expected a model with torch.nn.Linear layers")
    folder = name_or_path
    if not os.path.isdir(folder):
        with reading("its files cannot be read again"):
            patterns = ["*.json", "*.safetensors"]
            folder = snapshot_download(str(name_or_path), revision=revision, allow_patterns=patterns)
    stored: dict[str, Path] = {}
    for path in weight_files(folder):
        unreadable = reading(f"{path} cannot be read")
        with unreadable:
            file = safe_open(path, framework="pt")
        with file:
            for name in list(file.keys()):
                with unreadable:
                    tensor = file.get_tensor(name)
                if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                    raise ValueError(
                        f"'{name}' in {path} has values that are NaN or infinite: expected finite weights; the "
                        "checkpoint is damaged"
                    )
                stored[name] = path
    require_rounding(model, kind, stored)


@torch.no_grad()
def require_rounding(model: PreTrainedModel, kind: str = "nf4", stored: Mapping[str, Path] | None = None) -> None:
    """Raise ValueError, naming the layer, if the error of a layer's products exceeds the error of correct rounding.

    Libraries are wrong for some shapes, for example bitsandbytes 0.50 on a CPU for nf4 and widths that are no
    multiple of 64. stored: the file of each saved tensor, by the tensor's name. A layer's products are compared with
    products of its saved weight. If `stored` does not have this weight, as for a folder with quantized weights, they
    are compared with products of the decoded 4-bit codes.
    """
    stored = stored or {}
    renamings = [part for part in get_model_conversion_mapping(model) if isinstance(part, WeightRenaming)]
    names: dict[str, Any] = dict.fromkeys(model.state_dict(), True)
    keys = {rename_source_key(key, renamings, [], model.base_model_prefix, names)[0]: key for key in stored}
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if weight is None or not is_quantized(weight):
            continue
        key = keys.get(f"{name}.weight")
        if key is not None and getattr(module, "source_cls", None) is not Conv1D:  # a Conv1D is saved transposed
            with safe_open(stored[key], framework="pt") as file:
                _check_layer(name, module, kind, model.dtype, file.get_slice(key))
        elif hasattr(weight, "quant_state"):
            _check_layer(name, module, kind, model.dtype)


def _check_layer(name: str, layer: Any, kind: str, dtype: torch.dtype, saved_RD: Any = None) -> None:
    """Raise ValueError if a layer's products of random signs and a few rows of its weight are wrong.

    saved_RD: the saved weight; if it is None, the layer's 4-bit codes are decoded instead.
    """
    rows, width, weight = layer.out_features, layer.in_features, layer.weight
    if saved_RD is not None and saved_RD.get_shape() != [rows, width]:
        return
    what = f"{kind} cannot run the layer '{name}' of shape [{rows}, {width}] on {weight.device.type}"
    remedy = "expected unquantized weights, or another kind of quantization"
    if kind == "nf4":
        remedy = "expected int8, unquantized weights, or a GPU (nf4 on a CPU needs widths that are multiples of 64)"
    signs_ND = torch.randint(2, (PROBES, width), generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
    signs_ND = signs_ND.to(weight.device)
    with reading(f"{what}; {remedy}; {LIBRARIES[kind]} says"):
        # use a copy: the first product in bitsandbytes changes the weight's layout and the dtype of later products
        products_NR = copy.deepcopy(layer)(signs_ND.to(dtype)).float()
    if layer.bias is not None:
        products_NR -= layer.bias.float()
    saved_RD = decoded(weight) if (has_codes_alone := saved_RD is None) else saved_RD
    for start in sorted({0, max(0, (rows - ROWS) // 2), max(0, rows - ROWS)}):
        part = slice(start, start + ROWS)
        right_RD = saved_RD[part].to(weight.device, torch.float32)
        least = 0.0 if has_codes_alone else float((_rounded(right_RD, kind, weight) - right_RD).norm())
        # over random signs, the mean of the squared error of a product is the squared norm of its row's error
        error = float((products_NR[:, part] - signs_ND @ right_RD.T).norm()) / PROBES**0.5
        size = float(right_RD.norm())
        if not math.isfinite(size):
            raise ValueError(f"the {kind} weights of '{name}' are NaN or infinite: the checkpoint is damaged")
        if not error <= LARGEST_ERROR * least + PRODUCT_ERROR * size:
            raise ValueError(
                f"{what}: the error of its products is {error / size:.2g} of their size with the installed "
                f"{LIBRARIES[kind]}, and rounding alone gives {least / size:.2g}; {remedy}"
            )


def _rounded(right_RD: Tensor, kind: str, weight: Any) -> Tensor:
    """Return the weights after the best rounding that the kind allows."""
    if kind == "nf4":
        size, code = weight.quant_state.blocksize, weight.quant_state.code.float()
        flat = nn.functional.pad(right_RD.flatten(), (0, -right_RD.numel() % size)).reshape(-1, size)
        largest = flat.abs().amax(1, keepdim=True).clamp(min=torch.finfo(flat.dtype).tiny)
        nearest = torch.bucketize(flat / largest, (code[1:] + code[:-1]) / 2)
        return (code[nearest] * largest).flatten()[: right_RD.numel()].reshape(right_RD.shape)
    most = 127.0 if kind == "int8" else torch.finfo(torch.float8_e4m3fn).max
    scale = right_RD.abs().amax(1, keepdim=True).clamp(min=torch.finfo(right_RD.dtype).tiny) / most
    steps = right_RD / scale
    return (steps.round() if kind == "int8" else steps.to(torch.float8_e4m3fn).float()) * scale


def decoded(weight: Any) -> Tensor:
    """Return the values of a weight's 4-bit codes in float32. A byte has two codes, and a block has one scale."""
    state = weight.quant_state
    scales = state.absmax
    if state.nested:
        from bitsandbytes.functional import dequantize_blockwise

        scales = dequantize_blockwise(scales, state.state2) + state.offset
    packed, size = weight.data.view(torch.uint8).flatten(), math.prod(state.shape)
    codes = torch.stack([packed >> 4, packed & 15], 1).flatten()[:size].long()
    return (state.code.float()[codes] * scales.float().repeat_interleave(state.blocksize)[:size]).reshape(state.shape)


def quantized_identity(fingerprint: str, kind: str | None) -> str:
    """Return an identity for a model, from the fingerprint of its files and the kind of its quantization."""
    return fingerprint if kind is None else f"{fingerprint}-{kind}"


def is_quantized(weight: Tensor) -> bool:
    """Return whether a weight is stored in 8 or 4 bits, which its `dtype` does not show."""
    return hasattr(weight, "qdata") or hasattr(weight, "quant_state")


def element_count(weight: Tensor) -> int:
    """Return the number of a weight's elements. `numel` of an nf4 weight counts bytes, with two elements each."""
    state = getattr(weight, "quant_state", None)
    return weight.numel() if state is None else math.prod(state.shape)


def weight_bytes(module: nn.Module) -> int:
    """Return the memory of a module's parameters in bytes. For a quantized weight, count its codes and scales."""
    parts: list[Any] = []
    for weight in module.parameters():
        if hasattr(weight, "qdata"):
            parts += [weight.qdata, weight.scale]  # type: ignore[attr-defined]
        else:  # in bitsandbytes, a weight has no state before it is quantized
            state = getattr(weight, "quant_state", None)
            parts += [weight] if state is None else [weight.data, state.absmax]
    return sum(part.numel() * part.element_size() for part in parts)


def float8_problem(device: torch.device | str | None) -> str | None:
    """Return the reason why a device cannot multiply in fp8, or None if it can."""
    place = torch.device(device or "cpu")
    capability = torch.cuda.get_device_capability(place) if place.type == "cuda" else (0, 0)
    if capability >= _CAPABILITY:
        return None
    actual = "compute capability {}.{}".format(*capability) if place.type == "cuda" else str(place)
    return (
        f"fp8 needs a GPU of compute capability {'.'.join(map(str, _CAPABILITY))} or later (such as L40S or H100), "
        f"got {actual}: expected int8 or nf4"
    )


def round_to_float8(model: PreTrainedModel) -> None:
    """Quantize the linear layers of a bfloat16 model to fp8 in place.

    Raises ValueError for another dtype, and if the change of the logits is larger than rounding can cause.
    """
    if model.dtype != torch.bfloat16:
        raise ValueError(f"fp8 rounds bfloat16 weights, got {model.dtype}: expected dtype bfloat16")
    model.requires_grad_(False)
    before_NV = _probe_logits(model)
    head = model.get_output_embeddings()
    rounded = {
        id(module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and not ROUTERS & set(name.split("."))
        if not module.in_features % _MULTIPLE and not module.out_features % _MULTIPLE
        if bool(module.weight.ne(0).any(1).all())  # torchao would divide a row of zeros by 0
    }
    with reading("torchao cannot be used"):
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_
        from torchao.quantization.quantize_.common import KernelPreference

        configuration = Float8DynamicActivationFloat8WeightConfig(
            granularity=PerRow(),
            activation_value_lb=_LEAST,  # torchao would divide a row of zeros by 0
            kernel_preference=KernelPreference.TORCH,
            set_inductor_config=False,  # these settings are global, and the objective is compiled with others
        )
        quantize_(model, configuration, filter_fn=lambda module, name: id(module) in rounded)
    deviation_N = (before_NV - before_NV.mean(-1, keepdim=True)).norm(dim=-1)
    change = float(((_probe_logits(model) - before_NV).norm(dim=-1) / deviation_N).median())
    if not change <= _LARGEST_CHANGE:
        raise ValueError(
            f"fp8 changes its logits by {change:.2g} of their deviation, but rounding changes them by at most "
            f"{_LARGEST_CHANGE}: expected a device and a version of torchao with correct fp8 products, or int8 or nf4"
        )


@torch.no_grad()
def _probe_logits(model: PreTrainedModel) -> Tensor:
    rows = model.get_input_embeddings().weight.shape[0]
    ids_N = torch.randint(rows, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    with evaluating(model):
        return model(ids_N.to(model.device), use_cache=False).logits[0].float()
