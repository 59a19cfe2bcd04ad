"""The teachers' signals: opens the stores that a configuration names, and builds the sources under any layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from stillhouse.config import ConfigError, TeacherConfig, TeachersConfig, as_config_error
from stillhouse.data import Documents, load_tokenizer
from stillhouse.engine.losses import configured_objective
from stillhouse.loops.session import Data
from stillhouse.models import Decoder, ProofError
from stillhouse.models.pretrained import read_configuration
from stillhouse.objective import forward_kl
from stillhouse.parallel import (
    DecoderHead,
    DistributedStudent,
    Layout,
    Mesh,
    ModelSource,
    Ranks,
    TeacherHead,
    load_head,
)
from stillhouse.parallel.apply.tensor_parallel import dispatched_experts
from stillhouse.parallel.backbone_cut import is_cuttable
from stillhouse.parallel.host_memory import BufferedHead, HeadBuffers, pin_weights
from stillhouse.proofs.layouts import prove_heads
from stillhouse.run.models import ModelSources, load_model, teacher_fingerprint
from stillhouse.run.objective import RunObjective
from stillhouse.signals import (
    ChosenTeacher,
    InStageTeacher,
    NoTeacher,
    SeparateTeacher,
    SeveralTeachers,
    SignalSource,
    SignalStore,
    StoredTeacher,
    WeightAverage,
)
from stillhouse.signals.cross_tokenizer import CrossTokenizerStore
from stillhouse.signals.scorer import LocalModelStore
from stillhouse.signals.signal_spec import SignalSpec


def open_cross_tokenizer(
    section: str, teacher: TeacherConfig, objective: RunObjective, batch_tokens: int
) -> CrossTokenizerStore:
    """Open the store of a teacher with another tokenizer. The store's `start` loads the teacher.

    Raises ConfigError if the tokenizers cannot be aligned.
    """
    student = objective.student
    assert teacher.model is not None
    ours = load_tokenizer(student.model, student.revision, student.trust_remote_code)
    theirs = load_tokenizer(teacher.model, teacher.revision, teacher.trust_remote_code)
    if teacher.top_k > len(theirs):
        raise ConfigError(
            f"{section}.top_k", f"got {teacher.top_k}, expected at most {len(theirs)}, the teacher's vocabulary"
        )
    model = LocalModelStore(
        teacher.model,
        teacher_fingerprint(teacher),
        SignalSpec("top_k", "float32", teacher.top_k, objective.temperature_of(teacher), with_label=True),
        partial(load_model, section, teacher),
        batch_tokens,
    )
    with as_config_error(f"{section}.cross_tokenizer"):
        return CrossTokenizerStore(model, ours, theirs)


def require_signals(
    stores: Mapping[str, SignalStore],
    teachers: Mapping[str, TeacherConfig],
    objective: RunObjective,
    data: Data,
    ranks: Ranks,
) -> None:
    """Raise ConfigError if a signal store does not fit the data or the objective.

    Servers must also score some documents, to prove that they serve the teacher.

    teachers: all teachers, by the keys of their sections.
    """
    route = None if objective.teachers is None else objective.teachers.route
    for section, store in stores.items():
        teacher = teachers[section]
        _require_objective(section, store, teacher, objective)
        with ranks.all_raise(ConfigError), as_config_error(f"{section}.{teacher.signals_from}"):
            train = _documents_of(section, route, data.train.documents)
            checked = {"data.train": [train]}
            if objective.rollouts:
                longest = _with_completion(train, [rollout.max_new_tokens for rollout in objective.rollouts])
                checked["the longest prompt of data.train with rollout.max_new_tokens"] = [longest]
            if data.dataset is not None:
                checked["data.train"].append(_documents_of(section, route, data.dataset))
            if data.evaluation is not None:
                checked["data.eval"] = [_documents_of(section, route, data.evaluation.documents)]
            try:
                for what, splits in checked.items():
                    for documents in splits:
                        store.require(documents, what, data.train.media_inputs)
                teacher.source_kind.prove(section, teacher, store, train, data, ranks.device)
            except OSError as error:
                raise ValueError(str(error)) from error


def _with_completion(documents: Documents, tokens_of_sources: Sequence[int]) -> Documents:
    """Return the prompt whose length plus the most tokens of its completion is largest, extended to this sum.

    tokens_of_sources: the most tokens of a completion, by the number of the prompt's source.
    """
    set_D = np.zeros(len(documents), dtype=np.int64) if documents.set_D is None else documents.set_D
    added_D = np.array(tokens_of_sources)[set_D]
    number = int((documents.lengths_D + added_D).argmax())
    longest, tokens = documents.select([number]), int(added_D[number])
    tokens_N = np.concatenate([longest.tokens_N, np.repeat(longest.tokens_N[-1:], tokens)])
    targets_N = np.zeros(len(tokens_N), dtype=bool)
    return replace(longest, tokens_N=tokens_N, targets_N=targets_N, offsets=np.array([0, len(tokens_N)]))


def _require_objective(section: str, store: SignalStore, teacher: TeacherConfig, objective: RunObjective) -> None:
    """Raise ConfigError if the objective cannot be computed from the store's signals."""
    signal, temperature = store.signal, objective.temperature_of(teacher)
    if signal.temperature not in (None, temperature):
        raise ConfigError(
            "objective.temperature" if section == "teacher" else f"{section}.temperature",
            f"got {temperature:g}, but {store.name} holds {signal}: expected the same "
            "temperature, or hidden states, which give every temperature",
        )
    for key, loss in objective.objective.losses.items() if signal.kind == "sampled" else ():
        if configured_objective(key, loss).divergence not in (None, forward_kl()):
            raise ConfigError(key, f"got {loss!r}: sampled ids can only estimate forward_kl")
    several = objective.teachers
    if several is not None and several.sum == "distributions" and not signal.is_exact:
        raise ConfigError(
            f"{section}.{teacher.signals_from}",
            f"holds {signal}: expected hidden states, from which distributions can be summed",
        )


