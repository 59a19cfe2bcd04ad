"""Makes the objects of a run, a dry run (`check`) or a cache from a configuration.

`RunSetup` has the full configuration. The objects that it makes get only the sections or the values that they need.
"""

from dataclasses import replace
from functools import cached_property
from typing import TypeVar

import torch

from stillhouse.config import ConfigError, ParallelConfig, RunConfig, StudentConfig, TeacherConfig, as_config_error
from stillhouse.config.check_rules import check_rules
from stillhouse.config.engine_capabilities import GROUP, capabilities
from stillhouse.config.read_config import dotted_values
from stillhouse.engine.engine import Engine
from stillhouse.engine.engine_kind import EngineKind
from stillhouse.gguf.plain_folder import plain_folder
from stillhouse.hashing import json_hash
from stillhouse.models import ProofError, quantized_identity
from stillhouse.objective import use_kernels
from stillhouse.parallel import (
    Degrees,
    Layout,
    Mesh,
    Ranks,
    best_precision,
    choose_device,
    connect_processes,
    log_rank0,
    process_count,
    start_alone,
)
from stillhouse.registry import load
from stillhouse.run.agreement import require_same_configuration
from stillhouse.run.models import ModelSources, source_fingerprint, teacher_fingerprint
from stillhouse.run.objective import RunObjective
from stillhouse.run.teachers import TeacherSources, teacher_of_stages
from stillhouse.signals import SignalSource, SignalStore, WeightAverage

ModelT = TypeVar("ModelT", StudentConfig, TeacherConfig)


class RunSetup:
    """The objects that a configuration describes. A cached property makes its object at the first use.

    warnings: a warning for each library whose version differs between ranks; filled by the first use of `ranks`.

    config: the configuration, with the plain folder of each model that is a GGUF.
    values: the values of the configuration as it was written, by dotted keys; a GGUF keeps its own path.

    Raises ConfigError if the configuration breaks a rule of `check_rules`, and for a GGUF that cannot be converted.
    """

    def __init__(self, config: RunConfig):
        check_rules(config)
        self.values = dotted_values(config)
        config = with_plain_models(config)
        self.config = config
        self.teachers = config.teacher_sections
        self.warnings: list[str] = []
        sections = config.objective, config.student, config.teacher, config.teachers
        self.objective = RunObjective(
            *sections, config.rollouts, config.rollout_key, turns_in_words=config.data.turns_in_words
        )

        #: the dtype of the student's matrix products, or None for the dtype of its weights
        self._autocast = torch.bfloat16 if config.train.precision == "bf16" else None

    @cached_property
    def device(self) -> torch.device:
        """The device of this process. Raises ConfigError if this machine does not have it."""
        return device_of(self.config.device)

    @cached_property
    def stores(self) -> dict[str, SignalStore]:
        """The signal stores, by the keys of the teachers' sections. Raises ConfigError if one cannot be used."""
        tokens = self.config.train.micro_batch_tokens  # the batch size of teachers with another tokenizer
        stored = {section: teacher for section, teacher in self.teachers.items() if teacher.source_kind.is_store}
        return {
            key: teacher.source_kind.open(key, teacher, self.objective, tokens) for key, teacher in stored.items()
        }

    @cached_property
    def layout(self) -> Layout:
        """The layout of the student. Raises ConfigError if it is impossible with the job's number of processes."""
        train = self.config.train
        return replace(
            configured_layout(self.config.parallel, process_count()),
            residual_dtype=None if train.residual_dtype is None else torch.bfloat16,
            compile=train.compile,
            autocast=self._autocast,
            recompute=train.activation_checkpointing,
        )

    @cached_property
    def own_layouts(self) -> dict[str, Layout]:
        """The layouts of the teachers with the key `parallel`, by the keys of their sections."""
        parallel, processes, compiles = self.config.parallel, process_count(), self.config.train.compile
        return {
            section: replace(
                configured_layout(teacher.parallel, processes, f"{section}.parallel"),
                offload=parallel.offload or teacher.offload,
                compile=compiles,
            )
            for section, teacher in self.teachers.items()
            if teacher.parallel is not None
        }

    @cached_property
    def ranks(self) -> Ranks:
        """All processes of the job. The first use connects them and is a collective of all processes.

        Raises ConfigError for an impossible layout, and if the ranks were started with different configurations.
        """
        own_layouts, device = self.own_layouts.values(), self.device
        for layout in (self.layout, *own_layouts):
            require_sharing(layout, device)
        if process_count() > 1:
            connect_processes(device, self.config.train.timeout)
        elif capabilities(self.config.parallel.engine).always_in_group:
            start_alone(device)
        ranks = Ranks.all_of_job(device)
        self.warnings = require_same_configuration(self.values, ranks)
        return ranks

    def model_hashes(self) -> dict[str, str]:
        """Return the fingerprints of the student and of the teachers, by the keys of their sections.

        A fingerprint is a hash of the model's files, the commit of a model on the hub, or the identity of a store.
        With `student.init`, the student's fingerprint also depends on the teacher's files, or on the seed of the
        initial weights. A teacher that is the student itself has no fingerprint.
        """
        student, init = self.config.student, self.config.student.init
        file_hash = source_fingerprint(student.model, student.revision)
        fingerprints = {"student": quantized_identity(file_hash, student.quantize)}
        if init is not None:
            start: str | int = self.config.seed
            if init.source == "teacher":
                start = source_fingerprint(str(self.teachers["teacher"].model), self.teachers["teacher"].revision)
            fingerprints["student"] = json_hash([file_hash, init.source, init.layers, start])
        for section, teacher in self.teachers.items():
            if section in self.stores:
                fingerprints[section] = self.stores[section].identity
            elif teacher.model is not None:
                fingerprints[section] = teacher_fingerprint(teacher)
        return fingerprints

    def models(self, mesh: Mesh, *, multimodal: bool = False) -> ModelSources:
        """The sources of the models for the processes of a mesh. multimodal: whether the models read media."""
        config = self.config
        return ModelSources(
            config.student,
            self.teachers,
            self.objective.parts,
            mesh,
            config.seed,
            config.parallel.offload,
            config.train.activation_checkpointing,
            config.data.packing,
            self._autocast,
            multimodal,
            self.objective.spec.uses_ratios,
        )

    def engine(self, models: ModelSources, layout: Layout) -> tuple[Engine, SignalSource]:
        """Make the engine and the source of the teachers' signals. Each rank reads its own shard of the weights.

        Raises ConfigError if a model does not fit its layout.
        """
        config, mesh = self.config, models.mesh
        kind: EngineKind = load(GROUP, config.parallel.engine)()
        use_kernels(config.objective.kernels, log_rank0)
        separate = self.own_layouts.get("teacher")  # the layout of a single teacher outside the student's stages
        if mesh.ranks.size == 1:
            is_moved = config.teacher is not None and config.teacher.offload
            separate = Layout(offload=True, compile=config.train.compile) if is_moved else None
        head_only = separate is not None or bool(self.stores) or config.teachers is not None
        key_of_one_process = None if separate is None else "teacher.offload"
        with as_config_error("parallel" if mesh.ranks.size > 1 else key_of_one_process, ProofError):
            source = models.student_source
            store = self.stores.get("teacher")
            teacher = teacher_of_stages(models, config.teacher, layout, store, head_only=head_only)
            student = kind.distribute(layout, mesh, source, teacher, teacher_head_only=head_only)
        decays = [teacher.ema_decay for teacher in config.several.values() if teacher.student == "ema"]
        average = WeightAverage(student, decays[0]) if decays else None
        engine = kind.engine(
            student,
            self.objective.spec,
            train=config.train,
            autocast=self._autocast,
            chunk_tokens=config.objective.chunk_tokens,
            parts=[part.distributed(student) for part in self.objective.parts],
            average=average,
        )
        teachers = config.teacher, config.teachers, self.own_layouts, separate
        signals = TeacherSources(models, student, engine.autocast, average, self.stores, *teachers).source()
        if mesh.ranks.size > 1:
            # ranks with different tokens need different dropout masks; tensor-parallel ranks need the same masks
            torch.manual_seed(config.seed + mesh.ranks.rank - mesh.coordinate("tensor"))
        return engine, signals


