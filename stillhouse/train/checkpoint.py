"""Checkpoints: everything that a run needs to go on as if it had never stopped.

    checkpoints/step-00000500/
        resume/        weights and optimizer in PyTorch's distributed checkpoint format, as safetensors
        student/       the student and its tokenizer, as transformers reads them; an adapter by itself, as peft does
        state.json     step, tokens, the last evaluation, a hash of the data

A folder is written under another name and renamed when it is complete, so that a process killed at any moment leaves
either the whole checkpoint or none. There is no pickle in it.
"""

import json
import math
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from stillhouse.config import StudentConfig
from stillhouse.models import Decoder
from stillhouse.models.adapter import is_lora, merged, save_lora
from stillhouse.models.loading import load_causal_lm
from stillhouse.parallel import Mesh, Runner, is_first
from stillhouse.parallel.gradients import local
from stillhouse.parallel.loading import checkpoint_names

_PREFIX = "step-"
_UNFINISHED = ".partial"
_WEIGHT, _MOMENT = "student.", "optimizer.state."
#: of a file of a model that is written from a checkpoint
FILE_BYTES = 5 * 10**9
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW


@dataclass
class Progress:
    """How far a run is: steps done, target tokens trained on, seconds spent, the last evaluation.

    `data` holds a hash of each split's documents: a step's data follows from its number only while they are the same.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)


def save_checkpoint(
    folder: Path, progress: Progress, runner: Runner, optimizer: torch.optim.Optimizer, tokenizer: Any
) -> Path:
    """Write checkpoints/step-<n> whole or not at all; returns its path. All processes take part."""
    final = folder / f"{_PREFIX}{progress.step:08d}"
    with written_together(final, runner.mesh) as partial:
        _save_tensors(partial / "resume", _tensors(runner, optimizer), runner.mesh)
        if is_first():
            save_student(partial / "student", runner, tokenizer, partial / "resume")
            # NaN is no JSON, and no figure to be best by
            finite = {key: value for key, value in progress.metrics.items() if math.isfinite(value)}
            state = asdict(replace(progress, metrics=finite))
            (partial / "state.json").write_text(json.dumps(state, indent=1, allow_nan=False))
    return final


def load_checkpoint(path: Path, runner: Runner, optimizer: torch.optim.Optimizer) -> Progress:
    """Put weights, optimizer and random generators back as they were; returns how far the run was.

    The layout need not be the one that it was saved under. Raises ValueError for a checkpoint that is damaged or of
    another model.
    """
    progress = read_progress(path)
    reader = dcp.HuggingFaceStorageReader(path=str(path / "resume"))
    stored = _stored_shapes(path)
    weights = _weights(runner)
    _require_fit(path, stored, weights, whole=runner.layout.stages == 1)
    moments = {
        f"{_MOMENT}{name}.{key}": torch.zeros_like(parameter) if key != "step" else torch.zeros(())
        for name, parameter in _owned(runner).items()
        for key in _MOMENTS
    }
    # absent: the random state of a device it was not written on, the moments of a parameter without a gradient so far
    wanted = {**weights, **moments, **_random_states(runner)}
    tensors = {name: value for name, value in wanted.items() if name in stored}
    with _one_process():
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    _put_back(tensors, runner, optimizer)
    return progress


def read_progress(path: Path) -> Progress:
    """How far a checkpoint is, without loading it. Raises ValueError where there is none that can be read."""
    try:
        return Progress(**json.loads((path / "state.json").read_text()))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise ValueError(
            f"{path} is not a checkpoint of this version: {error}; expected a folder with state.json"
        ) from error


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if not path.name.endswith(_UNFINISHED))


def prune(folder: Path, keep: int, best: str | None) -> None:
    """Remove all but the newest `keep` and the one with the best value of the metric `best`."""
    every = checkpoints(folder)
    kept = set(every[-keep:])
    if best is not None and (first := best_checkpoint(folder, best)) is not None:
        kept.add(first)
    for path in every:
        if path not in kept:
            unfinished = path.with_name(path.name + _UNFINISHED)
            path.rename(unfinished)  # a removal that is interrupted must not look like a checkpoint
            shutil.rmtree(unfinished)


def best_checkpoint(folder: Path, metric: str) -> Path | None:
    """The checkpoint with the lowest value of a metric (the highest of an agreement); the earliest of equals."""
    sign = -1.0 if metric.endswith("agreement") else 1.0
    values = []
    for path in checkpoints(folder):
        metrics = read_progress(path).metrics
        if metric in metrics:
            values.append((sign * metrics[metric], path))
    return min(values)[1] if values else None


def remove_unfinished(folder: Path) -> None:
    """What a killed process left behind."""
    for path in folder.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(path)


def save_student(folder: Path, runner: Runner, tokenizer: Any, resume: Path) -> None:
    """The student for exchange: Hugging Face safetensors, configuration and tokenizer. Of an adapter, it alone.

    resume: the tensors of a checkpoint of it, read where this process has only a part of the student.
    """
    (student, *_) = runner.students()
    if student.lora is not None:
        save_lora(student, _stored_lora(resume), folder)
    elif runner.mesh is None:
        student.save_pretrained(folder)
    else:
        save_from_checkpoint(folder, student, resume)
    tokenizer.save_pretrained(folder)


def save_from_checkpoint(folder: Path, part: Decoder, resume: Path, file_bytes: int = FILE_BYTES) -> None:
    """What transformers' `save_pretrained` writes of the model that `part` is of, with a checkpoint's weights.

    One file of at most `file_bytes` is in memory at a time; all of them for a family that transformers converts when
    it saves (experts, which it stores one by one).
    """
    stored = _stored_tensors(resume)
    dtype = stored[f"{_WEIGHT}{part.embedding_name}"].properties.dtype
    with torch.device("meta"):
        whole = Decoder(
            AutoModelForCausalLM.from_config(part.config, dtype=dtype, trust_remote_code=False), verify=False
        )
    model = whole.pretrained
    model.generation_config = part.pretrained.generation_config
    keys = {checkpoint_names(whole, name)[0]: f"{_WEIGHT}{name}" for name in whole.state_dict()}

    def read(names: Iterable[str]) -> dict[str, Tensor]:
        tensors = _read(resume, [keys[name] for name in names])
        return {name: tensors[keys[name]] for name in names}

    held_as = {name: stored[key] for name, key in keys.items()}
    shapes = {
        name: torch.empty(each.size, dtype=each.properties.dtype, device="meta") for name, each in held_as.items()
    }
    written = revert_weight_conversion(model, dict(shapes))
    if any(written.get(name) is not tensor for name, tensor in shapes.items()):
        model.save_pretrained(folder, state_dict=read(keys), max_shard_size=file_bytes)
        return
    model.save_pretrained(folder, state_dict={})  # the configuration alone
    split = split_torch_state_dict_into_shards(written, max_shard_size=file_bytes)
    for file, held in split.filename_to_tensors.items():
        save_file(read(held), folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def save_merged(folder: Path, base: StudentConfig, adapter: Path, tokenizer: Any) -> None:
    """A plain Hugging Face model: an adapter's folder added to the weights that it was trained on, in host memory."""
    model = load_causal_lm(
        base.model,
        revision=base.revision,
        dtype=base.dtype,
        trust_remote_code=base.trust_remote_code,
    )
    merged(model, adapter).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _stored_lora(resume: Path) -> dict[str, Tensor]:
    """An adapter's matrices, by their names in the decoder."""
    stored = _stored_tensors(resume)
    names = [name for name in stored if name.startswith(_WEIGHT) and is_lora(name)]
    return {name.removeprefix(_WEIGHT): each for name, each in _read(resume, names).items()}


