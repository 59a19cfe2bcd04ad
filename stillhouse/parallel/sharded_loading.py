"""Reads weights from safetensors files into a distributed model. Each process has only its shards in memory.

decoder = empty_decoder(folder)           the full model on the meta device, which has shapes but no memory
…                                         cut the model into stages, shard it
load_weights(decoder, folder, device)     allocate memory for this process's shards, read them from the files
"""

import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from stillhouse.libraries import reading
from stillhouse.models import Activations, Decoder
from stillhouse.models.adapter import is_lora
from stillhouse.models.checkpoint_names import MTP, StoredNames, checkpoint_names, parts_of_stack
from stillhouse.models.decoder import HEAD_BIAS, HEAD_WEIGHT
from stillhouse.models.document_packing import AUTO
from stillhouse.models.dtensors import local, shard_slices
from stillhouse.models.pretrained import (
    auto_class,
    initialize_buffers,
    keep_in_float32,
    parse_dtype,
    read_configuration,
    require_safe_files,
)
from stillhouse.models.weight_files import read_tensor, tensor_files

#: the number of elements that are compared at a time
COMPARED_ELEMENTS = 2**24


@dataclass(frozen=True)
class ModelSource:
    """Builds a model and loads its weights.

    build: returns the full model, with weights or on the meta device. It is called once for each stage of a process.
    load_weights: loads the weights of the distributed model. It is None if `build` returns a model with weights.
    teacher_is_base: whether the teacher is this student without its adapter.
    offload: whether FSDP keeps the shards of this model in host memory between uses, even without `Layout.offload`.
    name: the model's name in errors.
    is_proven: whether `build` returns a full model that is already proven (`models/load_proof.py`).
    without_noise: whether `build` removes dropout and routers' noise; then their absence must be proven.
    has_values: whether the weights have values. In a dry run they have none, so the model cannot be proven.
    """

    build: Callable[[], Decoder]
    load_weights: Callable[[Decoder], object] | None = None
    teacher_is_base: bool = False
    offload: bool = False
    name: str = "model"
    is_proven: bool = False
    without_noise: bool = False
    has_values: bool = True


def local_folder(name_or_path: str, revision: str | None = None) -> str:
    """Return the local folder of a model's files; download the files from the hub unless the name is a folder."""
    if os.path.isdir(name_or_path):
        return name_or_path
    return snapshot_download(name_or_path, revision=revision, allow_patterns=["*.json", "*.safetensors"])


def empty_decoder(
    folder: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    attention: str | None = None,
    packing: str = AUTO,
    multimodal: bool = False,
    activations: Activations | None = None,
    weights: str | os.PathLike[str] | None = "",
) -> Decoder:
    """Return a decoder with a folder's configuration on the meta device.

    dtype: None or "auto" for the saved dtype. packing, activations: see `Decoder`. multimodal: see `auto_class`.
    weights: the folder from which the weights will be read; "" means `folder`, None means no folder. Two weights
        with different values in the files are not tied, even if the configuration ties them (see `match_tied_flag`).
    Raises ValueError for a model that cannot be constructed, needs code from its folder, or is quantized.
    """
    require_safe_files(folder)
    config = read_configuration(folder)
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{folder} is quantized: expected weights without quantization, or a run of one process")
    parsed, build = parse_dtype(dtype), auto_class(config, multimodal=multimodal)
    with torch.device("meta"), reading(f"{folder} cannot be constructed as a causal language model"):
        model = build.from_config(
            config,
            dtype=config.dtype if parsed == "auto" else parsed,
            attn_implementation=attention,
            trust_remote_code=False,
        )
        keep_in_float32(model)
    if weights is not None:
        _untie(model, weights or folder)
    if os.path.isfile(os.path.join(folder, GENERATION_CONFIG_NAME)):  # the file is optional
        with reading(f"{folder}: its {GENERATION_CONFIG_NAME} cannot be read"):
            model.generation_config = GenerationConfig.from_pretrained(folder)
    return Decoder(model, packing=packing, activations=activations, verify=False)


def load_weights(
    decoder: Decoder, folder: str | os.PathLike[str], device: torch.device, *, offload: bool = False
) -> None:
    """Allocate the memory of a decoder on the meta device, and read its weights from a folder.

    The decoder can already be cut into a stage, and sharded.

    offload: whether to keep the parameters in host memory, and only the buffers on the device.

    Raises the errors of `read_weights`.
    """
    allocate(decoder, device, offload=offload)
    read_weights(decoder, folder)