def with_precision(config: RunConfig) -> RunConfig:
    """Replace `train.precision: auto` in the configuration by the best precision of this process's device.

    The resolved value is compared between ranks and at a resume, so a run never mixes two precisions.
    """
    if config.train.precision != "auto":
        return config
    precision = best_precision(device_of(config.device))
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})


def with_plain_models(config: RunConfig) -> RunConfig:
    """Replace each model of the configuration that is a GGUF by its plain folder. Raises ConfigError if it cannot be
    converted.
    """
    several = {name: _plain(f"teachers.{name}", teacher) for name, teacher in config.several.items()}
    sections = {
        "student": _plain("student", config.student),
        "teacher": config.teacher and _plain("teacher", config.teacher),
        "teachers": config.teachers and config.teachers.model_copy(update=several),
    }
    return config.model_copy(update=sections)


def _plain(section: str, model: ModelT) -> ModelT:
    if model.model is None:
        return model
    with as_config_error(f"{section}.model"):
        return model.model_copy(update={"model": plain_folder(model.model)})


def device_of(name: str) -> torch.device:
    """The device that the key `device` names. Raises ConfigError if this machine does not have it."""
    with as_config_error("device"):
        return choose_device(name)


def configured_layout(parallel: ParallelConfig, processes: int, key: str = "parallel") -> Layout:
    """The layout that a section describes. key: the section's key, for error messages.

    Raises ConfigError for an impossible layout (see `ParallelConfig.degrees`).
    """
    return Layout(
        Degrees(**parallel.degrees(processes, key)),
        parallel.schedule,
        None if parallel.gather_dtype is None else torch.bfloat16,
        parallel.offload,
        sequence=parallel.sequence,
        options=parallel.settings,
    )


def require_sharing(layout: Layout, device: torch.device) -> None:
    """Raise ConfigError for `offload` on a CPU, and for options of FSDP if the layout does not use FSDP."""
    for key in ("offload", "gather_dtype"):
        if getattr(layout, key):
            require_fsdp(f"parallel.{key}", layout, device)


def require_fsdp(key: str, layout: Layout, device: torch.device) -> None:
    """Raise ConfigError for `offload` on a CPU, and for an option of FSDP if the layout does not use FSDP."""
    if key.endswith("offload") and device.type == "cpu":
        raise ConfigError(
            key, "got true on a CPU, where everything is in host memory already: expected false, or a GPU"
        )
    if layout.degrees.replicate * layout.degrees.shard == 1:
        raise ConfigError(
            key, f"has no effect under {layout}, which does not use FSDP: expected fsdp, replicate or context above 1"
        )
