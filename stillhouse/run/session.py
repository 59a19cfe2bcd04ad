"""Prepares a run: builds a session from the sections of the configuration."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from stillhouse.checkpoint.identity import (
    COMPLETION_KEYS,
    DECAY,
    ORDER,
    PROCESSOR,
    RunIdentity,
    configuration_hash,
)
from stillhouse.config import RunConfig
from stillhouse.data import DataReport, Documents, text_fingerprint, tokenizer_fingerprint
from stillhouse.display import escaped, name_list
from stillhouse.engine.engine import Engine
from stillhouse.engine.optimizer import stacked_vectors
from stillhouse.engine.schedule import (
    StepSchedule,
    make_on_policy_schedule,
    make_step_schedule,
    micro_batch_capacity,
)
from stillhouse.images.prepare import require_image_layout, require_images_for_parts, with_images_proven
from stillhouse.loops.completion_engine import samplings
from stillhouse.loops.session import Session
from stillhouse.models import add_end_ids, eos_ids
from stillhouse.models.document_packing import ROWS
from stillhouse.parallel import Layout, join, use_deterministic_algorithms, watchdog
from stillhouse.rollout import PromptPlan, PromptSource
from stillhouse.run.agreement import require_same_sources
from stillhouse.run.data import RunData
from stillhouse.run.preflight import (
    check_before_loading,
    check_data,
    check_models,
    evaluation_warnings,
    noise_warnings,
    prompt_warnings,
    same_model_warnings,
    schedule_warnings,
    tower_warnings,
)
from stillhouse.run.setup import RunSetup, with_precision
from stillhouse.signals import SignalSource

__all__ = ["Session", "build_session", "data_reports", "prepare", "steps_in_words"]


def prepare(config: RunConfig, *, announce: bool = True) -> Session:
    """Load and check everything that the run needs.

    announce: whether to print the resolved objective and the beginning of each phase

    Raises ConfigError for a mistake in the configuration, ValueError for a mistake in the data or models.
    """
    return build_session(RunSetup(with_precision(config)), announce=announce)


def build_session(setup: RunSetup, *, announce: bool = True) -> Session:
    """As `prepare`. setup: made from a configuration whose precision `with_precision` has resolved"""
    config, spec, stores = setup.config, setup.objective.spec, setup.stores
    if announce:
        print(escaped(setup.objective.in_words(stores), lines=True), flush=True)
    check_before_loading(setup)
    _enter("reading the data", announce)
    torch.manual_seed(config.seed)
    if config.deterministic:
        use_deterministic_algorithms()
    data = setup.load_data()
    setup.require_signals(data)
    model_hashes = {"tokenizer": tokenizer_fingerprint(data.tokenizer), **setup.model_hashes()}
    check_data(setup, data, model_hashes)
    require_images_for_parts(config.student.train, data)
    _enter("loading the models", announce)
    layout = setup.layout
    if (image_inputs := data.train.image_inputs) is not None:
        require_image_layout(setup, image_inputs)
    mesh = join(layout.degrees, setup.device, config.train.timeout)
    models = setup.models(mesh, images=image_inputs is not None)
    engine, source = setup.engine(models, layout)
    data = with_images_proven(data, engine, source, stores)
    by_length = _runs_rows(engine, source)
    packed = _by_length(data, config, layout) if by_length and config.rollout is None else data
    schedule, plan = _schedule(config, packed, layout)
    session = Session(
        spec=spec,
        tokenizer=data.tokenizer,
        train=packed.train,
        evaluation=packed.evaluation,
        step_schedule=schedule,
        student_source=models.student_source,
        engine=engine,
        source=source,
        stores=stores,
        identity=_identity(setup, data, model_hashes, engine, source, by_length=by_length),
        train_config=config.train,
        eval_config=config.eval,
        checkpoint_config=config.checkpoint,
        student_config=config.student,
        teacher_configs=setup.teachers,
        rollout_config=config.rollout,
        rollouts=config.rollouts,
        prompt_sources=config.data.weighted_sources if config.rollout is not None else [],
        by_length=by_length,
        seed=config.seed,
        track=list(config.track),
        values=setup.values,
        plan=plan,
        dataset=data.dataset,
        processor=data.processor,
        teacher_images=data.teacher_images,
    )
    _add_trained_ends(session)
    of_models = check_models({"student": session.student, **session.teachers}, models.self_teachers, data)
    of_models += [*noise_warnings(models.removed_noise), *_schedule_warnings(config, session, packed)]
    of_models += same_model_warnings(setup, model_hashes, session.student)
    of_models += tower_warnings(config.student) if image_inputs is None else []
    session.warnings = [escaped(line) for line in dict.fromkeys([*setup.warnings, *data.warnings, *of_models])]
    return session


def _add_trained_ends(session: Session) -> None:
    """Add the tokens with which the student learns to stop: those of documents, and those that end completions."""
    documents = session.train.documents if session.rollout_config is None else session.dataset
    ends = set[int]() if documents is None else set(documents.report.trained_ends)
    added = session.tokenizer.get_added_vocab()
    for sampling in samplings(session) if session.rollout_config is not None else ():
        ends |= {*sampling.eos_ids, *(added[stop] for stop in sampling.stop if stop in added)}
    for decoder in session.engine.student.decoders:
        add_end_ids(decoder, ends)


def _schedule_warnings(config: RunConfig, session: Session, data: RunData) -> Iterator[str]:
    plan, policies = session.plan, [part.policy for part in session.spec.parts]
    yield from schedule_warnings(config.train, session.step_schedule.steps, data, on_policy=plan is not None)
    if config.rollout is not None and plan is not None:
        yield from prompt_warnings(config.train, config.rollout, plan, config.data.max_tokens, policies)
        yield from evaluation_warnings(config.eval, config.rollouts)


def _by_length(data: RunData, config: RunConfig, layout: Layout) -> RunData:
    """The same data in sequences of documents of similar lengths, each of which is a micro-batch."""
    capacity = micro_batch_capacity(config.train, config.data.max_tokens, layout.degrees.data, layout.stages)
    held_out_capacity = max(config.data.max_tokens, config.eval.micro_batch_tokens or capacity)
    return data.sorted_by_length(capacity, held_out_capacity)


def _identity(
    setup: RunSetup,
    data: RunData,
    model_hashes: dict[str, str],
    engine: Engine,
    source: SignalSource,
    *,
    by_length: bool,
) -> RunIdentity:
    hashes = data.hashes | {f"{PROCESSOR}{section}": digest for section, digest in data.processors.items()}
    if by_length:
        hashes[ORDER] = ROWS
    vectors = stacked_vectors(engine.student.decoders) if setup.config.train.weight_decay else []
    if names := sorted({name for of_rank in engine.student.ranks.gather(vectors) for name in of_rank}):
        hashes[DECAY] = name_list(names)
    decisive = _decisive_for_completions(setup, data, engine, source)
    return RunIdentity(configuration_hash(setup.values), hashes, model_hashes | decisive)


def _decisive_for_completions(setup: RunSetup, data: RunData, engine: Engine, source: SignalSource) -> dict[str, str]:
    """The values of `COMPLETION_KEYS`; empty for a run that generates none. Raises ValueError if ranks differ."""
    rollout, evaluation, writer = setup.config.rollout, setup.config.eval, engine.student.decoders[0]
    if rollout is None and not (evaluation.samples or evaluation.tasks or evaluation.prompts or evaluation.callbacks):
        return {}
    if rollout is not None and rollout.writer == "teacher" and not rollout.urls:
        writer = source.decoders.get("teacher") or engine.student.teacher or writer
    ids, text = eos_ids(data.tokenizer, writer), text_fingerprint(data.tokenizer)
    decisive = {"end_ids": ", ".join(map(str, ids)), "text": text}
    require_same_sources({COMPLETION_KEYS[name]: value for name, value in decisive.items()}, setup.ranks)
    return decisive


def _runs_rows(engine: Engine, source: SignalSource) -> bool:
    """Whether a model of this job, on any process, runs one document per row."""
    decoders = [*engine.student.decoders, engine.student.teacher, *source.decoders.values()]
    has_rows = any(decoder is not None and decoder.packing.name == ROWS for decoder in decoders)
    return bool(engine.student.ranks.largest(int(has_rows)))


def _enter(phase: str, announce: bool) -> None:
    watchdog.enter(phase, timed=False)
    if announce:
        print(f"{phase} …", flush=True)


def _schedule(config: RunConfig, data: RunData, layout: Layout) -> tuple[StepSchedule, PromptPlan | None]:
    train, rollout, max_tokens = config.train, config.rollout, data.train.max_tokens
    if rollout is None:
        return make_step_schedule(train, len(data.train), max_tokens, layout.degrees.data, layout.stages), None
    sources = prompt_sources(config, data.train.documents, data.dataset)
    return make_on_policy_schedule(train, rollout, sources, max_tokens, config.seed)


def prompt_sources(config: RunConfig, prompts: Documents, dataset: Documents | None) -> list[PromptSource]:
    """Return the sources of an on-policy run. prompts, dataset: their documents with prompts and with completions."""
    rollouts, weights = config.rollouts, [source.weight for source in config.data.weighted_sources] or [1.0]
    of_dataset = iter([] if dataset is None else _set_sizes(dataset))
    return [
        PromptSource(
            size,
            rollout.samples_per_prompt,
            0 if rollout.is_on_student_alone else next(of_dataset),
            rollout.share,
            weight,
        )
        for size, rollout, weight in zip(_set_sizes(prompts), rollouts, weights, strict=True)
    ]


def _set_sizes(documents: Documents) -> list[int]:
    """The number of documents of each set, which follow each other."""
    return [len(documents)] if documents.set_D is None else np.bincount(documents.set_D).tolist()


def steps_in_words(session: Session) -> str:
    """The number of steps, and what a step has."""
    schedule, plan, rollout = session.step_schedule, session.plan, session.rollout_config
    if plan is None or rollout is None:
        return (
            f"{schedule.steps:,} of {schedule.sequences_per_step} sequences (at most "
            f"{session.train.max_tokens:,} tokens each), {schedule.rows_per_micro_batch} per micro-batch"
        )
    shares = sorted({source.share for source in plan.sources})
    share = " to ".join(f"{share:.0%}" for share in dict.fromkeys((shares[0], shares[-1])))
    return (
        f"{schedule.steps:,}; in each of them, prompts: {plan.prompts_per_step} (rollout.prompts_per_step), "
        f"completions: {schedule.sequences_per_step}, {share} written by the {rollout.writer}"
    )


def data_reports(session: Session) -> dict[str, DataReport]:
    """The reports on used, cut and skipped records, by split. A split with several sets also has a report per set."""
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
