"""One run from start to end: check and load everything, lock the run folder, train, write the model."""

from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from stillhouse.checkpoint.checkpoint_folder import RESUME, IntactCheckpoint
from stillhouse.checkpoint.export_weights import save_merged, save_student
from stillhouse.checkpoint.resume import (
    COMPLETION_KEYS,
    DECAY,
    ORDER,
    PROCESSOR,
    RunIdentity,
    candidates,
    configuration_hash,
    open_checkpoint,
    require_same_teachers,
)
from stillhouse.config import RolloutConfig, RunConfig, SourceConfig, as_config_error, dump_config
from stillhouse.data import DataReport, Documents, save_tokenizer, text_fingerprint, tokenizer_fingerprint
from stillhouse.data.media import media_kind
from stillhouse.display import counted, escaped, name_list
from stillhouse.engine.optimizer import stacked_vectors
from stillhouse.engine.schedule import StepSchedule, make_on_policy_schedule, make_step_schedule, micro_batch_capacity
from stillhouse.loops import off_policy, on_policy
from stillhouse.loops.held_out import held_out_tokens
from stillhouse.loops.rollouts import samplings
from stillhouse.loops.session import Data, Loss, Models, RolloutPlan, Schedule, Session
from stillhouse.models import add_end_ids, eos_ids
from stillhouse.models.document_packing import ROWS
from stillhouse.models.pretrained import tower_warnings
from stillhouse.models.vision_language import require_language_alone
from stillhouse.objective.expression import class_paths
from stillhouse.output.closing_lines import closing_lines
from stillhouse.output.disk import atomic_folder, file_names, hashes
from stillhouse.output.folder import HASHES, RunFolder, environment, folder_lock, init_run_dir, require_intact_model
from stillhouse.output.progress import Progress, folder_name
from stillhouse.parallel import (
    destroy_process_group,
    is_first,
    join,
    log_rank0,
    use_deterministic_algorithms,
    watchdog,
)
from stillhouse.preemption import finishing
from stillhouse.rollout import PromptSource
from stillhouse.run import preflight
from stillhouse.run.agreement import require_same_sources, require_shared_folder
from stillhouse.run.data import load_run_data
from stillhouse.run.local_checks import require_writable
from stillhouse.run.setup import RunSetup, with_precision
from stillhouse.run.teachers import require_signals
from stillhouse.signals import SignalsLostError
from stillhouse.user_code.function_state import module_hashes
from stillhouse.user_code.functions import UserFunction, load_object


def distill(config: RunConfig, *, later_steps: int = 0) -> Path:
    """Start or resume the run of a configuration, and return the run's folder. A complete run is not changed.

    later_steps: the number of steps of the runs that follow this run; the printed time left includes them.

    Raises ConfigError for a mistake in the configuration, and ValueError for a mistake in the data or models. Until
    all checks have passed, nothing is written except the empty folder and the files of its lock.
    """
    config = with_precision(config)
    setup, folder = RunSetup(config), RunFolder(Path(config.out))
    _ = setup.objective.spec  # first, so that a misspelt loss is reported before an occupied folder
    resume, values = config.checkpoint.resume, setup.values
    candidates(folder, resume, values)  # reports an occupied folder before the models are loaded
    ranks = setup.ranks
    if all(ranks.gather(folder.complete)):
        return _report_complete(folder)
    require_writable(config.out)
    data = read_data(setup, announce=is_first())
    session = replace(build_session(setup, data, announce=is_first()), later_steps=later_steps)
    require_shared_folder(folder.path, ranks)
    with closing(session), folder_lock(folder.path) if is_first() else nullcontext():
        # another process may have written to the folder while this process loaded its models
        paths = candidates(folder, resume, values) if is_first() else []
        if any(ranks.gather(folder.complete)):
            return _report_complete(folder)
        checkpoint = open_checkpoint(
            folder,
            paths,
            ranks,
            session.identity,
            fallback=config.checkpoint.fallback,
            base=None if session.models.student.lora is None else setup.config.student.model,
        )
        if checkpoint is None and is_first() and folder.metrics.exists():
            log_rank0(f"{folder.path} has no checkpoint of this run yet: the run starts anew, at step 1")
        if is_first():
            init_run_dir(folder, dump_config(config))
        require_same_teachers(session.models.stores, folder, ranks)
        _run(setup, session, folder, checkpoint)
    return folder.path


