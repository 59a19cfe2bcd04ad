"""Prepares a run: checks the configuration, and builds the five records of a session from its sections."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from stillhouse.checkpoint.identity import COMPLETION_KEYS, DECAY, ORDER, PROCESSOR, RunIdentity, configuration_hash
from stillhouse.config import EvalConfig, RolloutConfig, RunConfig, SourceConfig, as_config_error
from stillhouse.data import DataReport, Documents, text_fingerprint, tokenizer_fingerprint
from stillhouse.data.media import media_kind
from stillhouse.display import escaped, name_list
from stillhouse.engine.optimizer import stacked_vectors
from stillhouse.engine.schedule import StepSchedule, make_on_policy_schedule, make_step_schedule, micro_batch_capacity
from stillhouse.loops.rollouts import samplings
from stillhouse.loops.session import Data, Loss, Models, RolloutPlan, Schedule, Session
from stillhouse.models import add_end_ids, eos_ids
from stillhouse.models.document_packing import ROWS
from stillhouse.models.pretrained import tower_warnings
from stillhouse.models.vision_language import require_language_alone
from stillhouse.parallel import join, use_deterministic_algorithms, watchdog
from stillhouse.rollout import PromptSource
from stillhouse.run.agreement import require_same_sources
from stillhouse.run.preflight import (
    check_before_loading,
    check_models,
    evaluation_warnings,
    noise_warnings,
    prompt_warnings,
    same_model_warnings,
    schedule_warnings,
)
from stillhouse.run.setup import RunSetup, with_precision


def prepare(config: RunConfig, *, announce: bool = True) -> Session:
    """Load and check everything that the run needs.

    announce: whether to print the resolved objective and the beginning of each phase

    Raises ConfigError for a mistake in the configuration, ValueError for a mistake in the data or models.
    """
    return build_session(RunSetup(with_precision(config)), announce=announce)


def build_session(setup: RunSetup, *, announce: bool = True) -> Session:
    """As `prepare`. setup: made from a configuration whose precision `with_precision` has resolved"""
    config, stores = setup.config, setup.stores
    loss = Loss(setup.objective.spec, setup.objective.in_words(stores))
    if announce:
        print(escaped(loss.in_words, lines=True), flush=True)
    check_before_loading(setup)
    _enter("reading the data", announce)
    torch.manual_seed(config.seed)
    if config.deterministic:
        use_deterministic_algorithms()
    data = setup.load_data()
    setup.require_signals(data)
    model_hashes = {"tokenizer": tokenizer_fingerprint(data.tokenizer), **setup.model_hashes()}
    watchdog.enter("comparing data and models")
    data_hashes = {f"data.{split}": documents_hash for split, documents_hash in data.hashes.items()}
    require_same_sources(data_hashes | model_hashes, setup.ranks)
    if not (data.train.documents.has_media or (data.dataset is not None and data.dataset.has_media)):
        with as_config_error("student.train"):
            require_language_alone(config.student.train)
    _enter("loading the models", announce)
    if (media_inputs := data.train.media_inputs) is not None:
        media_kind(media_inputs.processor).require_layout(setup, media_inputs)
    mesh = join(setup.layout.degrees, setup.device, config.train.timeout)
    sources = setup.models(mesh, multimodal=data.has_media)
    engine, source = setup.engine(sources, setup.layout)
    models = Models(engine, source, stores, sources.student_source, config.student, setup.teachers)
    if media_inputs is not None:
        data = media_kind(media_inputs.processor).with_models_proven(data, engine, source, stores)
    max_tokens, data = data.train.max_tokens, _in_rows(data, models, setup)
    schedule, rollout = _schedule(data, setup)
    decisive = _decisive_for_completions(models, data, config.rollout, config.eval)
    hashes = _data_hashes(models, data, schedule)
    identity = RunIdentity(configuration_hash(setup.values), hashes, model_hashes | decisive)
    _add_trained_ends(models, data, rollout)
    warnings = [
        *setup.warnings,
        *data.warnings,
        *check_models({"student": models.student, **models.teachers}, sources.self_teachers, data, max_tokens),
        *noise_warnings(sources.removed_noise),
        *schedule_warnings(config.train, schedule.steps, data, on_policy=rollout is not None),
    ]
    if rollout is not None:
        policies = [part.policy for part in loss.spec.parts]
        warnings += prompt_warnings(config.train, rollout.config, rollout.prompts, config.data.max_tokens, policies)
        warnings += evaluation_warnings(config.eval, rollout.configs)
    warnings += same_model_warnings(setup, model_hashes, models.student)
    if not data.has_media:
        student = config.student
        code = student.trust_remote_code
        warnings += tower_warnings(str(student.model), student.revision, trust_remote_code=code)
    warnings = [escaped(line) for line in dict.fromkeys(warnings)]
    return Session(models, data, loss, schedule, rollout, identity, setup.values, warnings)


def _enter(phase: str, announce: bool) -> None:
    watchdog.enter(phase, timed=False)
    if announce:
        print(f"{phase} …", flush=True)


def _in_rows(data: Data, models: Models, setup: RunSetup) -> Data:
    """The same data; packed by length if a model of this job, on any process, runs one document per row."""
    decoders = [*models.engine.student.decoders, models.engine.student.teacher, *models.source.decoders.values()]
    has_rows = any(decoder is not None and decoder.packing.name == ROWS for decoder in decoders)
    if not models.ranks.largest(int(has_rows)):
        return data
    data, config, layout = replace(data, by_length=True), setup.config, setup.layout
    if config.rollout is not None:  # each step packs its completions
        return data
    capacity = micro_batch_capacity(config.train, config.data.max_tokens, layout.degrees.data, layout.stages)
    return data.sorted_by_length(capacity, max(config.data.max_tokens, config.eval.micro_batch_tokens or capacity))


def _schedule(data: Data, setup: RunSetup) -> tuple[Schedule, RolloutPlan | None]:
    """The steps of the run, and the plan of their completions; None on a fixed dataset."""
    config, layout, max_tokens, rollout = setup.config, setup.layout, data.train.max_tokens, None
    if config.rollout is None:
        steps = make_step_schedule(config.train, len(data.train), max_tokens, layout.degrees.data, layout.stages)
    else:
        weighted = config.data.weighted_sources
        prompts = prompt_sources(config.rollouts, weighted, data.train.documents, data.dataset)
        steps, plan = make_on_policy_schedule(config.train, config.rollout, prompts, max_tokens, config.seed)
        rollout = RolloutPlan(plan, config.rollout, config.rollouts, weighted)
    return Schedule(steps, config.train, config.eval, config.checkpoint, config.seed), rollout


def prompt_sources(
    rollouts: Sequence[RolloutConfig], sources: Sequence[SourceConfig], prompts: Documents, dataset: Documents | None
) -> list[PromptSource]:
    """Return the sources of an on-policy run. prompts, dataset: their documents with prompts and with completions.

    rollouts: the section rollout for each source. sources: those of data.train; empty for a single source
    """
    weights = [source.weight for source in sources] or [1.0]
    dataset_sizes = iter([] if dataset is None else _set_sizes(dataset))
    return [
        PromptSource(
            size,
            rollout.samples_per_prompt,
            0 if rollout.is_on_student_alone else next(dataset_sizes),
            rollout.share,
            weight,
        )
        for size, rollout, weight in zip(_set_sizes(prompts), rollouts, weights, strict=True)
    ]


def _set_sizes(documents: Documents) -> list[int]:
    """The number of documents of each set, which follow each other."""
    return [len(documents)] if documents.set_D is None else np.bincount(documents.set_D).tolist()


def _data_hashes(models: Models, data: Data, schedule: Schedule) -> dict[str, str]:
    """`RunIdentity.data`."""
    hashes = data.hashes | {f"{PROCESSOR}{section}": digest for section, digest in data.processors.items()}
    if data.by_length:
        hashes[ORDER] = ROWS
    vectors = stacked_vectors(models.engine.student.decoders) if schedule.train_config.weight_decay else []
    if names := sorted({name for rank_names in models.ranks.gather(vectors) for name in rank_names}):
        hashes[DECAY] = name_list(names)
    return hashes


def _decisive_for_completions(
    models: Models, data: Data, rollout: RolloutConfig | None, evaluation: EvalConfig
) -> dict[str, str]:
    """The values of `COMPLETION_KEYS`; empty for a run that generates none. Raises ValueError if ranks differ."""
    if rollout is None and not (evaluation.samples or evaluation.tasks or evaluation.prompts or evaluation.callbacks):
        return {}
    writer = models.student
    if rollout is not None and rollout.writer == "teacher" and not rollout.urls:
        writer = models.teacher or writer
    end_ids = ", ".join(map(str, eos_ids(data.tokenizer, writer)))
    decisive = {"end_ids": end_ids, "text": text_fingerprint(data.tokenizer)}
    require_same_sources({COMPLETION_KEYS[name]: value for name, value in decisive.items()}, models.ranks)
    return decisive


def _add_trained_ends(models: Models, data: Data, rollout: RolloutPlan | None) -> None:
    """Add the tokens with which the student learns to stop: those of documents, and those that end completions."""
    documents = data.train.documents if rollout is None else data.dataset
    ends = set[int]() if documents is None else set(documents.report.trained_ends)
    added = data.tokenizer.get_added_vocab()
    for sampling in () if rollout is None else samplings(models, data.tokenizer, rollout.configs):
        ends |= {*sampling.eos_ids, *(added[stop] for stop in sampling.stop if stop in added)}
    for decoder in models.engine.student.decoders:
        add_end_ids(decoder, ends)


def steps_in_words(schedule: StepSchedule, max_tokens: int, rollout: RolloutPlan | None) -> str:
    """The number of steps, and what a step has. max_tokens: of a packed sequence"""
    if rollout is None:
        return (
            f"{schedule.steps:,} of {schedule.sequences_per_step} sequences (at most {max_tokens:,} tokens each), "
            f"{schedule.rows_per_micro_batch} per micro-batch"
        )
    shares = sorted({source.share for source in rollout.prompts.sources})
    share = " to ".join(f"{share:.0%}" for share in dict.fromkeys((shares[0], shares[-1])))
    return (
        f"{schedule.steps:,}; in each of them, prompts: {rollout.prompts.prompts_per_step} "
        f"(rollout.prompts_per_step), completions: {schedule.sequences_per_step}, {share} written by the "
        f"{rollout.config.writer}"
    )


def data_reports(data: Data, schedule: StepSchedule) -> dict[str, DataReport]:
    """The reports on used, cut and skipped records, by split. A split with several sets also has a report per set."""
    reports = {"train": data.train.documents.report}
    if data.train.weights is not None:
        shares = data.train.trained_shares(schedule.total_sequences).tolist()
        sources = zip(data.train.documents.reports.values(), shares, strict=True)
        for number, (report, share) in enumerate(sources, start=1):
            reports[f"train/{number}"] = replace(report, trained_share=round(share, 6))
    if data.evaluation is not None:
        reports["eval"] = data.evaluation.documents.report
        sets = data.evaluation.documents.reports
        reports |= {f"eval/{name}": report for name, report in sets.items()}
    return reports
