"""The models of a run: what the configuration names, loaded or laid over the ranks, and made ready for training."""

import importlib.util
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import snapshot_download

from stillhouse.config import ConfigError, RunConfig, StudentConfig, TeacherConfig
from stillhouse.models import Decoder, add_lora, balance_routers, check_finite_weights, draw_lora, model_fingerprint
from stillhouse.parallel import (
    Layout,
    Mesh,
    Origin,
    Runner,
    alone,
    empty_decoder,
    fill,
    join,
    lay_out,
    layout_of,
    local_folder,
    process_count,
)


def build_runner(config: RunConfig, layout: Layout, device: torch.device) -> Runner:
    """Student and teacher in their layout, with their weights, of which each rank reads its own part."""
    mesh = join(layout, device, config.train.timeout)
    if mesh is None:
        return alone(*load_models(config, device), own_base=own_base(config))
    runner = lay_out_models(config, layout, mesh, device)
    # dropout draws otherwise for other tokens, and alike on ranks that share them
    torch.manual_seed(config.seed + mesh.everyone.rank() - mesh.place("tensor"))
    return runner


def model_fingerprints(config: RunConfig) -> dict[str, str]:
    """A hash of each model's files, by student and teacher; of a hub's model, the commit."""
    models = {"student": config.student, "teacher": config.teacher}
    return {which: _fingerprint(model) for which, model in models.items() if model is not None}


def require_adapters(student: StudentConfig) -> None:
    """Raise ConfigError for an adapter without the library that it needs."""
    if student.adapter is not None and importlib.util.find_spec("peft") is None:
        raise ConfigError("student.adapter", "peft is not installed; pip install 'stillhouse[lora]'")


def own_base(config: RunConfig) -> bool:
    """Whether the teacher is what the student is without its adapter, so that there is one model and not two."""
    student, teacher = config.student, config.teacher
    if student.adapter is None or teacher is None:
        return False
    same = all(getattr(student, key) == getattr(teacher, key) for key in ("model", "revision", "attention"))
    return same and teacher.dtype in ("auto", student.dtype) and teacher.parallel is None


def load_models(config: RunConfig, device: torch.device) -> tuple[Decoder, Decoder | None]:
    """Student and teacher on the device, their weights finite. No teacher where it is the student's base."""
    student = _trained(_load("student", config.student, device), config)
    draw_lora(student, config.seed)
    if config.teacher is None or own_base(config):
        return student, None
    return student, _load("teacher", config.teacher, device)


def lay_out_models(config: RunConfig, layout: Layout, mesh: Mesh, device: torch.device) -> Runner:
    """The same over processes, each of which reads its own part."""
    student, teacher = _origin("student", config.student, device, layout.offload, config.seed), None
    apart = teacher_layout(config)
    if config.teacher is not None and not own_base(config):
        teacher = _origin("teacher", config.teacher, device, layout.offload, config.seed)
    make = student.make
    student = replace(student, make=lambda: _trained(make(), config), own_base=own_base(config))
    teacher_apart = None if apart is None else (apart, Mesh(apart.degrees, device))
    try:
        return lay_out(layout, mesh, student, teacher, teacher_apart)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError("parallel", str(error)) from error


def teacher_layout(config: RunConfig) -> Layout | None:
    """The teacher's own, if it is to have one."""
    if config.teacher is None or config.teacher.parallel is None:
        return None
    for key in ("gather_dtype", "offload"):
        if getattr(config.teacher.parallel, key):
            raise ConfigError(f"teacher.parallel.{key}", f"is of both models: expected parallel.{key} in its place")
    layout = layout_of(config.teacher.parallel, process_count(), "teacher.parallel")
    return replace(layout, offload=config.parallel.offload)


def _fingerprint(model: StudentConfig | TeacherConfig) -> str:
    if os.path.isdir(model.model):
        return model_fingerprint(model.model)
    return Path(snapshot_download(model.model, revision=model.revision, allow_patterns=["config.json"])).name


def _origin(
    which: str, model: StudentConfig | TeacherConfig, device: torch.device, offload: bool, seed: int
) -> Origin:
    if model.trust_remote_code:
        raise ConfigError(
            f"{which}.trust_remote_code", "got true under torchrun: expected a model of transformers' own"
        )
    folder = local_folder(model.model, model.revision)

    def weights(decoder: Decoder) -> None:
        fill(decoder, folder, device, offload=offload)
        draw_lora(decoder, seed)
        check_finite_weights(decoder, which)

    return Origin(partial(empty_decoder, folder, dtype=model.dtype, attention=model.attention), weights)


def _trained(student: Decoder, config: RunConfig) -> Decoder:
    """Made ready for training."""
    adapter = config.student.adapter
    if adapter is not None:
        options = adapter.model_dump(exclude={"type"})
        try:
            add_lora(student, **options, base=config.student.model, revision=config.student.revision)
        except ValueError as error:
            raise ConfigError("student.adapter.targets", str(error)) from error
    if config.objective.router_aux_loss:
        try:
            balance_routers(student)
        except ValueError as error:
            raise ConfigError("objective.router_aux_loss", str(error)) from error
    if config.train.activation_checkpointing:
        student.gradient_checkpointing_enable()
    return student.train()


def _load(which: str, model: StudentConfig | TeacherConfig, device: torch.device) -> Decoder:
    try:
        decoder = Decoder.from_pretrained(
            model.model,
            revision=model.revision,
            dtype=model.dtype,
            attention=model.attention,
            trust_remote_code=model.trust_remote_code,
            device=device,
        )
    except ValueError as error:
        raise ValueError(f"{which}: {error}") from error
    check_finite_weights(decoder, which)
    return decoder
