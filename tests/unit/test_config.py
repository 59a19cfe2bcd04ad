"""What a configuration means (YAML, overrides, layers, defaults); a mistake in it gives one line with the key."""

import json
import subprocess
import sys
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from kit.config_cases import LEAST, MESSAGES, MISTAKES, failure, load, overrides_of, refused_calls, yaml_file
from pydantic import ValidationError

from docs.write_config import EXAMPLE  # noqa: F401 (messages.yaml)
from stillhouse.config import AdapterConfig, ConfigError, MissingKeyError, TrainConfig, load_config, read_config  # noqa: F401 (messages.yaml)
from stillhouse.config.check_rules import all_rules


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


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: str(mistake.get("given", mistake.get("file")))[:60])
def test_a_mistake_is_one_line_with_key_and_expectation(tmp_path: Path, mistake: dict[str, Any]) -> None:
    if "file" in mistake:
        error, key = failure(file=yaml_file(tmp_path, mistake["file"])), mistake["key"]
    else:
        overrides = overrides_of(mistake)
        error, key = failure(*overrides), mistake.get("key", overrides[0].partition("=")[0])
    assert error.key == key
    start = "" if key is None else f"{key}: "
    assert str(error).startswith(start)
    assert mistake["error"] in str(error).removeprefix(start)
    assert "\n" not in str(error)
    assert "hunter2" not in str(error)  # a secret in an address


def test_each_rule_refuses_one_of_the_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_config, "check_rules", lambda config: None)
    configs = []
    for mistake in MISTAKES:
        with suppress(ConfigError, KeyError):
            configs.append(load(*overrides_of(mistake)))
    unused = [rule.keys for rule in all_rules() if not any(list(rule.mistakes(config)) for config in configs)]
    assert unused == []


def test_every_fault_and_every_missing_key_has_its_line() -> None:
    error = failure("train.clip=a", "device=gpu", "parallel.tensor=0")
    assert [part.key for part in error.parts] == ["train.clip", "parallel.tensor", "device"]
    assert error.key == "train.clip"
    assert len(str(error).splitlines()) == 3
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["teacher.dtype=float32"])
    parts = caught.value.parts
    assert [part.key for part in parts] == ["student.model", "teacher.model", "data.train", "out"]
    assert all(isinstance(part, MissingKeyError) for part in parts)
    assert "out: required, but not given; expected: text, such as runs/qwen3" in str(caught.value)


def test_a_section_of_another_tool_has_a_line_for_each_key_that_is_known(tmp_path: Path) -> None:
    text = "trainer: {total_epochs: 3, default_local_dir: a, nnodes: {x: 1}}\noptim: {}\n"
    error = failure(file=yaml_file(tmp_path, text))
    keys = ["trainer.total_epochs", "trainer.default_local_dir", "trainer", "optim"]
    assert [part.key for part in error.parts] == keys
    assert "unknown section; did you mean train? There are no suggestions for its nnodes.x" in str(error)
    names = ["model_name_or_path", "learning_rate", "num_train_epochs", "output_dir", "lmbda", "beta", "seed_", "lr"]
    many = {f"{name}{'_' * number}": 1 for number in range(4) for name in names}
    lines = str(failure(file=yaml_file(tmp_path, json.dumps(many)))).splitlines()
    assert len(lines) == 18
    assert lines[-1].startswith("and ")


@pytest.mark.parametrize(("call", "message"), refused_calls("files of configurations"))
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, call: str, message: str) -> None:
    content = eval(call)
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_bytes(content)
    assert str(failure(file=path)).startswith(f"{path}{message}")
    assert "Is a directory" in str(failure(file=tmp_path))


@pytest.mark.parametrize(("call", "message"), refused_calls("files and overrides"))
def test_a_mistake_in_file_and_overrides(tmp_path: Path, call: str, message: str) -> None:
    file, override = eval(call)
    assert str(failure(override, file=yaml_file(tmp_path, file))).startswith(message)


def test_sections_are_frozen_and_strict_in_python_too() -> None:
    with pytest.raises(ValidationError):
        load().seed = 3
    with pytest.raises(ValidationError):
        TrainConfig(learning_rate="2e-5")  # type: ignore[arg-type]
