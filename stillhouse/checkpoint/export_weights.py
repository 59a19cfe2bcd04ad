"""Exports the student: safetensors, configuration and tokenizer in the formats of transformers and peft.

In a distributed run, no rank has the full student. So the files are written from a checkpoint's tensors.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from stillhouse.config import StudentConfig
from stillhouse.data import save_tokenizer
from stillhouse.engine.state_folder import WEIGHT, read_full, stored_tensors
from stillhouse.models import Decoder
from stillhouse.models.adapter import is_lora, merged_lora, save_lora
from stillhouse.models.checkpoint_names import save_as, saved_names
from stillhouse.models.families import ModelFacts
from stillhouse.models.lm_head import match_tied_flag
from stillhouse.models.pretrained import auto_class, load_causal_lm
from stillhouse.parallel import Ranks

#: the maximum size of one file when a model is written from a checkpoint
FILE_BYTES = 5 * 10**9


def save_student(
    folder: Path, student: Decoder, tokenizer: Any, resume: Path, ranks: Ranks, processor_files: Sequence[Path] = ()
) -> None:
    """Save the student, its tokenizer and the files of its media processor. If the student has an adapter, the
    adapter is saved instead of the full model.

    student: the student, or this process's shard of the student.
    resume: the folder of a checkpoint's tensors. It is read if the student has an adapter or is distributed.
    """
    if student.lora is not None:
        matrices = [name for name in stored_tensors(resume) if name.startswith(WEIGHT) and is_lora(name)]
        stored = {name.removeprefix(WEIGHT): matrix for name, matrix in read_full(resume, matrices).items()}
        save_lora(student, stored, folder)
        # the base's generation configuration may lack the end tokens with which the student was trained
        if (generation := student.pretrained.generation_config) is not None:
            generation.save_pretrained(folder)
    elif ranks.group is None:
        student.save_pretrained(folder)
    else:
        save_from_checkpoint(folder, student, resume)
    save_tokenizer(tokenizer, folder, processor_files)


def save_from_checkpoint(folder: Path, part: Decoder, resume: Path, file_bytes: int = FILE_BYTES) -> None:
    """Write a checkpoint's weights into the same files as transformers' `save_pretrained` for the full model.

    Host memory contains one file of at most `file_bytes` at a time. If transformers converts the weights of a family
    when it saves them (stacked experts), host memory contains the full model.

    part: this process's shard of the model.
    """
    stored = stored_tensors(resume)
    dtype = stored[f"{WEIGHT}{part.embedding_name}"].properties.dtype
    with torch.device("meta"):
        full = Decoder(
            auto_class(part.config, multimodal=True).from_config(part.config, dtype=dtype, trust_remote_code=False),
            verify=False,
        )
    model = full.pretrained
    model.generation_config = part.pretrained.generation_config
    save_as(model, part.pretrained)
    if any(name.startswith(f"{WEIGHT}mtp.") for name in stored):
        from stillhouse.models.mtp import add_mtp  # requires a newer transformers than this module

        add_mtp(full, ModelFacts(part.config).declared_depths, is_new=False)
    keys = {saved: f"{WEIGHT}{name}" for name, saved in saved_names(full).items()}

    def read(names: Iterable[str]) -> dict[str, Tensor]:
        tensors = read_full(resume, [keys[name] for name in names])
        return {name: tensors[keys[name]] for name in names}

    shapes = {
        name: torch.empty(stored[key].size, dtype=stored[key].properties.dtype, device="meta")
        for name, key in keys.items()
    }
    converted = revert_weight_conversion(model, dict(shapes))
    if any(converted.get(name) is not tensor for name, tensor in shapes.items()):
        model.save_pretrained(folder, state_dict=read(keys), max_shard_size=file_bytes)
        return
    model.save_pretrained(folder, state_dict={})  # writes only the configuration
    write_weights(folder, converted, read, file_bytes, model.num_parameters())


def write_weights(
    folder: Path,
    shapes: Mapping[str, Tensor],
    read: Callable[[Iterable[str]], dict[str, Tensor]],
    file_bytes: int,
    parameters: int | None = None,
    file: str = SAFE_WEIGHTS_NAME,
) -> None:
    """Write weights as transformers does, with one file in memory at a time.

    shapes: all weights as tensors on the meta device.
    read: returns the weights with the given names.
    parameters: the number of parameters that the index states. If it is None, the elements of `shapes` are counted.
    file: the name of the file if all weights fit into one file.
    """
    # any other file name belongs to an adapter, whose weights are not split, because peft reads only one file
    largest = file_bytes if file == SAFE_WEIGHTS_NAME else sys.maxsize
    split = split_torch_state_dict_into_shards(dict(shapes), max_shard_size=largest)
    for name, tensor_names in split.filename_to_tensors.items():
        save_file(read(tensor_names), folder / (name if split.is_sharded else file), metadata={"format": "pt"})
    if split.is_sharded:
        total = sum(shape.numel() for shape in shapes.values()) if parameters is None else parameters
        index = {"metadata": {"total_parameters": total, **split.metadata}, "weight_map": split.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def save_merged(folder: Path, base: StudentConfig, adapter: Path, dtype: str | None = None) -> None:
    """Merge an adapter into its base model in host memory, and save the merged model.

    dtype: the dtype of the computation and of the saved weights. None means `base.dtype`.
    """
    model = load_causal_lm(
        base.model, revision=base.revision, dtype=dtype or base.dtype, trust_remote_code=base.trust_remote_code
    )
    match_tied_flag(model)
    merged_lora(model, adapter).save_pretrained(folder)
    if (generation := adapter / GENERATION_CONFIG_NAME).is_file():  # earlier versions did not write this file
        shutil.copyfile(generation, folder / GENERATION_CONFIG_NAME)
