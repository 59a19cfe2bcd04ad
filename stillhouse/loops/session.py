"""The records of a run that is ready to start, with which the loops work. `run/run.py` builds these records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from stillhouse.checkpoint.resume import RunIdentity
from stillhouse.config import (
    CheckpointConfig,
    EvalConfig,
    RolloutConfig,
    SourceConfig,
    StudentConfig,
    TeacherConfig,
    TrainConfig,
)
from stillhouse.data import Documents, PackedSequences, StepMicroBatches
from stillhouse.data.media import MediaInputs, MediaProcessor
from stillhouse.data.render.teacher_substitutions import TeacherMedia
from stillhouse.engine.engine import Engine, StepOutput
from stillhouse.engine.schedule import StepSchedule
from stillhouse.models import Decoder, weight_bytes
from stillhouse.models.document_packing import PACKED
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import ModelSource, Ranks, ShardedMicroBatches
from stillhouse.rollout import PromptPlan
from stillhouse.signals import NoTeacher, SignalSource, SignalStore


@dataclass(frozen=True)
class Models:
    """The student in its engine, and its teachers: in this job, in caches or on servers.

    source: the source of the teachers' signals.
    stores: the signal stores of teachers (caches and servers), by the keys of the teachers' sections.
    student_source: the source of the student's weights, for a copy of the student that generates completions.
    teacher_configs: the sections of all teachers, by their keys.
    """

    engine: Engine
    source: SignalSource
    stores: Mapping[str, SignalStore]
    student_source: ModelSource
    student_config: StudentConfig
    teacher_configs: Mapping[str, TeacherConfig]

    @property
    def device(self) -> torch.device:
        return self.engine.student.device

    @property
    def ranks(self) -> Ranks:
        """All processes of the run."""
        return self.engine.student.ranks

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of the student's matrix products, or None for the dtype of its weights."""
        # some engines use no autocast; their matrix products have the dtype that the layout gives
        return self.engine.autocast or self.engine.student.layout.autocast

    @property
    def student(self) -> Decoder:
        """The student; under a pipeline, its part on this process's first stage."""
        return self.engine.student.decoders[0]

    @property
    def teacher(self) -> Decoder | None:
        """The teacher, or its part on this process's first stage; None unless exactly one teacher is in this job."""
        return self.source.decoders.get("teacher", self.engine.student.teacher)

    @property
    def teachers(self) -> dict[str, Decoder]:
        """The teachers that run in this job as separate models, by the keys of their sections."""
        return dict(self.source.decoders) or ({} if self.teacher is None else {"teacher": self.teacher})

    @property
    def has_exact_teacher(self) -> bool:
        """Whether there is exactly one teacher, and its signals cover the full vocabulary."""
        return "teacher" in self.teacher_configs and all(store.signal.is_exact for store in self.stores.values())

    @property
    def signal_temperatures(self) -> set[float]:
        """The temperatures of the signals in stores. Signals that can be used at every temperature count as 1."""
        return {store.signal.temperature or 1.0 for store in self.stores.values()}

    @property
    def adapter_in_words(self) -> str | None:
        """A description of the student's adapter, or None if the student has no adapter."""
        if self.student.lora is None:
            return None
        base_note = "; the teacher is the same model without the adapter, so only one model is in memory"
        kind = self.student_config.quantize
        bits = f"; the base in {kind}, {weight_bytes(self.student) / 2**30:.2f} GiB with it" if kind else ""
        return f"{self.student.lora}{bits}{base_note if self.student_source.teacher_is_base else ''}"

    @property
    def packing_in_words(self) -> dict[str, str]:
        """How documents are packed, by the models' sections, for models that need special packing."""
        decoders = {"student": self.student, **self.teachers}
        packings = {key: decoder.packing for key, decoder in decoders.items()}
        return {key: str(way) for key, way in packings.items() if way.name != PACKED or way.attention.in_words}

    def shard(self, micro_batches: StepMicroBatches, *, training: bool = True) -> ShardedMicroBatches:
        return self.engine.student.shard(micro_batches, training=training)

    def step(self, micro_batches: ShardedMicroBatches, engine: Engine | None = None) -> StepOutput:
        """Request a step's signals, then run its forward and backward. engine: None for the run's engine."""
        engine = engine or self.engine
        signals = self.source_for(engine).request(micro_batches).result()
        return engine.forward_backward(micro_batches, signals, micro_batches.all_ranks.normalizer)

    def source_for(self, engine: Engine) -> SignalSource:
        """Return the source of the signals that an engine's steps need."""
        return self.source if engine.needs_teacher else NoTeacher()


