"""Prepares everything that a run needs, in the order in which mistakes are cheapest to find.

`prepare` checks the objective's expression first, then the tokenizers, then the data, then the models. So a misspelt
divergence is reported within a second, and a teacher with another tokenizer before any weight is read.
"""

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from stillhouse.config import ConfigError, RunConfig
from stillhouse.data import (
    DataReport,
    PackedSequences,
    StepMicroBatches,
    check_vocabulary,
    tokenizer_fingerprint,
)
from stillhouse.display import escaped
from stillhouse.models import Decoder, check_document_length, check_saving
from stillhouse.objective.spec import ObjectiveSpec, parse_objective
from stillhouse.parallel import (
    Runner,
    ShardedMicroBatches,
    local_rank,
    process_count,
    shard_micro_batches,
    start,
    watchdog,
)
from stillhouse.teachers import NoTeacher, SeparateTeacher, SignalSource, SignalStore, StoredTeacher
from stillhouse.train.agreement import require_same_configuration, require_same_sources
from stillhouse.train.build import (
    build_engine,
    model_fingerprints,
    require_adapters,
    teacher_is_base,
    teacher_layout,
)
from stillhouse.train.cross_tokenizer import require_objective
from stillhouse.train.engine import Engine
from stillhouse.train.inputs import load_run_data
from stillhouse.train.layouts import layout_of, require_sharing
from stillhouse.train.logging import require_trackers
from stillhouse.train.schedule import StepSchedule, make_step_schedule
from stillhouse.train.stores import open_store, require_signals


@dataclass
class Session:
    """One run, ready to start.

    evaluation: the held-out data; None if the configuration asks for none. source: where the teacher's signals come
    from. data_hashes: a hash of each split's documents. model_hashes: a hash of the tokenizer and of each model's
    files.
    """

    config: RunConfig
    spec: ObjectiveSpec
    device: torch.device
    tokenizer: PreTrainedTokenizerBase
    tokenizer_hash: str
    train: PackedSequences
    evaluation: PackedSequences | None
    step_schedule: StepSchedule
    engine: Engine
    source: SignalSource
    data_hashes: dict[str, str]
    model_hashes: dict[str, str]
    warnings: list[str] = field(default_factory=list)

    @property
    def runner(self) -> Runner:
        return self.engine.runner

    @property
    def student(self) -> Decoder:
        """The student; under a pipeline, its part on this process's first stage."""
        return self.runner.students()[0]

    @property
    def teacher(self) -> Decoder | None:
        """The teacher; under a pipeline, its part on this process's first stage.

        None if there is no teacher, or if the teacher is the student's own base model.
        """
        return self.source.decoder if isinstance(self.source, SeparateTeacher) else self.runner.teacher

    @property
    def store(self) -> SignalStore | None:
        """The store from which the teacher's signals come, if they come from one."""
        return self.source.store if isinstance(self.source, StoredTeacher) else None

    @property
    def has_exact_teacher(self) -> bool:
        """Whether the teacher's signals give the whole distribution, and not only some ids."""
        return self.config.teacher is not None and (self.store is None or self.store.signal.is_exact)

    def shard(self, micro_batches: StepMicroBatches, *, training: bool = True) -> ShardedMicroBatches:
        """This process's part of a step's micro-batches. training=False: of an evaluation's micro-batches."""
        uniform_shapes = training and self.runner.layout.stages > 1
        return shard_micro_batches(micro_batches, self.runner.mesh, self.device, uniform_shapes=uniform_shapes)

    def close(self) -> None:
        """Give up requests for signals that are under way."""
        if isinstance(self.source, StoredTeacher):
            self.source.close()

    def source_for(self, objective: ObjectiveSpec) -> SignalSource:
        """The source of the signals that an objective needs."""
        return self.source if objective.needs_teacher else NoTeacher()


def prepare(config: RunConfig, *, announce: bool = True) -> Session:
    """Load and check everything that the run needs.

    Raises ConfigError for a mistake in the configuration, ValueError for a mistake in the data or models.
    announce: print the resolved objective first, before anything is loaded.
    """
    spec, store = objective_spec(config), open_store(config)
    if announce:
        print(in_words(config, spec, store), flush=True)
    require_trackers(config.track)
    require_adapters(config.student)
    layout = layout_of(config.parallel, process_count())
    device, warnings = connect_ranks(config)
    watchdog.enter("reading the data", timed=False)
    torch.manual_seed(config.seed)
    data = load_run_data(config, store)
    if store is not None:
        require_signals(config, data, store, device)
    models = {"tokenizer": tokenizer_fingerprint(data.tokenizer), **model_fingerprints(config, store)}
    watchdog.enter("comparing data and models")
    require_same_sources({f"data.{which}": each for which, each in data.hashes.items()} | models, device)
    watchdog.enter("loading the models", timed=False)
    engine, source = build_engine(config, spec, layout, device, store)
    sequences = len(data.train)
    session = Session(
        config=config,
        spec=spec,
        device=device,
        tokenizer=data.tokenizer,
        tokenizer_hash=models["tokenizer"],
        train=data.train,
        evaluation=data.evaluation,
        step_schedule=make_step_schedule(
            config.train, sequences, config.data.max_tokens, layout.degrees.data, layout.stages
        ),
        engine=engine,
        source=source,
        data_hashes=data.hashes,
        model_hashes=models,
    )
    warnings += [*data.warnings, *check_models(session)]
    session.warnings = [escaped(warning) for warning in dict.fromkeys(warnings)]
    return session


