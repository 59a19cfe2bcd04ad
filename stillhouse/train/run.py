"""A whole run: make everything ready, claim the folder, train, leave the model behind."""

from contextlib import nullcontext
from pathlib import Path

from stillhouse.config import RunConfig
from stillhouse.parallel import is_first, leave
from stillhouse.preemption import finishing
from stillhouse.train.checkpoint import atomic_folder, checkpoints, save_merged, save_student
from stillhouse.train.folder import RunFolder, alone, claim, environment, require_same_data, resumable
from stillhouse.train.held_out import held_out_tokens
from stillhouse.train.off_policy import train
from stillhouse.train.session import Session, adapter_in_words, data_reports, in_words, parse_objective, prepare


def distill(config: RunConfig) -> Path:
    """Run, or go on with, what the configuration says; returns the run's folder. A complete run is left as it is.

    Raises ConfigError for the configuration and ValueError for what it points to. Nothing is written before all of
    it has been found in order.
    """
    parse_objective(config)  # before anything else: a misspelt loss is not to hide behind an occupied folder
    resume, folder = resumable(config), RunFolder(Path(config.out))
    if folder.complete:
        say(f"{folder.path} holds this run, complete: {folder.model}. Nothing to do; another run needs another out")
        return folder.path
    session = prepare(config, announce=is_first())
    if resume is not None:
        require_same_data(resume, folder, session.data)
    with alone(folder) if is_first() else nullcontext():
        if is_first():
            claim(folder, config)
        _run(session, folder, resume)
    return folder.path


def say(line: str) -> None:
    """Once, of all processes."""
    if is_first():
        print(line)


def _run(session: Session, folder: RunFolder, resume: Path | None) -> None:
    config = session.config
    reports = data_reports(session)
    for which, report in reports.items():
        say(f"{which}: {report.summary()}")
    for warning in session.warnings:
        say(f"warning: {warning}")
    if session.runner.mesh is not None:
        say(f"layout: {session.runner.layout}")
    if session.student.lora is not None:
        say(f"adapter: {adapter_in_words(session)}")
    if resume is not None:
        say(f"resuming from {resume}")
    if is_first():
        words = in_words(config, session.recipe)
        folder.write_json("environment.json", environment(words, config.seed, session.device))
        folder.write_json("data.json", {which: report.as_dict() for which, report in reports.items()})
    progress = train(session, folder, resume)
    with finishing("the final model"):
        tokens = held_out_tokens(session, progress.step)
        if tokens is not None and is_first():
            folder.write_json("tokens.json", tokens)
        if is_first():
            _leave_model(session, folder)
        leave()
    say(f"model: {folder.model}")


def _leave_model(session: Session, folder: RunFolder) -> None:
    """The final student, last of all: it is what makes a run complete."""
    resume = checkpoints(folder.checkpoints)[-1] / "resume"  # of the last step
    if session.student.lora is None:
        with atomic_folder(folder.model) as model:
            save_student(model, session.runner, session.tokenizer, resume)
        return
    with atomic_folder(folder.adapter) as adapter:
        save_student(adapter, session.runner, session.tokenizer, resume)
    with atomic_folder(folder.model) as model:
        save_merged(model, session.config.student, folder.adapter, session.tokenizer)
