"""The meaning of a configuration: YAML, overrides, layers and defaults."""

import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
from kit.config_cases import LEAST, MESSAGES, load, yaml_file

from docs.write_config import EXAMPLE  # noqa: F401 (messages.yaml)
from stillhouse.config import AdapterConfig, TrainConfig, load_config  # noqa: F401 (messages.yaml)


@pytest.mark.parametrize("call", MESSAGES["meanings of configurations"])
def test_a_configuration_means_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    file, overrides, expected = eval(call)
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