def _report_complete(folder: RunFolder) -> Path:
    if is_first():
        finding = require_intact_model(folder)
        log_rank0(
            f"{folder.path} contains this run, which is complete: {folder.model} ({finding}). There is nothing to "
            "do; another run needs another folder as out"
        )
    destroy_process_group()
    return folder.path


def _run(setup: RunSetup, session: Session, folder: RunFolder, checkpoint: IntactCheckpoint | None) -> None:
    models, data = session.models, session.data
    schedule = session.schedule.step_schedule
    reports = data_reports(data, schedule)
    for split, report in reports.items():
        log_rank0(f"{split}: {report.summary()}")
    log_rank0(f"steps: {steps_in_words(schedule, data.train.max_tokens, session.rollout)}")
    for warning in session.warnings:
        log_rank0(f"warning: {warning}")
    if models.ranks.size > 1:
        teachers = [f"{section}: {layout}" for section, layout in setup.own_layouts.items()]
        log_rank0(f"layout: {'; '.join([str(models.engine.student.layout), *teachers])}")
    for section, words in models.packing_in_words.items():
        log_rank0(f"documents of {section}: {words}")
    if models.adapter_in_words is not None:
        log_rank0(f"adapter: {models.adapter_in_words}")
    if checkpoint is not None:
        log_rank0(f"resuming from {checkpoint.path}")
    if is_first():
        seed = session.schedule.seed
        folder.write_json("environment.json", environment(session.loss.in_words, seed, models.device))
        folder.write_json("data.json", {split: asdict(report) for split, report in reports.items()})
    loop = off_policy if session.rollout is None else on_policy
    progress = loop.train(session, folder, checkpoint)
    with finishing("the final model"):
        try:
            tokens = held_out_tokens(models, data, session.loss.spec, progress.step)
        except SignalsLostError as error:  # the model does not depend on these signals and is still written
            tokens = None
            log_rank0(f"warning: tokens.json is left out: {error}")
        if tokens is not None and is_first():
            folder.write_json("tokens.json", tokens)
        if is_first():
            _write_model(setup, session, folder, progress)
        destroy_process_group()
    if is_first():
        checkpoint_config = session.schedule.checkpoint_config
        for line in closing_lines(folder.metrics, checkpoint_config.best, checkpoint_config.greater_is_better):
            log_rank0(line)
    log_rank0(f"model: {folder.model}")


def _write_model(setup: RunSetup, session: Session, folder: RunFolder, progress: Progress) -> None:
    """Write the adapter (if any), the hashes of all files, and last the model: its folder marks a complete run."""
    resume = folder.checkpoints / folder_name(progress.step) / RESUME
    models, data = session.models, session.data
    processor_files = data.processor_files
    if models.student.lora is not None:
        with atomic_folder(folder.adapter) as adapter:
            save_student(adapter, models.student, data.tokenizer, resume, models.ranks, processor_files)
    with atomic_folder(folder.model) as model:
        if models.student.lora is None:
            save_student(model, models.student, data.tokenizer, resume, models.ranks, processor_files)
        else:
            student = setup.config.student
            if setup.model_hashes()["student"] != session.identity.models["student"]:
                raise ValueError(
                    f"student: the files of {student.model} have changed since this run was started; restore them, "
                    "and the same command merges the adapter into them"
                )
            save_merged(model, student, folder.adapter)
            save_tokenizer(data.tokenizer, model, processor_files)
        written = {"model": model} | ({} if models.student.lora is None else {"adapter": folder.adapter})
        digests = {name: hashes(path, file_names(path)) for name, path in sorted(written.items())}
        folder.write_json(
            HASHES, {f"{name}/{file}": digests[name][file] for name in digests for file in digests[name]}
        )


