"""Prepares everything that a run needs, in the order in which mistakes are cheapest to find.

`prepare` checks the objective's expression first, then the tokenizers, then the data, then the models. So a misspelt
divergence is reported within a second, and a teacher with another tokenizer before any weight is read.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedTokenizerBase

from stillhouse.config import ConfigError, RunConfig, TeachersConfig
from stillhouse.config.rules import check_rules
from stillhouse.data import (
    DataReport,
    Documents,
    PackedSequences,
    StepMicroBatches,
    check_vocabulary,
    tokenizer_fingerprint,
)
from stillhouse.display import escaped
from stillhouse.engine.depths import mtp_objective
from stillhouse.engine.engine import Engine
from stillhouse.engine.optimizer import require_optimizer
from stillhouse.engine.schedule import StepSchedule, make_rollout_schedule, make_step_schedule
from stillhouse.generation import RolloutPlan
from stillhouse.models import Decoder, check_document_length, check_saving, warn_of_positions
from stillhouse.objective.correction import Correction
from stillhouse.objective.spec import ObjectiveSpec, TeacherShare, parse_objective
from stillhouse.output.trackers import require_trackers
from stillhouse.parallel import (
    Layout,
    Ranks,
    ShardedMicroBatches,
    best_precision,
    choose_device,
    join,
    process_count,
    start,
    watchdog,
)
from stillhouse.run.agreement import require_same_configuration, require_same_sources
from stillhouse.run.build import build_engine
from stillhouse.run.cross_tokenizer_rules import require_objective
from stillhouse.run.in_words import in_words
from stillhouse.run.inputs import RunData, load_run_data
from stillhouse.run.layouts import layout_of, require_sharing
from stillhouse.run.models import (
    ModelSources,
    model_fingerprints,
    require_adapters,
    require_teachers_fit,
    teacher_is_base,
    teacher_layout,
)
from stillhouse.run.stores import open_stores, require_signals
from stillhouse.run.user_functions import all_functions
from stillhouse.signals import (
    NoTeacher,
    SeparateTeacher,
    SeveralTeachers,
    SignalSource,
    SignalStore,
    StoredTeacher,
)

#: runs of fewer steps are warned of, unless train.steps asks for them
FEW_STEPS = 10
#: shares of the peak learning rate up to this are warned of, since other tools have the learning rate itself there
SMALL_FLOOR = 1e-4


@dataclass
class Session:
    """One run, ready to start.

    train: with rollouts, the prompts, whose completions are written in each step as `plan` says. dataset: with
    rollouts, the documents that a share of each step's completions are from. evaluation: the held-out data; None if
    the configuration asks for none. source: where the teachers' signals come from. stores: the caches and servers
    among them, by the keys of the teachers' sections. data_hashes: a hash of each split's documents. model_hashes: a
    hash of the tokenizer and of each model's files.
    """

    config: RunConfig
    spec: ObjectiveSpec
    device: torch.device
    tokenizer: PreTrainedTokenizerBase
    tokenizer_hash: str
    train: PackedSequences
    evaluation: PackedSequences | None
    step_schedule: StepSchedule
    models: ModelSources
    engine: Engine
    source: SignalSource
    stores: dict[str, SignalStore]
    data_hashes: dict[str, str]
    model_hashes: dict[str, str]
    warnings: list[str] = field(default_factory=list)
    plan: RolloutPlan | None = None
    dataset: Documents | None = None

    @property
    def ranks(self) -> Ranks:
        """All processes of the run."""
        return self.engine.ranks

    @property
    def student(self) -> Decoder:
        """The student; under a pipeline, its part on this process's first stage."""
        return self.engine.students[0]

    @property
    def teacher(self) -> Decoder | None:
        """The teacher; under a pipeline, its part on this process's first stage.

        None if there is none or several, if its signals come from a store, or if it is the student's base model.
        """
        return self.source.decoder if isinstance(self.source, SeparateTeacher) else self.engine.teacher

    @property
    def teachers(self) -> dict[str, Decoder]:
        """The teachers that run in this job as separate models, by the keys of their sections."""
        if isinstance(self.source, SeveralTeachers):
            found = self.source.teachers.items()
            return {f"teachers.{name}": each.decoder for name, each in found if isinstance(each, SeparateTeacher)}
        return {} if self.teacher is None else {"teacher": self.teacher}

    @property
    def has_dense_teacher(self) -> bool:
        """Whether there is one teacher, whose signals give the whole distribution, and not only some ids."""
        return self.config.teacher is not None and all(each.signal.is_exact for each in self.stores.values())

    def shard(self, micro_batches: StepMicroBatches, *, training: bool = True) -> ShardedMicroBatches:
        """This process's part of a step's micro-batches. training=False: of an evaluation's micro-batches."""
        return self.engine.shard(micro_batches, training=training)

    def close(self) -> None:
        """Give up requests for signals that are under way."""
        if isinstance(self.source, StoredTeacher | SeveralTeachers):
            self.source.close()

    def source_for(self, engine: Engine) -> SignalSource:
        """The source of the signals that an engine's steps need."""
        return self.source if engine.needs_teacher else NoTeacher()


