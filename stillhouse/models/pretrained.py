"""Loads a causal language model from an untrusted folder or hub repository.

Code that comes with a model runs only if the caller allows it. Weights are read only from safetensors files in the
model's own folder, since a pickle file can run any code. transformers would read pickle files if the folder has no
other weights, or if an index, `transformers_weights` or an adapter in the folder names them. All these cases raise a
ValueError before transformers reads anything. For a damaged file, the ValueError names the file.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import build_glob_alternation
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, TRANSFORMERS_DYNAMIC_MODULE_NAME

from stillhouse.config.model_folder import require_safetensors
from stillhouse.display import escaped, first_line
from stillhouse.libraries import reading
from stillhouse.models.lm_head import PassThrough
from stillhouse.models.model_checks import prefixed, typename, unsaved_buffers
from stillhouse.models.quantized import (
    FP8,
    REPACKS,
    quantized_loading,
    require_quantized,
    require_rounding,
    round_to_float8,
)
from stillhouse.models.weight_files import INDEX, json_object, named_weights, require_index, tensor_files

#: the largest allowed number of layers: for a huge number in a damaged file, transformers would run for hours
MAX_LAYERS = 10_000
_DTYPES = ("float64", "float32", "bfloat16", "float16")


def load_causal_lm(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: str | torch.dtype | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
    quantize: str | None = None,
    trained: bool = False,
    multimodal: bool = False,
    device: str | torch.device | None = None,
) -> PreTrainedModel:
    """Load a model with the class that `auto_class` returns. Every failure raises ValueError.

    Missing weights are also a failure, because transformers would only warn and initialise them at random. Buffers
    that code from the model's folder does not initialise are a failure, too.

    quantize: "int8", "nf4" or "fp8" (see `quantized.py`).
    trained: whether gradients flow through quantized layers to an adapter.
    device: None means the CPU.
    """
    what = f"model '{escaped(os.fspath(name_or_path))}'"
    failure = f"{what} cannot be loaded as a causal language model"
    weights_dtype = parse_dtype(dtype)
    quantization: dict[str, Any] = {}
    with _missing_files_named(what, name_or_path, revision):
        require_safe_files(name_or_path, revision)
        with reading(failure):
            config = AutoConfig.from_pretrained(
                name_or_path, revision=revision or "main", trust_remote_code=trust_remote_code
            )
        if quantize is not None:
            with prefixed(failure):
                quantization = quantized_loading(config, quantize, weights_dtype, device)
        build = auto_class(config, multimodal=multimodal)
        with _damaged_files_named(failure, name_or_path, revision), reading(failure):
            model, report = build.from_pretrained(
                name_or_path,
                revision=revision or "main",
                dtype=weights_dtype,
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
                **quantization,
            )
        for module in model.modules() if quantize is not None and trained else ():  # must precede the first forward
            if hasattr(module, REPACKS):
                setattr(module, REPACKS, False)
        with prefixed(failure):
            if quantize == FP8:
                round_to_float8(model.to(device))
            if quantize is not None:
                require_quantized(model, quantize, name_or_path, revision)
            else:
                require_rounding(model)  # the folder may have quantized weights
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{what} lacks {len(missing)} of the weights of a {type(model).__name__}, first '{missing[0]}': "
            "expected the checkpoint of a whole causal language model, head included"
        )
    # only for code from outside of transformers, because tests check the buffers of transformers' own families
    if type(model).__module__.partition(".")[0] == TRANSFORMERS_DYNAMIC_MODULE_NAME:
        initialize_buffers(model, model)
    return model if quantize is not None or device is None else model.to(device)


def read_configuration(
    name_or_path: str | os.PathLike[str], revision: str | None = None, *, trust_remote_code: bool = False
) -> PreTrainedConfig:
    """Return the configuration of a model. Raises ValueError if it cannot be read."""
    with reading(f"model '{escaped(os.fspath(name_or_path))}': its configuration cannot be read"):
        return AutoConfig.from_pretrained(name_or_path, revision=revision, trust_remote_code=trust_remote_code)


def auto_class(config: PreTrainedConfig, *, multimodal: bool = False) -> Any:
    """Return the class of transformers by which a model is loaded.

    This is AutoModelForImageTextToText for a vision-language model whose language model has no separate class, and
    otherwise AutoModelForCausalLM, which raises ValueError for an unknown model.

    multimodal: whether to choose the class that reads images if the family has both classes.
    """
    # a model's folder may contain its class as code
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    has_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if has_images and (multimodal or not causal) else AutoModelForCausalLM


def tower_warnings(name: str, revision: str | None, *, trust_remote_code: bool) -> Iterator[str]:
    """For a run without images, yield a warning if the family has a separate class for its language model."""
    config = read_configuration(name, revision, trust_remote_code=trust_remote_code)
    if auto_class(config, multimodal=True) is not auto_class(config):
        yield (
            f"student.model: no document has an image that the processor of {name} reads, so only the language model "
            "is loaded and trained. The saved student has no vision tower and cannot be loaded as an image-text model"
        )


def keep_in_float32(model: PreTrainedModel) -> None:
    """Convert to float32 those tensors that transformers keeps in float32 when it loads a half-precision model, such
    as corrections of router scores.

    model: a model on the meta device; a model whose dtype is neither float16 nor bfloat16 does not change.
    """
    dtype = model.dtype
    kept = {*(model._keep_in_fp32_modules_strict or ())} if dtype in (torch.float16, torch.bfloat16) else set()
    kept |= {*(model._keep_in_fp32_modules or ())} if dtype == torch.float16 else set()
    pattern = build_glob_alternation(sorted(kept))[0] if kept else None
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if pattern is not None and tensor.dtype == dtype and pattern.search(name):
            tensor.data = tensor.data.float()


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | str:
    """Return the dtype with a name such as "bfloat16". For None and "auto", return "auto" (the saved dtype)."""
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return dtype or "auto"
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r}: expected auto, {', '.join(_DTYPES)}")
    named: torch.dtype = getattr(torch, dtype)
    return named


@contextmanager
def _missing_files_named(what: str, name: str | os.PathLike[str], revision: str | None) -> Iterator[None]:
    """If the block cannot read the model's files, raise a ValueError that says which name or files were expected."""
    try:
        yield
    except ValueError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        reason, at = first_line(error.__cause__), f" at revision '{revision}'" if revision else ""
        if os.path.isdir(name):
            raise ValueError(f"{what} cannot be read: {reason}") from error
        raise ValueError(
            f"{what}{at} is not a folder on this machine, and could not be loaded from the hub: {reason} "
            "Expected a folder with config.json and safetensors, or a hub id such as Qwen/Qwen3-0.6B "
            "(a private or gated model needs a login)."
        ) from error