@dataclass(frozen=True)
class Data:
    """The tokenizer and the packed documents.

    train: the training documents; in a run with rollouts, prompts without targets.
    evaluation: the held-out documents, or None if the configuration has none.
    hashes: for each split, a hash of its documents.
    dataset: the documents with completions, if a run with rollouts takes a share of each step from the dataset.
    processor: the student's processor of media, or None if the student has none.
    teacher_media: by the teachers' names, the readers of media for the teachers in this job that do not use
        `processor`.
    processors: hashes of the media processors that determine pixels, by the sections of their models. `hashes`
        depends on these hashes.
    by_length: whether a micro-batch has documents of similar lengths, because a model runs one document per row.
    """

    tokenizer: PreTrainedTokenizerBase
    train: PackedSequences
    evaluation: PackedSequences | None
    hashes: dict[str, str]
    warnings: list[str]
    dataset: Documents | None = None
    processor: MediaProcessor | None = None
    teacher_media: Mapping[str, TeacherMedia] = field(default_factory=dict)
    processors: Mapping[str, str] = field(default_factory=dict)
    by_length: bool = False

    @property
    def has_media(self) -> bool:
        """Whether a document has media."""
        return self.train.media_inputs is not None

    @property
    def media_processor(self) -> MediaProcessor | None:
        """The student's processor of media, or None if the data has no media."""
        return None if self.train.media_inputs is None else self.train.media_inputs.processor

    @property
    def processor_files(self) -> Sequence[Path]:
        """The files of the student's processor of media; empty if there is no processor."""
        return [] if self.processor is None else self.processor.files

    def with_media_inputs(self, media_inputs: MediaInputs) -> "Data":
        """A copy of the data whose micro-batches have these inputs of media."""
        evaluation = None if self.evaluation is None else self.evaluation.with_media_inputs(media_inputs)
        return replace(self, train=self.train.with_media_inputs(media_inputs), evaluation=evaluation)

    def sorted_by_length(self, max_tokens: int, held_out_tokens: int) -> "Data":
        """A copy of the data. Each sequence has documents of similar lengths, and at most `max_tokens` tokens, or
        `held_out_tokens` tokens in the evaluation (see `PackedSequences`).
        """
        evaluation = None if self.evaluation is None else self.evaluation.sorted_by_length(held_out_tokens)
        return replace(self, train=self.train.sorted_by_length(max_tokens), evaluation=evaluation)


@dataclass(frozen=True)
class Loss:
    """The objective of a run.

    spec: the parsed objective.
    in_words: a sentence that describes the objective.
    """

    spec: ObjectiveSpec
    in_words: str


@dataclass(frozen=True)
class Schedule:
    """The sequences or completions of each step, and the steps after which the run evaluates and saves.

    step_schedule: divides the sequences, or the completions in a run with rollouts, into steps.
    """

    step_schedule: StepSchedule
    train_config: TrainConfig
    eval_config: EvalConfig
    checkpoint_config: CheckpointConfig
    seed: int

    @property
    def steps(self) -> int:
        return self.step_schedule.steps

    @property
    def held_out_tokens(self) -> int:
        """The maximum number of tokens in a micro-batch of an evaluation."""
        return self.eval_config.micro_batch_tokens or self.train_config.micro_batch_tokens

    def evaluates_after(self, step: int) -> bool:
        """Whether to evaluate after this number of steps. `checkpoint.best` needs metrics at each checkpoint."""
        compared = self.checkpoint_config.best is not None and self.saves_after(step)
        every = self.eval_config.every
        return step in (0, self.steps) or (every > 0 and (step % every == 0 or compared))

    def saves_after(self, step: int) -> bool:
        """Whether `checkpoint.every` makes a checkpoint due after this number of steps."""
        return self.checkpoint_config.every > 0 and step % self.checkpoint_config.every == 0


@dataclass(frozen=True)
class RolloutPlan:
    """The prompts of an on-policy run, and the settings of their completions.

    prompts: chooses the prompts of a step.
    config, configs: the section rollout, and its values for the prompts of each source of data.train.
    sources: the sources of data.train; empty for a single source.
    """

    prompts: PromptPlan
    config: RolloutConfig
    configs: Sequence[RolloutConfig]
    sources: Sequence[SourceConfig]


@dataclass(frozen=True)
class Session:
    """The records of one run.

    rollout: the prompts of an on-policy run, or None in a run on a fixed dataset.
    identity: the hashes that must be the same when the run is resumed.
    values: the configuration by dotted keys, which the trackers show.
    later_steps: the number of steps of the runs that the same command makes after this run.
    """

    models: Models
    data: Data
    loss: Loss
    schedule: Schedule
    rollout: RolloutPlan | None
    identity: RunIdentity
    values: Mapping[str, Any]
    warnings: Sequence[str] = ()
    later_steps: int = 0

    def close(self) -> None:
        """Cancel open requests for signals."""
        self.models.source.close()
