"""The meaning of a configuration: YAML, overrides, layers and defaults."""

import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from kit.config_cases import LEAST, load, yaml_file

from docs.write_config import EXAMPLE
from stillhouse.config import AdapterConfig, TrainConfig, load_config

#: a file, overrides, and the values that they give by their keys
MEANINGS: list[tuple[str, list[str], dict[str, Any]]] = [
    ("", [], {"teacher": None, "train": TrainConfig(), "objective.loss": "forward_kl", "data.on_error": "raise"}),
    (
        "# nothing yet\n",
        [],
        {"train.tokens_per_step": 131072, "train.betas": (0.9, 0.95), "device": "auto", "seed": 0},
    ),
    ("train:\nteacher:\nobjective: {}\n", [], {"train.clip": 1.0, "teacher": None, "objective.temperature": 1.0}),
    (EXAMPLE, [], {"student.model": "Qwen/Qwen3-0.6B", "teacher.dtype": "bfloat16", "out": "runs/qwen3"}),
    (EXAMPLE, [], {"data.eval": 0.02, "data.max_tokens": 4096, "train.learning_rate": 2e-5, "train.epochs": 1.0}),
    (EXAMPLE, [], {"objective.loss": "0.3*cross_entropy + 0.7*jsd(0.5)", "train.steps": None, "eval.every": 100}),
    (EXAMPLE, [], {"checkpoint.keep": 2, "track": ["tensorboard"]}),
    (
        *("", ["teacher=null", "objective.loss=cross_entropy", "checkpoint.best=eval/forward_kl", "data.eval=0"]),
        {"checkpoint.best": "eval/forward_kl"},
    ),
    # null
    *(("", [f"train.clip={null}"], {"train.clip": None}) for null in ("null", "~", "")),
    ("teacher: {model: t}", ["teacher=null"], {"teacher": None}),
    # sections
    (
        *("", ["teacher={model: t, dtype: float16}", "teacher.revision=main"]),
        {"teacher.model": "t", "teacher.dtype": "float16", "teacher.revision": "main"},
    ),
    ("", [], {"student.adapter": None}),
    (
        *("", ["student.adapter={type: lora, r: 8, alpha: 16, targets: [q_proj]}", "student.adapter.r=4"]),
        {"student.adapter": AdapterConfig(r=4, alpha=16, targets=["q_proj"])},
    ),
    ("", ["student.adapter.dropout=0.1"], {"student.adapter": AdapterConfig(dropout=0.1)}),
    ("", ["student.adapter={r: 8}", "student.adapter=null"], {"student.adapter": None}),
    # a later layer's steps replace an earlier layer's epochs
    ("", ["train.steps=5"], {"train.epochs": None, "train.steps": 5}),
    ("train: {epochs: 3}", ["train.steps=5"], {"train.epochs": None, "train.steps": 5}),
    ("train: {steps: 30}", ["train.epochs=2"], {"train.epochs": 2.0, "train.steps": None}),
    # the home folder
    ("", ["out=~/runs/a", "data.eval=~/a"], {"out": "/home/somebody/runs/a", "data.eval": "/home/somebody/a"}),
    ("", ["student.model=org/name~1"], {"student.model": "org/name~1"}),
]


@pytest.mark.parametrize(("file", "overrides", "expected"), MEANINGS)
def test_a_configuration_means_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, overrides: list[str], expected: dict[str, Any]
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load(*overrides, file=yaml_file(tmp_path, file))
    assert {key: attrgetter(key)(config) for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [("2e-5", 2e-5), ("1e-4", 1e-4), ("1E-3", 1e-3), ("1", 1.0), ("0o17", 15.0), ("017", 17.0), (".5", 0.5)],
)
def test_numbers_are_yaml_1_2(text: str, value: float) -> None:
    rate = load(f"train.learning_rate={text}").train.learning_rate
    assert isinstance(rate, float)
    assert rate == value


@pytest.mark.parametrize("text", ["on", "no", "yes", "off", "y", "2026-11-21", "12:30", "=", "runs/a b", "café"])
def test_words_that_yaml_1_1_reads_otherwise_are_text(tmp_path: Path, text: str) -> None:
    assert load(f"out={text}").out == load(file=yaml_file(tmp_path, f"out: {text}\n")).out == text


def test_later_layers_win(tmp_path: Path) -> None:
    config = load_config(
        yaml_file(tmp_path, "seed: 2\nout: file\ntrain: {eps: 0.2, weight_decay: 0.2}\n"),
        ["train.weight_decay=0.4", "train.weight_decay=0.5"],
        defaults={**LEAST, "seed": 1, "device": "cpu", "train": {"clip": 0.1}},
        settings={"out": "settings", "train": {"weight_decay": 0.3}},
    )
    assert (config.device, config.seed, config.out) == ("cpu", 2, "settings")
    assert (config.train.clip, config.train.eps, config.train.weight_decay) == (0.1, 0.2, 0.5)


def test_mistakes_in_losses_are_found_with_all_others_and_without_torch() -> None:
    """Also: no public name of the objective is the name of one of its modules, which would replace it."""
    code = """
import sys
from stillhouse.config import ConfigError, load_config
losses = {"objective": {"loss": "0.5*foward_kl"}, "train": {"steps": 2, "epochs": 1}}
losses["student"] = {"model": "a", "mtp": {"objective": "jsd(1.5)"}}
try:
    load_config(None, settings={"data": {"train": "x"}, "teacher": {"model": "b"}, "out": "c"} | losses)
except ConfigError as error:
    print(*(part.key for part in error.parts), {"torch", "transformers", "numpy"} & {*sys.modules} or False)
import pkgutil
from stillhouse import objective
from stillhouse.objective.public import __all__ as names
print({module.name for module in pkgutil.iter_modules(objective.__path__)} & {*names})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["objective.loss student.mtp.objective train.steps False", "set()"], done
