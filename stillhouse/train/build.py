"""Builds engine and teacher from a configuration: loads the models, or distributes them over ranks, for training."""

import importlib.util
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import snapshot_download

from stillhouse.config import ConfigError, RunConfig, StudentConfig, TeacherConfig
from stillhouse.models import Decoder, add_lora, balance_routers, check_finite_weights, draw_lora, model_fingerprint
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import (
    Layout,
    Mesh,
    ModelSource,
    Runner,
    build_runner,
    empty_decoder,
    join,
    load_weights,
    local_folder,
    process_count,
    require_own_teacher,
    single_process_runner,
)
from stillhouse.teachers import (
    ChosenTeacher,
    CrossTokenizerStore,
    InStageTeacher,
    NoTeacher,
    RemoteSignals,
    SeparateTeacher,
    SignalSource,
    SignalStore,
    StoredTeacher,
)
from stillhouse.train.engine import Engine, OptimizerSettings
from stillhouse.train.layouts import layout_of


def build_engine(
    config: RunConfig,
    objective: ObjectiveSpec,
    layout: Layout,
    device: torch.device,
    store: SignalStore | None = None,
) -> tuple[Engine, SignalSource]:
    """A run's engine and the source of the teacher's signals. Each rank reads its own part of the weights.

    store: the teacher's signals, if they are in a store (`open_store`).
    """
    mesh = join(layout, device, config.train.timeout)
    if mesh is None:
        return single_process_engine(config, objective, device, store)
    engine, teacher = distributed_engine(config, objective, layout, mesh, device, store)
    # ranks with different tokens draw different dropout; tensor ranks, which share tokens, draw the same dropout
    torch.manual_seed(config.seed + mesh.everyone.rank() - mesh.coordinate("tensor"))
    return engine, teacher


def single_process_engine(
    config: RunConfig, objective: ObjectiveSpec, device: torch.device, store: SignalStore | None = None
) -> tuple[Engine, SignalSource]:
    """`build_engine` for one process, which holds both models completely."""
    student = load_student(config, device)
    if store is not None:
        head = _stored_head(config, store, device)
        runner = build_runner(Layout(), None, ModelSource(lambda: student), head, teacher_head_only=True)
    elif config.teacher is None or teacher_is_base(config):
        runner = single_process_runner(student, None, teacher_is_base=teacher_is_base(config))
    else:
        runner = single_process_runner(student, load_teacher(config, device))
    engine = _engine(config, objective, runner, device)
    return engine, _source(config, engine, store)


def distributed_engine(
    config: RunConfig,
    objective: ObjectiveSpec,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    store: SignalStore | None = None,
) -> tuple[Engine, SignalSource]:
    """`build_engine` for several processes. Raises ConfigError for a model that the layout does not fit."""
    name = config.student.model
    student = _model_source("student", name, config.student, device, layout.offload, config.seed)
    build = student.build
    student = replace(student, build=lambda: _trained(build(), config), teacher_is_base=teacher_is_base(config))
    teacher = None
    if store is not None:
        teacher = _stored_head(config, store, device)
    elif config.teacher is not None and not student.teacher_is_base:
        name = _name_of(config.teacher)
        teacher = _model_source("teacher", name, config.teacher, device, layout.offload, config.seed)
    separate_layout, separate = teacher_layout(config), None
    try:
        if teacher is not None and separate_layout is not None:
            separate_mesh = Mesh(separate_layout.degrees, device)
            require_own_teacher(layout, student, teacher_head_only=True)
            separate = _separate_teacher(teacher, separate_layout, separate_mesh, layout, mesh)
        head_only = separate is not None or store is not None
        runner = build_runner(layout, mesh, student, teacher, teacher_head_only=head_only)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError("parallel", str(error)) from error
    engine = _engine(config, objective, runner, device)
    return engine, separate or _source(config, engine, store)


def _separate_teacher(
    source: ModelSource, layout: Layout, mesh: Mesh, student_layout: Layout, student_mesh: Mesh
) -> SeparateTeacher:
    try:
        return SeparateTeacher(source, layout, mesh, student_layout, student_mesh)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError("teacher.parallel", str(error)) from error


def _engine(config: RunConfig, objective: ObjectiveSpec, runner: Runner, device: torch.device) -> Engine:
    train = config.train
    return Engine(
        runner,
        objective,
        device,
        optimizer=OptimizerSettings(
            train.learning_rate, train.weight_decay, train.betas, train.eps, train.clip or 0.0
        ),
        bf16=train.precision == "bf16",
        chunk_tokens=config.objective.chunk_tokens,
        router_aux_loss=config.objective.router_aux_loss,
    )


