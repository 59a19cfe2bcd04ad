"""Builds the sources of teachers' signals that are not computed in the student's stages."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from transformers import AutoConfig

from stillhouse.config import ConfigError, NamedTeacherConfig, RunConfig, TeacherConfig
from stillhouse.engine.engine import Engine
from stillhouse.libraries import reading
from stillhouse.models import Decoder, ProofError
from stillhouse.parallel import (
    Layout,
    Mesh,
    ModelSource,
    TeacherHeads,
    apply_parallelism,
    only_head,
    prove_heads,
)
from stillhouse.parallel.expert_parallel import dispatched_experts
from stillhouse.parallel.stages import is_cuttable
from stillhouse.run.run_models import (
    head_source,
    load_model,
    model_source,
    teacher_layout,
)
from stillhouse.serving.client import RemoteSignals
from stillhouse.signals import (
    ChosenTeacher,
    CrossTokenizerStore,
    SelfTeacher,
    SeparateTeacher,
    SeveralTeachers,
    SignalSource,
    SignalStore,
    StoredTeacher,
    WeightAverage,
)


def separate_teacher(
    section: str,
    source: ModelSource,
    layout: Layout,
    mesh: Mesh,
    student_layout: Layout,
    student_mesh: Mesh,
    device: torch.device,
) -> SeparateTeacher:
    """section: the key of the teacher's section."""
    try:
        return SeparateTeacher(source, layout, mesh, student_layout, student_mesh, device)
    except (ConfigError, ProofError):
        raise
    except ValueError as error:
        raise ConfigError(f"{section}.parallel", str(error)) from error


def stored_source(teacher: TeacherConfig, store: SignalStore, engine: Engine, name: str = "") -> StoredTeacher:
    """name: of one of several teachers, which may read a prefix. A process that reads signals of a teacher with
    another tokenizer loads that teacher.
    """
    if isinstance(store, CrossTokenizerStore) and engine.runner.has_results:
        store.start(engine.device)
    if isinstance(store, RemoteSignals) and store.signal.kind == "chosen":
        assert store.vocabulary is not None
        return ChosenTeacher(store, engine.runner, store.vocabulary, engine.precision, teacher.tail, name)
    return StoredTeacher(store, engine.runner, teacher.tail, name)


def several_teachers(
    config: RunConfig, engine: Engine, mesh: Mesh, stores: Mapping[str, SignalStore]
) -> SeveralTeachers:
    """The source of all teachers' signals. It also gives the student's last stage the teachers' output heads.

    A collective of all processes. Raises ConfigError for a model that its layout does not fit.
    """
    assert config.teachers is not None
    sources: dict[str, SignalSource] = {}
    heads: dict[str, ModelSource] = {}
    whole: dict[str, Decoder] = {}
    is_sharded = mesh.sharding is not None
    # a head that FSDP does not shard waits in host memory
    head_device = engine.device if is_sharded else torch.device("cpu")
    offload = config.parallel.offload
    for name, teacher in config.several.items():
        section = f"teachers.{name}"
        store = stores.get(section)
        if teacher.student is not None:
            sources[name] = _self_teacher(section, teacher, engine)
        elif store is not None:
            sources[name] = stored_source(teacher, store, engine, name)
            if store.signal.is_exact:
                heads[name] = head_source(section, teacher, store, head_device, offload, config.seed)
        elif mesh.ranks.size == 1 and (teacher.quantize is not None or not _can_be_cut(teacher)):
            if teacher.offload:
                raise ConfigError(
                    f"{section}.offload", "got true for a family whose head cannot be loaded separately"
                )
            whole[name] = load_model(section, str(teacher.model), teacher, engine.device).requires_grad_(False)
            source, layout = ModelSource(partial(whole.__getitem__, name)), Layout()
            sources[name] = SeparateTeacher(source, layout, mesh, layout, mesh, engine.device, keep_head=True)
        else:
            model = str(teacher.model)
            waits = offload or teacher.offload
            source = model_source(section, model, teacher, engine.device, waits, config.seed)
            heads[name] = model_source(section, model, teacher, head_device, offload, config.seed)
            sources[name] = _in_job(config, section, source, engine, mesh)
    runner = engine.runner
    with_heads = heads if runner.has_last_stage else {}
    decoders = {name: _head(source, runner.layout, mesh) for name, source in with_heads.items()}
    prove_heads(runner, {heads[name].name: decoder for name, decoder in decoders.items()})
    if runner.has_last_stage:
        teacher_heads = TeacherHeads(decoders | whole, engine.device, is_sharded=is_sharded)
        runner.pairs[runner.layout.stages - 1].heads = teacher_heads
    return SeveralTeachers(sources, runner, engine.device, config.teachers.route)


def _self_teacher(section: str, teacher: NamedTeacherConfig, engine: Engine) -> SelfTeacher:
    if teacher.student == "live":
        return SelfTeacher(engine.runner, engine.precision)
    if engine.average is not None:
        raise ConfigError(f"{section}.student", "got ema a second time; expected one teacher with student: ema")
    engine.average = WeightAverage(engine.runner, teacher.ema_decay)
    return SelfTeacher(engine.runner, engine.precision, engine.average)


def _in_job(config: RunConfig, section: str, source: ModelSource, engine: Engine, mesh: Mesh) -> SeparateTeacher:
    """A teacher that runs in this job: in a layout of its own, or in the student's."""
    student = engine.runner.layout
    own = None if mesh.ranks.size == 1 else teacher_layout(config, section)
    if own is None and student.degrees.expert > 1 and not dispatched_experts(source.build()):
        own = Layout(replace(student.degrees, expert=1), offload=source.offload)
    layout = own or Layout(student.degrees, offload=source.offload)
    own_mesh = mesh if own is None else Mesh(own.degrees, engine.device)
    return separate_teacher(section, source, layout, own_mesh, student, mesh, engine.device)


def _can_be_cut(teacher: TeacherConfig) -> bool:
    """Whether the teacher's layers and its output head can be loaded separately."""
    if teacher.trust_remote_code:
        return False
    with reading(f"the configuration of {teacher.model!r} cannot be read"):
        config = AutoConfig.from_pretrained(str(teacher.model), revision=teacher.revision, trust_remote_code=False)
    return is_cuttable(config)


def _head(source: ModelSource, layout: Layout, mesh: Mesh) -> Decoder:
    decoder = only_head(source.build)().requires_grad_(False).eval()
    apply_parallelism(decoder, layout, mesh, None)
    assert source.load_weights is not None
    source.load_weights(decoder)
    return decoder
