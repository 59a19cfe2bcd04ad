"""What a run with a teacher of another tokenizer refuses, by the name of the key, the document or the model."""

import math
from pathlib import Path

import pytest
from kit.config_cases import refused_calls
from kit.runs import run, session_of, write_records, write_run
from kit.two_tokenizers import GOLD, tokenizer, write_model, write_pair
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("cross"))


def with_nan(teacher: Path) -> None:
    path = teacher / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, path, {"format": "pt"})


ADAPTER = {"student.model": "student", "teacher.model": "student", "student.adapter": {"type": "lora", "r": 2}}


@pytest.mark.parametrize(("call", "message"), refused_calls("teachers with another tokenizer"))
def test_a_teacher_or_settings_that_cannot_be_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, message: str
) -> None:
    """The list has the tokenizer of another teacher than that of the pair, settings, and the message."""
    teacher, settings = eval(call)
    monkeypatch.chdir(folder)
    write_records(folder / "tricky.jsonl", [{"text": "fine"}, {"text": "a▁b"}])
    if teacher:
        other = write_model(folder / teacher, teacher.partition(",")[0], family="qwen3", seed=2)
        settings = settings | {"teacher.model": str(other)}
    if "NaN" in teacher:
        with_nan(other)
    elif "more tokens" in teacher:
        tokenizer("large").save_pretrained(other)
    with pytest.raises(ValueError, match=message):
        session_of(folder, **settings)


def test_no_cache_is_written(folder: Path, tmp_path: Path) -> None:
    write_run(folder, **GOLD)
    message = run("cache", folder / "run.yaml", "--out", tmp_path / "cache", code=2).err
    assert "teacher.cross_tokenizer: got gold: a cache holds the signals of one tokenizer" in message


def test_the_same_tokenizer_gives_a_warning(folder: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "teacher", "small", family="qwen3", seed=2)
    session = session_of(folder, **GOLD, **{"teacher.model": str(tmp_path / "teacher")})
    assert any("have the same tokenizer" in warning for warning in session.warnings)
    session.close()