def _source(config: RunConfig, engine: Engine, store: SignalStore | None) -> SignalSource:
    if config.teacher is None:
        return NoTeacher()
    if store is None:
        return InStageTeacher(engine.runner)
    if isinstance(store, CrossTokenizerStore) and engine.runner.has_results:
        store.start(engine.device)
    if isinstance(store, RemoteSignals) and store.signal.kind == "chosen":
        assert store.vocabulary is not None
        return ChosenTeacher(store, engine.runner, store.vocabulary, engine.precision, config.teacher.tail)
    return StoredTeacher(store, engine.runner, config.teacher.tail)


def _stored_head(config: RunConfig, store: SignalStore, device: torch.device) -> ModelSource | None:
    """The teacher's output head, if the store has hidden states."""
    if not store.signal.is_exact:
        return None
    assert config.teacher is not None
    assert store.teacher_folder is not None
    folder = store.teacher_folder
    return _model_source("teacher", str(folder), config.teacher, device, config.parallel.offload, config.seed)


def model_fingerprints(config: RunConfig, store: SignalStore | None = None) -> dict[str, str]:
    """For student and teacher, a hash of the model's files; for a model of the hub, the commit; for a store, its
    identity.
    """
    hashes = {"student": _fingerprint(config.student.model, config.student.revision)}
    if config.teacher is not None:
        hashes["teacher"] = (
            store.identity if store is not None else _fingerprint(_name_of(config.teacher), config.teacher.revision)
        )
    return hashes


def require_adapters(student: StudentConfig) -> None:
    """Raise ConfigError if the student has an adapter and peft is not installed."""
    if student.adapter is not None and importlib.util.find_spec("peft") is None:
        raise ConfigError("student.adapter", "peft is not installed; pip install 'stillhouse[lora]'")


def teacher_is_base(config: RunConfig) -> bool:
    """Whether the teacher is the student without its adapter, so that one model in memory serves as both."""
    student, teacher = config.student, config.teacher
    if student.adapter is None or teacher is None or teacher.url is not None:
        return False
    same = all(getattr(student, key) == getattr(teacher, key) for key in ("model", "revision", "attention"))
    return same and teacher.dtype in ("auto", student.dtype) and teacher.parallel is None


def load_student(config: RunConfig, device: torch.device) -> Decoder:
    """Load the student onto the device, prepare it for training, and check that its weights are finite."""
    student = _trained(_load("student", config.student.model, config.student, device), config)
    draw_lora(student, config.seed)
    return student


def load_teacher(config: RunConfig, device: torch.device) -> Decoder:
    """Load the teacher onto the device and check that its weights are finite."""
    assert config.teacher is not None
    return _load("teacher", _name_of(config.teacher), config.teacher, device)


def teacher_layout(config: RunConfig) -> Layout | None:
    """The teacher's own layout, if the configuration has `teacher.parallel`; else None."""
    if config.teacher is None or config.teacher.parallel is None:
        return None
    for key in ("gather_dtype", "offload"):
        if getattr(config.teacher.parallel, key):
            raise ConfigError(f"teacher.parallel.{key}", f"is of both models: expected parallel.{key} in its place")
    layout = layout_of(config.teacher.parallel, process_count(), "teacher.parallel")
    return replace(layout, offload=config.parallel.offload)


def _name_of(teacher: TeacherConfig) -> str:
    """The model of a teacher that runs in this job."""
    assert teacher.model is not None
    return teacher.model


def _fingerprint(name: str, revision: str | None) -> str:
    if os.path.isdir(name):
        return model_fingerprint(name)
    return Path(snapshot_download(name, revision=revision, allow_patterns=["config.json"])).name


def _model_source(
    which: str, name: str, model: StudentConfig | TeacherConfig, device: torch.device, offload: bool, seed: int
) -> ModelSource:
    """name: the hub id or folder of the model."""
    if model.trust_remote_code:
        raise ConfigError(
            f"{which}.trust_remote_code", "got true under torchrun: expected a model of transformers' own"
        )
    folder = local_folder(name, model.revision)

    def weights(decoder: Decoder) -> None:
        load_weights(decoder, folder, device, offload=offload)
        draw_lora(decoder, seed)
        check_finite_weights(decoder, which)

    return ModelSource(partial(empty_decoder, folder, dtype=model.dtype, attention=model.attention), weights)


def _trained(student: Decoder, config: RunConfig) -> Decoder:
    """Prepare the student for training: its adapter, router losses, activation checkpointing, train mode."""
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


def _load(which: str, name: str, model: StudentConfig | TeacherConfig, device: torch.device) -> Decoder:
    try:
        decoder = Decoder.from_pretrained(
            name,
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
