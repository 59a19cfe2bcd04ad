"""A run that is ready to start: the objects that the loops work with. `run/session.py` builds them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from stillhouse.checkpoint.identity import RunIdentity
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
from stillhouse.data.render.teacher_media import TeacherImages
from stillhouse.engine.engine import Engine, StepOutput
from stillhouse.engine.schedule import StepSchedule
from stillhouse.images.processor import ImageProcessor
from stillhouse.models import Decoder, weight_bytes
from stillhouse.models.document_packing import PACKED
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import ModelSource, Ranks, ShardedMicroBatches
from stillhouse.rollout import PromptPlan
from stillhouse.signals import NoTeacher, SignalSource, SignalStore


@dataclass
class Session:
    """The objects of one run.

    train: the training documents; with rollouts, the prompts. `plan` chooses the prompts of a step.
    dataset: with rollouts, the documents for the share of completions that come from the dataset.
    evaluation: the held-out data; None if the configuration has none.
    stores: the signal stores of teachers (caches and servers), by the keys of the teachers' sections.
    identity: the hashes that must be the same when the run is resumed.
    student_source: the source of the student's weights, for a copy of the student that generates completions.
    teacher_configs: the sections of all teachers, by their keys.
    rollouts: the section rollout for the prompts of each source of data.train.
    prompt_sources: with rollouts, the sources of data.train; empty for a single source.
    processor: the student's processor for images; None if it has none.
    teacher_images: how teachers in this job read images, if they do not share it, by their names.
    by_length: whether a micro-batch has documents of similar lengths, because a model runs one document per row.
    track, values: the trackers, and the configuration by dotted keys, which the trackers show.
    """

    spec: ObjectiveSpec
    tokenizer: PreTrainedTokenizerBase
    train: PackedSequences
    evaluation: PackedSequences | None
    step_schedule: StepSchedule
    student_source: ModelSource
    engine: Engine
    source: SignalSource
    stores: dict[str, SignalStore]
    identity: RunIdentity
    train_config: TrainConfig
    eval_config: EvalConfig
    checkpoint_config: CheckpointConfig
    student_config: StudentConfig
    teacher_configs: Mapping[str, TeacherConfig]
    rollout_config: RolloutConfig | None = None
    rollouts: Sequence[RolloutConfig] = ()
    prompt_sources: Sequence[SourceConfig] = ()
    by_length: bool = False
    seed: int = 0
    track: list[str] = field(default_factory=list)
    values: dict[str, object] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    plan: PromptPlan | None = None
    dataset: Documents | None = None
    processor: ImageProcessor | None = None
    teacher_images: Mapping[str, TeacherImages] = field(default_factory=dict)

    @property
    def processor_files(self) -> list[Path]:
        """The files of the student's processor for images; empty if it has none."""
        return [] if self.processor is None else self.processor.files

    @property
    def device(self) -> torch.device:
        return self.engine.student.device

    @property
    def image_processor(self) -> ImageProcessor | None:
        """The student's processor of images; None if the data has none."""
        return None if self.train.image_inputs is None else self.train.image_inputs.processor

    @property
    def ranks(self) -> Ranks:
        """All processes of the run."""
        return self.engine.student.ranks

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of the student's matrix products; None: the dtype of its weights."""
        # Megatron-Core computes without autocast, with parameters in this dtype
        return self.engine.autocast or self.engine.student.layout.autocast

    @property
    def student(self) -> Decoder:
        """The student; under a pipeline, its part on this process's first stage."""
        return self.engine.student.decoders[0]

    @property
    def teacher(self) -> Decoder | None:
        """The teacher; under a pipeline, its part on this process's first stage.

        None without a teacher, with several teachers or a signal store, or if the student's base is the teacher.
        """
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
    def adapter_in_words(self) -> str | None:
        """A description of the student's adapter; None if it has none."""
        if self.student.lora is None:
            return None
        base_note = "; the teacher is the same model without the adapter, so only one model is in memory"
        kind = self.student_config.quantize
        bits = f"; the base in {kind}, {weight_bytes(self.student) / 2**30:.2f} GiB with it" if kind else ""
        return f"{self.student.lora}{bits}{base_note if self.student_source.teacher_is_base else ''}"

    @property
    def packing_in_words(self) -> dict[str, str]:
        """How documents are packed, by the keys of the models' sections, for models that need a special way."""
        decoders = {"student": self.student, **self.teachers}
        packings = {key: decoder.packing for key, decoder in decoders.items()}
        return {key: str(way) for key, way in packings.items() if way.name != PACKED or way.attention.in_words}

    def shard(self, micro_batches: StepMicroBatches, *, training: bool = True) -> ShardedMicroBatches:
        return self.engine.student.shard(micro_batches, training=training)

    def forward_backward(self, micro_batches: ShardedMicroBatches, engine: Engine | None = None) -> StepOutput:
        """Request a step's signals, then run its forward and backward. engine: None for the run's own engine."""
        engine = engine or self.engine
        signals = self.source_for(engine).request(micro_batches).result()
        return engine.forward_backward(micro_batches, signals, micro_batches.of_all_ranks.normalizer)

    def close(self) -> None:
        """Give up pending requests for signals."""
        self.source.close()

    def source_for(self, engine: Engine) -> SignalSource:
        """Return the source of the signals that an engine's steps need."""
        return self.source if engine.needs_teacher else NoTeacher()
