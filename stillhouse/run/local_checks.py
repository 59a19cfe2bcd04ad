"""Checks of the things on this machine that a configuration names: models, data, functions, the run's folder, the
layout.

A command makes these checks before it imports torch, so that a misspelt path is reported within a second. Checks that
need a model, a server or the hub are made later.
"""

import os
import socket
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from stillhouse.config import ConfigError, RunConfig, as_config_error
from stillhouse.config.errors import listed
from stillhouse.config.model_folder import require_model, require_template
from stillhouse.config.reward_sum import reward_parts
from stillhouse.config.section import function_hint, text_list
from stillhouse.data.read.data_source import require_source
from stillhouse.objective.expression import class_paths
from stillhouse.user_code.environment import environments
from stillhouse.user_code.function_files import require_in_file

Check = Callable[[Any], object]
#: the time limit in seconds to reach a server
_SECONDS = 5.0
#: the things that a command needs in addition to models
Need = Literal["data", "run", "servers"]


def check_local(config: RunConfig, needs: Collection[Need]) -> None:
    """Raise one ConfigError with all mistakes in models and in the things that a command needs.

    needs: "data" for data and functions, "run" for the run's folder and a layout, "servers" for servers, which
        must already listen.
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
    if "servers" in needs:
        urls = {f"{key}.url": teacher.urls for key, teacher in teachers.items()}
        urls["rollout.url"] = [] if config.rollout is None else config.rollout.urls
        checks += [(key, _require_server, url) for key, addresses in urls.items() for url in addresses]
        checks += [(key, _require_server, part.name) for key, part in rewards if part.is_server]
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
    if mistakes:
        raise listed(mistakes)


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


def _require_server(url: str) -> None:
    """Raise ValueError unless a server listens at the address. A run has no such check: it waits for the server."""
    address = urlsplit(url)
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=_SECONDS).close()
    except OSError as error:
        raise ValueError(
            f"got {url}, where no server can be reached now ({error.strerror or error}): start it before `stillhouse "
            "check`, or correct the address; `stillhouse distill` waits for it"
        ) from error
