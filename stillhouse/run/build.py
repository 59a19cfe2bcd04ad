"""Builds a run's engine and the source of its teachers' signals from the configuration, under any layout."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import AutoConfig

from stillhouse.config import ConfigError, NamedTeacherConfig, RunConfig, TeacherConfig
from stillhouse.engine.depths import mtp_objective
from stillhouse.engine.optimizer import optimizer_settings
from stillhouse.engine.parts import HiddenStates, LossPart, RouterBalancing
from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.libraries import reading
from stillhouse.models import Decoder, ProofError
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import (
    BufferedHead,
    DecoderHead,
    HeadBuffers,
    Layout,
    Mesh,
    ModelSource,
    Runner,
    TeacherHead,
    apply_parallelism,
    build_runner,
    only_head,
    prove_heads,
    require_own_teacher,
)
from stillhouse.parallel.apply.expert_parallel import dispatched_experts
from stillhouse.parallel.stages import is_cuttable
from stillhouse.run.models import ModelSources, teacher_is_base, teacher_layout
from stillhouse.serving.client import RemoteSignals
from stillhouse.signals import (
    ChosenTeacher,
    CrossTokenizerStore,
    InStageTeacher,
    NoTeacher,
    SelfTeacher,
    SeparateTeacher,
    SeveralTeachers,
    SignalSource,
    SignalStore,
    StoredTeacher,
    WeightAverage,
)


def build_engine(
    models: ModelSources, objective: ObjectiveSpec, layout: Layout, stores: Mapping[str, SignalStore]
) -> tuple[TorchEngine, SignalSource]:
    """A run's engine and the source of the teachers' signals. Each rank reads its own part of the weights.

    stores: of the teachers whose signals are in one (`open_stores`), by the keys of their sections.
    Raises ConfigError for a model that the layout does not fit.
    """
    config, mesh = models.config, models.mesh
    separate = _separate_layout(config, mesh)
    head_only = separate is not None or bool(stores) or config.teachers is not None
    with _as_config_error("parallel" if mesh.ranks.size > 1 else None):
        student = models.student()
        if separate is not None:
            require_own_teacher(layout, student, teacher_head_only=True)
        teacher = _teacher_of_stages(config, models, layout, stores.get("teacher"), head_only=head_only)
        runner = build_runner(layout, mesh, student, teacher, teacher_head_only=head_only)
    average = _average(config, runner)
    engine = TorchEngine(
        runner,
        objective,
        optimizer=optimizer_settings(config.train),
        autocast=torch.bfloat16 if config.train.precision == "bf16" else None,
        chunk_tokens=config.objective.chunk_tokens,
        parts=_loss_parts(config, objective, runner),
        average=average,
    )
    source = _Sources(models, runner, engine.autocast, stores, average).source(separate)
    if mesh.ranks.size > 1:
        # ranks with different tokens draw different dropout; tensor ranks, which share tokens, draw the same dropout
        torch.manual_seed(config.seed + mesh.ranks.rank - mesh.coordinate("tensor"))
    return engine, source


def _separate_layout(config: RunConfig, mesh: Mesh) -> Layout | None:
    """The layout of a teacher that does not run in the student's stages; None if there is none."""
    if mesh.ranks.size == 1:
        return Layout(offload=True) if config.teacher is not None and config.teacher.offload else None
    return teacher_layout(config)


def _teacher_of_stages(
    config: RunConfig, models: ModelSources, layout: Layout, store: SignalStore | None, *, head_only: bool
) -> ModelSource | None:
    """The teacher in the student's stages, or the one whose head is on the last stage; None without one."""
    if store is not None:
        return models.head_of_store("teacher", store) if store.signal.is_exact else None
    if config.teacher is None or teacher_is_base(config):
        return None
    if layout.degrees.processes == 1 and not head_only:
        return models.whole_teacher("teacher")
    waits = not head_only and config.teacher.offload
    return models.teacher("teacher", offload=layout.offload or waits)


def _loss_parts(config: RunConfig, objective: ObjectiveSpec, runner: Runner) -> list[LossPart]:
    """The losses inside the student that the configuration asks for."""
    parts: list[LossPart] = []
    if (mtp := mtp_objective(config, objective)) is not None:
        parts.append(replace(mtp, group=runner.context_group))
    if config.objective.router_aux_loss:
        parts.append(RouterBalancing(config.objective.router_aux_loss, runner.context_group))
    if (match := runner.students()[0].hidden_match) is not None:
        parts.append(HiddenStates(match.all_pairs))
    return parts


def _average(config: RunConfig, runner: Runner) -> WeightAverage | None:
    """The average of the student's weights, if a teacher has them."""
    averaged = [name for name, teacher in config.several.items() if teacher.student == "ema"]
    if len(averaged) > 1:
        raise ConfigError(
            f"teachers.{averaged[1]}.student", "got ema a second time; expected one teacher with student: ema"
        )
    return WeightAverage(runner, config.several[averaged[0]].ema_decay) if averaged else None


