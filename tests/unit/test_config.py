"""The meaning of a configuration: YAML, overrides, layers and defaults."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from kit.config_cases import LEAST, failure, load, written

from stillhouse.config import AdapterConfig, ConfigError, TrainConfig, load_config
from stillhouse.config.document import EXAMPLE


def test_the_example_of_the_reference_means_what_it_says(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, EXAMPLE))
    assert config.teacher is not None
    assert (config.student.model, config.teacher.dtype) == ("Qwen/Qwen3-0.6B", "bfloat16")
    assert (config.data.eval, config.data.max_tokens) == (0.02, 4096)
    assert config.objective.loss == "0.3*cross_entropy + 0.7*jsd(0.5)"
    assert (config.train.learning_rate, config.train.epochs, config.train.steps) == (2e-5, 1.0, None)
    assert (config.eval.every, config.checkpoint.keep, config.track, config.out) == (
        100,
        2,
        ["tensorboard"],
        "runs/qwen3",
    )


def test_the_least_configuration_has_the_defaults() -> None:
    config = load()
    assert config.teacher is None
    assert config.train == TrainConfig()
    assert (config.train.tokens_per_step, config.train.betas, config.train.clip) == (131072, (0.9, 0.95), 1.0)
    assert (config.objective.loss, config.data.on_error, config.device, config.seed) == (
        "forward_kl",
        "raise",
        "auto",
        0,
    )


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
    assert load(f"out={text}").out == text
    path = written(tmp_path, f"out: {text}\n")
    assert load_config(path, LEAST[:2]).out == text


@pytest.mark.parametrize("text", ["null", "~", ""])
def test_null_turns_off_what_can_be_turned_off(text: str) -> None:
    assert load(f"train.clip={text}").train.clip is None
    assert failure(f"train.learning_rate={text}").key == "train.learning_rate"


def test_later_layers_win(tmp_path: Path) -> None:
    path = written(tmp_path, "seed: 2\nout: file\ntrain: {eps: 0.2, weight_decay: 0.2}\n")
    config = load_config(
        path,
        [*LEAST[:2], "train.weight_decay=0.4", "train.weight_decay=0.5"],
        defaults={"seed": 1, "device": "cpu", "train": {"clip": 0.1}},
        settings={"out": "settings", "train": {"weight_decay": 0.3}},
    )
    assert (config.device, config.seed, config.out) == ("cpu", 2, "settings")
    assert (config.train.clip, config.train.eps, config.train.weight_decay) == (0.1, 0.2, 0.5)


def test_an_override_can_be_a_whole_section() -> None:
    config = load("teacher={model: t, dtype: float16}", "teacher.revision=main")
    assert config.teacher is not None
    assert (config.teacher.model, config.teacher.dtype, config.teacher.revision) == ("t", "float16", "main")


def test_empty_sections_have_their_defaults_and_a_null_teacher_is_none(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "train:\nteacher:\nobjective: {}\n"), LEAST)
    assert config == load()
    assert load_config(written(tmp_path, "teacher: {model: t}"), [*LEAST, "teacher=null"]).teacher is None


def test_an_empty_file_is_a_file_without_keys(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "# nothing yet\n"), LEAST) == load()


def test_an_adapter_is_a_section_of_the_student_or_null() -> None:
    assert load().student.adapter is None
    adapter = load("student.adapter={type: lora, r: 8, alpha: 16, targets: [q_proj]}", "student.adapter.r=4").student
    assert adapter.adapter == AdapterConfig(r=4, alpha=16, targets=["q_proj"])
    assert load("student.adapter.dropout=0.1").student.adapter == AdapterConfig(dropout=0.1)
    assert load("student.adapter={r: 8}", "student.adapter=null").student.adapter is None


def test_steps_take_the_place_of_epochs() -> None:
    assert (load("train.steps=5").train.epochs, TrainConfig(steps=5).epochs) == (None, None)
    assert failure("train.steps=5", "train.epochs=2").key == "train.steps"
    assert failure("train.epochs=null").key == "train.epochs"


def test_steps_of_a_later_layer_replace_epochs_of_an_earlier_one(tmp_path: Path) -> None:
    epochs, steps = "train: {epochs: 3}", "train: {steps: 30}"
    train = load_config(written(tmp_path, epochs), [*LEAST, "train.steps=5"]).train
    assert (train.epochs, train.steps) == (None, 5)
    train = load_config(written(tmp_path, steps), [*LEAST, "train.epochs=2"]).train
    assert (train.epochs, train.steps) == (2.0, None)
    with pytest.raises(ConfigError, match=r"train\.steps"):
        load_config(written(tmp_path, "train: {epochs: 3, steps: 30}"), LEAST)


def test_home_is_expanded_and_hub_ids_are_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load("out=~/runs/a", "student.model=org/name~1", "data.eval=~/eval.jsonl")
    assert (config.out, config.data.eval) == ("/home/somebody/runs/a", "/home/somebody/eval.jsonl")
    assert config.student.model == "org/name~1"


def test_the_configuration_is_free_of_torch() -> None:
    code = (
        "import sys, stillhouse.config.document; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == []
