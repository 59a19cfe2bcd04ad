"""Which device and precision `auto` means. No GPU is here: torch's answers about GPUs are replaced."""

from pathlib import Path

import pytest
import torch
from kit.config_cases import refused_calls
from kit.runs import write_run

from stillhouse.config import ConfigError
from stillhouse.parallel import best_precision, choose_device
from stillhouse.run.preflight import require_attention
from stillhouse.run.run import prepare


@pytest.mark.parametrize(
    ("cuda", "mps", "processes", "expected"),
    [(2, True, 1, "cuda:0"), (2, False, 2, "cuda:1"), (0, True, 1, "mps"), (0, True, 2, "cpu"), (0, False, 1, "cpu")],
)
def test_what_auto_is(monkeypatch: pytest.MonkeyPatch, cuda: int, mps: bool, processes: int, expected: str) -> None:
    replace_devices(monkeypatch, cuda=cuda, mps=mps, processes=processes)
    assert str(choose_device("auto")) == expected


@pytest.mark.parametrize(("call", "message"), refused_calls("devices"))
def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, call: str, message: str) -> None:
    name, processes = eval(call)
    replace_devices(monkeypatch, cuda=0, mps=False, processes=processes)
    with pytest.raises(ValueError, match=message):
        choose_device(name)


def test_the_precision_that_auto_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert best_precision(torch.device("cuda", 0)) == "bf16"
    assert best_precision(torch.device("mps")) == "fp32"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert best_precision(torch.device("cuda", 0)) == "fp32"
    session = prepare(write_run(tmp_path, **{"train.precision": "auto"}), announce=False)
    assert session.schedule.train_config.precision == "fp32"
    assert session.models.engine.autocast is None
    with pytest.raises(ConfigError, match=r"parallel\.gather_dtype: got bfloat16 with train\.precision=fp32"):
        prepare(write_run(tmp_path, **{"train.precision": "auto", "parallel.gather_dtype": "bfloat16"}))


def test_flash_attention_needs_a_gpu_and_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_run(tmp_path, **{"teacher.attention": "flash_attention_2"})
    installed: set[str] = set()
    monkeypatch.setattr("stillhouse.run.preflight.distributions", lambda name: installed & {name})
    with pytest.raises(ConfigError, match=r"flash-attn is not installed: .* `pip install kernels`") as error:
        require_attention(config.student, config.teacher_sections, torch.device("cuda"))
    assert error.value.key == "teacher.attention"
    with pytest.raises(ConfigError, match="got flash_attention_2 on a CPU"):
        require_attention(config.student, config.teacher_sections, torch.device("cpu"))
    for package in ("kernels", "flash-attn"):
        installed.clear()
        installed.add(package)
        require_attention(config.student, config.teacher_sections, torch.device("cuda"))


def replace_devices(monkeypatch: pytest.MonkeyPatch, *, cuda: int, mps: bool, processes: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("LOCAL_RANK", str(processes - 1))
