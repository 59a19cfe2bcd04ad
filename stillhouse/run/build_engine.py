"""Builds engine and teachers from a configuration: on one process, or distributed over ranks."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from stillhouse.config import ConfigError, RunConfig
from stillhouse.engine.depths import mtp_objective
from stillhouse.engine.engine import Engine
from stillhouse.engine.optimizer import optimizer_settings
from stillhouse.models import Decoder, ProofError
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import (
    Degrees,
    Layout,
    Mesh,
    ModelSource,
    Runner,
    build_runner,
    join,
    require_own_teacher,
    single_process_runner,
)
from stillhouse.run.run_models import (
    head_source,
    load_student,
    load_teacher,
    model_source,
    prepared_for_training,
    student_source,
    teacher_is_base,
    teacher_layout,
)
from stillhouse.run.sources import separate_teacher, several_teachers, stored_source
from stillhouse.signals import (
    InStageTeacher,
    NoTeacher,
    SeparateTeacher,
    SignalSource,
    SignalStore,
)


def build_engine(
    config: RunConfig,
    objective: ObjectiveSpec,
    layout: Layout,
    device: torch.device,
    stores: Mapping[str, SignalStore],
) -> tuple[Engine, SignalSource]:
    """A run's engine and the source of the teachers' signals. Each rank reads its own part of the weights.

    stores: of the teachers whose signals are in one (`open_stores`).
    """
    mesh = join(layout.degrees, device, config.train.timeout)
    if mesh.ranks.size == 1:
        return single_process_engine(config, objective, device, stores)
    engine, teacher = distributed_engine(config, objective, layout, mesh, device, stores)
    # ranks with different tokens draw different dropout; tensor ranks, which share tokens, draw the same dropout
    torch.manual_seed(config.seed + mesh.ranks.rank - mesh.coordinate("tensor"))
    return engine, teacher


def single_process_engine(
    config: RunConfig, objective: ObjectiveSpec, device: torch.device, stores: Mapping[str, SignalStore]
) -> tuple[Engine, SignalSource]:
    """`build_engine` for one process, which holds all models completely."""
    student, store = load_student(config, device), stores.get("teacher")
    mesh = Mesh(Degrees(), device, of_one_process=True)
    if store is not None:
        head = _stored_head(config, store, device)
        runner = build_runner(Layout(), mesh, ModelSource(lambda: student), head, teacher_head_only=True)
    elif config.teacher is not None and config.teacher.offload:
        return _with_offloaded_teacher(config, objective, student, mesh)
    elif config.teacher is None or teacher_is_base(config):
        runner = single_process_runner(student, None, teacher_is_base=teacher_is_base(config))
    else:
        runner = single_process_runner(student, load_teacher(config, device))
    engine = _engine(config, objective, runner, device)
    return engine, _source(config, engine, mesh, stores)


def _with_offloaded_teacher(
    config: RunConfig, objective: ObjectiveSpec, student: Decoder, mesh: Mesh
) -> tuple[Engine, SignalSource]:
    """An engine whose teacher's head is on the device, and whose teacher's layers are there only while they run."""
    layout, device = Layout(), mesh.device
    head, layers = (_teacher(config, device, offload=offload) for offload in (False, True))
    try:
        runner = build_runner(layout, mesh, ModelSource(lambda: student), head, teacher_head_only=True)
        source = SeparateTeacher(layers, replace(layout, offload=True), mesh, layout, mesh, device)
    except ProofError:
        raise
    except ValueError as error:
        raise ConfigError("teacher.offload", str(error)) from error
    return _engine(config, objective, runner, device), source


def distributed_engine(
    config: RunConfig,
    objective: ObjectiveSpec,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    stores: Mapping[str, SignalStore],
) -> tuple[Engine, SignalSource]:
    """`build_engine` for several processes. Raises ConfigError for a model that the layout does not fit."""
    store = stores.get("teacher")
    student = student_source(config, device, layout.offload)
    build, is_base = student.build, teacher_is_base(config)
    student = replace(student, build=lambda: prepared_for_training(build(), config), teacher_is_base=is_base)
    separate_layout, separate, teacher = teacher_layout(config), None, None
    if store is not None:
        teacher = _stored_head(config, store, device)
    elif config.teacher is not None and not is_base:
        teacher = _teacher(config, device, offload=layout.offload or config.teacher.offload)
    try:
        if teacher is not None and separate_layout is not None:
            separate_mesh = Mesh(separate_layout.degrees, device)
            require_own_teacher(layout, student, teacher_head_only=True)
            separate = separate_teacher("teacher", teacher, separate_layout, separate_mesh, layout, mesh, device)
            teacher = _teacher(config, device, offload=layout.offload)  # its head is distributed like the student's
        head_only = separate is not None or bool(stores) or config.teachers is not None
        runner = build_runner(layout, mesh, student, teacher, teacher_head_only=head_only)
    except (ConfigError, ProofError):
        raise
    except ValueError as error:
        raise ConfigError("parallel", str(error)) from error
    engine = _engine(config, objective, runner, device)
    return engine, separate or _source(config, engine, mesh, stores)


def _teacher(config: RunConfig, device: torch.device, *, offload: bool) -> ModelSource:
    assert config.teacher is not None
    return model_source("teacher", str(config.teacher.model), config.teacher, device, offload, config.seed)


def _engine(config: RunConfig, objective: ObjectiveSpec, runner: Runner, device: torch.device) -> Engine:
    train = config.train
    return Engine(
        runner,
        objective,
        device,
        optimizer=optimizer_settings(train),
        bf16=train.precision == "bf16",
        chunk_tokens=config.objective.chunk_tokens,
        router_aux_loss=config.objective.router_aux_loss,
        mtp=mtp_objective(config, objective),
    )


def _source(config: RunConfig, engine: Engine, mesh: Mesh, stores: Mapping[str, SignalStore]) -> SignalSource:
    if config.teachers is not None:
        return several_teachers(config, engine, mesh, stores)
    if config.teacher is None:
        return NoTeacher()
    if "teacher" not in stores:
        return InStageTeacher(engine.runner)
    return stored_source(config.teacher, stores["teacher"], engine)


def _stored_head(config: RunConfig, store: SignalStore, device: torch.device) -> ModelSource | None:
    """The teacher's output head, if the store has hidden states."""
    assert config.teacher is not None
    if not store.signal.is_exact:
        return None
    return head_source("teacher", config.teacher, store, device, config.parallel.offload, config.seed)
