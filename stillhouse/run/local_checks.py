"""Checks of the things on this machine that a configuration names: models, data, functions, the run's folder, the
layout.

A command makes these checks before it imports torch, so that a misspelt path is reported within a second. Checks that
need a model or the hub are made later.
"""

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from stillhouse.config import ConfigError, RunConfig, as_config_error
from stillhouse.config.errors import listed
from stillhouse.config.model_folder import require_model, require_template
from stillhouse.config.reward_sum import reward_parts
from stillhouse.config.section import function_hint, text_list
from stillhouse.data.read.data_source import first_records, require_source
from stillhouse.data.read.foreign_columns import needed_columns, renamed, with_source_names
from stillhouse.data.record import DataError, column_value, kept_value
from stillhouse.objective.expression import class_paths
from stillhouse.run.server_checks import server_mistakes
from stillhouse.user_code.environment import environments
from stillhouse.user_code.function_files import require_in_file

Check = Callable[[Any], object]
#: the things that a command needs in addition to models
Need = Literal["data", "run", "servers", "servers of a new run"]


def check_local(config: RunConfig, needs: Collection[Need]) -> None:
    """Raise one ConfigError with all mistakes in models and in the things that a command needs. Then raise DataError
    if the first record of a data file cannot be used.

    needs: "data" for data and functions, "run" for the run's folder and a layout, "servers" for servers, which must
        already listen. "servers of a new run": servers that may listen later, unless the run has checkpoints. Servers
        may be started at the same time as a run, which waits for them.
    """
    data, prompts, teachers = config.data, config.eval.prompts, config.teacher_sections
    models = {"student": config.student, **teachers}
    rewards = [("eval.prompts.reward", part) for part in reward_parts(None if prompts is None else prompts.reward)]
    rollout_keys: list[tuple[str, str]] = []  # pairs of the key and the path of a function of rollouts
    for number, rollout in enumerate(config.rollouts):
        rewards += [(config.rollout_key(number, "reward"), part) for part in reward_parts(rollout.reward)]
        for name in environments():
            rollout_keys += [(config.rollout_key(number, name), path) for path in text_list(getattr(rollout, name))]
    # for each check: the key that its error names, the check, and its argument
    checks: list[tuple[str, Check, Any]]
    checks = [(f"{key}.model", require_model, model.model) for key, model in models.items() if model.model]
    if "data" in needs:
        sources = [item.source for item in data.weighted_sources] or [str(data.train)]
        checks += [("data.train", require_source, source) for source in sources]
        checks += [(f"data.eval.{name}", require_source, source) for name, source in data.eval_sets.items()]
        checks += [("data.eval", require_source, data.eval)] if isinstance(data.eval, str) else []
        checks += [] if prompts is None else [("eval.prompts.data", require_source, prompts.data)]
        if data.chat_template is not None:
            checks.append(("data.chat_template", require_template, data.chat_template))
        functions = [("eval.callbacks", path) for path in config.eval.callbacks]
        functions += [(key, part.name) for key, part in rewards if part.is_function]
        functions += [(key, path) for key, loss in config.losses.items() for path in class_paths(loss)]
        checks += [(key, _require_function, path) for key, path in functions + rollout_keys]
    if "run" in needs:
        checks.append(("out", require_writable, config.out))
        checks.append(("parallel", config.parallel.degrees, int(os.environ.get("WORLD_SIZE", "1"))))
    caches = [(f"{key}.cache", teacher.cache) for key, teacher in teachers.items() if teacher.cache]
    mistakes = [
        ConfigError(key, f"got {folder}, but there is no such folder")
        for key, folder in caches
        if "data" in needs and not os.path.isdir(folder)
    ]
    for key, check, value in dict.fromkeys(checks):  # several sources of prompts can have the same reward
        try:
            with as_config_error(key):
                check(value)
        except ConfigError as error:
            mistakes.append(error)
    is_new = not os.path.isdir(os.path.join(config.out, "checkpoints"))
    if "servers" in needs or ("servers of a new run" in needs and is_new):
        mistakes += server_mistakes(config, must_listen="servers" in needs)
    if mistakes:
        raise listed(mistakes)
    if "data" in needs and data.on_error == "raise":
        _require_first_records(config)


def _require_first_records(config: RunConfig) -> None:
    """Raise ValueError if the first record of a file cannot be read or has not the columns that the run needs."""
    data, share, prompts = config.data, config.data.eval, config.eval.prompts
    common: Mapping[str, str] = data.columns or {}
    route, teachers = None if config.teachers is None else config.teachers.route, list(config.several)
    require = partial(_require_columns, route=route, teachers=teachers)
    sources = [(item.source, common if item.columns is None else item.columns) for item in data.weighted_sources]
    for (source, names), rollout in zip_longest(sources or [(str(data.train), common)], config.rollouts):
        require(source, names, prompts=rollout is not None)
        if rollout is not None and share and isinstance(share, float):
            with held_out_needs_completions(share):
                require(source, names, prompts=False)
        elif rollout is not None and not rollout.is_on_student_alone:
            require(source, names, prompts=False)
    for source in [share] if isinstance(share, str) else data.eval_sets.values():
        require(source, common, prompts=False)
    if prompts is not None:
        with as_config_error("eval.prompts.data"):
            require(prompts.data, common, prompts=True)


def _require_columns(
    source: str, names: Mapping[str, str], *, prompts: bool, route: str | None, teachers: list[str]
) -> None:
    """Raise ValueError if a local source is empty, or if the first record of one of its files cannot be read, lacks
    columns of the form of the source's first record, or names no teacher of the run.

    names: see `renamed`. prompts: whether only prompts are read. route: the column that names the teacher, or None.
    """
    records, columns = first_records(source), None
    if records == []:
        raise ValueError(f"{source}: the dataset is empty")
    for record in records or ():
        try:
            if record.problem:
                raise ValueError(record.problem)
            fields = renamed(record.fields, names)
            columns = columns or needed_columns(fields, prompts=prompts)
            for column in columns:
                column_value(fields, column)
            if route is not None:
                kept_value(record.fields, route, teachers)
        except ValueError as error:
            raise DataError(record.where, with_source_names(str(error), names)) from error


@contextmanager
def held_out_needs_completions(share: float) -> Iterator[None]:
    """Convert a ValueError about training documents whose completions are not there, although some are held out."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(
            "data.eval",
            f"got {share:g}, but held-out metrics need completions: expected 0 for prompts only, or a source with "
            f"completions ({error})",
        ) from error


def require_writable(out: str) -> None:
    """Raise ConfigError if a run's folder cannot be created or written. Creates a temporary folder as a test."""
    folder = Path(out)
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError("out", f"got {folder}, but {existing} is a file: expected a folder")
    if os.environ.get("RANK", "0") != "0":  # only rank 0 writes to the folder
        return
    try:
        # write as a test, because permissions mislead in /proc, on read-only disks, and for administrators
        os.rmdir(tempfile.mkdtemp(prefix=".stillhouse-", dir=existing))
    except OSError as error:
        raise ConfigError(
            "out", f"got {folder}, but {existing} cannot be written ({error.strerror}): expected another folder"
        ) from error


def _require_function(path: str) -> None:
    require_in_file(path, function_hint(path))
