"""Every mistake in a configuration gives one line that names the key."""

import json
from pathlib import Path

import pytest
from kit.config_cases import LEAST, failure, load, written
from pydantic import ValidationError

from stillhouse.config import (
    ConfigError,
    MissingKeyError,
    TrainConfig,
    load_config,
)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("train.learning_rat", "did you mean train.learning_rate?"),
        ("learning_rate", "did you mean train.learning_rate?"),
        ("data.learning_rate", "did you mean train.learning_rate?"),
        ("trian.micro_batch_tokens", "did you mean train.micro_batch_tokens?"),
        ("train_learning_rate", "did you mean train.learning_rate?"),
        ("every", "did you mean eval.every or checkpoint.every?"),
        ("max_token", "did you mean data.max_tokens?"),
        ("model", "did you mean student.model or teacher.model or teachers.<name>.model?"),
        ("objective.qqq", "the keys of objective are: loss, temperature"),
        ("zzz", "the keys are: student, teacher, teachers, data"),
    ],
)
def test_an_unknown_key_names_the_nearest_right_one(key: str, hint: str) -> None:
    error = failure(f"{key}=1")
    assert error.key == key
    assert hint in str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {learning_rat: 1}", "train.learning_rat: unknown key; did you mean train.learning_rate?"),
        ("learning_rate: 1", "learning_rate: unknown key; did you mean train.learning_rate?"),
        ("trian: {learning_rate: 1}", "trian.learning_rate: unknown key; did you mean train.learning_rate?"),
        ("objective: {qqq: 1}", "objective.qqq: unknown key; the keys of objective are: loss, temperature"),
        ("1: 2", "1: unknown key; the keys are: student, teacher"),
        ("data: {1: 2}", "data.1: unknown key; the keys of data are: train, eval"),
        ("kd_loss_fn: {temperature: 2}", "kd_loss_fn.temperature of Automodel is objective.temperature here"),
        ("step_scheduler: {max_steps: 9}", "step_scheduler.max_steps of Automodel is train.steps here"),
        ("actor_rollout_ref: {rollout: {n: 2, x: 1}}", "rollout.n of verl is rollout.samples_per_prompt here"),
        ("actor_rollout_ref: {x: {y: 2}}", "actor_rollout_ref: unknown key; the keys are: student, teacher"),
    ],
)
def test_an_unknown_key_of_a_file_names_the_nearest_right_one(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text), LEAST)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rate=fast", "train.learning_rate: got 'fast' (text); expected: number > 0"),
        ("train.learning_rate='2e-5'", "train.learning_rate: got '2e-5' (text); expected: number > 0"),
        ("train.learning_rate=true", "train.learning_rate: got true; expected: number > 0"),
        ("train.learning_rate=0", "train.learning_rate: got 0; expected: number > 0"),
        ("train.learning_rate=.nan", "train.learning_rate: got nan; expected: number > 0"),
        ("train.tokens_per_step=1e5", "train.tokens_per_step: got 100000.0; expected: whole number >= 1"),
        ("seed=true", "seed: got true; expected: whole number >= 0 and < 4294967296"),
        ("seed=-1", "seed: got -1; expected: whole number >= 0 and < 4294967296"),
        ("out=7", "out: got 7; expected: text"),
        ("data.eval=1", "data.eval: got 1; expected: text, number >= 0 and < 1 or names with text each"),
        ("data.eval=[a]", "data.eval: got ['a']; expected: text, number >= 0 and < 1 or names with text each"),
        ("train.schedule=cosin", "train.schedule: got 'cosin' (text); expected: constant, linear, cosine or wsd"),
        ("train.betas=[0.9]", "train.betas: got [0.9]; expected: list of 2 (number >= 0 and < 1)"),
        ("train.betas=[0.9, '0.95']", "train.betas: got [0.9, '0.95']; expected: list of 2 (number >= 0 and < 1)"),
        ("student.trust_remote_code=yes", "student.trust_remote_code: got 'yes' (text); expected: true or false"),
        (
            "track=tensorboard",
            "track: got 'tensorboard' (text); expected: list of tensorboard, wandb, trackio or mlflow",
        ),
        (
            "checkpoint.best=loss",
            "expected: eval/cross_entropy, eval/forward_kl, eval/agreement, eval/exact_match",
        ),
        ("device=gpu", "device: got 'gpu' (text); expected: text such as auto, cpu, mps, cuda, cuda:1"),
        ("train.warmup=1.5", "train.warmup: got 1.5, expected a share below 1 or a whole number of steps"),
        ("eval=0.1", "eval: got 0.1; expected: a section with the keys every, micro_batch_tokens"),
        ("student.adapter.r=0", "student.adapter.r: got 0; expected: whole number >= 1"),
        ("student.adapter.type=lra", "student.adapter.type: got 'lra' (text); expected: lora"),
        ("student.adapter.targets=[]", "student.adapter.targets: got []; expected: all-linear or list of text"),
        (
            "student.adapter.targets=q_proj",
            "student.adapter.targets: got 'q_proj' (text); expected: all-linear or list",
        ),
        ("seed.x=1", "seed.x: seed is a value without keys of its own: write seed=..."),
    ],
)
def test_a_wrong_value_is_one_line_with_key_value_and_expectation(override: str, message: str) -> None:
    error = failure(override)
    assert message in str(error)
    assert error.key == override.partition("=")[0]
    assert "\n" not in str(error)


