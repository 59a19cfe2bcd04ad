"""A whole run: make everything ready, claim the folder, train, leave the model behind."""

from pathlib import Path

from stillhouse.config import RunConfig
from stillhouse.train.checkpoint import atomic_folder, save_student
from stillhouse.train.folder import RunFolder, alone, claim, environment, require_same_data, resumable
from stillhouse.train.held_out import held_out_tokens
from stillhouse.train.off_policy import train
from stillhouse.train.session import Session, data_reports, in_words, parse_objective, prepare


def distill(config: RunConfig) -> Path:
    """Run, or go on with, what the configuration says; returns the run's folder. A complete run is left as it is.

    Raises ConfigError for the configuration and ValueError for what it points to. Nothing is written before all of
    it has been found in order.
    """
    parse_objective(config)  # before anything else: a misspelt loss is not to hide behind an occupied folder
    resume, folder = resumable(config), RunFolder(Path(config.out))
    if folder.complete:
        print(f"{folder.path} holds this run, complete: {folder.model}. Nothing to do; another run needs another out")
        return folder.path
    session = prepare(config)
    if resume is not None:
        require_same_data(resume, folder, session.data)
    with alone(folder):
        claim(folder, config)
        _run(session, folder, resume)
    return folder.path


def _run(session: Session, folder: RunFolder, resume: Path | None) -> None:
    config = session.config
    reports = data_reports(session)
    for which, report in reports.items():
        print(f"{which}: {report.summary()}")
    for warning in session.warnings:
        print(f"warning: {warning}")
    if resume is not None:
        print(f"resuming from {resume}")
    folder.write_json("environment.json", environment(in_words(config, session.recipe), config.seed, session.device))
    folder.write_json("data.json", {which: report.as_dict() for which, report in reports.items()})
    progress = train(session, folder, resume)
    tokens = held_out_tokens(session, progress.step)
    if tokens is not None:
        folder.write_json("tokens.json", tokens)
    with atomic_folder(folder.model) as model:
        save_student(model, session.student, session.tokenizer)
    print(f"model: {folder.model}")