def check_models(session: Session) -> list[str]:
    """Check that the models fit the data and can be saved; returns warnings. Raises ValueError if they do not."""
    max_tokens, warnings = session.config.data.max_tokens, list[str]()
    for which, decoder in (("student", session.student), ("teacher", session.teacher)):
        if decoder is None:
            continue
        warnings += check_vocabulary(session.tokenizer, decoder.vocabulary_rows, which)
        try:
            check_document_length(decoder.pretrained, max_tokens, which)
        except ValueError as error:
            raise ConfigError("data.max_tokens", str(error)) from error
        for sequences in (session.train, session.evaluation):
            if sequences is not None:
                sequences.documents.check_ids(decoder.vocabulary_rows, which)
    check_saving(session.student.pretrained)
    return warnings


def connect_ranks(config: RunConfig) -> tuple[torch.device, list[str]]:
    """Check the layout, then connect the ranks of a job and compare their configurations.

    If the ranks are connected already, a second call only checks and compares again. Returns this rank's device and
    a warning for each library whose version differs between ranks. Raises ConfigError for an impossible layout, and
    if the ranks were started with different configurations.
    """
    layout, separate_layout = layout_of(config.parallel, process_count()), teacher_layout(config)
    device = choose_device(config.device)
    for each in (layout, separate_layout):
        if each is not None:
            require_sharing(each, device)
    if process_count() > 1:
        start(device, config.train.timeout)
    return device, require_same_configuration(config, device)


def objective_spec(config: RunConfig) -> ObjectiveSpec:
    """The parsed `objective.loss`. Raises ConfigError if it cannot be parsed, or needs a teacher and has none.

    Also raises ConfigError if `checkpoint.best` is a metric that needs a teacher and there is none.
    """
    objective = config.objective
    try:
        spec = parse_objective(objective.loss, objective.temperature, objective.scale_by_temperature_squared)
    except ValueError as error:
        raise ConfigError("objective.loss", str(error)) from error
    require_objective(config, spec)
    if config.teacher is None:
        if spec.needs_teacher:
            raise ConfigError("teacher", f"objective.loss '{objective.loss}' needs a teacher: set teacher.model")
        if config.data.eval and config.checkpoint.best not in ("eval/cross_entropy", None):
            raise ConfigError(
                "checkpoint.best",
                f"got {config.checkpoint.best} without a teacher: expected eval/cross_entropy or null",
            )
    return spec


def adapter_in_words(session: Session) -> str:
    teacher = (
        "; the teacher is the same model without the adapter, so only one model is in memory"
        if teacher_is_base(session.config)
        else ""
    )
    return f"{session.student.lora}{teacher}"


def in_words(config: RunConfig, spec: ObjectiveSpec, store: SignalStore | None) -> str:
    """The resolved objective as a sentence: the first line that a run prints."""
    teacher, over = "", ""
    if config.teacher is not None and spec.needs_teacher:
        teacher = f" ← {config.teacher.model if store is None else store.name}"
        over = "over the full vocabulary, "
        if store is not None and not store.signal.is_exact:
            without_tail = store.signal.kind == "sampled" or config.teacher.cross_tokenizer == "uld"
            tail = "" if without_tail else f" (tail: {config.teacher.tail})"
            over = f"over {store.signal} of the teacher{tail}, "
    return (
        f"minimise {spec.in_words()}, {over}temperature {spec.temperature:g}, "
        f"mean over {config.objective.tokens} tokens of each step: "
        f"{config.student.model}{teacher}"
    )


def choose_device(name: str) -> torch.device:
    """The device that `name` means; `auto` means the GPU if there is one, else the CPU.

    Raises ConfigError for a device that this machine does not have.
    """
    if name == "auto":
        name = f"cuda:{local_rank()}" if torch.cuda.is_available() else "cpu"
    device, count = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and process_count() > 1:
        if device.index is not None and name != f"cuda:{local_rank()}":
            raise ConfigError(
                "device",
                f"got {name} for {process_count()} processes: expected cuda, so that each process gets another GPU",
            )
        device = torch.device("cuda", local_rank())
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError("device", f"got {name}, but this machine has {count} CUDA devices; expected auto or cpu")
    return device


def data_reports(session: Session) -> dict[str, DataReport]:
    """For each split, how many of its records were used, cut or skipped."""
    reports = {"train": session.train.documents.report}
    if session.evaluation is not None:
        reports["eval"] = session.evaluation.documents.report
    return reports
