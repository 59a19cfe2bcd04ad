"""The hash of a model's files, and the changes that it detects or ignores."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.runs import save_model

from stillhouse.models import model_fingerprint, weight_files


def scale_rows(model: Any) -> None:
    model.lm_head.weight[100:110] *= 3


def scale(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.001)


def test_a_few_rows_of_a_small_model_change_it(tmp_path: Path) -> None:
    hashes = {
        name: model_fingerprint(save_model(tmp_path / name, "llama", tied=False, change=change))
        for name, change in (("one", None), ("same", None), ("rows", scale_rows), ("all", scale))
    }
    assert hashes["one"] == hashes["same"]
    assert len(set(hashes.values())) == 3


def test_samples_of_a_large_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed value in any trained tensor changes the hash, and so does another name or size of a tensor."""
    monkeypatch.setattr(weight_files, "WHOLE_BYTES", 0)
    plain = model_fingerprint(save_model(tmp_path / "plain", tied=False))
    assert plain == model_fingerprint(save_model(tmp_path / "same", tied=False))
    names = [name for name, _ in torch.nn.Module.named_parameters(_model(tmp_path / "plain"))]
    for at, name in enumerate(names[:5]):

        def change(model: Any, name: str = name) -> None:
            model.get_parameter(name).mul_(1.001)

        assert model_fingerprint(save_model(tmp_path / str(at), tied=False, change=change)) != plain


def _model(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def test_files_that_are_not_read_do_not_change_the_hash(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    before = model_fingerprint(folder)
    for name in ("training_args.bin", "README.md", "generation_config.json", "notes.py"):
        (folder / name).write_text("{}")
    assert model_fingerprint(folder) == before
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "notes.Model"}}))
    with_code = model_fingerprint(folder)
    (folder / "notes.py").write_text("{ }")
    assert len({before, with_code, model_fingerprint(folder)}) == 3


@pytest.mark.parametrize("content", [b"", b"\xff" * 9, b"\x02\0\0\0\0\0\0\0[]", b'\x0b\0\0\0\0\0\0\0{"a": true}'])
def test_a_file_that_is_no_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(weight_files, "WHOLE_BYTES", -1)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors is not a safetensors file"):
        model_fingerprint(tmp_path)
