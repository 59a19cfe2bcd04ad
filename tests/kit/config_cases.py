"""Calls and configurations that are refused, with their messages, as data; and functions that load configurations."""

import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from stillhouse.config import ConfigError, RunConfig, load_config

#: the keys that every configuration needs
LEAST = {"student": {"model": "s"}, "data": {"train": "d.jsonl"}, "out": "o"}
MISTAKES = YAML(typ="safe").load(Path(__file__).with_name("config_errors.yaml").read_text(encoding="utf-8"))
#: the lists of tests/kit/messages.yaml, and of a folder's own messages.yaml
MESSAGES: dict[str, list[dict[str, str]]] = {}
for path in sorted(Path(__file__).parents[1].glob("*/messages.yaml")):
    lists = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    assert MESSAGES.keys().isdisjoint(lists), f"{path} has a subject of another file"
    MESSAGES |= lists


def refused_calls(subject: str) -> list[Any]:
    """Return the parameters of a test: each call of a list in messages.yaml, and a part of its message."""
    return [pytest.param(case["call"], case["error"], id=case["error"] or case["call"]) for case in MESSAGES[subject]]


def assert_refused(call: str, text: str, names: dict[str, Any], error: type[Exception] = ValueError) -> None:
    """names: those that the call may use."""
    with pytest.raises(error, match=re.escape(text)):
        eval(call, names)


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
