"""The arguments of commands that take a run's configuration: a file, options and overrides."""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stillhouse.cli.hub import require_on_hub, settle_offline
from stillhouse.registry import registered

if TYPE_CHECKING:
    from stillhouse.config import RunConfig
    from stillhouse.run.local_checks import Need

#: the options of commands that take a configuration: for each key, the option, the name of its value, and its help
OPTIONS = {
    "teacher.model": ("--teacher", "MODEL", "Model to imitate: hub id or folder"),
    "student.model": ("--student", "MODEL", "Model to train: hub id or folder"),
    "data.train": ("--data", "SOURCE", "JSONL, Parquet, folder or hub id"),
    "data.eval": ("--eval", "SOURCE|SHARE", "Held-out data, or a share of --data"),
    "objective.loss": ("--loss", "SUM", "Objective, such as 0.3*cross_entropy + 0.7*jsd(0.5)"),
    "out": ("--out", "DIR", "Folder of the run"),
}
#: how the help of a `configured` command shows its arguments
ARGUMENTS = "[CONFIG] [KEY=VALUE]..."
EXAMPLE = "--teacher Qwen/Qwen3-8B --student Qwen/Qwen3-0.6B --data train.jsonl --out runs/a"
#: suffixes of data files beside those of the registered readers; such a file is never a configuration
_OF_DATA = (".gz", ".zst", ".arrow", ".txt")
#: suffixes that a configuration may have, even if there is a reader for them
_OF_CONFIGURATIONS = (".json", ".yaml", ".yml")
#: loggers whose warnings are hidden; transformers and peft import these libraries if they are installed
_NOISY_LOGGERS = ("torchao", "torch.utils._pytree", "bitsandbytes")

Command = TypeVar("Command", bound=Callable[..., Any])


def configured(command: Command, out: str = "Folder of the run (out).") -> Command:
    """Add the arguments for a run's configuration to a command: a file, options and overrides.

    out: the help of the option --out.
    """
    for key, (flag, metavar, text) in reversed(OPTIONS.items()):
        command = click.option(flag, metavar=metavar, help=out if key == "out" else f"{text} ({key}).")(command)
    return click.argument("arguments", nargs=-1, metavar=ARGUMENTS)(command)


def load_arguments(
    arguments: Sequence[str], flags: dict[str, str | None], needs: "Sequence[Need]" = ("data",)
) -> "RunConfig":
    """Load the configuration from a command's file, options and overrides.

    needs: see `check_local`.

    Raises ConfigError if a file, package or device is missing on this machine, before large libraries are imported.
    """
    options = {name: value for name, value in flags.items() if value is not None}
    if not arguments and not options:
        name = click.get_current_context().info_name
        raise misused(f"a configuration file or options are needed, for example\n  stillhouse {name} {EXAMPLE}")
    overrides = [argument for argument in arguments if is_override(argument)]
    files = [argument for argument in arguments if not is_override(argument)]
    file = files[0] if files else None
    if any(argument.startswith("=") for argument in arguments):
        raise misused("an override has no spaces: expected for example train.learning_rate=2e-5")
    if len(files) > 1:
        raise misused(f"got {len(files)} configuration files, expected one: {', '.join(files)}")
    if file is not None and is_data(file):
        raise misused(f"{file} is data, not a configuration: write --data {file}")
    if file is not None and not Path(file).exists():
        if Path(file).suffix in (".yaml", ".yml") or "/" in file:
            raise misused(f"the file {file} does not exist: expected a YAML file{_similar_file(Path(file))}")
        expected = f"expected a YAML file or key=value{_similar_file(Path(file))}"
        raise misused(f"{file!r} is neither a file nor an override: {expected}")
    from stillhouse.config import load_config
    from stillhouse.run.local_checks import check_local

    config = load_config(file, overrides, settings=settings_layer(options))
    # a complete run is not trained again, so its data and models need not exist
    is_complete = "run" in needs and os.path.isdir(os.path.join(config.out, "model"))
    sections = {"student": config.student, **config.teacher_sections}
    models = {f"{key}.model": (model.model, model.revision) for key, model in sections.items() if model.model}
    if not is_complete:
        check_local(config, needs)
    settle_offline([*(name for name, _ in models.values()), config.data.chat_template])
    if not is_complete:
        require_on_hub(models)
    quiet_libraries()
    return config


def _similar_file(file: Path) -> str:
    """Return a hint with the YAML file in the same folder whose name is most similar; "" if there is none."""
    names = [other.name for other in (*file.parent.glob("*.yaml"), *file.parent.glob("*.yml"))]
    near = get_close_matches(file.name, names, n=1) or [name for name in names if Path(name).stem == file.name]
    return f"; did you mean {file.parent / near[0]}?" if near else ""


def is_data(file: str) -> bool:
    """Return whether a file has a suffix that only data files have. A .json file can also be a configuration."""
    readers = (f".{name}" for name in registered("stillhouse.readers"))
    return Path(file).suffix.lower() in {*_OF_DATA, *readers}.difference(_OF_CONFIGURATIONS)


def is_override(argument: str) -> bool:
    """Return whether an argument is an override (`train.steps=3`), and not a path (`runs/lr=3/config.yaml`).

    Hydra's form `~rollout.reward` also counts as an override if no file has this name. The user then gets an error
    about overrides, not about a missing file.
    """
    key, sign, _ = argument.partition("=")
    is_meant = bool(sign) or (key.startswith("~") and not os.path.exists(key))
    return is_meant and "/" not in key and os.sep not in key


def settings_layer(options: dict[str, str]) -> dict[str, Any]:
    """Return the options as a layer of the configuration. Values are text, except that `--eval` may be a number."""
    settings: dict[str, Any] = {}
    for key, (flag, *_) in OPTIONS.items():
        value: str | float | None = options.get(flag.removeprefix("--"))
        if value is not None:
            section, _, field = key.rpartition(".")
            with suppress(ValueError):
                value = float(value) if flag == "--eval" else value
            (settings.setdefault(section, {}) if section else settings)[field] = value
    return settings


def misused(message: str) -> click.UsageError:
    """An error about the arguments of the current command."""
    return click.UsageError(message, click.get_current_context())


def quiet_libraries() -> None:
    """Disable progress bars of transformers, and messages of torch's C++ code and of some libraries.

    The bars for reading and writing weights would break the live line of a run. When a rank ends unexpectedly, the
    C++ code would print a warning with a stack trace on all other ranks.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads the variable when it is imported
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
