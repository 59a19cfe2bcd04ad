"""An adapter on a student whose frozen weights have 8 or 4 bits (QLoRA, arXiv:2305.14314)."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import slow
from kit.low_bit import dequantized, first_step, save_teacher
from kit.runs import assert_same_run, run, session_of, write_run
from kit.signal_hooks import kill_at
from kit.teacher_gradients import assert_close
from peft import PeftModel
from transformers import AutoModelForCausalLM

from stillhouse.config import ConfigError
from stillhouse.engine.state_folder import stored_tensors
from stillhouse.loops.session import Session
from stillhouse.models import evaluating, initialize_lora
from stillhouse.models.pretrained import load_causal_lm
from stillhouse.models.quantized import is_quantized
from stillhouse.parallel import Degrees, Layout
from stillhouse.run.preflight import require_models_fit

ADAPTER: dict[str, Any] = {"student.adapter": {"r": 4, "alpha": 8}, "train.learning_rate": 1e-2}
EACH_KIND = pytest.mark.parametrize("kind", ["nf4", slow("int8")])


def write(folder: Path, **settings: Any) -> Any:
    """Write a run whose student's rows are multiples of 64 numbers, the blocks of nf4."""
    if not (folder / "student").exists():
        save_teacher(folder / "student")
    return write_run(folder, **ADAPTER, **settings)


def with_drawn_adapter(folder: Path, **settings: Any) -> Session:
    """The session of a run whose matrices B are not zero, so that no gradient is."""
    write(folder)
    session = session_of(folder, **ADAPTER, **settings)
    initialize_lora(session.models.student, 0, fresh=False)
    return session


@EACH_KIND
@pytest.mark.parametrize("teacher", ["another", slow("the same files")])
def test_gradients_are_those_of_the_dequantized_base(tmp_path: Path, kind: str, teacher: str) -> None:
    """In float32, also after an evaluation, for which bitsandbytes may lay weights out anew."""
    write(tmp_path)
    rounded = load_causal_lm(tmp_path / "student", quantize=kind)

    def change(model: Any) -> None:
        for name, weight in model.named_parameters():
            if is_quantized(values := rounded.get_parameter(name)):
                weight.copy_(dequantized(values))

    plain = save_teacher(tmp_path / "plain", change)
    settings = {} if teacher == "another" else {"teacher.model": str(tmp_path / "student")}
    session = with_drawn_adapter(tmp_path, **settings, **{"student.quantize": kind})
    assert not session.models.student_source.teacher_is_base
    with torch.no_grad(), evaluating(session.models.student):
        session.models.student(torch.arange(12)[None], head=False)
    actual = first_step(session)
    expected = first_step(with_drawn_adapter(tmp_path, **settings, **{"student.model": str(plain)}))
    exact = first_step(with_drawn_adapter(tmp_path, **settings))
    assert actual[1].keys() == expected[1].keys()
    assert_close(actual, expected, 1e-4)
    assert abs(actual[0] - exact[0]) > 1e-5


@EACH_KIND
def test_a_teacher_in_as_many_bits_is_the_base_itself(tmp_path: Path, kind: str) -> None:
    write(tmp_path)
    same = {"teacher.model": str(tmp_path / "student"), "teacher.quantize": kind, "student.quantize": kind}
    session = with_drawn_adapter(tmp_path, **same)
    assert session.models.student_source.teacher_is_base
    assert session.models.adapter_in_words is not None
    assert re.search(
        rf"; the base in {kind}, 0\.00 GiB with it; the teacher is the same", session.models.adapter_in_words
    )


@EACH_KIND
def test_a_run_that_was_killed_and_resumed_is_the_same(tmp_path: Path, kind: str) -> None:
    """A checkpoint holds the adapter alone, and peft reads it."""
    write(tmp_path, **{"student.quantize": kind, "checkpoint.every": 2})
    ended = run("distill", tmp_path / "run.yaml")
    assert f"the base in {kind}" in ended.out
    killed = tmp_path / "killed"
    kill_at(3, killed, tmp_path / "run.yaml", f"out={killed}")
    assert "resuming from" in run("distill", tmp_path / "run.yaml", f"out={killed}").out
    assert_same_run(killed, tmp_path / "out")
    (last,) = sorted((killed / "checkpoints").glob("step-*6"))
    names = stored_tensors(last / "resume")
    assert not [name for name in names if "absmax" in name or "quant" in name or name.endswith("q_proj.weight")]
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "student"), killed / "adapter")


def test_another_precision_is_another_student(tmp_path: Path) -> None:
    write(tmp_path, **{"student.quantize": "int8", "train.steps": 1})
    run("distill", tmp_path / "run.yaml")
    ended = run("distill", tmp_path / "run.yaml", "student.quantize=nf4", code=1)
    assert "student.quantize" in ended.err


def test_layouts_are_refused(tmp_path: Path) -> None:
    config = write(tmp_path, **{"student.quantize": "nf4"})
    layout = Layout(Degrees(tensor=2))
    with pytest.raises(ConfigError, match=r"student\.quantize: got nf4 under .*tensor.* expected null"):
        require_models_fit(config.student, {}, {}, layout, torch.device("cpu"))
