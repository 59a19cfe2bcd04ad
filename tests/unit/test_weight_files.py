"""Which files of a model's folder are read: transformers' choice, by every loader; and their hash."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from kit.config_cases import refused_calls
from kit.families import build
from kit.loading_memory import LOADERS, loaded
from kit.runs import save_model, session_of, write_run
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from stillhouse.models import Decoder, model_fingerprint
from stillhouse.models import weight_files as folder_files
from stillhouse.models.weight_files import weight_files
from stillhouse.signals.teacher_folder import head_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
IDS = torch.arange(3, 40)[None]
#: the largest size of a file; the models of the tests have several
SIZE = "30KB"


def other_weights(folder: Path, **options: Any) -> Path:
    build("llama", seed=7).save_pretrained(folder, **options)
    return folder


def leftover_shards(folder: Path) -> None:
    """Shards of another version, with their index, beside a single file."""
    build("llama").save_pretrained(folder)
    for path in other_weights(folder / "other", max_shard_size=SIZE).glob("*.safetensors*"):
        shutil.copy(path, folder)


def variant(folder: Path) -> None:
    build("llama").save_pretrained(folder)
    shutil.copy(other_weights(folder / "other") / SINGLE, folder / "model.fp16.safetensors")


def beside_an_index(folder: Path) -> None:
    """A file that sorts after all files of the index, and one that sorts before them."""
    build("llama").save_pretrained(folder, max_shard_size=SIZE)
    for name in ("old.safetensors", "consolidated.safetensors"):
        shutil.copy(other_weights(folder / "other") / SINGLE, folder / name)


def named(written: str, folder: Path, **options: Any) -> None:
    """config.json names the file or the index under another name."""
    build("llama").save_pretrained(folder, **options)
    path = (folder / written).rename(folder / written.replace("model", "step-7"))
    shutil.copy(other_weights(folder / "other") / SINGLE, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": path.name}))


def under_two_names(folder: Path) -> None:
    """The second name is read by versions that stored a backbone alone; of both, transformers takes the first."""
    build("llama").save_pretrained(folder)
    tensors = load_file(folder / SINGLE)
    name = "model.embed_tokens.weight"
    tensors |= {name: tensors[name] + 1, name.removeprefix("model."): tensors[name]}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


NAMED = (partial(named, SINGLE), partial(named, INDEX, max_shard_size=SIZE))
WRITE = [leftover_shards, variant, beside_an_index, *NAMED, under_two_names]


@pytest.mark.parametrize("write", WRITE)
def test_every_loader_reads_the_files_that_transformers_reads(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path)
    (tmp_path / "unrelated.safetensors").write_bytes(b"not a header")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(expected.lm_head.weight, build("llama").lm_head.weight)
    for decoder in (Decoder.from_pretrained(tmp_path), loaded(tmp_path)):
        assert torch.equal(decoder(IDS), expected(IDS).logits)
    assert torch.equal(head_of(tmp_path).output_weight, expected.lm_head.weight)
    before = model_fingerprint(tmp_path)
    (tmp_path / "unrelated.safetensors").write_bytes(b"another one")
    assert model_fingerprint(tmp_path) == before
    read = weight_files(tmp_path)[-1]
    save_file({name: tensor + 1 for name, tensor in load_file(read).items()}, read, metadata={"format": "pt"})
    assert model_fingerprint(tmp_path) != before


def test_a_student_with_the_teachers_layers_gets_those_that_transformers_reads(tmp_path: Path) -> None:
    save_model(tmp_path / "teacher", seed=2)
    shutil.copytree(tmp_path / "teacher", tmp_path / "student")
    write_run(tmp_path)
    init = {"student.init": {"from": "teacher", "layers": "first 2"}}
    expected = session_of(tmp_path, **init).models.student.state_dict()
    save_model(tmp_path / "other", seed=9)
    shutil.copy(tmp_path / "other" / SINGLE, tmp_path / "teacher" / "model.fp16.safetensors")
    for name, tensor in session_of(tmp_path, **init).models.student.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def without_a_tensor(path: Path) -> None:
    tensors = load_file(path)
    tensors.popitem()
    save_file(tensors or {"x": Tensor(1)}, path, metadata={"format": "pt"})


@pytest.mark.parametrize(("call", "message"), refused_calls("files of weights"))
@LOADERS
def test_a_damaged_file_is_named(tmp_path: Path, load: Callable[[Path], Decoder], call: str, message: str) -> None:
    damage = eval(call)
    build("llama").save_pretrained(tmp_path, max_shard_size=SIZE)
    path = sorted(tmp_path.glob("*.safetensors"))[1]
    damage(path)
    with pytest.raises(ValueError, match=f"{path} {message}"):
        load(tmp_path)


@LOADERS
def test_a_wrong_index_is_named(tmp_path: Path, load: Callable[[Path], Decoder]) -> None:
    """transformers cannot read one without one of its objects; a tensor is in another file than the index says."""
    build("llama").save_pretrained(tmp_path, max_shard_size=SIZE)
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_text(json.dumps(index | {"metadata": {}}))
    load(tmp_path)
    files = index["weight_map"]
    first, second, *_ = sorted(set(files.values()))
    name = next(name for name, file in files.items() if file == first)
    for wrong, message in (
        ({"weight_map": files}, f"{INDEX}:? has no object 'metadata'"),
        ({"metadata": index["metadata"]}, f"{INDEX}:? weight_map: expected an object"),
        (index | {"weight_map": files | {name: second}}, f"{second} has no tensor '{name}'"),
    ):
        (tmp_path / INDEX).write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


def test_a_folder_without_weights_is_named_under_a_layout(tmp_path: Path) -> None:
    """The names of a variant are not those that transformers reads."""
    build("llama").save_pretrained(tmp_path)
    (tmp_path / SINGLE).rename(tmp_path / "model.fp16.safetensors")
    with pytest.raises(ValueError, match=rf"has no weights: expected {SINGLE}, or {INDEX}"):
        loaded(tmp_path)


def test_a_folder_with_the_files_of_the_head_alone(tmp_path: Path) -> None:
    """As of a served teacher on the hub, of which no other file is downloaded."""
    model = build("llama", tied=False)
    model.save_pretrained(tmp_path, max_shard_size=SIZE)
    files = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    for path in tmp_path.glob("*.safetensors"):
        if path.name != files["lm_head.weight"]:
            path.unlink()
    assert torch.equal(head_of(tmp_path).output_weight, model.lm_head.weight)
    with pytest.raises(ValueError, match=r"is missing, but config\.json or the index"):
        loaded(tmp_path)


def test_a_damaged_file_of_a_model_of_the_hub_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a download that filled the disk; the hub is not asked again."""
    cache = tmp_path / "models--some--model"
    build("llama").save_pretrained(cache / "snapshots" / "0123")
    cut(cache / "snapshots" / "0123" / SINGLE)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0123")
    for name, value in (("HF_HUB_CACHE", str(tmp_path)), ("HF_HUB_OFFLINE", True)):
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    with pytest.raises(ValueError, match=rf"^model 'some/model' .*/{SINGLE} is not a readable safetensors file"):
        Decoder.from_pretrained("some/model")


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
    monkeypatch.setattr(folder_files, "WHOLE_BYTES", 0)
    plain = model_fingerprint(save_model(tmp_path / "plain", tied=False))
    assert plain == model_fingerprint(save_model(tmp_path / "same", tied=False))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    names = [name for name, _ in model.named_parameters()]
    for at, name in enumerate(names[:5]):

        def change(model: Any, name: str = name) -> None:
            model.get_parameter(name).mul_(1.001)

        assert model_fingerprint(save_model(tmp_path / str(at), tied=False, change=change)) != plain


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
    monkeypatch.setattr(folder_files, "WHOLE_BYTES", -1)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors is not a safetensors file"):
        model_fingerprint(tmp_path)
