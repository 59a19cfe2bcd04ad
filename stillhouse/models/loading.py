"""Loading a causal language model, with a message of one line for each of the many ways in which that fails.

A model's folder or hub repository is not trusted: its code runs only if the caller allows that, pickle files are
never read (`files.py`), and a damaged file raises a ValueError that names it.
"""

import os
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from stillhouse.display import escaped, first_line
from stillhouse.libraries import reading
from stillhouse.models.files import require_safe_files
from stillhouse.models.quantized import quantized_loading, require_quantized

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_causal_lm(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: str | torch.dtype | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
    quantize: str | None = None,
    device: str | torch.device | None = None,
) -> PreTrainedModel:
    """Call the `from_pretrained` of `auto_class` with the name unchanged; every failure is a ValueError.

    Missing weights also raise ValueError: transformers would initialise them at random and only warn. Weights are
    read only from safetensors files, even with trust_remote_code.

    quantize: "int8" or "nf4" for linear layers in so many bits (see `quantized.py`). device: None for the CPU.
    """
    what = f"model '{escaped(os.fspath(name_or_path))}'"
    options: dict[str, Any] = {
        "dtype": parse_dtype(dtype),
        "attn_implementation": attention,
        "trust_remote_code": trust_remote_code,
    }
    try:
        require_safe_files(name_or_path, revision)
        with reading(f"{what} cannot be loaded as a causal language model"):
            revision_or_main = revision or "main"
            config = AutoConfig.from_pretrained(
                name_or_path, revision=revision_or_main, trust_remote_code=trust_remote_code
            )
            if quantize is not None:
                options |= quantized_loading(config, quantize, options["dtype"], device)
            model, report = auto_class(config).from_pretrained(
                name_or_path,
                revision=revision_or_main,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
            if quantize is not None:
                require_quantized(model, quantize, name_or_path, revision)
    except ValueError as error:
        if isinstance(error.__cause__, OSError):
            raise ValueError(_not_found(what, name_or_path, revision, error.__cause__)) from error
        raise
    if report["missing_keys"]:
        names = sorted(report["missing_keys"])
        raise ValueError(
            f"{what} lacks {len(names)} of the weights of a {type(model).__name__}, first '{names[0]}': "
            "expected the checkpoint of a whole causal language model, head included"
        )
    return model if quantize is not None or device is None else model.to(device)


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class of transformers that builds a configuration's model.

    It is AutoModelForImageTextToText for a vision-language model that has no class among the causal language models,
    and AutoModelForCausalLM for everything else. The latter raises a ValueError if it does not know the model either.
    """
    # a model's folder may contain its class as code
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if images and not causal else AutoModelForCausalLM


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | str:
    """Return the dtype of a name such as "bfloat16"; for None or "auto", "auto": the dtype of the saved weights."""
    if dtype is None or dtype == "auto":
        return "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r}: expected auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _not_found(what: str, name: str | os.PathLike[str], revision: str | None, error: OSError) -> str:
    if os.path.isdir(name):
        return f"{what} cannot be read: {first_line(error)}"
    at = f" at revision '{revision}'" if revision else ""
    return (
        f"{what}{at} is not a folder here, and the hub did not give it: {first_line(error)} "
        "Expected a folder with config.json and safetensors, or a hub id such as Qwen/Qwen3-0.6B "
        "(a private or gated one needs a login)."
    )