@contextmanager
def _damaged_files_named(failure: str, name: str | os.PathLike[str], revision: str | None) -> Iterator[None]:
    """Raise a ValueError that names a missing or damaged weight file. Its message begins with `failure`.

    The files of a folder are checked before the block, files of the hub only after the block has failed.
    """
    if os.path.isdir(name):
        with prefixed(failure):
            tensor_files(name)
    try:
        yield
    except ValueError:
        config = None if os.path.isdir(name) else try_to_load_from_cache(str(name), CONFIG_NAME, revision=revision)
        if isinstance(config, str):
            with prefixed(failure):
                tensor_files(os.path.dirname(config), partial=True)
        raise


def require_safe_files(name: str | os.PathLike[str], revision: str | None = None) -> None:
    """Raise ValueError for a folder or hub id whose loading would read weights from other files than its own
    safetensors files, for an adapter's folder, and for more than `MAX_LAYERS` layers. A name that does not exist
    raises no error here.
    """
    folder = escaped(os.fspath(name))
    if os.path.isdir(name):
        require_safetensors(folder, os.listdir(name))
    config = json_object(name, CONFIG_NAME, revision)
    parts = {"": config} | {f"{name}.": part for name, part in config.items() if isinstance(part, dict)}
    values = {prefix + key: value for prefix, part in parts.items() for key, value in part.items()}
    for key, value in values.items():
        if key.endswith(("layer", "layers")) and isinstance(value, int) and value > MAX_LAYERS:
            raise ValueError(f"{folder}/{CONFIG_NAME} has {key} {value}: expected at most {MAX_LAYERS:,}")
    weights = named_weights(folder, config) or ""
    for index in [SAFE_WEIGHTS_INDEX_NAME, *([weights] if weights.endswith(INDEX) else [])]:
        require_index(f"{folder}/{index}", json_object(name, index, revision))


def initialize_buffers(module: nn.Module, model: PreTrainedModel, new_layers: Sequence[nn.Module] = ()) -> None:
    """Compute the non-persistent buffers, such as rotary frequencies, with the family's own initialisation.

    No file has these buffers. No other tensor changes. The buffers are filled with 0 before a first initialisation
    and with 1 before a second one. If a value differs afterwards, no `_init_weights` has computed it, and a
    ValueError names the buffer.

    module: a module that contains `model` and `new_layers`. new_layers: layers that are not a part of `model`.
    """
    zeros, ones = (_buffers_after(module, model, new_layers, value) for value in (0, 1))
    for name, buffer in ones.items():
        if bool((buffer != zeros[name]).logical_and(~buffer.isnan()).any()):
            raise ValueError(
                f"{typename(model)} has no rule to initialise its buffer '{name}', which no file holds: expected "
                "code in its _init_weights that computes the buffer, or a persistent buffer"
            )


@torch.no_grad()
def _buffers_after(
    module: nn.Module, model: PreTrainedModel, new_layers: Sequence[nn.Module], value: int
) -> dict[str, Tensor]:
    """Fill the non-persistent buffers with `value`, initialise them, and return copies of them by name. During the
    call, all other tensors are marked as initialised, so that transformers does not change them.
    """
    names = unsaved_buffers(module)
    for name in names:
        module.get_buffer(name).fill_(value)
    unsaved = {id(module.get_buffer(name)) for name in names}
    others: list[Any] = [tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) not in unsaved]
    for tensor in others:
        tensor._is_hf_initialized = True
    for part in model.modules():
        part._is_hf_initialized = False
    # hide placeholders for layers of other pipeline stages from families that initialise all layers (Falcon-H1)
    lists = [(part, part._modules) for part in model.modules() if isinstance(part, nn.ModuleList)]
    for part, layers in lists:
        part._modules = {name: layer for name, layer in layers.items() if not isinstance(layer, PassThrough)}
    try:
        with torch.random.fork_rng(devices=[]), reading(f"{typename(model)}: its buffers cannot be computed"):
            model.initialize_weights()  # each module is initialised by the innermost transformers model around it
            for part in (part for layer in new_layers for part in layer.modules()):
                model._init_weights(part)
    finally:
        for part, layers in lists:
            part._modules = layers
    for tensor in others:
        del tensor._is_hf_initialized
    return {name: module.get_buffer(name).clone() for name in names}
