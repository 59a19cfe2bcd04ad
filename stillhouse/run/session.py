"""A run that is ready to start, and its preparation: objects are built from the sections of the configuration."""

from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedTokenizerBase

from stillhouse.checkpoint.identity import RunIdentity, configuration_hash
from stillhouse.config import CheckpointConfig, EvalConfig, RolloutConfig, RunConfig, TrainConfig
from stillhouse.data import DataReport, Documents, PackedSequences, StepMicroBatches, tokenizer_fingerprint
from stillhouse.display import escaped
from stillhouse.engine.engine import Engine
from stillhouse.engine.schedule import StepSchedule, make_rollout_schedule, make_step_schedule
from stillhouse.generation import RolloutPlan
from stillhouse.models import Decoder
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import Layout, Ranks, ShardedMicroBatches, join, watchdog
from stillhouse.run.inputs import RunData
from stillhouse.run.models import ModelSources
from stillhouse.run.preflight import check_before_loading, check_data, check_models, schedule_warnings
from stillhouse.run.setup import RunSetup, with_precision
from stillhouse.signals import (
    NoTeacher,
    SeparateTeacher,
    SeveralTeachers,
    SignalSource,
    SignalStore,
    StoredTeacher,
)


@dataclass
class Session:
    """One run, ready to start.

    train: with rollouts, the prompts, whose completions are written in each step as `plan` says
    dataset: with rollouts, the documents that a share of each step's completions are from
    evaluation: the held-out data; None if the configuration asks for none
    source: where the teachers' signals come from
    stores: the caches and servers among the teachers, by the keys of their sections
    identity: what a resumed run must have in common with this one
    train_config, eval_config, checkpoint_config, rollout_config: sections that the loops need
    single_row: whether a micro-batch has to be one row, since flash attention separates documents only there
    track, values: the trackers, and the configuration by dotted keys, which they show
    """

    spec: ObjectiveSpec
    tokenizer: PreTrainedTokenizerBase
    train: PackedSequences
    evaluation: PackedSequences | None
    step_schedule: StepSchedule
    models: ModelSources
    engine: Engine
    source: SignalSource
    stores: dict[str, SignalStore]
    identity: RunIdentity
    train_config: TrainConfig
    eval_config: EvalConfig
    checkpoint_config: CheckpointConfig
    rollout_config: RolloutConfig | None = None
    single_row: bool = False
    seed: int = 0
    track: list[str] = field(default_factory=list)
    values: dict[str, object] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    plan: RolloutPlan | None = None
    dataset: Documents | None = None

    @property
    def device(self) -> torch.device:
        return self.engine.device

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
            sources = self.source.teachers.items()
            return {
                f"teachers.{name}": source.decoder for name, source in sources if isinstance(source, SeparateTeacher)
            }
        return {} if self.teacher is None else {"teacher": self.teacher}

    @property
    def has_exact_teacher(self) -> bool:
        """Whether there is one teacher, whose signals give the whole distribution, and not only some ids."""
        is_single = not isinstance(self.source, NoTeacher | SeveralTeachers)
        return is_single and all(store.signal.is_exact for store in self.stores.values())

    @property
    def adapter_in_words(self) -> str | None:
        """The student's adapter; None if it has none."""
        if self.student.lora is None:
            return None
        base_note = "; the teacher is the same model without the adapter, so only one model is in memory"
        return f"{self.student.lora}{base_note if self.models.teacher_is_base else ''}"

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

    announce: print the resolved objective first, before anything is loaded, and each stage that may take long

    Raises ConfigError for a mistake in the configuration, ValueError for a mistake in the data or models.
    """
    return build_session(RunSetup(with_precision(config)), announce=announce)


def build_session(setup: RunSetup, *, announce: bool = True) -> Session:
    """See `prepare`. setup: of the configuration, with its precision resolved."""
    config, spec, stores = setup.config, setup.spec, setup.stores
    if announce:
        print(setup.objective.in_words(stores), flush=True)
    check_before_loading(setup)
    _enter("reading the data", announce)
    torch.manual_seed(config.seed)
    data = setup.load_data()
    setup.require_signals(data)
    model_hashes = {"tokenizer": tokenizer_fingerprint(data.tokenizer), **setup.model_hashes()}
    check_data(setup, data, model_hashes)
    _enter("loading the models", announce)
    layout = setup.layout
    models = setup.models(join(layout.degrees, setup.device, config.train.timeout))
    engine, source = setup.engine(models, layout)
    schedule, plan = _schedule(config.train, config.rollout, data, layout, config.seed)
    session = Session(
        spec=spec,
        tokenizer=data.tokenizer,
        train=data.train,
        evaluation=data.evaluation,
        step_schedule=schedule,
        models=models,
        engine=engine,
        source=source,
        stores=stores,
        identity=RunIdentity(configuration_hash(setup.values), data.hashes, model_hashes),
        train_config=config.train,
        eval_config=config.eval,
        checkpoint_config=config.checkpoint,
        rollout_config=config.rollout,
        single_row=bool(config.flash_attentions),
        seed=config.seed,
        track=list(config.track),
        values=setup.values,
        plan=plan,
        dataset=data.dataset,
    )
    warnings = [
        *setup.warnings,
        *data.warnings,
        *check_models({"student": session.student, **session.teachers}, models.self_teachers, data),
        *schedule_warnings(config.train, schedule.steps, data, on_policy=plan is not None),
    ]
    session.warnings = [escaped(warning) for warning in dict.fromkeys(warnings)]
    return session


def _enter(phase: str, announce: bool) -> None:
    watchdog.enter(phase, timed=False)
    if announce:
        print(f"{phase} …", flush=True)


def _schedule(
    train: TrainConfig, rollout: RolloutConfig | None, data: RunData, layout: Layout, seed: int
) -> tuple[StepSchedule, RolloutPlan | None]:
    max_tokens = data.train.max_tokens
    if rollout is None:
        return make_step_schedule(train, len(data.train), max_tokens, layout.degrees.data, layout.stages), None
    prompts, dataset = len(data.train.documents), 0 if data.dataset is None else len(data.dataset)
    return make_rollout_schedule(train, rollout, prompts, dataset, max_tokens, seed)


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
