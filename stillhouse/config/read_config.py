"""Reads a file, settings and overrides into a validated `RunConfig`, and writes a `RunConfig` as YAML."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stillhouse.config.check_rules import check_rules
from stillhouse.config.errors import ConfigError, listed
from stillhouse.config.explain_errors import explain, unknown_key
from stillhouse.config.run_section import RunConfig
from stillhouse.config.schema import inner_section, named_sections, section_of, value_fields
from stillhouse.config.section import Section
from stillhouse.config.yaml_text import read_yaml, write_yaml

Layer = Mapping[str, Any]


def load_config(
    path: str | os.PathLike[str] | None,
    overrides: Sequence[str] = (),
    defaults: Layer | None = None,
    settings: Layer | None = None,
) -> RunConfig:
    """Return a run's configuration. The layers are defaults, file, settings, overrides; later ones have precedence.

    path: the YAML file, or None.
    overrides: texts such as `train.learning_rate=2e-5`, with YAML values. A repeated key gets its last value.
    defaults, settings: nested mappings, like the file's content.

    Sections are merged, and values are replaced. `train.steps` in a later layer also replaces `train.epochs` in an
    earlier layer, and vice versa. Raises ConfigError.
    """
    from_file = _read_file(path)
    from_overrides: Layer = {}
    mistakes: list[ConfigError] = []
    for override in overrides:
        try:
            from_overrides = _merge(from_overrides, _read_override(override))
        except ConfigError as error:
            mistakes.append(error)
    if mistakes:
        raise listed(mistakes)
    merged: Layer = {}
    for layer in (defaults or {}, from_file, settings or {}, from_overrides):
        merged = _merge(_without_rival(merged, layer), layer)
    # remove empty sections (null in YAML), so that they get their defaults
    required = {name for name, field in RunConfig.model_fields.items() if section_of(field) is field.annotation}
    content = {name: value for name, value in merged.items() if value is not None or name not in required}
    try:
        config = RunConfig.model_validate(content)
    except ValidationError as error:
        raise explain(error, content, RunConfig) from error
    check_rules(config)
    return config


def dump_config(config: Section) -> str:
    """Write all keys as YAML, from which `load_config` reads an equal configuration."""
    return write_yaml(config.model_dump(mode="json"))


def dotted_values(config: Section) -> dict[str, Any]:
    """Return the values by dotted key. A section within a section is one value."""
    values: dict[str, Any] = {}
    for section, content in config.model_dump(mode="json").items():
        is_section = isinstance(content, dict)
        values |= (
            {f"{section}.{name}": value for name, value in content.items()} if is_section else {section: content}
        )
    return values


def _read_file(path: str | os.PathLike[str] | None) -> Layer:
    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(None, f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise ConfigError(None, f"{path}: cannot read the configuration: {error.strerror}") from error
    content = read_yaml(text, str(path))
    if not isinstance(content, Mapping | None):
        kind = type(content).__name__
        raise ConfigError(None, f"{path}: got a {kind}, expected sections such as 'student: {{model: ...}}'")
    return content or {}


def _read_override(override: str) -> Layer:
    key, sign, text = override.partition("=")
    if key.startswith(("+", "~")):
        raise ConfigError(key, f"Hydra's signs + and ~ are not supported{_without_sign(key)}")
    if not sign:
        raise ConfigError(None, f"override {override!r}: expected key=value, such as train.learning_rate=2e-5")
    _check_key(key)
    nested: Any = text  # *.jsonl is a glob, not a YAML alias, because an override has no YAML anchors
    if not text.startswith("*"):
        nested = read_yaml(text, f"override {override!r}", numbered=False)
    for name in reversed(key.split(".")):
        nested = {name: nested}
    return nested


def _check_key(key: str) -> None:
    """Raise ConfigError unless `key` is the full name of a section or a value."""
    model: type[Section] | None = RunConfig
    parent = ""
    for name in key.split("."):
        if model is None:
            raise ConfigError(key, f"{parent} is a value without keys of its own: write {parent}=...")
        if name not in model.model_fields and named_sections(model) is None:
            raise unknown_key(key, RunConfig)
        model, parent = inner_section(model, name), f"{parent}.{name}".removeprefix(".")


def _without_sign(key: str) -> str:
    """Return a hint with the replacement for a key with Hydra's sign + (add the key) or ~ (remove the key)."""
    bare = key.lstrip("+~")
    try:
        _check_key(bare)
    except ConfigError as error:
        return f", and without the sign: {error.problem}"
    if key.startswith("+"):
        return f": write {bare}=..."
    field = {**value_fields(RunConfig), **RunConfig.model_fields}.get(bare)
    if field is not None and field.default is None:
        return f": write {bare}=null"
    return f": remove {bare} from the file, so that its default is used"


def _merge(below: Layer, above: Layer, prefix: str = "") -> Layer:
    merged = dict(below)
    for name, value in above.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and merged.get(name) is not None and key not in value_fields(RunConfig):
            if not isinstance(merged[name], Mapping):
                raise ConfigError(
                    key, f"got {merged[name]!r}; expected: a section, because {key}.{next(iter(value), '')} is set"
                )
            value = _merge(merged[name], value, f"{key}.")
        merged[name] = value
    return merged


def _without_rival(below: Layer, above: Layer) -> Layer:
    """Remove train.epochs from `below` if `above` sets only train.steps, and vice versa."""
    train_below, train_above = below.get("train"), above.get("train")
    if not isinstance(train_below, Mapping) or not isinstance(train_above, Mapping):
        return below
    train = dict(train_below)
    for name, rival in (("steps", "epochs"), ("epochs", "steps")):
        if train_above.get(name) is not None and rival not in train_above:
            train.pop(rival, None)
    return {**below, "train": train}