def _documents_of(section: str, route: str | None, documents: Documents) -> Documents:
    """Select the documents that a teacher scores, with its prefix. route: the column of teachers' names, or None."""
    name = section.partition(".")[2]
    if route is not None:
        documents = documents.select([row for row, value in enumerate(documents.columns[route]) if value == name])
    return documents.as_read_by(name)


def teacher_of_stages(
    models: ModelSources, teacher: TeacherConfig | None, layout: Layout, store: SignalStore | None, *, head_only: bool
) -> ModelSource | None:
    """The source of the teacher whose layers run in the student's stages, or whose head is on the last stage.

    It is None if the student's stages need no model of the teacher.

    teacher, store: the single teacher, and its signal store if there is one.
    head_only: true if no stage of the student has the teacher's layers, and only the last stage has its head.
    """
    if store is not None and store.signal.is_exact:
        assert store.teacher_folder is not None  # without it, the head of another model would be read
        return models.sharded("teacher", offload=models.offload, folder=store.teacher_folder)
    if store is not None or teacher is None or not teacher.source_kind.runs_model or models.teacher_is_base:
        return None
    if layout.degrees.processes == 1 and not head_only:
        return models.whole_teacher("teacher")
    waits = not head_only and teacher.offload
    return models.sharded("teacher", offload=layout.offload or waits)


@dataclass(frozen=True)
class TeacherSources:
    """Builds the source of all teachers' signals for a student.

    autocast: the dtype of the student's matrix products, or None for the dtype of its weights
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
        """Build the source. A collective of all processes. Raises ConfigError if a model does not fit its layout."""
        if self.teacher is not None:
            return self._source("teacher", self.teacher, self.student.teacher_head)
        if (teachers := self.teachers) is None:
            return NoTeacher()
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

    def _source(self, section: str, teacher: TeacherConfig, head: TeacherHead | None) -> SignalSource:
        """The source of one teacher. head: the teacher's head; None on a process without the student's last stage."""
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

    def _unsplit_teachers(self, teachers: TeachersConfig) -> dict[str, Decoder]:
        """In a run of one process, load the full models of teachers whose head cannot be loaded separately."""
        decoders: dict[str, Decoder] = {}
        for name, teacher in teachers.named.items() if self.student.ranks.size == 1 else ():
            section = f"teachers.{name}"
            if not teacher.source_kind.runs_model or section in self.stores:
                continue
            is_whole = teacher.quantize is not None or teacher.trust_remote_code
            if not is_whole and is_cuttable(read_configuration(str(teacher.model), teacher.revision)):
                continue
            if teacher.offload:
                raise ConfigError(
                    f"{section}.offload", "got true, but its head cannot be loaded separately: expected false"
                )
            decoders[name] = self.models.whole_teacher(section).build().requires_grad_(False)
        return decoders

    def _heads(self, teachers: TeachersConfig, unsplit: Mapping[str, Decoder]) -> dict[str, TeacherHead]:
        """Load the teachers' output heads by teacher name; empty on processes without the student's last stage.

        Without FSDP, the heads are in host memory, and each head is copied to a buffer on the device when it is used.
        """
        runner, is_sharded = self.student, self.student.mesh.is_sharded
        device = runner.device if is_sharded else torch.device("cpu")
        decoders: dict[str, Decoder] = {}
        has_values = True
        for name, teacher in teachers.named.items() if runner.has_last_stage else ():
            store = self.stores.get(section := f"teachers.{name}")
            runs_here = teacher.source_kind.runs_model and name not in unsplit
            if runs_here if store is None else store.signal.is_exact:
                folder = None if store is None else store.teacher_folder
                assert store is None or folder is not None  # without it, the head of another model would be read
                source = self.models.sharded(section, device, offload=self.models.offload, folder=folder)
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

    def model(self, section: str, teacher: TeacherConfig, head: TeacherHead | None) -> SignalSource:
        """The source of a teacher whose model runs in this job."""
        runner, separate, key = self.student, self.separate, f"{section}.parallel"
        if section == "teacher":
            if separate is None:
                return InStageTeacher()
            source, layout = self.models.sharded(section, offload=separate.offload), separate
            if teacher.parallel is None:
                key, separate = "teacher.offload", None
        else:
            source = self.models.sharded(section, offload=self.models.offload or teacher.offload)
            compiles = runner.layout.compile
            separate = None if runner.ranks.size == 1 else self.own_layouts.get(section)
            if separate is None and runner.layout.degrees.expert > 1 and not dispatched_experts(source.build()):
                separate = Layout(replace(runner.layout.degrees, expert=1), offload=source.offload, compile=compiles)
            layout = separate or Layout(runner.layout.degrees, offload=source.offload, compile=compiles)
        mesh = runner.mesh if separate is None else Mesh(separate.degrees, runner.device)
        with as_config_error(key, ProofError):
            return SeparateTeacher(source, layout, mesh, runner.layout, runner.mesh, head=head)