def _read(resume: Path, names: Iterable[str]) -> dict[str, Any]:
    """Tensors of a checkpoint, whole."""
    stored = _stored_tensors(resume)
    tensors: dict[str, Any] = {
        name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in names
    }
    with _one_process():
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(path=str(resume)), no_dist=True)
    return tensors


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """A folder to write to that takes its name when the block ends without an error, after all of it is on disk."""
    partial = _partial(final)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    yield partial
    for path in [*partial.rglob("*"), partial]:
        _flush(path)
    if final.exists():
        shutil.rmtree(final)
    os.rename(partial, final)
    _flush(final.parent)


@contextmanager
def written_together(final: Path, mesh: Mesh | None) -> Iterator[Path]:
    """`atomic_folder` for all processes: the first one makes it and gives it its name, after the others are done."""
    if mesh is None:
        with atomic_folder(final) as partial:
            yield partial
        return
    with atomic_folder(final) if is_first() else nullcontext(_partial(final)) as partial:
        dist.barrier(mesh.everyone)
        yield partial
        dist.barrier(mesh.everyone)
    dist.barrier(mesh.everyone)


def _partial(final: Path) -> Path:
    return final.with_name(final.name + _UNFINISHED)


def _save_tensors(folder: Path, tensors: dict[str, Any], mesh: Mesh | None) -> None:
    writer = dcp.HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    if mesh is None:
        with _one_process():
            dcp.save(tensors, storage_writer=writer, no_dist=True)
    else:
        dcp.save(tensors, storage_writer=writer, process_group=mesh.everyone)


