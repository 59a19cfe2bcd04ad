"""Every mistake in a configuration gives one line that names the key."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kit.config_cases import MISTAKES, failure, load, overrides_of, refused_calls, yaml_file
from pydantic import ValidationError

from stillhouse.config import ConfigError, MissingKeyError, TrainConfig, load_config, read_config
from stillhouse.config.check_rules import all_rules


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
    assert [part.key for part in error.parts] == [
        *("trainer.total_epochs", "trainer.default_local_dir", "trainer", "optim")
    ]
    assert "there are no suggestions for its nnodes.x" in str(error)
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
