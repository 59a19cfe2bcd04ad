"""Builds the sources of the teachers' signals, under any layout."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from stillhouse.config import ConfigError, NamedTeacherConfig, TeacherConfig, TeachersConfig, as_config_error
from stillhouse.models import Decoder, ProofError
from stillhouse.models.pretrained import read_configuration
from stillhouse.parallel import (
    BufferedHead,
    DecoderHead,
    DistributedStudent,
    HeadBuffers,
    Layout,
    Mesh,
    ModelSource,
    TeacherHead,
    apply_parallelism,
    only_head,
    prove_heads,
)
from stillhouse.parallel.apply.expert_parallel import dispatched_experts
from stillhouse.parallel.stages import is_cuttable
from stillhouse.run.models import ModelSources
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


def teacher_of_stages(
    models: ModelSources,
    teacher: TeacherConfig | None,
    layout: Layout,
    store: SignalStore | None,
    *,
    head_only: bool,
) -> ModelSource | None:
    """The teacher in the student's stages, or the one whose head is on the last stage; None without one.

    teacher, store: the single teacher, and its store of signals, if it has one
    head_only: whether a teacher's layers do not run in the student's stages
    """
    if store is not None:
        return models.head_of_store("teacher", store) if store.signal.is_exact else None
    if teacher is None or models.teacher_is_base:
        return None
    if layout.degrees.processes == 1 and not head_only:
        return models.whole_teacher("teacher")
    waits = not head_only and teacher.offload
    return models.teacher("teacher", offload=layout.offload or waits)


@dataclass(frozen=True)
class TeacherSources:
    """Builds the source of all teachers' signals for a student.

    student: its runner
    autocast: the dtype of the student's matrix products; None: that of its weights
    average: of the student's weights, if a teacher has them
    stores: the stores of teachers' signals, by the keys of those teachers' sections
    teacher, teachers: the sections, of which a run has at most one
    own_layouts: of the teachers with a layout of their own, by the keys of their sections
    """

    models: ModelSources
    student: DistributedStudent
    autocast: torch.dtype | None
    average: WeightAverage | None
    stores: Mapping[str, SignalStore]
    teacher: TeacherConfig | None
    teachers: TeachersConfig | None
    own_layouts: Mapping[str, Layout]

    def source(self, separate: Layout | None) -> SignalSource:
        """separate: the layout of a single teacher that does not run in the student's stages."""
        if self.teachers is not None:
            return self._several(self.teachers)
        teacher, mesh = self.teacher, self.student.mesh
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

    def _several(self, teachers: TeachersConfig) -> SeveralTeachers:
        """The source of all teachers' signals; their output heads are on the student's last stage.

        A collective of all processes. Raises ConfigError for a model that its layout does not fit.
        """
        unsplit = self._unsplit_teachers(teachers)
        heads = self._heads(teachers, unsplit)
        sources: dict[str, SignalSource] = {}
        for name, teacher in teachers.named.items():
            section, head = f"teachers.{name}", heads.get(name)
            if teacher.student is not None:
                sources[name] = SelfTeacher(
                    self.student, self.autocast, self.average if teacher.student == "ema" else None
                )
            elif section in self.stores:
                sources[name] = self._stored(teacher, self.stores[section], head, name)
            elif name in unsplit:
                layers = ModelSource(partial(unsplit.__getitem__, name), is_proven=True)
                layout, mesh = Layout(), self.student.mesh
                sources[name] = SeparateTeacher(layers, layout, mesh, layout, mesh, head=head, keep_head=True)
            else:
                sources[name] = self._in_job(section, teacher, head)
        is_sharded = bool(heads) and self.student.mesh.sharding is not None
        return SeveralTeachers(sources, self.student, teachers.route, heads_are_sharded=is_sharded)

    def _unsplit_teachers(self, teachers: TeachersConfig) -> dict[str, Decoder]:
        """In one process, the teachers whose layers and head cannot be loaded separately."""
        decoders: dict[str, Decoder] = {}
        for name, teacher in teachers.named.items() if self.student.ranks.size == 1 else ():
            section = f"teachers.{name}"
            if teacher.student is not None or section in self.stores:
                continue
            if teacher.quantize is None and _can_be_cut(teacher):
                continue
            if teacher.offload:
                raise ConfigError(
                    f"{section}.offload", "got true for a family whose head cannot be loaded separately"
                )
            decoders[name] = self.models.whole_teacher(section).build().requires_grad_(False)
        return decoders

    def _heads(self, teachers: TeachersConfig, unsplit: Mapping[str, Decoder]) -> dict[str, TeacherHead]:
        """The teachers' output heads by their names, on processes with the student's last stage.

        Heads that FSDP does not shard are in host memory, and share buffers on the device.
        """
        runner, is_sharded = self.student, self.student.mesh.sharding is not None
        device = runner.device if is_sharded else torch.device("cpu")
        decoders: dict[str, Decoder] = {}
        for name, teacher in teachers.named.items() if runner.has_last_stage else ():
            section = f"teachers.{name}"
            store = self.stores.get(section)
            if teacher.student is not None or name in unsplit or (store is not None and not store.signal.is_exact):
                continue
            source = (
                self.models.teacher(section, device, offload=self.models.offload)
                if store is None
                else self.models.head_of_store(section, store, device)
            )
            decoders[name] = _head(source, runner.layout, runner.mesh)
        prove_heads(runner, {f"teachers.{name}": decoder for name, decoder in decoders.items()})
        if is_sharded:
            return {name: DecoderHead(decoder) for name, decoder in decoders.items()}
        buffers = HeadBuffers(runner.device)
        return {name: BufferedHead(name, decoder, buffers) for name, decoder in (decoders | dict(unsplit)).items()}

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
        source = self.models.teacher(section, offload=self.models.offload or teacher.offload)
        separate = None if runner.ranks.size == 1 else self.own_layouts.get(section)
        if separate is None and runner.layout.degrees.expert > 1 and not dispatched_experts(source.build()):
            separate = Layout(replace(runner.layout.degrees, expert=1), offload=source.offload)
        layout = separate or Layout(runner.layout.degrees, offload=source.offload)
        mesh = runner.mesh if separate is None else Mesh(separate.degrees, runner.device)
        return self._separate(f"{section}.parallel", source, layout, mesh, head)

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


def _head(source: ModelSource, layout: Layout, mesh: Mesh) -> Decoder:
    decoder = only_head(source.build).requires_grad_(False).eval()
    apply_parallelism(decoder, replace(layout, gather_dtype=None), mesh)
    assert source.load_weights is not None
    source.load_weights(decoder)
    return decoder
