"""A teacher in less memory: its layers in 8 or 4 bits, or in host memory except while they run.

The reference for quantized weights is a plain model with the dequantized weights, which both must agree on exactly.
"""

import importlib.util
import json
import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from kit.low_bit import dequantized, first_step, save_teacher
from kit.runs import session_of, write_run
from kit.serving import Server
from kit.teacher_gradients import Gradients, assert_close, gradients
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from stillhouse.config import ConfigError
from stillhouse.models import Decoder
from stillhouse.models.pretrained import load_causal_lm
from stillhouse.models.quantized import is_quantized, require_rounding, weight_bytes
from stillhouse.parallel import Degrees, Layout
from stillhouse.parallel.host_memory import WaitingWeights
from stillhouse.run import preflight
from stillhouse.run.preflight import require_models_fit
from stillhouse.run.run import prepare
from stillhouse.signals import SignalCache
from stillhouse.tools.write_cache import write_cache

CPU = torch.device("cpu")
KINDS = ["int8", "nf4"]
#: CPUs with such units multiply 4-bit weights in bfloat16, whatever dtype is asked for
TOLERANCE = {"int8": 1e-5, "nf4": 2e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("economy")
    save_teacher(folder / "teacher")
    write_run(folder)
    return folder


def distance(one: Gradients, other: Gradients) -> float:
    return float(torch.stack([(weight - other[1][name]).norm() for name, weight in one[1].items()]).norm())


@pytest.fixture(scope="module", params=KINDS)
def plain(request: pytest.FixtureRequest, folder: Path) -> tuple[str, Path]:
    """A kind, and a folder with a plain teacher whose weights are the dequantized ones of that kind."""
    quantized = load_causal_lm(folder / "teacher", quantize=request.param)
    changed = {name: dequantized(weight) for name, weight in quantized.named_parameters() if is_quantized(weight)}
    assert changed

    def change(model: Any) -> None:
        for name, weight in model.named_parameters():
            if name in changed:
                assert not torch.equal(weight, changed[name]), f"{name} is the same in fewer bits"
                weight.copy_(changed[name])

    return request.param, save_teacher(folder / f"plain-{request.param}", change)


def test_a_quantized_teacher_gives_the_gradients_of_its_dequantized_weights(
    folder: Path, plain: tuple[str, Path]
) -> None:
    kind, other = plain
    actual = gradients(folder, **{"teacher.quantize": kind})
    exact, expected = gradients(folder), gradients(folder, **{"teacher.model": str(other)})
    assert_close(actual, expected, TOLERANCE[kind])
    assert distance(actual, expected) < 0.2 * distance(actual, exact)


def test_one_of_several_teachers_may_be_quantized(folder: Path, plain: tuple[str, Path]) -> None:
    kind, other = plain

    def teachers(**quantized: Any) -> dict[str, Any]:
        named = {"a": {"model": str(folder / "teacher")}, "b": {"model": str(folder / "teacher"), **quantized}}
        return {f"teachers.{name}": keys for name, keys in named.items()}

    actual, expected = (
        session_of(folder, cached=True, **teachers(**options))
        for options in ({"quantize": kind}, {"model": str(other)})
    )
    assert_close(first_step(actual), first_step(expected), TOLERANCE[kind])


def test_quantized_weights_take_less_memory(folder: Path) -> None:
    whole, eight, four = (
        weight_bytes(Decoder.from_pretrained(folder / "teacher", quantize=kind).backbone.layers)  # type: ignore[arg-type]
        for kind in (None, *KINDS)
    )
    assert eight < 0.36 * whole
    assert four < 0.24 * whole


@pytest.mark.slow
def test_a_served_quantized_teacher_is_proven_and_is_another_teacher(folder: Path, plain: tuple[str, Path]) -> None:
    kind, other = plain
    with Server(folder / "teacher", "--quantize", kind) as server, Server(folder / "teacher") as exact:
        assert server.info()["quantize"] == kind
        assert server.info()["teacher"] == f"{exact.info()['teacher']}-{kind}"
        served = {"teacher.url": server.url, "teacher.model": str(folder / "teacher")}
        actual = gradients(folder, **served, **{"teacher.prove": "always"})
        assert_close(actual, gradients(folder, **{"teacher.model": str(other)}), TOLERANCE[kind])
        with pytest.raises(ConfigError, match="serve different teachers: identity is"):
            session_of(folder, cached=True, **{"teacher.url": [server.url, exact.url]})


def test_a_cache_of_a_quantized_teacher(folder: Path, plain: tuple[str, Path], tmp_path: Path) -> None:
    kind, other = plain
    write_cache(write_run(folder, **{"teacher.quantize": kind}), tmp_path / "cache", "hidden")
    write_cache(write_run(folder), tmp_path / "exact", "hidden")
    of_teacher = [SignalCache(tmp_path / name).manifest.teacher_hash for name in ("cache", "exact")]
    assert of_teacher[0] == f"{of_teacher[1]}-{kind}"
    assert "quantization_config" not in json.loads((tmp_path / "cache" / "teacher" / "config.json").read_text())
    actual = gradients(folder, **{"teacher.cache": str(tmp_path / "cache")})
    assert_close(actual, gradients(folder, **{"teacher.model": str(other)}), TOLERANCE[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_weight_is_found_although_quantizing_hides_it(tmp_path: Path, kind: str) -> None:
    save_teacher(tmp_path / "teacher")
    path = tmp_path / "teacher" / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if name.endswith("up_proj.weight"))
    weights[name][3, 5] = float("nan")
    save_file(weights, path.with_name("model-00001-of-00002.safetensors"), metadata={"format": "pt"})
    Decoder.from_pretrained(tmp_path / "teacher", quantize=kind)  # transformers does not read this file
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"'{name}' in .*model\.safetensors has values that are NaN or infinite"):
        Decoder.from_pretrained(tmp_path / "teacher", quantize=kind)


def wide(folder: Path, kind: str, **options: Any) -> nn.Module:
    """A teacher whose width, 96, is no multiple of 64."""
    return load_causal_lm(save_teacher(folder / "wide", width=96), quantize=kind, **options)


def refused_if_wrong(message: str) -> AbstractContextManager[object]:
    """bitsandbytes dequantizes a width of 96 wrongly on some CPUs, and its kernels for others cannot run it at all.

    Where the library itself is right, nothing may be refused.
    """
    weight_RD = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    codes, state = bitsandbytes.functional.quantize_4bit(weight_RD, quant_type="nf4")
    rounded_RD = bitsandbytes.functional.dequantize_4bit(codes, state)
    is_right = float((rounded_RD - weight_RD).norm() / weight_RD.norm()) < 0.12
    return nullcontext() if is_right else pytest.raises(ValueError, match=message)


def test_a_layer_that_nf4_rounds_wrongly_is_refused_by_name(tmp_path: Path) -> None:
    layer = r"nf4 cannot run the layer 'model.layers.0.self_attn.q_proj' of shape \[64, 96\] on cpu"
    with refused_if_wrong(layer + ".*widths that are multiples of 64"):
        wide(tmp_path, "nf4")
    with refused_if_wrong(layer + ": the error of its products is 0.2.* rounding alone gives 0.09"):
        wide(tmp_path, "nf4", trained=True)
    wide(tmp_path, "int8", trained=True)


def test_codes_in_a_folder_are_read_as_what_they_stand_for(tmp_path: Path) -> None:
    """transformers reads a folder that is quantized already, for which there are no other weights to compare with."""
    for width, compressed in ((96, False), (64, True), (64, False)):
        configuration = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=compressed
        )
        source, folder = save_teacher(tmp_path / f"plain-{width}", width=width), tmp_path / f"{width}-{compressed}"
        model = AutoModelForCausalLM.from_pretrained(
            source, quantization_config=configuration, device_map={"": "cpu"}, dtype=torch.float32
        )
        model.save_pretrained(folder)
        if width == 96:
            with refused_if_wrong(r"nf4 cannot run the layer 'model.layers.0.self_attn.q_proj'"):
                load_causal_lm(folder)
        else:
            load_causal_lm(folder)
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.0.mlp.up_proj.weight.absmax"][0] = float("nan")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"weights of 'model.layers.0.mlp.up_proj' are NaN or infinite: the checkpoint"
    ):
        load_causal_lm(folder)


