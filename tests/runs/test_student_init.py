"""Students that begin with some of the teacher's layers, or with random weights."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.families import build
from kit.image_models import image_model, image_tokenizer
from kit.layout_runs import distill
from kit.runs import contents, edit_json, refused_runs, run, save_model, session_of, write_run
from kit.tensors import assert_equal_tensors
from kit.toy_tokenizer import toy_tokenizer
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from stillhouse.config import ConfigError
from stillhouse.run.setup import RunSetup

EVERY_2 = {"student.init": {"from": "teacher", "layers": "every 2"}}


def prepare_folder(
    folder: Path, family: str = "llama", *, layers: int = 3, student: int = 2, rows: int = 0, **changes: Any
) -> None:
    """Write a teacher of so many layers, and the configuration and tokenizer alone of a student.

    rows: additional rows of the student's vocabulary. changes: of the student's configuration.
    """
    tokenizer = toy_tokenizer()
    config = build(family, vocab_size=len(tokenizer)).config
    _set_layers(config, layers)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "teacher")
    config = AutoConfig.from_pretrained(folder / "teacher")
    kinds = getattr(config, "layer_types", None)
    _set_layers(config, student)
    if kinds is not None:
        config.layer_types = kinds[::2][:student]
    config.vocab_size += rows
    for key, value in changes.items():
        setattr(config, key, value)
    config.save_pretrained(folder / "student")
    for name in ("teacher", "student"):
        tokenizer.save_pretrained(folder / name)


def _set_layers(config: Any, count: int) -> None:
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = count
    if kinds is not None:
        config.layer_types = (kinds * count)[:count]


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gemma2", "gpt2"])
def test_the_student_is_the_teacher_without_the_other_layers(tmp_path: Path, family: str) -> None:
    """Its logits are those of the teacher's own model from which the other layers were removed."""
    prepare_folder(tmp_path, family)
    student = session_of(tmp_path, **EVERY_2).models.student.eval()
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.float32)
    inner = teacher.base_model
    name = "h" if family == "gpt2" else "layers"
    setattr(inner, name, torch.nn.ModuleList([getattr(inner, name)[number] for number in (0, 2)]))
    inner.config.num_hidden_layers = 2
    if getattr(inner.config, "layer_types", None) is not None:
        inner.config.layer_types = inner.config.layer_types[::2]
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        assert torch.equal(student(ids), teacher.eval()(ids, use_cache=False).logits)


CHOSEN = [("first 2", [0, 1]), ("last 2", [1, 2]), ([2, 0], [2, 0]), ("every 2", [0, 2])]


@pytest.mark.parametrize(("layers", "chosen"), CHOSEN)
def test_layers_are_chosen(tmp_path: Path, layers: Any, chosen: list[int]) -> None:
    prepare_folder(tmp_path)
    session = session_of(tmp_path, **{"student.init": {"from": "teacher", "layers": layers}})
    expected = weights(tmp_path / "teacher")
    for name, tensor in session.models.student.pretrained.state_dict().items():
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(chosen[int(parts[2])])
        assert torch.equal(tensor, expected[".".join(parts)]), name


@pytest.mark.parametrize("rows", [5, -5])
def test_padding_rows_of_the_vocabulary_may_differ(tmp_path: Path, rows: int) -> None:
    prepare_folder(tmp_path, rows=max(rows, 0))
    if rows < 0:  # the teacher is the one with padding
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher")
        model.resize_token_embeddings(model.config.vocab_size - rows)
        model.save_pretrained(tmp_path / "teacher")
    student = session_of(tmp_path, **EVERY_2).models.student
    expected = weights(tmp_path / "teacher")
    for weight, name in (
        (student.pretrained.get_input_embeddings().weight, "model.embed_tokens.weight"),
        (student.output_weight, "lm_head.weight"),
    ):
        both = min(len(weight), len(expected[name]))
        assert len(weight) - len(expected[name]) == rows
        assert torch.equal(weight[:both], expected[name][:both])
        assert not weight[both:].any()


@pytest.mark.parametrize(("changes", "layers", "text"), refused_runs("layers of the teacher"))
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], layers: Any, text: str) -> None:
    prepare_folder(tmp_path, **changes)
    with pytest.raises(ConfigError, match=re.escape(text)) as raised:
        session_of(tmp_path, **{"student.init": {"from": "teacher", "layers": layers}})
    assert "family" not in changes or "the layer_types of the student are [" in str(raised.value)


