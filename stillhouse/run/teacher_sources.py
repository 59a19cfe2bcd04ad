"""Builds the sources of the teachers' signals, under any layout."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from stillhouse.config import ConfigError, NamedTeacherConfig, TeacherConfig, TeachersConfig, as_config_error
from stillhouse.models import Decoder, ProofError
from stillhouse.models.pretrained import read_configuration
from stillhouse.parallel import DecoderHead, DistributedStudent, Layout, Mesh, ModelSource, TeacherHead, load_head
from stillhouse.parallel.apply.tensor_parallel import dispatched_experts
from stillhouse.parallel.backbone_cut import is_cuttable
from stillhouse.parallel.host_memory import BufferedHead, HeadBuffers, pin_weights
from stillhouse.proofs.layouts import prove_heads
from stillhouse.run.models import ModelSources
from stillhouse.signals import (
    ChosenTeacher,
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


def teacher_of_stages(
    models: ModelSources, teacher: TeacherConfig | None, layout: Layout, store: SignalStore | None, *, head_only: bool
) -> ModelSource | None:
    """The source of the teacher whose layers run in the student's stages, or whose head is on the last stage.

    teacher, store: the single teacher, and its signal store, if it has one
    head_only: whether the teacher's layers do not run in the student's stages

    None: no model of the teacher is needed in the student's stages.
    """
    if store is not None:
        return models.head_of_store("teacher", store) if store.signal.is_exact else None
    if teacher is None or not teacher.source_kind.runs_model or models.teacher_is_base:
        return None
    if layout.degrees.processes == 1 and not head_only:
        return models.whole_teacher("teacher")
    waits = not head_only and teacher.offload
    return models.teacher("teacher", offload=layout.offload or waits)


@dataclass(frozen=True)
class TeacherSources:
    """Builds the source of all teachers' signals for a student.

    autocast: the dtype of the student's matrix products; None: the dtype of its weights
    average: the average of the student's weights, if a teacher uses it
    stores: the signal stores, by the keys of the teachers' sections
    teacher, teachers: the sections `teacher` and `teachers`; a run has at most one of them
    own_layouts: the layouts of the teachers with the key `parallel`, by the keys of their sections
    separate: the layout of a single teacher outside the student's stages
    """

    models: ModelSources
    student: DistributedStudent
    autocast: torch.dtype | None
    average: WeightAverage | None
    stores: Mapping[str, SignalStore]
    teacher: TeacherConfig | None
    teachers: TeachersConfig | None
    own_layouts: Mapping[str, Layout]
    separate: Layout | None

    def source(self) -> SignalSource:
        if self.teachers is not None:
            return self._several(self.teachers)
        if self.teacher is None:
            return NoTeacher()
        return self._source("teacher", self.teacher, self.student.teacher_head)

    def _source(self, section: str, teacher: TeacherConfig, head: TeacherHead | None) -> SignalSource:
        """The source of one teacher. head: the teacher's head, on processes with the student's last stage."""
        store = self.stores.get(section)
        if store is None:
            source: SignalSource = teacher.source_kind.source(self, section, teacher, head)
            return source
        if self.student.has_results:
            store.start(self.student.device)
        name = section.partition(".")[2]
        if store.signal.kind == "chosen":
            return ChosenTeacher(store, self.student, self.autocast, teacher.tail, name)
        return StoredTeacher(store, self.student, teacher.tail, name, head=head)

    def _several(self, teachers: TeachersConfig) -> SeveralTeachers:
        """A collective of all processes. Raises ConfigError if a model does not fit its layout."""
        unsplit = self._unsplit_teachers(teachers)
        heads = self._heads(teachers, unsplit)
        sources: dict[str, SignalSource] = {}
        for name, teacher in teachers.named.items():
            head = heads.get(name)
            if name in unsplit:
                layers = ModelSource(partial(unsplit.__getitem__, name), is_proven=True)
                layout, mesh = Layout(), self.student.mesh
                sources[name] = SeparateTeacher(layers, layout, mesh, layout, mesh, head=head, keep_head=True)
            else:
                sources[name] = self._source(f"teachers.{name}", teacher, head)
        is_sharded = bool(heads) and self.student.mesh.is_sharded
        return SeveralTeachers(sources, self.student, teachers.route, heads_are_sharded=is_sharded)

    def _unsplit_teachers(self, teachers: TeachersConfig) -> dict[str, Decoder]:
        """In a run of one process: the full models of the teachers whose layers and head cannot be separated."""
        decoders: dict[str, Decoder] = {}
        for name, teacher in teachers.named.items() if self.student.ranks.size == 1 else ():
            section = f"teachers.{name}"
            is_here = teacher.source_kind.runs_model and section not in self.stores
            if not is_here or (teacher.quantize is None and _can_be_cut(teacher)):
                continue
            if teacher.offload:
                raise ConfigError(
                    f"{section}.offload", "got true for a family whose head cannot be loaded separately"
                )
            decoders[name] = self.models.whole_teacher(section).build().requires_grad_(False)
        return decoders

    def _heads(self, teachers: TeachersConfig, unsplit: Mapping[str, Decoder]) -> dict[str, TeacherHead]:
        """The teachers' output heads, by name; empty on processes without the student's last stage.

        Without FSDP, the heads are in host memory, and each head is copied to a buffer on the device for its use.
        """
        runner, is_sharded = self.student, self.student.mesh.is_sharded
        device = runner.device if is_sharded else torch.device("cpu")
        decoders: dict[str, Decoder] = {}
        has_values = True
        for name, teacher in teachers.named.items() if runner.has_last_stage else ():
            section = f"teachers.{name}"
            store = self.stores.get(section)
            if store is not None and store.signal.is_exact:
                source = self.models.head_of_store(section, store, device)
            elif store is None and teacher.source_kind.runs_model and name not in unsplit:
                source = self.models.teacher(section, device, offload=self.models.offload)
            else:
                continue
            decoders[name] = load_head(source, runner.layout, runner.mesh)
            has_values = source.has_values
        if has_values:
            prove_heads(runner.mesh, {f"teachers.{name}": decoder for name, decoder in decoders.items()})
        if is_sharded:
            return {name: DecoderHead(decoder) for name, decoder in decoders.items()}
        for decoder in decoders.values():
            pin_weights(decoder, runner.device)
        buffers = HeadBuffers(runner.device)
        return {name: BufferedHead(name, decoder, buffers) for name, decoder in (decoders | dict(unsplit)).items()}

    def _single_model(self, teacher: TeacherConfig, head: TeacherHead | None) -> SignalSource:
        separate, mesh = self.separate, self.student.mesh
        if separate is None:
            return InStageTeacher(self.student)
        layers = self.models.teacher("teacher", offload=separate.offload)
        if teacher.parallel is None:
            return self._separate("teacher.offload", layers, separate, mesh, head)
        return self._separate("teacher.parallel", layers, separate, Mesh(separate.degrees, mesh.device), head)

    def model(self, section: str, teacher: TeacherConfig, head: TeacherHead | None) -> SignalSource:
        """The source of a teacher whose model runs in this job."""
        if section == "teacher":
            return self._single_model(teacher, head)
        runner = self.student
        source = self.models.teacher(section, offload=self.models.offload or teacher.offload)
        compiles = runner.layout.compile
        separate = None if runner.ranks.size == 1 else self.own_layouts.get(section)
        if separate is None and runner.layout.degrees.expert > 1 and not dispatched_experts(source.build()):
            separate = Layout(replace(runner.layout.degrees, expert=1), offload=source.offload, compile=compiles)
        layout = separate or Layout(runner.layout.degrees, offload=source.offload, compile=compiles)
        mesh = runner.mesh if separate is None else Mesh(separate.degrees, runner.device)
        return self._separate(f"{section}.parallel", source, layout, mesh, head)

    def self_teacher(self, teacher: TeacherConfig) -> SelfTeacher:
        """The source for a teacher that is the student itself, with its present weights or their average."""
        assert isinstance(teacher, NamedTeacherConfig)
        return SelfTeacher(self.student, self.autocast, self.average if teacher.student == "ema" else None)

    def _separate(
        self, key: str, source: ModelSource, layout: Layout, mesh: Mesh, head: TeacherHead | None
    ) -> SeparateTeacher:
        with as_config_error(key, ProofError):
            return SeparateTeacher(source, layout, mesh, self.student.layout, self.student.mesh, head=head)


def _can_be_cut(teacher: TeacherConfig) -> bool:
    """Whether the teacher's layers and its output head can be loaded separately."""
    if teacher.trust_remote_code:
        return False
    return is_cuttable(read_configuration(str(teacher.model), teacher.revision))