def read_weights(
    decoder: Decoder, folder: str | os.PathLike[str], prefix: str = "", renamed: Callable[[str], str] | None = None
) -> None:
    """Read weights from a folder into the allocated memory of a decoder.

    The weights of experts, which the decoder stacks, can be separate tensors in the files.

    prefix: read only the tensors whose names in the decoder begin with this prefix.
    renamed: for a folder with another model; maps a tensor's name in the decoder's own files to its name in this
        folder. The other model can have a vocabulary of another size.

    Raises ValueError if the folder lacks a weight.
    """
    state = decoder.state_dict()
    is_head = {*state} <= {decoder.embedding_name, HEAD_WEIGHT, HEAD_BIAS}
    files = tensor_files(folder, partial=is_head)
    if not files:
        raise ValueError(f"{folder} has no weights: expected {SAFE_WEIGHTS_NAME}, or {SAFE_WEIGHTS_INDEX_NAME}")
    names = StoredNames(decoder.pretrained, files)
    if not prefix and renamed is None:
        names.remember()
    shared = decoder.shared_names()

    for name, value in state.items():
        is_new_mtp = name.startswith(MTP) and bool(decoder.mtp and decoder.mtp.is_new)
        is_initialised = is_lora(name) or name.partition(".")[0] in decoder.layer_losses or is_new_mtp
        if is_initialised or not name.startswith(prefix):
            continue
        # first try the other names of a tied weight: a folder with only a head's files can lack the embedding's file
        aliases = [*(alias for alias, other in shared.items() if other == name), name]
        candidates = [candidate for alias in aliases for candidate in checkpoint_names(decoder, alias)]
        wanted = checkpoint_names(decoder, name)[0]
        is_padded = False
        if renamed is not None:
            candidates, wanted = [renamed(candidate) for candidate in candidates], renamed(wanted)
            is_padded = name == decoder.embedding_name or name.startswith("head.linear.")
        if stored := next(filter(None, map(names.get, candidates)), None):
            _read_rows(local(value), [*shard_slices(value)], value.shape, [stored], files, is_padded)
        elif parts := parts_of_stack(decoder, wanted):
            experts, *slices = shard_slices(value)
            for number, expert in enumerate(local(value), start=experts.start):
                stored_parts = [part.replace("*", str(number)) for part in parts]
                stored_parts = [names.get(part) or part for part in stored_parts]
                _read_rows(expert, slices, value.shape[1:], stored_parts, files, False)
        elif (converted := names.converted(wanted, lambda stored: read_tensor(files[stored], stored))) is not None:
            if converted.shape != value.shape:  # a stored part is missing; `copy_` would broadcast the rest
                raise ValueError(
                    f"{folder}: the tensors from which '{wanted}' is made give the shape "
                    f"{list(converted.shape)}: expected {list(value.shape)}"
                )
            local(value).copy_(converted[*shard_slices(value)])
        else:
            raise ValueError(
                f"{folder} has no tensor '{wanted}', and no tensors from which transformers makes it: expected "
                "tensors with the model's own names, or with the names in its released checkpoints"
            )


@torch.no_grad()
def _read_rows(
    shard: Tensor, slices: list[slice], shape: torch.Size, parts: list[str], files: dict[str, Path], is_padded: bool
) -> None:
    """Read this process's `shard` of a global tensor.

    slices: the shard's slice of each dim of the global tensor.
    shape: the global shape.
    parts: the names of the stored tensors that together have the global tensor's rows, in order.
    is_padded: whether the files can have another number of padding rows; missing rows become zero.
    """
    rows, *columns = slices or [slice(0)]
    above = 0  # the number of rows in the previous parts
    if is_padded:
        shard.zero_()
    for part in parts:
        if part not in files:
            raise ValueError(f"the model's files have no tensor '{part}': expected a tensor for each expert")
        path = files[part]
        with reading(f"{path}: its weights cannot be read"), safe_open(path, framework="pt") as file:
            stored = file.get_slice(part)
            if not shape:
                shard.copy_(stored[...])
                return
            count, *widths = stored.get_shape()
            if widths != list(shape[1:]) or (part == parts[-1] and above + count != shape[0] and not is_padded):
                raise ValueError(f"'{part}' has {count} rows of shape {widths}: expected {list(shape)} in total")
            start, stop = max(rows.start, above), min(rows.stop, above + count)
            if start < stop:
                shard[start - rows.start : stop - rows.start] = stored[start - above : stop - above, *columns]
        above += count


def allocate(decoder: Decoder, device: torch.device, *, offload: bool = False) -> None:
    """Allocate the memory of a decoder on the meta device, and compute the values of its non-persistent buffers."""
    shared = decoder.shared_names()
    decoder.to_empty(device="cpu" if offload else device)
    decoder.share(shared)
    for module in decoder.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    initialize_buffers(decoder, decoder.pretrained, decoder.mtp_layers())


def _untie(model: PreTrainedModel, folder: str | os.PathLike[str]) -> None:
    """Untie weights that have different values in a folder's files, as transformers does.

    The model must be on the meta device.
    """
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    files = tensor_files(folder, partial=True) if ties else {}
    names = StoredNames(model, files)
    for target, source in ties.items():
        parameter = model.get_parameter_or_buffer(source)
        places = [(files[stored], stored) for stored in (names.get(source), names.get(target)) if stored is not None]
        # a weight that is not stored, or whose file is missing, stays tied
        are_stored = len(places) == 2 and all(path.is_file() for path, _ in places)
        if are_stored and not _are_equal(places, parameter.dtype):
            module, _, leaf = target.rpartition(".")
            setattr(model.get_submodule(module), leaf, nn.Parameter(torch.empty_like(parameter)))
            model.all_tied_weights_keys.pop(target, None)


def _are_equal(places: list[tuple[Path, str]], dtype: torch.dtype) -> bool:
    """Return whether two stored tensors are equal in a dtype. Only some of their rows are in memory at a time.

    places: for each tensor, its file and its name.
    """
    with ExitStack() as opened:
        opened.enter_context(reading(f"{places[0][0]} and {places[1][0]}: their weights cannot be compared"))
        one, other = (opened.enter_context(safe_open(path, framework="pt")).get_slice(name) for path, name in places)
        if one.get_shape() != other.get_shape():
            return False
        rows, *widths = one.get_shape()
        step = max(1, COMPARED_ELEMENTS // math.prod(widths))
        starts = range(0, rows, step)
        return all(torch.equal(*(part[at : at + step].to(dtype) for part in (one, other))) for at in starts)
