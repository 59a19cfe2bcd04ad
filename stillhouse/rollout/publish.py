"""Publishes the student's weights in a folder that the job shares with the servers that generate completions.

    weights/version-00000007/
        model.safetensors, or model-00001-of-00003.safetensors … with model.safetensors.index.json
        config.json, generation_config.json, and the tokenizer's files if a tokenizer is given
        manifest.json      the version, the file of every tensor, and the sha256 of every file

The tensors have the names and values that transformers' `save_pretrained` writes, so that any engine can read them.
If the student has an adapter, only the adapter is written, in peft's format. A version is written under a temporary
name and then renamed, so that a reader never finds an incomplete version. `published_folder.py` reads a version.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from stillhouse.data import save_tokenizer
from stillhouse.hashing import file_hash
from stillhouse.libraries import reading
from stillhouse.models import Decoder
from stillhouse.models.adapter import is_lora, save_lora
from stillhouse.models.checkpoint_names import save_as, saved_names
from stillhouse.models.pretrained import auto_class
from stillhouse.parallel import DistributedStudent, StageWeight
from stillhouse.rollout.published_folder import MANIFEST, VERSION_PREFIX, AdapterBase, WeightsManifest

#: the largest size of a file in bytes, unless a single tensor is larger. To publish, a rank needs this much host
#: memory and the memory for all-gathering one tensor
BUCKET_BYTES = 512 * 2**20
#: the number of versions that stay in the folder: a server may still be reading the second-newest version
KEPT = 2
_PARTIAL = ".partial"


def publish(
    student: DistributedStudent,
    folder: Path,
    version: int,
    *,
    run: str = "",
    bucket_bytes: int = BUCKET_BYTES,
    tokenizer: Any = None,
    base: AdapterBase | None = None,
) -> Path:
    """Write the student's present weights below `folder` as a new version, and return the version's path.

    All ranks must call this. Tensors are all-gathered one at a time. One rank of each pipeline stage collects tensors
    until it has `bucket_bytes` of them, and writes them as one file. This version and the previous one stay in the
    folder. All other versions are removed, including versions that a resumed run will publish again.

    run: the identity of the publishing run, for the manifest.
    base: the model on which the student's adapter is trained, for the manifest; None if the student has no adapter.

    Raises ValueError if transformers must convert several layers at once to save this model, and OSError on all ranks
    if one rank cannot write.
    """
    final = version_folder(folder, version)
    partial = final.with_name(final.name + _PARTIAL)
    with _errors_on_all_ranks(student):
        if student.ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    kind: Literal["model", "adapter"] = "model" if student.decoders[0].lora is None else "adapter"
    with torch.no_grad():
        if kind == "model":
            _write_model(partial, student, bucket_bytes)
        else:
            _write_adapter(partial, student)
    with _errors_on_all_ranks(student):
        if student.ranks.is_first:
            if tokenizer is not None:
                save_tokenizer(tokenizer, partial)
            _write_manifest(partial, version, run, kind, base)
            if final.exists():  # published before the run was resumed from an earlier checkpoint
                shutil.rmtree(final)
            os.rename(partial, final)
            numbered = {path.name.removeprefix(VERSION_PREFIX): path for path in folder.glob(f"{VERSION_PREFIX}*")}
            versions = {int(number): path for number, path in numbered.items() if number.isdecimal()}
            kept = sorted(number for number in versions if number <= version)[-KEPT:]
            for number in versions.keys() - set(kept):
                shutil.rmtree(versions[number])
    return final


def version_folder(folder: Path, version: int) -> Path:
    return folder / f"{VERSION_PREFIX}{version:08d}"


def _write_model(partial: Path, student: DistributedStudent, bucket_bytes: int) -> None:
    full_decoder, collects = _full_student(student), _collects(student)
    names, model = saved_names(full_decoder), full_decoder.pretrained
    # on the last stage of a pipeline, the copy of a tied embedding has no saved name: the first stage writes it
    held = {names[name]: weight for name, weight in student.stage_weights().items() if name in names}
    buckets = _buckets(model, {name: weight.empty for name, weight in held.items()}, bucket_bytes)
    counts = student.ranks.gather(len(buckets) if collects else 0)
    before, total = sum(counts[: student.ranks.rank]), sum(counts)
    file_of: dict[str, str] = {}
    failure: Exception | None = None
    with _errors_on_all_ranks(student):
        for number, bucket in enumerate(buckets, start=before + 1):
            file = SAFE_WEIGHTS_NAME if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
            tensors: dict[str, Tensor] = {}
            for group in bucket:
                gathered = {name: _gather(held[name], student) for name in group}
                if collects:
                    tensors |= _as_saved(model, gathered)
            # after a failure, a rank still takes part in the collectives; otherwise the other ranks would wait for it
            if collects and failure is None:
                try:
                    save_file(tensors, partial / file, metadata={"format": "pt"})
                except (OSError, SafetensorError, ValueError) as error:
                    failure = error
                file_of |= dict.fromkeys(tensors, file)
        if failure is not None:
            raise failure
    files = {name: file for file_of_rank in student.ranks.gather(file_of) for name, file in file_of_rank.items()}
    with _errors_on_all_ranks(student):
        if student.ranks.is_first:
            _write_configuration(partial, student, model)
            if len(set(files.values())) > 1:
                sizes = sum(path.stat().st_size for path in partial.glob("*.safetensors"))
                metadata = {"total_parameters": model.num_parameters(), "total_size": sizes}
                index = {"metadata": metadata, "weight_map": dict(sorted(files.items()))}
                (partial / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
            # if a tensor were missing, an engine would keep the tensor's old values and only log a warning
            saved = set(names.values())
            meta = {name: tensor.to("meta") for name, tensor in model.state_dict().items() if name in saved}
            expected = set(_as_saved(model, meta)) if len(meta) == len(names) else set(files)
            if missing := sorted(expected ^ files.keys()):
                words = f"{len(missing)} tensors are missing or do not belong to the model, first '{missing[0]}'"
                raise ValueError(f"{partial}: {words}")


def _write_adapter(partial: Path, student: DistributedStudent) -> None:
    """Write the adapter: one rank of each stage writes the stage's LoRA matrices to the shared folder, and rank 0
    merges these files into one adapter in peft's format.
    """
    weights = student.stage_weights()
    matrices = {name: _gather(weight, student) for name, weight in weights.items() if is_lora(name)}
    number = student.ranks.rank if _collects(student) else -1
    with _errors_on_all_ranks(student):
        if number >= 0:
            save_file(matrices, partial / f"part-{number}")
    numbers = [rank_entries for rank_entries in student.ranks.gather(number) if rank_entries >= 0]
    with _errors_on_all_ranks(student):
        if student.ranks.is_first:
            parts = [partial / f"part-{number}" for number in numbers]
            save_lora(student.decoders[0], {k: v for part in parts for k, v in load_file(part).items()}, partial)
            for part in parts:
                part.unlink()


def _full_student(student: DistributedStudent) -> Decoder:
    """The full student, for names and shapes; with several processes, it is a model on the meta device."""
    (part, *_) = student.decoders
    if student.ranks.size == 1:
        return part
    with torch.device("meta"):
        model = auto_class(part.config, multimodal=True).from_config(part.config, trust_remote_code=False)
    save_as(model, part.pretrained)
    return Decoder(model, verify=False)


def _gather(weight: StageWeight, student: DistributedStudent) -> Tensor:
    """All-gather a tensor from the ranks that hold its shards. On a rank that writes tensors (see `_collects`), the
    result is in host memory.
    """
    tensor = weight.gather()
    return tensor.detach().cpu().contiguous() if _collects(student) else tensor


def _collects(student: DistributedStudent) -> bool:
    """Whether this rank writes the tensors of its pipeline stage. One rank of each stage does this."""
    if student.ranks.size == 1:
        return True
    coordinate = student.mesh.weights.get_coordinate()
    return coordinate is not None and not any(coordinate[1:])


def _as_saved(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors as transformers does to save them; for example, stacked experts become separate tensors."""
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, dict(tensors)).items()}


