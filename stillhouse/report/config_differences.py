"""Finds the configuration values that differ between compared runs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stillhouse.display import escaped
from stillhouse.report.run_files import Run

ABSENT, NULL = "not set", "null"


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return (dotted key, one text per run) for every value that is not the same in all runs.

    A run without config.yaml differs in every key.
    """
    configs = [_flat(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [(key, [config.get(key, ABSENT) for config in configs]) for key in keys]
    return [
        (escaped(key), texts)
        for key, texts in rows
        if len(set(texts)) > 1 and not (set(texts) == {ABSENT, NULL} and _is_section(key, keys))
    ]


def _is_section(key: str, keys: Iterable[str]) -> bool:
    """Whether the key is a section in one of the runs; each value of the section then has its own row."""
    return any(nested.startswith(f"{key}.") for nested in keys)


def _flat(config: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """The values by their dotted keys, as text. A section that is null has no keys."""
    values: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            values |= _flat(value, f"{before}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            values[f"{before}{key}"] = escaped(text)
    return values