@dataclass(frozen=True)
class _Sources:
    """Builds the sources of the teachers' signals.

    student: its runner. autocast: the dtype of its matrix products. average: of its weights.
    """

    models: ModelSources
    student: Runner
    autocast: torch.dtype | None
    stores: Mapping[str, SignalStore]
    average: WeightAverage | None

    @property
    def config(self) -> RunConfig:
        return self.models.config

    def source(self, separate: Layout | None) -> SignalSource:
        """separate: the layout of a teacher that does not run in the student's stages."""
        teacher, mesh = self.config.teacher, self.student.mesh
        if self.config.teachers is not None:
            return self._several()
        if teacher is None:
            return NoTeacher()
        if separate is not None:
            layers = self.models.teacher("teacher", offload=separate.offload)
            of_offload = teacher.parallel is None
            teacher_mesh = mesh if of_offload else Mesh(separate.degrees, mesh.device)
            key = "teacher.offload" if of_offload else "teacher.parallel"
            return self._separate(key, layers, separate, teacher_mesh, self.student.teacher_head)
        if "teacher" in self.stores:
            return self._stored(teacher, self.stores["teacher"], self.student.teacher_head)
        return InStageTeacher(self.student)

    def _several(self) -> SeveralTeachers:
        """The source of all teachers' signals; their output heads are on the student's last stage.

        A collective of all processes. Raises ConfigError for a model that its layout does not fit.
        """
        assert self.config.teachers is not None
        whole = self._whole_teachers()
        heads = self._heads(whole)
        sources: dict[str, SignalSource] = {}
        for name, teacher in self.config.several.items():
            section, head = f"teachers.{name}", heads.get(name)
            if teacher.student is not None:
                sources[name] = SelfTeacher(
                    self.student, self.autocast, self.average if teacher.student == "ema" else None
                )
            elif section in self.stores:
                sources[name] = self._stored(teacher, self.stores[section], head, name)
            elif name in whole:
                layers = ModelSource(partial(whole.__getitem__, name), is_proven=True)
                layout, mesh = Layout(), self.student.mesh
                sources[name] = SeparateTeacher(layers, layout, mesh, layout, mesh, head=head, keep_head=True)
            else:
                sources[name] = self._in_job(section, teacher, head)
        return SeveralTeachers(sources, self.student, self.config.teachers.route)

    def _whole_teachers(self) -> dict[str, Decoder]:
        """In one process, the teachers whose layers and head cannot be loaded separately."""
        whole: dict[str, Decoder] = {}
        for name, teacher in self.config.several.items() if self.student.ranks.size == 1 else ():
            section = f"teachers.{name}"
            if teacher.student is not None or section in self.stores:
                continue
            if teacher.quantize is None and _can_be_cut(teacher):
                continue
            if teacher.offload:
                raise ConfigError(
                    f"{section}.offload", "got true for a family whose head cannot be loaded separately"
                )
            whole[name] = self.models.whole_teacher(section).build().requires_grad_(False)
        return whole

    def _heads(self, whole: Mapping[str, Decoder]) -> dict[str, TeacherHead]:
        """The teachers' output heads by their names, on processes with the student's last stage.

        Heads that FSDP does not shard are in host memory, and share buffers on the device.
        """
        runner, is_sharded = self.student, self.student.mesh.sharding is not None
        device = runner.device if is_sharded else torch.device("cpu")
        decoders: dict[str, Decoder] = {}
        for name, teacher in self.config.several.items() if runner.has_last_stage else ():
            section, offload = f"teachers.{name}", self.config.parallel.offload
            store = self.stores.get(section)
            if teacher.student is not None or name in whole or (store is not None and not store.signal.is_exact):
                continue
            source = (
                self.models.teacher(section, device, offload=offload)
                if store is None
                else self.models.head_of_store(section, store, device)
            )
            decoders[name] = _head(source, runner.layout, runner.mesh)
        prove_heads(runner, {f"teachers.{name}": decoder for name, decoder in decoders.items()})
        if is_sharded:
            return {name: DecoderHead(decoder) for name, decoder in decoders.items()}
        buffers = HeadBuffers(runner.device)
        return {name: BufferedHead(name, decoder, buffers) for name, decoder in (decoders | dict(whole)).items()}

    def _stored(
        self, teacher: TeacherConfig, store: SignalStore, head: TeacherHead | None, name: str = ""
    ) -> StoredTeacher:
        """name: of one of several teachers, which may read a prefix. A process that reads signals of a teacher with
        another tokenizer loads that teacher.
        """
        if isinstance(store, CrossTokenizerStore) and self.student.has_results:
            store.start(self.student.device)
        if isinstance(store, RemoteSignals) and store.signal.kind == "chosen":
            assert store.vocabulary is not None
            return ChosenTeacher(store, self.student, store.vocabulary, self.autocast, teacher.tail, name)
        return StoredTeacher(store, self.student, teacher.tail, name, head=head)

    def _in_job(self, section: str, teacher: NamedTeacherConfig, head: TeacherHead | None) -> SeparateTeacher:
        """A teacher that runs in this job: in a layout of its own, or in the student's."""
        runner = self.student
        source = self.models.teacher(section, offload=self.config.parallel.offload or teacher.offload)
        separate = None if runner.ranks.size == 1 else teacher_layout(self.config, section)
        if separate is None and runner.layout.degrees.expert > 1 and not dispatched_experts(source.build()):
            separate = Layout(replace(runner.layout.degrees, expert=1), offload=source.offload)
        layout = separate or Layout(runner.layout.degrees, offload=source.offload)
        mesh = runner.mesh if separate is None else Mesh(separate.degrees, runner.device)
        return self._separate(f"{section}.parallel", source, layout, mesh, head)

    def _separate(
        self, key: str, source: ModelSource, layout: Layout, mesh: Mesh, head: TeacherHead | None
    ) -> SeparateTeacher:
        with _as_config_error(key):
            return SeparateTeacher(source, layout, mesh, self.student.layout, self.student.mesh, head=head)


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


@contextmanager
def _as_config_error(key: str | None) -> Iterator[None]:
    """Raise a ValueError of the block as a ConfigError with this key; None: as it is."""
    try:
        yield
    except (ConfigError, ProofError):
        raise
    except ValueError as error:
        if key is None:
            raise
        raise ConfigError(key, str(error)) from error