def _tensors(runner: Runner, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    tensors = _weights(runner) | _random_states(runner)
    for name, parameter in _owned(runner).items():
        # hyper-parameters are not tensors: they come from the configuration
        tensors |= {f"{_MOMENT}{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return tensors


def _weights(runner: Runner) -> dict[str, Any]:
    """The student's parameters and buffers that are here, a weight that two stages share by the embedding's name.

    Without what is frozen, beside an adapter: that is in the files of the model that it was trained on.
    """
    weights: dict[str, Any] = {}
    for student in runner.students():
        frozen = {name for name, parameter in student.named_parameters() if not parameter.requires_grad}
        for name, value in student.state_dict().items():
            if name not in frozen:
                weights.setdefault(f"{_WEIGHT}{runner.shared_name(name)}", value)
    return weights


def _owned(runner: Runner) -> dict[str, nn.Parameter]:
    """What trains, of what is here, by its name in a checkpoint; a parameter that is here twice, once."""
    owned: dict[str, nn.Parameter] = {}
    for name, parameter in _trained(runner):
        owned.setdefault(runner.shared_name(name), parameter)
    return owned


def _trained(runner: Runner) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in runner.named_parameters() if parameter.requires_grad)


def _random_states(runner: Runner) -> dict[str, Tensor]:
    """Of this process's generators. Tensor ranks share theirs: dropout must drop the same of what all have."""
    mesh = runner.mesh
    own = "" if mesh is None else f".{mesh.everyone.rank() - mesh.place('tensor')}"
    device = _device(runner)
    states = {f"random.cpu{own}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"random.cuda{own}"] = torch.cuda.get_rng_state(device)
    return states


def _put_back(tensors: dict[str, Any], runner: Runner, optimizer: torch.optim.Optimizer) -> None:
    """The weights are where they belong, since they were read in place."""
    owned = _owned(runner)
    for name, parameter in _trained(runner):
        shared = runner.shared_name(name)
        found = {key: tensors.get(f"{_MOMENT}{shared}.{key}") for key in _MOMENTS}
        if parameter is not owned[shared]:
            local(parameter.detach()).copy_(local(owned[shared].detach()))
            found = {key: None if value is None else value.clone() for key, value in found.items()}
        optimizer.state.pop(parameter, None)
        if found["step"] is not None:
            optimizer.state[parameter] = found
    for name in _random_states(runner).keys() & tensors.keys():
        if name.startswith("random.cpu"):
            torch.set_rng_state(tensors[name])
        else:
            torch.cuda.set_rng_state(tensors[name], _device(runner))


def _device(runner: Runner) -> torch.device:
    """Where the run computes; its weights may be in host memory."""
    return next(runner.students()[0].parameters()).device if runner.mesh is None else runner.mesh.device


def _stored_tensors(resume: Path) -> dict[str, TensorStorageMetadata]:
    stored = dcp.HuggingFaceStorageReader(path=str(resume)).read_metadata().state_dict_metadata
    return {name: each for name, each in stored.items() if isinstance(each, TensorStorageMetadata)}


def _stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        return {name: tuple(each.size) for name, each in _stored_tensors(path / "resume").items()}
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged: {error}; remove it to go on from the one before") from error


def _require_fit(path: Path, stored: dict[str, tuple[int, ...]], weights: dict[str, Any], whole: bool) -> None:
    """Before DCP: it says less, leaves out what it is not asked for, and its own error is no Exception.

    whole: this process has the whole student, so that what it does not ask for is too much.
    """
    wanted = {name: tuple(value.shape) for name, value in weights.items()}
    names = stored.keys() | wanted.keys() if whole else wanted.keys()
    for name in sorted(name for name in names if name.startswith(_WEIGHT)):
        there, here = (f"of shape {shapes[name]}" if name in shapes else "absent" for shapes in (stored, wanted))
        if there != here:
            raise ValueError(
                f"{path} does not fit this student: '{name}' is {there} in the checkpoint and {here} in the run; "
                "expected the student that the checkpoint was made with, whole"
            )


@contextmanager
def _one_process() -> Iterator[None]:
    """DCP warns that there is one process only; that is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
