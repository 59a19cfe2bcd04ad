"""Loads configurations from overrides or from the text of a file, for the tests of the configuration."""

from pathlib import Path
from typing import Any

import pytest

from stillhouse.config import (
    ConfigError,
    RunConfig,
    load_config,
)

LEAST = ("student.model=s", "data.train=d.jsonl", "out=o")


def load(*overrides: str, **layers: Any) -> RunConfig:
    return load_config(None, [*LEAST, *overrides], **layers)


def failure(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return caught.value


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path
