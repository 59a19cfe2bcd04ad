"""One run from start to end: load everything, lock the run folder, train, write the model."""

from contextlib import closing, nullcontext
from pathlib import Path

from stillhouse.checkpoint.checkpoint_folder import RESUME, IntactCheckpoint
from stillhouse.checkpoint.export_weights import save_merged, save_student
from stillhouse.checkpoint.resume import candidates, open_checkpoint, require_same_teachers
from stillhouse.config import RunConfig, dump_config
from stillhouse.data import save_tokenizer
from stillhouse.loops import off_policy, on_policy
from stillhouse.loops.held_out import held_out_tokens
from stillhouse.loops.session import Session
from stillhouse.output.disk import atomic_folder, file_names, hashes
from stillhouse.output.folder import HASHES, RunFolder, environment, folder_lock, init_run_dir, require_intact_model
from stillhouse.output.progress import Progress, folder_name
from stillhouse.parallel import destroy_process_group, is_first, log_rank0
from stillhouse.preemption import finishing
from stillhouse.run.agreement import require_shared_folder
from stillhouse.run.local_checks import require_writable
from stillhouse.run.session import build_session, data_reports, steps_in_words
from stillhouse.run.setup import RunSetup, with_precision
from stillhouse.signals import SignalsLostError


def distill(config: RunConfig) -> Path:
    """Start or resume the run of a configuration; returns the run's folder. A complete run is not changed.

    Raises ConfigError for a mistake in the configuration, and ValueError for a mistake in the data or models.
    Until all checks have passed, nothing is written except the empty folder and the files of its lock.
    """
    setup, folder = RunSetup(with_precision(config)), RunFolder(Path(config.out))
    _ = setup.objective.spec  # first, so that a misspelt loss is reported before an occupied folder
    resume, values = config.checkpoint.resume, setup.values
    candidates(folder, resume, values)  # reports an occupied folder before the models are loaded
    ranks = setup.ranks
    if all(ranks.gather(folder.complete)):
        return _report_complete(folder)
    require_writable(config.out)
    session = build_session(setup, announce=is_first())
    require_shared_folder(folder.path, ranks)
    with closing(session), folder_lock(folder.path) if is_first() else nullcontext():
        # another process may have written to the folder while this one loaded its models
        paths = candidates(folder, resume, values) if is_first() else []
        if any(ranks.gather(folder.complete)):
            return _report_complete(folder)
        checkpoint = open_checkpoint(
            folder,
            paths,
            ranks,
            session.identity,
            fallback=config.checkpoint.fallback,
            base=None if session.models.student.lora is None else config.student.model,
        )
        if checkpoint is None and is_first() and folder.metrics.exists():
            log_rank0(f"{folder.path} has no checkpoint of this run yet: it begins anew, at step 1")
        if is_first():
            init_run_dir(folder, dump_config(setup.config))
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
        folder.write_json("data.json", {split: report.as_dict() for split, report in reports.items()})
    loop = off_policy if session.rollout is None else on_policy
    progress = loop.train(session, folder, checkpoint)
    with finishing("the final model"):
        try:
            tokens = held_out_tokens(models, data, session.loss.spec, progress.step)
        except SignalsLostError as error:  # the model does not depend on these signals, so it is still written
            tokens = None
            log_rank0(f"warning: tokens.json is left out: {error}")
        if tokens is not None and is_first():
            folder.write_json("tokens.json", tokens)
        if is_first():
            _write_model(setup, session, folder, progress)
        destroy_process_group()
    log_rank0(f"model: {folder.model}")


def _write_model(setup: RunSetup, session: Session, folder: RunFolder, progress: Progress) -> None:
    """Write the adapter (if any), the hashes of all files, and the model last: its folder marks a complete run."""
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
