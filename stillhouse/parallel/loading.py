"""Reads weights from safetensors files into a distributed model: no process ever holds more than its own part.

decoder = empty_decoder(folder)             the whole model on the meta device: shapes, no memory
…                                           cut it into stages, shard it
load_weights(decoder, folder, device)       allocate memory for this process's part, read its slices from the files
"""

import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from stillhouse.display import escaped
from stillhouse.libraries import reading
from stillhouse.models import Decoder
from stillhouse.models.adapter import base_name, is_lora
from stillhouse.models.decoder import PROJECTORS
from stillhouse.models.files import require_safe_files
from stillhouse.models.head import local, own_slices
from stillhouse.models.loading import auto_class, parse_dtype
from stillhouse.models.structure import describe
from stillhouse.parallel.stacked_experts import parts_of_stack, read_stack


def local_folder(name_or_path: str, revision: str | None = None) -> str:
    """Return the local folder of a model's files. Downloads them from the hub unless the name is a folder."""
    if os.path.isdir(name_or_path):
        return name_or_path
    return snapshot_download(name_or_path, revision=revision, allow_patterns=["*.json", "*.safetensors"])


def empty_decoder(
    folder: str | os.PathLike[str], *, dtype: str | None = None, attention: str | None = None
) -> Decoder:
    """Return a decoder with a folder's configuration on the meta device.

    dtype: None or "auto" for the dtype in which the model was saved. Code that comes with a model is not run.
    Raises ValueError for a model that cannot be constructed or is quantized.
    """
    require_safe_files(folder)
    with reading(f"model '{escaped(os.fspath(folder))}': its configuration cannot be read"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{folder} is quantized: expected plain weights under a layout of several processes")
    wanted = parse_dtype(dtype)
    with torch.device("meta"), reading(f"{folder} cannot be constructed as a causal language model"):
        model = auto_class(config).from_config(
            config,
            dtype=config.dtype if wanted == "auto" else wanted,
            attn_implementation=attention,
            trust_remote_code=False,
        )
    if os.path.isfile(os.path.join(folder, GENERATION_CONFIG_NAME)):  # the file is optional
        with reading(f"{folder}: its {GENERATION_CONFIG_NAME} cannot be read"):
            model.generation_config = GenerationConfig.from_pretrained(folder)
    return Decoder(model, verify=False)


def load_weights(
    decoder: Decoder, folder: str | os.PathLike[str], device: torch.device, *, offload: bool = False
) -> None:
    """Allocate the memory of a decoder on the meta device, and read its weights from a folder.

    The decoder may have been cut and sharded. offload: parameters go to host memory, and only buffers to the device.

    Raises ValueError for a weight that the folder has neither under its name in the model nor as one tensor per
    expert.
    """
    allocate(decoder, device, offload=offload)
    read_weights(decoder, folder)


def read_weights(
    decoder: Decoder,
    folder: str | os.PathLike[str],
    prefix: str = "",
    renamed: Callable[[str], str] | None = None,
) -> None:
    """Read the weights of a decoder, which has memory and may have been cut and sharded, in place from a folder.

    prefix: read only the tensors whose names in the decoder begin with it. renamed: for a folder of another model,
    whose vocabulary may have another number of rows: the name that a tensor has there, from its name in the decoder's
    own files.
    Raises ValueError as `load_weights` does.
    """
    wanted: dict[str, Any] = {}
    files = _files(folder)
    for name, value in decoder.state_dict().items():
        # `draw_lora` sets adapters, `MtpLayers.draw` new MTP layers, and `HiddenMatch.draw` projectors
        is_new_mtp = _is_mtp(name) and decoder.mtp is not None and decoder.mtp.is_new
        if is_lora(name) or is_new_mtp or name.startswith(PROJECTORS):
            continue
        if not name.startswith(prefix):
            continue
        candidates = checkpoint_names(decoder, name)
        if renamed is not None:
            candidates = [renamed(each) for each in candidates]
        found = next((each for each in candidates if each in files), None)
        if found is None and (parts := parts_of_stack(decoder, candidates[0])):
            read_stack(value, parts, files)
            continue
        if found is None:
            raise ValueError(
                f"{folder} has no tensor '{candidates[0]}': expected the tensor names of the model itself, so that "
                "each process can read its own part of each tensor"
            )
        if renamed is not None and _has_vocabulary(decoder, name) and _read_rows(value, files[found], found):
            continue
        wanted[found] = value
    with warnings.catch_warnings(), reading(f"{folder}: its weights cannot be read"):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(path=str(folder)), no_dist=True)


