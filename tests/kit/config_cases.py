"""Mistakes in configurations, and functions that load a configuration from overrides or from the text of a file."""

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from stillhouse.config import ConfigError, RunConfig, load_config

#: the keys that every configuration needs
LEAST = {"student": {"model": "s"}, "data": {"train": "d.jsonl"}, "out": "o"}
MISTAKES = YAML(typ="safe").load(Path(__file__).with_name("config_errors.yaml").read_text(encoding="utf-8"))


def load(*overrides: str, file: Path | None = None) -> RunConfig:
    return load_config(file, overrides, defaults=LEAST)


def overrides_of(mistake: dict[str, Any]) -> list[str]:
    return mistake["given"] if isinstance(mistake["given"], list) else [mistake["given"]]


def failure(*overrides: str, file: Path | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, file=file)
    return caught.value


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path