def test_a_wrong_scale_is_noticed_in_the_last_rows(tmp_path: Path) -> None:
    source = save_teacher(tmp_path / "teacher")
    model = load_causal_lm(source, quantize="int8")
    path = source / "model.safetensors"
    stored = dict.fromkeys(load_file(path), path)
    require_rounding(model, "int8", stored)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.scale[-3:] *= 1.1
    with pytest.raises(ValueError, match=r"'model.layers.1.mlp.up_proj' of shape .*; expected unquantized weights"):
        require_rounding(model, "int8", stored)


def test_a_model_that_is_quantized_already_is_not_quantized_again(folder: Path, tmp_path: Path) -> None:
    Decoder.from_pretrained(folder / "teacher", quantize="nf4").pretrained.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="its weights are already quantized: expected no second quantization"):
        Decoder.from_pretrained(tmp_path, quantize="int8")


def test_without_the_library_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else find(name, *rest)
    )
    message = r"int8 needs torchao, which is not installed; pip install 'stillhouse\[low-bit\]'"
    with pytest.raises(ValueError, match=message):
        Decoder.from_pretrained(folder / "teacher", quantize="int8")


@pytest.mark.parametrize("several", [False, True])
def test_an_offloaded_teacher_gives_the_same_gradients(
    folder: Path, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run refuses this on a CPU, where the weights are copied for nothing."""

    def actual(*, offload: bool) -> tuple[float, dict[str, Tensor]]:
        teacher = {"model": str(folder / "teacher"), "offload": offload}
        if several:
            config = write_run(folder, cached=True, **{"teachers.a": teacher})
        else:
            config = write_run(folder, **{f"teacher.{key}": value for key, value in teacher.items()})
        monkeypatch.setattr(preflight, "require_fsdp", lambda *_: None)
        return first_step(prepare(config, announce=False))

    assert_close(actual(offload=True), actual(offload=False))


def test_waiting_weights_are_on_the_device_only_while_they_are_used() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
    model[1].weight.data = model[0].weight.data.T
    before = [weight.data_ptr() for weight in model.parameters()]
    inputs = torch.randn(3, 5)
    expected = model(inputs)
    weights = WaitingWeights(model, CPU)
    with weights.on_device():
        copies = [weakref.ref(weight.untyped_storage()) for weight in model.parameters()]
        assert all(weight.data_ptr() not in before for weight in model.parameters())
        torch.testing.assert_close(model(inputs), expected)
    assert [weight.data_ptr() for weight in model.parameters()] == before
    assert all(copy() is None for copy in copies)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), weights.on_device():
        model(inputs[:, 1:])
    assert [weight.data_ptr() for weight in model.parameters()] == before


@pytest.mark.parametrize(
    ("settings", "device", "degrees", "message"),
    [
        ({"quantize": "int8"}, "cpu", Degrees(fsdp=2), "teacher.quantize: got int8 under fsdp 2"),
        ({"offload": True}, "cpu", Degrees(), "teacher.offload: got true on a CPU"),
        (
            {"offload": True},
            "cuda",
            Degrees(tensor=2),
            "teacher.offload: has no effect under tensor 2, which does not use FSDP",
        ),
    ],
)
def test_what_a_layout_does_not_allow(
    folder: Path, settings: dict[str, Any], device: str, degrees: Degrees, message: str
) -> None:
    config = write_run(folder, **{f"teacher.{key}": value for key, value in settings.items()})
    with pytest.raises(ConfigError, match=message):
        require_models_fit(config.student, config.teacher_sections, {}, Layout(degrees), torch.device(device))