def _has_vocabulary(decoder: Decoder, name: str) -> bool:
    return name == decoder.embedding_name or name.startswith("head.linear.")


@torch.no_grad()
def _read_rows(value: Tensor, path: str, name: str) -> bool:
    """Read this process's rows of an embedding or head whose file has another number of rows, which are padding.

    Rows that the file lacks become zero. Returns False, and reads nothing, if the file has the same number.
    """
    with safe_open(path, framework="pt") as file:
        stored = file.get_slice(name)
        rows = stored.get_shape()[0]
        if rows == value.shape[0]:
            return False
        part = own_slices(value) or tuple(slice(0, size) for size in value.shape)
        own, stop = local(value).zero_(), min(part[0].stop, rows)
        if part[0].start < stop:
            own[: stop - part[0].start] = stored[(slice(part[0].start, stop), *part[1:])]
    return True


def allocate(decoder: Decoder, device: torch.device, *, offload: bool = False) -> None:
    """Allocate the memory of a decoder on the meta device. Only the buffers that no file holds get their values."""
    decoder.to_empty(device="cpu" if offload else device)
    decoder.tie()
    for module in decoder.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    make_buffers(decoder)


def _files(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return, by tensor name, the file of a folder that holds the tensor."""
    found: dict[str, str] = {}
    for path in Path(folder).glob("*.safetensors"):
        with reading(f"{path} is not a readable safetensors file"), safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), str(path))
    return found


def checkpoint_names(decoder: Decoder, name: str) -> list[str]:
    """Return the names that a tensor may have in transformers' files: a tied head may be saved as the embedding."""
    model, name = decoder.pretrained, base_name(name)
    inner = f"{model.base_model_prefix}."
    if decoder.mtp is not None and _is_mtp(name):
        return [decoder.mtp.checkpoint_name(model, name.removeprefix("mtp."))]
    if name.startswith("backbone."):
        return [inner + name.removeprefix("backbone.")]
    own = next(each for each, module in model.named_modules() if module is model.get_output_embeddings())
    candidates = [f"{own}.{name.removeprefix('head.linear.')}"]
    if getattr(model.config, "tie_word_embeddings", False):  # transformers ties by this one, not by the text part's
        candidates.append(inner + decoder.embedding_name.removeprefix("backbone."))
    return candidates


def _is_mtp(name: str) -> bool:
    """Whether a tensor with this name is one of a decoder's MTP layers."""
    return name.startswith("mtp.")


@torch.no_grad()
def make_buffers(decoder: Decoder) -> None:
    """Compute the buffers that no file holds, such as rotary frequencies, with the family's own initialisation.

    A family may set a module's buffer when it initialises the model around it. So all modules are initialised, each
    by the model to which it belongs. Meanwhile other tensors have the mark with which transformers protects them.
    Raises ValueError for a buffer that the family does not initialise.
    """
    model, names = decoder.pretrained, _unsaved_buffers(decoder)
    for name in names:
        buffer = decoder.get_buffer(name)
        buffer.fill_(_uninitialised(buffer))
    unsaved = {id(decoder.get_buffer(name)) for name in names}
    others: list[Any] = [each for each in (*decoder.parameters(), *decoder.buffers()) if id(each) not in unsaved]
    for tensor in others:
        tensor._is_hf_initialized = True
    with torch.random.fork_rng(devices=[]), reading(f"{describe(model)}: its buffers cannot be computed"):
        for owner, module in _owners(model, model):
            owner._init_weights(module)
        for module in (module for layer in decoder.mtp_layers() for module in layer.modules()):
            model._init_weights(module)
    for tensor in others:
        del tensor._is_hf_initialized
    for name in names:
        buffer = decoder.get_buffer(name)
        if bool((buffer.isnan() | (buffer == _uninitialised(buffer))).any()):
            raise ValueError(
                f"{describe(model)} has no rule to initialise its buffer '{name}', which no file holds: expected one "
                "process, which loads the model with transformers"
            )


def _unsaved_buffers(decoder: Decoder) -> list[str]:
    """The names of the buffers that no file holds; without masks, which have no value for `_uninitialised`."""
    return [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in decoder.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set and buffer.dtype != torch.bool
    ]


def _uninitialised(buffer: Tensor) -> float:
    """A value that no buffer is initialised with."""
    return math.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).min


def _owners(model: PreTrainedModel, module: nn.Module) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """The submodules of a module from the inside out, each with the innermost model of transformers around it."""
    for child in module.children():
        yield from _owners(child if isinstance(child, PreTrainedModel) else model, child)
    yield model, module