def _buckets(model: PreTrainedModel, shapes: dict[str, Tensor], bucket_bytes: int) -> list[list[list[str]]]:
    """Divide tensors into files. A file is a list of groups; transformers converts the tensors of a group together.

    Most groups have one tensor. If transformers joins tensors of a layer when it saves, such as the query, key and
    value matrices, the layer is a group.

    shapes: the tensors on the meta device.

    Raises ValueError if transformers joins tensors of several layers.
    """
    saved = {name: tensor.shape for name, tensor in _as_saved(model, shapes).items()}

    def is_converted(names: Iterable[str]) -> bool:
        """Whether transformers converts these tensors alone in the same way as together with all tensors."""
        try:
            with reading("they are converted together with others"):
                converted = _as_saved(model, {name: shapes[name] for name in names})
        except ValueError:
            return False
        return all(saved.get(name) == tensor.shape for name, tensor in converted.items())

    joined = {_layer(name) for name in shapes if not is_converted([name])}
    groups: dict[str, list[str]] = {}
    for name in shapes:
        groups.setdefault(_layer(name) if _layer(name) in joined else name, []).append(name)
    if not all(is_converted(names) for names in groups.values() if len(names) > 1):
        raise ValueError(
            f"the weights of model type '{model.config.model_type}' cannot be published layer by layer: transformers "
            "joins several layers when it saves; expected rollout.engine=transformers for this student"
        )
    sizes = {
        group: torch.empty(sum(shapes[name].nbytes for name in names), dtype=torch.uint8, device="meta")
        for group, names in groups.items()
    }
    files = split_torch_state_dict_into_shards(sizes, max_shard_size=bucket_bytes).filename_to_tensors.values()
    return [[groups[group] for group in file] for file in files]


