"""Published weights and adapters: the bytes of `save_pretrained` under every layout; others are refused."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import first_is_quick, loading_memory, slow
from kit.config_cases import refused_calls
from kit.families import build
from kit.loading_memory import growth_under, publish_under, read_manifest
from kit.low_bit import save_teacher
from kit.shard_ranks import RankPool, on_ranks
from kit.tensors import assert_same_bytes, tensors_in
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from stillhouse.libraries import is_supported
from stillhouse.models import Decoder
from stillhouse.models.adapter import ADAPTER_CONFIG, add_lora, initialize_lora, is_lora
from stillhouse.parallel import Degrees, single_process_runner
from stillhouse.rollout.publish import BUCKET_BYTES, publish, version_folder
from stillhouse.rollout.published_folder import MANIFEST, AdapterBase
from stillhouse.serving.server.weight_updates import WeightUpdates

LAYOUTS = {
    **{"fsdp 2": Degrees(fsdp=2), "tensor 2": Degrees(tensor=2), "pipeline 2": Degrees(pipeline=2)},
    **{"pipeline 2, fsdp 2": Degrees(pipeline=2, fsdp=2), "replicate 2, tensor 2": Degrees(replicate=2, tensor=2)},
    "expert 2": Degrees(fsdp=2, expert=2),
}


def publish_on(model: Path, folder: Path, layout: str, bucket_bytes: int, lora: bool = False) -> Path:
    degrees = LAYOUTS[layout]
    (path, *_) = on_ranks(publish_under, degrees.processes, (model, folder, degrees, bucket_bytes, lora))
    return Path(path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "gpt2", "qwen3_moe"])
def test_one_process_writes_the_files_of_save_pretrained(tmp_path: Path, family: str, tied: bool) -> None:
    build(family, tied=tied).save_pretrained(tmp_path / "model")
    student = Decoder.from_pretrained(tmp_path / "model", dtype="bfloat16")
    student.save_pretrained(tmp_path / "saved")
    published = publish(single_process_runner(student, None), tmp_path / "weights", 3)
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (published / name).read_bytes() == (tmp_path / "saved" / name).read_bytes(), name
    assert read_manifest(published).dtypes == ["BF16"]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_files_are_at_most_a_bucket_and_transformers_reads_them(tmp_path: Path, family: str) -> None:
    build(family).save_pretrained(tmp_path / "model")
    student = Decoder.from_pretrained(tmp_path / "model")
    published = publish(single_process_runner(student, None), tmp_path / "weights", 3, bucket_bytes=40_000)
    files = sorted(published.glob("*.safetensors"))
    assert len(files) > 2
    largest = max(tensor.nbytes for tensor in student.state_dict().values())
    for path in files:
        with safe_open(path, framework="pt") as file:
            assert sum(file.get_tensor(name).nbytes for name in file.keys()) <= max(40_000, largest)  # noqa: SIM118
    assert_same_bytes(tensors_in(published), tensors_in(tmp_path / "model"))
    read = AutoModelForCausalLM.from_pretrained(published)
    assert_same_bytes(dict(read.state_dict()), dict(student.pretrained.state_dict()))


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        *(("fsdp 2", False), ("tensor 2", False), ("pipeline 2", False), ("pipeline 2", True)),
        *(slow("fsdp 2", True), slow("tensor 2", True)),
        *(slow(*case) for case in product(("pipeline 2, fsdp 2", "replicate 2, tensor 2"), (False, True))),
    ],
)
def test_a_layout_writes_the_bytes_of_one_process(tmp_path: Path, layout: str, tied: bool) -> None:
    build("llama", tied=tied).save_pretrained(tmp_path / "model")
    for bucket_bytes in (BUCKET_BYTES, 30_000):
        folder = tmp_path / f"weights {bucket_bytes}"
        path = publish_on(tmp_path / "model", folder, layout, bucket_bytes)
        expected = tensors_in(tmp_path / "model")
        assert_same_bytes(tensors_in(path), expected)
        assert read_manifest(path).tensors.keys() == expected.keys()
        AutoModelForCausalLM.from_pretrained(path)
        assert os.listdir(folder) == ["version-00000007"]


@pytest.mark.skipif(not loading_memory.SUPPORTED, reason="no /proc to read the peak from")
@pytest.mark.slow
def test_a_rank_needs_the_memory_of_one_file_and_of_gathering_one_tensor(tmp_path: Path) -> None:
    loading_memory.save(tmp_path / "small", 64)
    model_mib, _ = loading_memory.save(tmp_path / "large", 1024)
    bucket, gathering = 32, 4 * 32  # gloo needs about 3.5 times the largest tensor, the embedding's 32 MiB
    # new processes, because memory that a process has used before would hide growth
    with RankPool(2) as pool:
        job = (tmp_path / "small", tmp_path / "large", tmp_path / "weights", Degrees(fsdp=2), bucket * 2**20)
        growths = pool.call(growth_under, job, limit=120)
    print(f"a model of {model_mib:.0f} MiB, files of {bucket} MiB: {growths} MiB")
    assert max(growths) <= bucket + gathering + 16 < model_mib


def test_stacked_experts_are_written_one_by_one(tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path / "model")
    expert = ["expert 2"] if is_supported("expert parallelism") else []
    for layout in ("fsdp 2", *expert, "pipeline 2"):
        path = publish_on(tmp_path / "model", tmp_path / layout, layout, 30_000)
        assert_same_bytes(tensors_in(path), tensors_in(tmp_path / "model"))


def test_of_an_adapter_the_adapter_alone_is_written(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "model")
    student = Decoder.from_pretrained(tmp_path / "model")
    add_lora(student, r=4, alpha=8, base=str(tmp_path / "model"))
    initialize_lora(student, 0, fresh=False)
    one = publish(single_process_runner(student, None), tmp_path / "one", 7)
    assert read_manifest(one).kind == "adapter"
    assert {path.name for path in one.iterdir()} >= {"adapter_model.safetensors", "adapter_config.json", MANIFEST}
    expected = tensors_in(one)
    matrices = [tensor for name, tensor in student.state_dict().items() if is_lora(name)]
    written, made = (
        sorted(tensor.flatten().tolist() for tensor in tensors) for tensors in (expected.values(), matrices)
    )
    assert written == made
    for layout in ("fsdp 2", "tensor 2", "pipeline 2"):
        path = publish_on(tmp_path / "model", tmp_path / layout, layout, BUCKET_BYTES, lora=True)
        assert_same_bytes(tensors_in(path), expected)
        assert {file.name for file in path.iterdir()} == {file.name for file in one.iterdir()}


def test_the_present_weights_are_written_and_two_versions_stay(tmp_path: Path) -> None:
    student = Decoder(build("llama"))
    runner = single_process_runner(student, None)
    for version in (1, 2, 3, 10, 4):  # 10: of a run that has then resumed from step 3
        with torch.no_grad():
            student.output_weight.fill_(version)
        published = publish(runner, tmp_path, version)
        assert (tensors_in(published)["lm_head.weight"] == version).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-00000003", "version-00000004"]
    with torch.no_grad():
        student.output_weight.fill_(44)
    assert (tensors_in(publish(runner, tmp_path, 4))["lm_head.weight"] == 44).all()  # the same version once more


def test_an_interrupted_version_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = single_process_runner(Decoder(build("llama")), None)
    published = publish(runner, tmp_path, 1)

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("stillhouse.rollout.publish.save_file", full)
    with pytest.raises(OSError, match="no space"):
        publish(runner, tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".partial")] == [published.name]
    read_manifest(published)
    monkeypatch.undo()
    read_manifest(publish(runner, tmp_path, 2))  # the remains do no harm
    assert not list(tmp_path.glob("*.partial"))


def edited(**values: Any) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps(json.loads(content) | values).encode()


@pytest.mark.parametrize(("call", "message"), refused_calls("published folders"))
def test_a_folder_that_is_not_what_was_published_is_refused(tmp_path: Path, call: str, message: str) -> None:
    """change: of the content of a file; None: the file is lost."""
    name, change = eval(call)
    runner = single_process_runner(Decoder(build("llama")), None)
    folder = publish(runner, tmp_path / "weights", 1, bucket_bytes=40_000)
    first = min(folder.glob("*.safetensors")).name
    path = folder / name.format(first=first)
    content = path.read_bytes() if path.exists() else b""
    path.unlink(missing_ok=True)
    if change is not None:
        path.write_bytes(change(content))
    with pytest.raises(ValueError, match=message.format(first=first)):
        read_manifest(folder)


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