def test_random_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    prepare_folder(tmp_path)
    states = []
    for seed in (7, 7, 8):
        torch.manual_seed(len(states))
        student = session_of(tmp_path, seed=seed, **{"student.init": {"from": "random"}}).models.student
        states.append(student.pretrained.state_dict())
    torch.manual_seed(7)
    expected = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "student"), dtype=torch.float32)
    for state in states[:2]:
        assert_equal_tensors(state, expected.state_dict())
    assert not torch.equal(states[2]["lm_head.weight"], expected.lm_head.weight)


def test_the_fingerprint_covers_what_the_student_begins_with(tmp_path: Path) -> None:
    prepare_folder(tmp_path)

    def fingerprint(**settings: Any) -> str:
        return RunSetup(write_run(tmp_path, **settings)).model_hashes()["student"]

    first = {"student.init": {"from": "teacher", "layers": "first 2"}}
    fingerprints = [fingerprint(), fingerprint(**EVERY_2), fingerprint(**first), fingerprint(**EVERY_2)]
    assert len(set(fingerprints)) == 3
    assert fingerprints[1] == fingerprints[3]
    edit_json(tmp_path / "teacher" / "config.json", use_cache=False)
    assert fingerprint(**EVERY_2) != fingerprints[1]


def test_other_layers_keep_their_numbers(tmp_path: Path) -> None:
    """The blocks of a vision tower are not the layers that are chosen."""
    tokenizer = image_tokenizer("qwen3_vl")
    config: Any = image_model("qwen3_vl", tokenizer).config
    config.text_config.num_hidden_layers = 3
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "teacher")
    for name in ("teacher", "student"):
        tokenizer.save_pretrained(tmp_path / name)
    config.save_pretrained(tmp_path / "student")
    student = session_of(tmp_path, **{"student.init": {"from": "teacher", "layers": [1, 0, 2]}}).models.student
    expected = weights(tmp_path / "teacher")
    for name, tensor in student.pretrained.state_dict().items():
        parts = name.split(".")
        if parts[1:3] == ["language_model", "layers"]:
            parts[3] = str([1, 0, 2][int(parts[3])])
        assert torch.equal(tensor, expected[".".join(parts)]), name


@pytest.mark.slow
def test_a_tied_student_begins_on_two_stages_with_the_same_random_weights(tmp_path: Path) -> None:
    prepare_folder(tmp_path, tie_word_embeddings=True)
    write_run(tmp_path, **{"student.init": {"from": "random"}, "train.steps": 1, "train.learning_rate": 1e-30})
    for out, processes, overrides in (("one", 1, ()), ("two", 2, ("parallel.pipeline=2",))):
        distill(tmp_path, out, processes, *overrides)
    one, two = (weights(tmp_path / name / "model") for name in ("one", "two"))
    # the zeros of the padding token's row have moved a little
    torch.testing.assert_close(two, one, rtol=0, atol=1e-20)


@pytest.mark.slow
@pytest.mark.parametrize("source", [EVERY_2, {"student.init": {"from": "random"}}], ids=["teacher", "random"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_every_layout_begins_with_the_same_weights(tmp_path: Path, family: str, source: dict[str, Any]) -> None:
    """After one step at a rate of nearly zero, the student is the one of one process; with rows of padding."""
    prepare_folder(tmp_path, family, rows=5)
    write_run(tmp_path, **source, **{"train.steps": 1, "train.learning_rate": 1e-30})
    distill(tmp_path, "one", 1)
    layouts = ["fsdp=2", "tensor=2", "pipeline=2"] if family == "llama" else ["fsdp=2"]
    for layout in layouts:
        distill(tmp_path, layout, 2, f"parallel.{layout}")
        one, other = ((tmp_path / out / "model" / "model.safetensors").read_bytes() for out in ("one", layout))
        assert other == one, layout


def test_a_run_is_resumed_and_another_start_is_refused(tmp_path: Path) -> None:
    prepare_folder(tmp_path)
    write_run(tmp_path, **EVERY_2, **{"train.steps": 2})
    run("distill", tmp_path / "run.yaml")
    (tmp_path / "out" / "model").rename(tmp_path / "gone")
    run("distill", tmp_path / "run.yaml")
    assert contents(tmp_path / "out" / "model") == contents(tmp_path / "gone")
    ended = run("distill", tmp_path / "run.yaml", "student.init.layers=first 2", code=1)
    assert "contains another run, with a different student.init" in ended.err


def test_a_saved_model_needs_no_init(tmp_path: Path) -> None:
    """The student's own files, if it has weights, are not read."""
    prepare_folder(tmp_path)
    expected = session_of(tmp_path, **EVERY_2).models.student.pretrained.state_dict()
    save_model(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "student" / "model.safetensors")
    assert_equal_tensors(session_of(tmp_path, **EVERY_2).models.student.pretrained.state_dict(), expected)
