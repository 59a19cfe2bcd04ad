"""From a file, settings and overrides to a checked `RunConfig`, and back to YAML."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stillhouse.config.errors import ConfigError
from stillhouse.config.explain import explain
from stillhouse.config.keys import section_of, unknown_key
from stillhouse.config.run import RunConfig
from stillhouse.config.section import Section
from stillhouse.config.yaml_text import read_yaml, write_yaml

Layer = Mapping[str, Any]


def load_config(
    path: str | os.PathLike[str] | None,
    overrides: Sequence[str] = (),
    defaults: Layer | None = None,
    settings: Layer | None = None,
) -> RunConfig:
    """The configuration of a run: each layer over the one before, in the order defaults, file, settings, overrides.

    `overrides` are texts such as `train.learning_rate=2e-5`, their values read as YAML; a later one wins. `defaults`
    and `settings` are nested mappings like the file's. A section is merged, a value replaced; a later layer's
    `train.steps` replaces an earlier one's `train.epochs` and the other way round. Raises ConfigError.
    """
    merged: Layer = {}
    for layer in (defaults or {}, _read_file(path), settings or {}, _read_overrides(overrides)):
        merged = _merge(_without_rival(merged, layer), layer)
    given = _without_empty_sections(merged)
    try:
        return RunConfig.model_validate(given)
    except ValidationError as error:
        raise explain(error, given, RunConfig) from error


def dump_config(config: RunConfig) -> str:
    """All keys as YAML; `load_config` on it gives an equal configuration."""
    return write_yaml(config.model_dump(mode="json"))


def dotted_values(config: RunConfig) -> dict[str, Any]:
    """Each value by its dotted key; a section within a section is one value."""
    values: dict[str, Any] = {}
    for section, content in config.model_dump(mode="json").items():
        if isinstance(content, dict):
            values |= {f"{section}.{name}": value for name, value in content.items()}
        else:
            values[section] = content
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


def _read_overrides(overrides: Sequence[str]) -> Layer:
    layer: Layer = {}
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign:
            raise ConfigError(None, f"override {override!r}: expected key=value, such as train.learning_rate=2e-5")
        _check_key(key)
        nested = read_yaml(text, f"override {override!r}", numbered=False)
        for name in reversed(key.split(".")):
            nested = {name: nested}
        layer = _merge(layer, nested)
    return layer


def _check_key(key: str) -> None:
    """Raise unless `key` is a section or a value; the whole key is named, not the first wrong part."""
    model: type[Section] | None = RunConfig
    parents: list[str] = []
    for name in key.split("."):
        if model is None:
            parent = ".".join(parents)
            raise ConfigError(key, f"{parent} is a value without keys of its own: write {parent}=...")
        if name not in model.model_fields:
            raise unknown_key(key, RunConfig)
        model = section_of(model.model_fields[name])
        parents.append(name)


def _merge(below: Layer, above: Layer, prefix: str = "") -> Layer:
    merged = dict(below)
    for name, value in above.items():
        if isinstance(value, Mapping) and merged.get(name) is not None:
            key = f"{prefix}{name}"
            if not isinstance(merged[name], Mapping):
                raise ConfigError(
                    key, f"got {merged[name]!r}; expected: a section, as {key}.{next(iter(value), '')} needs"
                )
            value = _merge(merged[name], value, f"{key}.")
        merged[name] = value
    return merged


def _without_rival(below: Layer, above: Layer) -> Layer:
    """`below` without the one of epochs and steps that `above` decides by giving the other."""
    train_below, train_above = below.get("train"), above.get("train")
    if not isinstance(train_below, Mapping) or not isinstance(train_above, Mapping):
        return below
    decided = {
        rival
        for name, rival in (("steps", "epochs"), ("epochs", "steps"))
        if train_above.get(name) is not None and rival not in train_above
    }
    return {**below, "train": {name: value for name, value in train_below.items() if name not in decided}}


def _without_empty_sections(given: Layer) -> Layer:
    """A section with nothing under it (null in YAML) has its defaults. A null teacher is no teacher."""
    required = {name for name, field in RunConfig.model_fields.items() if section_of(field) is field.annotation}
    return {name: value for name, value in given.items() if value is not None or name not in required}