def test_a_section_that_a_file_gives_as_a_value_is_not_overridden(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train: got 5; expected: a section"):
        load_config(written(tmp_path, "train: 5"), [*LEAST, "train.steps=3"])


def test_every_fault_has_its_line() -> None:
    error = failure("train.clip=a", "device=gpu", "parallel.tensor=0")
    assert [part.key for part in error.parts] == ["train.clip", "parallel.tensor", "device"]
    assert error.key == "train.clip"
    assert len(str(error).splitlines()) == 3


def test_a_section_of_another_tool_has_a_line_for_each_key_that_is_known(tmp_path: Path) -> None:
    text = "trainer: {total_epochs: 3, default_local_dir: a, nnodes: {x: 1}}\noptim: {}\n"
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text), LEAST)
    assert [part.key for part in caught.value.parts] == [
        *("trainer.total_epochs", "trainer.default_local_dir", "trainer", "optim"),
    ]
    assert "nothing is known here of its nnodes.x" in str(caught.value)
    names = ["model_name_or_path", "learning_rate", "num_train_epochs", "output_dir", "lmbda", "beta", "seed_", "lr"]
    many = {f"{name}{'_' * number}": 1 for number in range(4) for name in names}
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, json.dumps(many)), LEAST)
    assert len(str(caught.value).splitlines()) == 18
    assert str(caught.value).splitlines()[-1].startswith("and ")


def test_missing_keys_say_what_to_give() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["teacher.dtype=float32"])
    parts = caught.value.parts
    assert [part.key for part in parts] == ["student.model", "teacher.model", "data.train", "out"]
    assert all(isinstance(part, MissingKeyError) for part in parts)
    assert "out: required, but not given; expected: text, such as runs/qwen3" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["data.max_tokens=4096", "train.micro_batch_tokens=2048"], "train.micro_batch_tokens"),
        (["data.max_tokens=4096", "train.tokens_per_step=2048"], "train.tokens_per_step"),
        (["data.max_tokens=4096", "eval.micro_batch_tokens=2048"], "eval.micro_batch_tokens"),
    ],
)
def test_a_packed_sequence_must_fit(overrides: list[str], key: str) -> None:
    error = failure(*overrides)
    assert error.key == key
    assert "2048" in str(error)
    assert "data.max_tokens=4096" in str(error)


def test_weights_are_gathered_in_the_computed_dtype() -> None:
    error = failure("parallel.gather_dtype=bfloat16", "train.precision=fp32")
    assert error.key == "parallel.gather_dtype"
    assert "expected null, or train.precision=bf16" in str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "seed: 1\nout: a\nseed: 2\n",
            ':3: not valid YAML: found duplicate key "seed"',
        ),
        ("out: a\ntrain: {steps: 1\nseed: 1\n", ":3: not valid YAML: while parsing a flow mapping"),
        ("out: a\nseed: b: c\n", ":2: not valid YAML: mapping values are not allowed here"),
        ("out: a\n\tseed: 1\n", ":2: not valid YAML"),
        ("out: a\nseed: \x07\n", ":2: not valid YAML: unacceptable character"),
        ("out: !!python/object:os.system x\n", ":1: not valid YAML: could not determine a constructor"),
        ("- a\n", ": got a list, expected sections"),
        ("just words\n", ": got a str, expected sections"),
    ],
)
def test_broken_yaml_names_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, LEAST)
    assert str(caught.value).startswith(f"{path}{message}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot read the configuration: No such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes("out: café".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml: not UTF-8 text"):
        load_config(tmp_path / "latin.yaml")


def test_a_broken_override_is_named() -> None:
    assert "override 'train.betas=[0.9': not valid YAML" in str(failure("train.betas=[0.9"))
    assert "override 'train.steps': expected key=value" in str(failure("train.steps"))


def test_sections_are_frozen_and_strict_in_python_too() -> None:
    config = load()
    with pytest.raises(ValidationError):
        config.seed = 3
    with pytest.raises(ValidationError):
        TrainConfig(learning_rate="2e-5")  # type: ignore[arg-type]