def _layer(name: str) -> str:
    """The beginning of a tensor's name, up to and including the number of the layer, or "" if there is no number."""
    parts = name.split(".")
    return ".".join(parts[: next((place for place, part in enumerate(parts, start=1) if part.isdecimal()), 0)])


def _write_configuration(partial: Path, student: DistributedStudent, model: PreTrainedModel) -> None:
    part = student.decoders[0]
    config = type(model.config).from_dict(model.config.to_dict())
    config.architectures, config.dtype = [type(model).__name__], next(part.parameters()).dtype
    config.save_pretrained(partial)
    if (generation := getattr(part.pretrained, "generation_config", None)) is not None:
        generation.save_pretrained(partial)


def _write_manifest(
    partial: Path, version: int, run: str, kind: Literal["model", "adapter"], base: AdapterBase | None
) -> None:
    tensors, dtypes = dict[str, str](), set[str]()
    for path in sorted(partial.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= dict.fromkeys(file.keys(), path.name)
            dtypes |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 `file` is no dict
    manifest = WeightsManifest(
        version=version,
        run=run,
        kind=kind,
        dtypes=sorted(dtypes),
        tensors=tensors,
        files={path.name: file_hash(path) for path in sorted(partial.iterdir())},
        complete=True,
        base=base,
    )
    text = manifest.model_dump_json(indent=1, exclude={"base"} if base is None else None)
    (partial / MANIFEST).write_text(text + "\n", encoding="utf-8")


@contextmanager
def _errors_on_all_ranks(student: DistributedStudent) -> Iterator[None]:
    """Make all ranks raise a ValueError or OSError that one rank raises in the block. Without this, the ranks without
    the error would wait forever. A SafetensorError becomes an OSError.
    """
    with student.ranks.all_raise(ValueError, OSError):
        try:
            yield
        except SafetensorError as error:
            raise OSError(str(error)) from error