def prepare(config: RunConfig, *, announce: bool = True) -> Session:
    """Load and check everything that the run needs.

    Raises ConfigError for a mistake in the configuration, ValueError for a mistake in the data or models.
    announce: print the resolved objective first, before anything is loaded, and each stage that may take long.
    """
    config = with_precision(config)
    spec, stores = objective_spec(config), open_stores(config)
    if announce:
        print(in_words(config, spec, stores), flush=True)
    require_trackers(config.track)
    require_adapters(config.student)
    list(all_functions(config))  # before the models, and on all ranks, although only rank 0 calls them
    layout = layout_of(config.parallel, process_count())
    require_optimizer(config.train, layout)
    ranks, warnings = connect_ranks(config)
    device = ranks.device
    require_teachers_fit(config, layout, device)
    _enter("reading the data", announce)
    torch.manual_seed(config.seed)
    data = load_run_data(config, stores)
    require_signals(config, data, stores, ranks)
    model_hashes = {"tokenizer": tokenizer_fingerprint(data.tokenizer), **model_fingerprints(config, stores)}
    watchdog.enter("comparing data and models")
    require_same_sources({f"data.{which}": each for which, each in data.hashes.items()} | model_hashes, ranks)
    _enter("loading the models", announce)
    models = ModelSources(config, join(layout.degrees, device, config.train.timeout))
    engine, source = build_engine(models, spec, layout, stores)
    schedule, plan = _schedule(config, data, layout)
    session = Session(
        config=config,
        spec=spec,
        device=device,
        tokenizer=data.tokenizer,
        tokenizer_hash=model_hashes["tokenizer"],
        train=data.train,
        evaluation=data.evaluation,
        step_schedule=schedule,
        models=models,
        engine=engine,
        source=source,
        stores=stores,
        data_hashes=data.hashes,
        model_hashes=model_hashes,
        plan=plan,
        dataset=data.dataset,
    )
    warnings += [
        *data.warnings,
        *check_models(session),
        *_schedule_warnings(config, schedule, data),
    ]
    session.warnings = [escaped(warning) for warning in dict.fromkeys(warnings)]
    return session


def _enter(phase: str, announce: bool) -> None:
    watchdog.enter(phase, timed=False)
    if announce:
        print(f"{phase} …", flush=True)


def _schedule(config: RunConfig, data: RunData, layout: Layout) -> tuple[StepSchedule, RolloutPlan | None]:
    if config.rollout is None:
        sizes = config.data.max_tokens, layout.degrees.data, layout.stages
        return make_step_schedule(config.train, len(data.train), *sizes), None
    prompts, dataset = len(data.train.documents), 0 if data.dataset is None else len(data.dataset)
    return make_rollout_schedule(config.train, config.rollout, prompts, dataset, config.data.max_tokens, config.seed)


def _schedule_warnings(config: RunConfig, schedule: StepSchedule, data: RunData) -> Iterator[str]:
    """Warnings of epochs that are too few steps, a warm-up that does not end, and a share of the peak that may be
    meant as a learning rate.
    """
    train, steps, tokens = config.train, schedule.steps, len(data.train.documents.tokens_N)
    if train.steps is None and config.rollout is None and steps < FEW_STEPS:
        yield (
            f"the run has only {steps} optimizer step{'s' * (steps > 1)}, because train.tokens_per_step is "
            f"{train.tokens_per_step:,} and the data have {tokens:,} tokens; lower train.tokens_per_step, or raise "
            "train.epochs"
        )
    if train.warmup >= max(steps, 2):
        yield (
            f"train.warmup={train.warmup:g} is not shorter than the run ({steps} steps), so that the learning rate "
            "only rises; below 1, it is a share of all steps"
        )
    if 0 < train.min_learning_rate <= SMALL_FLOOR:
        yield (
            f"train.min_learning_rate={train.min_learning_rate:g} is a share of the peak, so that the learning rate "
            f"ends at {train.min_learning_rate * train.learning_rate:g}"
        )


def check_models(session: Session) -> list[str]:
    """Check that the models fit the data and can be saved; returns warnings. Raises ValueError if they do not."""
    max_tokens, warnings = session.config.data.max_tokens, list[str]()
    of_student = [name for name, each in session.config.several.items() if each.student is not None]
    for which, decoder in (("student", session.student), *session.teachers.items()):
        warnings += check_vocabulary(session.tokenizer, decoder.vocabulary_rows, which)
        try:
            check_document_length(decoder.pretrained, max_tokens, which)
        except ValueError as error:
            raise ConfigError("data.max_tokens", str(error)) from error
        evaluation = None if session.evaluation is None else session.evaluation.documents
        read = [each for each in (session.train.documents, evaluation, session.dataset) if each is not None]
        warnings += warn_of_positions(decoder.pretrained, max(int(each.lengths_D.max()) for each in read), which)
        for documents in read:
            readers = of_student if which == "student" else [which.partition(".")[2]]
            documents.check_ids(decoder.vocabulary_rows, which, readers)
    check_saving(session.student.pretrained)
    return warnings


