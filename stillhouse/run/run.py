"""A whole run: prepare everything, lock the run folder, train, write the model."""

import os
from contextlib import closing, nullcontext
from pathlib import Path

from stillhouse.checkpoint.export_weights import save_merged, save_student
from stillhouse.checkpoint.integrity import RESUME, IntactCheckpoint
from stillhouse.checkpoint.resume import candidates, open_checkpoint
from stillhouse.config import ConfigError, RunConfig
from stillhouse.loops import off_policy, on_policy
from stillhouse.loops.held_out_tokens import held_out_tokens
from stillhouse.output.disk import (
    UNFINISHED,
    atomic_folder,
    explained_write_errors,
    file_names,
    flush,
    hashes,
)
from stillhouse.output.folder import (
    HASHES,
    RunFolder,
    environment,
    folder_lock,
    init_run_dir,
    require_intact_model,
)
from stillhouse.output.progress import Progress, folder_name
from stillhouse.parallel import destroy_process_group, is_first, log_rank0
from stillhouse.preemption import finishing
from stillhouse.run.agreement import require_shared_folder
from stillhouse.run.in_words import in_words
from stillhouse.run.models import model_fingerprints, teacher_layout
from stillhouse.run.session import (
    Session,
    adapter_in_words,
    connect_ranks,
    data_reports,
    objective_spec,
    prepare,
    with_precision,
)
from stillhouse.serving.client import Proof, RemoteSignals
from stillhouse.signals import SignalsLostError

#: the beginning of the names of files in a run's folder: what the servers of a teacher answered when the run began
SERVED_TEACHER = "served_teacher"


def distill(config: RunConfig) -> Path:
    """Start or resume the run of a configuration; returns the run's folder. A complete run is left as it is.

    Raises ConfigError for a mistake in the configuration and ValueError for one in the data or models that it names.
    Before everything has been checked, only the folder itself, its lock and the lock's holder are written.
    """
    config = with_precision(config)
    objective_spec(config)  # first, so that a misspelt loss is reported even if the folder is occupied, too
    folder = RunFolder(Path(config.out))
    candidates(config)  # reports an occupied folder before the models are loaded
    ranks, _ = connect_ranks(config)
    if all(ranks.gather(folder.complete)):
        return _report_complete(folder)
    _require_writable(folder.path)
    session = prepare(config, announce=is_first())
    require_shared_folder(folder.path, ranks)
    with closing(session), folder_lock(folder.path) if is_first() else nullcontext():
        # another process may have written to the folder while this one loaded its models
        paths = candidates(config) if is_first() else []
        if any(ranks.gather(folder.complete)):
            return _report_complete(folder)
        checkpoint = open_checkpoint(session, folder, paths)
        if is_first():
            init_run_dir(folder, config)
        _require_same_teachers(session, folder)
        _run(session, folder, checkpoint)
    return folder.path


def _require_writable(folder: Path) -> None:
    """Raise ConfigError, before anything is loaded, if the run's folder cannot be created or written."""
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not existing.is_dir():
        raise ConfigError("out", f"got {folder}, but {existing} is a file: expected a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            "out", f"got {folder}, but {existing} cannot be written by this user: expected another folder"
        )


def _require_same_teachers(session: Session, folder: RunFolder) -> None:
    """Raise ValueError on all ranks if a served teacher answers otherwise than when the run began."""
    for section, store in session.stores.items():
        if not isinstance(store, RemoteSignals) or store.proof is None:
            continue
        name = section.partition(".")[2]
        with session.ranks.all_raise(ValueError):
            if is_first():
                _require_same(folder, store.proof, f"{SERVED_TEACHER}{f'.{name}' if name else ''}.safetensors")


def _require_same(folder: RunFolder, proof: Proof, name: str) -> None:
    """Compare a served teacher with what it answered when the run began; a new run's folder gets its answers."""
    path = folder.path / name
    if path.exists():
        proof.compare(path)
    elif any(folder.checkpoints.glob("step-*")):
        raise ValueError(f"{path} is missing: whether the teacher is still the same cannot be checked")
    else:
        partial = path.with_name(path.name + UNFINISHED)
        with explained_write_errors(path):
            proof.save(partial)
            flush(partial)
            partial.rename(path)


def _report_complete(folder: RunFolder) -> Path:
    if is_first():
        finding = require_intact_model(folder)
        log_rank0(
            f"{folder.path} contains this run, which is complete: {folder.model} ({finding}). There is nothing to "
            "do; another run needs another folder as out"
        )
    destroy_process_group()
    return folder.path


def _run(session: Session, folder: RunFolder, checkpoint: IntactCheckpoint | None) -> None:
    config = session.config
    reports = data_reports(session)
    for which, report in reports.items():
        log_rank0(f"{which}: {report.summary()}")
    for warning in session.warnings:
        log_rank0(f"warning: {warning}")
    if session.ranks.size > 1:
        own = {section: teacher_layout(config, section) for section in config.teacher_sections}
        teachers = [f"{section}: {layout}" for section, layout in own.items() if layout is not None]
        log_rank0(f"layout: {'; '.join([str(session.engine.layout), *teachers])}")
    if session.student.lora is not None:
        log_rank0(f"adapter: {adapter_in_words(session)}")
    if checkpoint is not None:
        log_rank0(f"resuming from {checkpoint.path}")
    if is_first():
        words = in_words(config, session.spec, session.stores)
        folder.write_json("environment.json", environment(words, config.seed, session.device))
        folder.write_json("data.json", {which: report.as_dict() for which, report in reports.items()})
    loop = off_policy if config.rollout is None else on_policy
    progress = loop.train(session, folder, checkpoint)
    with finishing("the final model"):
        try:
            tokens = held_out_tokens(session, progress.step)
        except SignalsLostError as error:  # the model does not depend on them
            tokens = None
            log_rank0(f"warning: tokens.json is left out: {error}")
        if tokens is not None and is_first():
            folder.write_json("tokens.json", tokens)
        if is_first():
            _write_model(session, folder, progress)
        destroy_process_group()
    log_rank0(f"model: {folder.model}")


def _write_model(session: Session, folder: RunFolder, progress: Progress) -> None:
    """Write the adapter, if any, then the hashes of all files, and last the model: it marks the run as complete."""
    resume = folder.checkpoints / folder_name(progress.step) / RESUME
    adapters: dict[str, str] = {}
    if session.student.lora is not None:
        with atomic_folder(folder.adapter) as adapter:
            save_student(adapter, session.student, session.tokenizer, resume, session.ranks)
            adapters = {f"adapter/{name}": each for name, each in hashes(adapter, file_names(adapter)).items()}
    with atomic_folder(folder.model) as model:
        if session.student.lora is None:
            save_student(model, session.student, session.tokenizer, resume, session.ranks)
        else:
            _require_same_base(session)
            save_merged(model, session.config.student, folder.adapter, session.tokenizer)
        files = {f"model/{name}": each for name, each in hashes(model, file_names(model)).items()}
        folder.write_json(HASHES, adapters | files)


def _require_same_base(session: Session) -> None:
    """Raise ValueError if the base model's files have changed since the run was started.

    The adapter was trained on those files, and will be merged into them.
    """
    name = session.config.student.model
    if model_fingerprints(session.config, session.stores)["student"] != session.model_hashes["student"]:
        raise ValueError(
            f"student: the files of {name} have changed since this run was started; restore them, and the same "
            "command merges the adapter into them"
        )
