"""Adapters for a server that generates: the student's model to the bit, and no adapter of another base or form."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import first_is_quick, slow
from kit.config_cases import refused_calls
from kit.families import build
from kit.low_bit import save_teacher
from safetensors.torch import load_file, save_file
from torch import Tensor

from stillhouse.models import Decoder
from stillhouse.models.adapter import ADAPTER_CONFIG, add_lora, initialize_lora
from stillhouse.parallel import single_process_runner
from stillhouse.rollout.publish import publish, version_folder
from stillhouse.rollout.published_folder import MANIFEST, AdapterBase
from stillhouse.serving.server.weight_updates import WeightUpdates

BASE = AdapterBase(fingerprint="ab" * 32, dtype="float32", quantize=None)
WEIGHTS = "adapter_model.safetensors"
TENSOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
IDS = torch.arange(2, 14)[None]


def decoder_of(family: str, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(build(family).to(dtype).eval(), verify=False)


class Student:
    """A student with an adapter; `publish` gives it other matrices and publishes them."""

    def __init__(self, folder: Path, decoder: Decoder | None = None, **options: Any):
        self.decoder, self.folder = decoder or decoder_of("llama"), folder
        add_lora(self.decoder, **{"r": 4, "alpha": 8} | options)
        self.decoder.eval()

    def publish(self, version: int, base: AdapterBase | None = BASE) -> Path:
        initialize_lora(self.decoder, version, fresh=False)
        return publish(single_process_runner(self.decoder, None), self.folder, version, base=base)

    @torch.no_grad()
    def logits(self) -> Tensor:
        return self.decoder(IDS)


def load(updates: WeightUpdates, folder: Path, version: str) -> None:
    done = updates.submit(updates.read(folder), version)
    updates.apply()
    done.result(0)
    assert updates.version == version


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)])
@pytest.mark.parametrize("family", first_is_quick(["llama", "gpt2", "qwen3_moe"]))
@torch.no_grad()
def test_a_server_with_an_adapter_is_the_student_to_the_bit(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    base = AdapterBase(fingerprint=BASE.fingerprint, dtype=str(dtype).removeprefix("torch."), quantize=None)
    server = decoder_of(family, dtype)
    frozen = {name: weight.clone() for name, weight in server.state_dict().items()}
    assert_becomes_student(server, Student(tmp_path, decoder_of(family, dtype), dropout=0.1), base)
    assert not any(parameter.requires_grad for parameter in server.parameters())
    for name, weight in server.state_dict().items():
        if ".lora_" not in name:
            assert weight.equal(frozen[name.replace(".base_layer.", ".")])


@pytest.mark.parametrize("kind", [slow("nf4"), slow("int8")])
def test_a_quantized_server_is_the_quantized_student_to_the_bit(tmp_path: Path, kind: str) -> None:
    model, base = save_teacher(tmp_path / "model"), AdapterBase(**BASE.model_dump() | {"quantize": kind})
    server, student = (Decoder.from_pretrained(model, quantize=kind, trained=True) for _ in range(2))
    assert_becomes_student(server, Student(tmp_path / "weights", student), base)


@torch.no_grad()
def assert_becomes_student(server: Decoder, student: Student, base: AdapterBase) -> None:
    updates, before = WeightUpdates(server, base), server(IDS)
    for version in (1, 2):
        load(updates, student.publish(version, base), str(version))
        assert server(IDS).equal(student.logits())
        assert not server(IDS).equal(before)


Edit = Callable[[Path], object]


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, whose hashes are then those of the files."""
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    for name in manifest["files"]:
        manifest["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))


def base(**changes: Any) -> Edit:
    return lambda folder: edit(folder, lambda manifest: manifest["base"].update(changes))


def config(**changes: Any) -> Edit:
    def change(folder: Path) -> None:
        path = folder / ADAPTER_CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        edit(folder, lambda manifest: None)

    return change


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Edit:
    def make(folder: Path) -> None:
        stored = load_file(folder / WEIGHTS)
        change(stored)
        save_file(stored, folder / WEIGHTS)
        edit(folder, lambda manifest: manifest.update(tensors=dict.fromkeys(stored, WEIGHTS)))

    return make


def cut(name: str) -> Edit:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-9])


ANOTHER = "trained on another base than the server's"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Student(tmp_path_factory.mktemp("weights")).publish(7)


@pytest.fixture(scope="module")
def updates() -> WeightUpdates:
    return WeightUpdates(decoder_of("llama"), BASE)


@pytest.mark.parametrize("has_adapter", [False, True])
@pytest.mark.parametrize(("call", "message"), refused_calls("published adapters"))
def test_an_adapter_is_refused_and_the_next_one_is_loaded(
    updates: WeightUpdates, published: Path, tmp_path: Path, call: str, message: str, has_adapter: bool
) -> None:
    if has_adapter:
        load(updates, published, "7")
    make = eval(call)
    target = version_folder(tmp_path, 7)
    shutil.copytree(published, target)
    make(target)
    with pytest.raises(ValueError, match=message if updates.version == "default" else f"{message}|start the server"):
        updates.read(target)


def test_models_and_adapters_take_no_turns(updates: WeightUpdates, published: Path, tmp_path: Path) -> None:
    """A whole model would replace the base, and another form of adapter would need other layers."""
    model = publish(single_process_runner(decoder_of("llama"), None), tmp_path / "model", 1)
    load(updates, published, "7")
    with pytest.raises(ValueError, match=r"whole model, and the server has an adapter of a run; .* restart"):
        updates.read(model)
    other = Student(tmp_path / "other", r=2).publish(1)
    with pytest.raises(
        ValueError, match=r"an adapter with r 2, alpha 8 on .*, and the server has one with r 4, .*: restart the"
    ):
        updates.read(other)
    with_model = WeightUpdates(decoder_of("llama"), BASE)
    load(with_model, model, "1")
    with pytest.raises(ValueError, match=r"has an adapter, and the server has a whole model of a run; .* restart"):
        with_model.read(published)
    of_bits = WeightUpdates(decoder_of("llama"), AdapterBase(**BASE.model_dump() | {"quantize": "int8"}))
    with pytest.raises(ValueError, match=r"the server's model is quantized \(int8\): expected an adapter"):
        of_bits.read(model)