def prepare(config: RunConfig, *, announce: bool = True) -> Session:
    """Load and check everything that the run needs.

    announce: whether to print the resolved objective and the beginning of each phase.

    Raises ConfigError for a mistake in the configuration, ValueError for a mistake in the data or models.
    """
    setup = RunSetup(with_precision(config))
    return build_session(setup, read_data(setup, announce=announce), announce=announce)


def read_data(setup: RunSetup, *, announce: bool = True) -> Data:
    """Make all checks that need no data and no models, and read the data. The first half of `prepare`.

    setup: its configuration must be a result of `with_precision`.
    """
    config, stores = setup.config, setup.stores
    if announce:
        print(escaped("\n  ".join(setup.objective.in_lines(stores)), lines=True), flush=True)
    preflight.check_before_loading(setup)
    _enter("reading the data", announce)
    torch.manual_seed(config.seed)
    if config.deterministic:
        use_deterministic_algorithms()
    return load_run_data(config, stores)


def build_session(setup: RunSetup, data: Data, *, announce: bool = True) -> Session:
    """Load the models, and check them with the data. The second half of `prepare`.

    data: the result of `read_data`.
    """
    config, stores = setup.config, setup.stores
    spec, in_words = setup.objective.spec, setup.objective.in_words(stores)  # raises ConfigError for a wrong class
    paths = [(key, path) for key, text in config.losses.items() for path in class_paths(text)]
    loss = Loss(spec, in_words, [UserFunction(key, path, load_object(path)) for key, path in paths])
    require_signals(stores, setup.teachers, setup.objective, data, setup.ranks)
    model_hashes = {"tokenizer": tokenizer_fingerprint(data.tokenizer), **setup.model_hashes()}
    watchdog.enter("comparing data and models")
    data_hashes = {f"data.{split}": digest for split, digest in data.hashes.items()}
    class_hashes = {f"the module {name} of the loss": digest for name, digest in module_hashes(loss.classes).items()}
    require_same_sources(data_hashes | model_hashes | class_hashes, setup.ranks)
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
    schedule, rollout = make_schedule(data, setup)
    identity = _identity(setup, models, data, model_hashes)
    _add_trained_ends(models, data, rollout)
    decoders = {"student": models.student, **models.teachers}
    warnings = [
        *setup.warnings,
        *data.warnings,
        *preflight.check_models(decoders, setup.teachers, data, max_tokens),
        *preflight.noise_warnings(sources.removed_noise),
        *preflight.schedule_warnings(config.train, schedule.steps, data, on_policy=rollout is not None),
    ]
    if rollout is not None:
        plan, policies = rollout.prompts, [part.policy for part in loss.spec.parts]
        warnings += preflight.prompt_warnings(config.train, rollout.config, plan, config.data.max_tokens, policies)
        warnings += preflight.evaluation_warnings(config.eval, rollout.configs)
    warnings += preflight.same_model_warnings(setup, model_hashes, models.student)
    if not data.has_media:
        name, revision, code = config.student.model, config.student.revision, config.student.trust_remote_code
        warnings += tower_warnings(name, revision, trust_remote_code=code)
    warnings = [escaped(line) for line in dict.fromkeys(warnings)]
    return Session(models, data, loss, schedule, rollout, identity, setup.values, warnings)


def _enter(phase: str, announce: bool) -> None:
    watchdog.enter(phase, timed=False)
    if announce:
        print(f"{phase} …", flush=True)


def _in_rows(data: Data, models: Models, setup: RunSetup) -> Data:
    """Return the data, packed by length if a model of any process of this job runs one document per row."""
    decoders = [*models.engine.student.decoders, models.engine.student.teacher, *models.source.decoders.values()]
    has_rows = any(decoder is not None and decoder.packing.name == ROWS for decoder in decoders)
    if not models.ranks.largest(int(has_rows)):
        return data
    data, config, layout = replace(data, by_length=True), setup.config, setup.layout
    if config.rollout is not None:  # completions are packed later, in each step
        return data
    capacity = micro_batch_capacity(config.train, config.data.max_tokens, layout.degrees.data, layout.stages)
    return data.sorted_by_length(capacity, max(config.data.max_tokens, config.eval.micro_batch_tokens or capacity))