def connect_ranks(config: RunConfig) -> tuple[Ranks, list[str]]:
    """Check the layout, then connect the ranks of a job and compare their configurations.

    If the ranks are connected already, a second call only checks and compares again. Returns the ranks and
    a warning for each library whose version differs between ranks. Raises ConfigError for an impossible layout, and
    if the ranks were started with different configurations.
    """
    layouts = [teacher_layout(config, section) for section in config.teacher_sections]
    device = device_of(config)
    for each in (layout_of(config.parallel, process_count()), *layouts):
        if each is not None:
            require_sharing(each, device)
    if process_count() > 1:
        start(device, config.train.timeout)
    ranks = Ranks.of_job(device)
    return ranks, require_same_configuration(config, ranks)


def objective_spec(config: RunConfig) -> ObjectiveSpec:
    """The parsed objective.loss. Raises ConfigError if it, or that of MTP layers, is impossible."""
    objective = config.objective
    try:
        spec = parse_objective(objective.loss, objective.temperature, objective.scale_by_temperature_squared)
    except ValueError as error:
        raise ConfigError("objective.loss", str(error)) from error
    require_objective(config, spec)
    spec = _on_rollouts(config, spec)
    mtp_objective(config, spec)  # raises ConfigError
    if config.teachers is not None:
        spec = replace(spec, teachers=_shares(config.teachers), is_mixture=config.teachers.sum == "distributions")
    elif config.teacher is None and spec.needs_teacher:
        raise ConfigError("teacher", f"objective.loss '{objective.loss}' needs a teacher: set teacher.model")
    return spec


def _on_rollouts(config: RunConfig, spec: ObjectiveSpec) -> ObjectiveSpec:
    """The objective with what the section rollout says of it. Raises ConfigError if the two do not fit."""
    rollout, loss = config.rollout, config.objective.loss
    draws = rollout is not None and rollout.writer == "student"
    if spec.needs_rollouts and not draws:
        raise ConfigError("objective.loss", f"got '{loss}', which needs the student's own completions: set rollout")
    if rollout is None:
        return spec
    if spec.needs_rewards and rollout.reward is None:
        raise ConfigError("rollout.reward", f"expected a function, because objective.loss is '{loss}'")
    if rollout.reward is not None and spec.policy_gradient is None:
        raise ConfigError(
            "rollout.reward", f"has no effect with objective.loss '{loss}': expected policy_gradient in it"
        )
    if spec.cross_entropy is not None and rollout.is_on_student_alone and draws:
        raise ConfigError(
            "objective.loss",
            f"got '{loss}' with rollout.share=1: cross_entropy counts on the dataset's completions, and there are"
            " none; lower rollout.share, or leave cross_entropy out",
        )
    if rollout.discount and not (spec.policy_gradient and spec.teacher_kl):
        raise ConfigError(
            "rollout.discount", "has an effect only with policy_gradient(teacher_kl=…) in objective.loss"
        )
    return replace(
        spec,
        correction=Correction(rollout.correction, rollout.limit),
        discount=rollout.discount,
        sampling_temperature=rollout.temperature,
    )


def adapter_in_words(session: Session) -> str:
    teacher = (
        "; the teacher is the same model without the adapter, so only one model is in memory"
        if teacher_is_base(session.config)
        else ""
    )
    return f"{session.student.lora}{teacher}"


def _shares(teachers: TeachersConfig) -> dict[str, TeacherShare]:
    """Each teacher's part in the objective: without a route, their weights sum to 1."""
    total = sum(each.weight for each in teachers.named.values()) if teachers.route is None else 1.0
    return {name: TeacherShare(each.weight / total, each.temperature) for name, each in teachers.named.items()}


def device_of(config: RunConfig) -> torch.device:
    """The device of this process. Raises ConfigError for one that this machine does not have."""
    try:
        return choose_device(config.device)
    except ValueError as error:
        raise ConfigError("device", str(error)) from error


def with_precision(config: RunConfig) -> RunConfig:
    """The configuration with the precision that `train.precision: auto` means on this process's device.

    It is settled before ranks are compared and checkpoints are written: a mixture of precisions is no run.
    """
    if config.train.precision != "auto":
        return config
    train = config.train.model_copy(update={"precision": best_precision(device_of(config))})
    settled = config.model_copy(update={"train": train})
    check_rules(settled)
    return settled


def data_reports(session: Session) -> dict[str, DataReport]:
    """For each split, how many of its records were used, cut or skipped; of several sets, for each of them, too."""
    reports = {"train": session.train.documents.report}
    if session.train.weights is not None:
        shares = session.train.trained_shares(session.step_schedule.total_sequences).tolist()
        sources = zip(session.train.documents.reports.values(), shares, strict=True)
        for number, (report, share) in enumerate(sources, start=1):
            reports[f"train/{number}"] = replace(report, trained_share=round(share, 6))
    if session.evaluation is not None:
        reports["eval"] = session.evaluation.documents.report
        sets = session.evaluation.documents.reports
        reports |= {f"eval/{name}": report for name, report in sets.items()}
    return reports