def make_schedule(data: Data, setup: RunSetup) -> tuple[Schedule, RolloutPlan | None]:
    """Return the steps of the run and the plan of the completions; the plan is None in a run on a fixed dataset."""
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
    """Return the sources of an on-policy run.

    prompts, dataset: the documents with prompts, and those with completions.
    rollouts: the section rollout for each source.
    sources: the sources of data.train; empty for a single source.
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
    return [len(documents)] if documents.set_D is None else np.bincount(documents.set_D).tolist()


def _identity(setup: RunSetup, models: Models, data: Data, model_hashes: dict[str, str]) -> RunIdentity:
    """Return the hashes that must not change when the run is resumed.

    If the run generates completions, the hashes include the values of `COMPLETION_KEYS`. Raises ValueError if these
    values differ between ranks.
    """
    rollout, evaluation = setup.config.rollout, setup.config.eval
    completes = bool(evaluation.samples or evaluation.tasks or evaluation.prompts or evaluation.callbacks)
    if rollout is not None or completes:
        writer = models.student
        if rollout is not None and rollout.writer == "teacher" and not rollout.urls:
            writer = models.teacher or writer
        end_ids = ", ".join(map(str, eos_ids(data.tokenizer, writer)))
        decisive = {"end_ids": end_ids, "text": text_fingerprint(data.tokenizer)}
        require_same_sources({COMPLETION_KEYS[name]: value for name, value in decisive.items()}, models.ranks)
        model_hashes = model_hashes | decisive
    hashes = data.hashes | {f"{PROCESSOR}{section}": digest for section, digest in data.processors.items()}
    if data.by_length:
        hashes[ORDER] = ROWS
    vectors = stacked_vectors(models.engine.student.decoders) if setup.config.train.weight_decay else []
    if names := sorted({name for rank_names in models.ranks.gather(vectors) for name in rank_names}):
        hashes[DECAY] = name_list(names)
    return RunIdentity(configuration_hash(setup.values), hashes, model_hashes)


def _add_trained_ends(models: Models, data: Data, rollout: RolloutPlan | None) -> None:
    """Add the tokens at the ends of documents and completions to the ids with which the student ends a text."""
    documents = data.train.documents if rollout is None else data.dataset
    ends = set[int]() if documents is None else set(documents.report.trained_ends)
    added = data.tokenizer.get_added_vocab()
    for sampling in () if rollout is None else samplings(models, data.tokenizer, rollout.configs):
        ends |= {*sampling.eos_ids, *(added[stop] for stop in sampling.stop if stop in added)}
    for decoder in models.engine.student.decoders:
        add_end_ids(decoder, ends)


def steps_in_words(schedule: StepSchedule, max_tokens: int, rollout: RolloutPlan | None) -> str:
    """Describe the number of steps and the content of a step. max_tokens: the most tokens of a packed sequence."""
    if rollout is None:
        sequences = f"{counted(schedule.sequences_per_step, 'sequence')} of at most {max_tokens:,} tokens"
        return f"{schedule.steps:,}, each with {sequences}, {schedule.rows_per_micro_batch} per micro-batch"
    shares = sorted({source.share for source in rollout.prompts.sources})
    share = " to ".join(f"{share:.0%}" for share in dict.fromkeys((shares[0], shares[-1])))
    return (
        f"{schedule.steps:,}; in each of them, prompts: {rollout.prompts.prompts_per_step} "
        f"(rollout.prompts_per_step), completions: {schedule.sequences_per_step}, {share} written by the "
        f"{rollout.config.writer}"
    )


def data_reports(data: Data, schedule: StepSchedule) -> dict[str, DataReport]:
    """Return the reports on used, cut and skipped records, by split, and by set for a split with several sets."""
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
