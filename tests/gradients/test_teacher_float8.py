"""A teacher whose layers multiply in fp8. torchao has these products for the CPU, too, but refuses to use them there.

So the tests run them on the CPU, without the two checks of the device.

N tokens, D width of the layer's inputs.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.causal_families import build
from kit.runs import forward_backward, session_of, write_run
from kit.teacher_gradients import named_gradients
from torch import Tensor, nn

from stillhouse.config import ConfigError
from stillhouse.models import Decoder, quantized
from stillhouse.models.quantized import is_quantized, round_to_float8, weight_bytes
from stillhouse.parallel import Degrees, Layout
from stillhouse.run import preflight
from stillhouse.run.preflight import require_models_fit

#: the largest number of e4m3
LARGEST = 448.0


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    quant_api = pytest.importorskip("torchao.quantization.quant_api")
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
    for module in (quantized, preflight):
        monkeypatch.setattr(module, "float8_problem", lambda device: None)


def model_of(family: str = "qwen3", **settings: Any) -> Any:
    return build(family, seed=0, **settings).to(torch.bfloat16)


def rounded(values_ND: Tensor) -> Tensor:
    """Round each row to e4m3 with a scale of its own, which is computed in bfloat16."""
    scale_N1 = (values_ND.abs().amax(-1, keepdim=True) / LARGEST).float()
    scaled_ND = (values_ND.float() / scale_N1).clamp(-LARGEST, LARGEST)
    return scaled_ND.to(torch.float8_e4m3fn).float() * scale_N1


@pytest.mark.usefixtures("on_cpu")
def test_weights_and_inputs_are_rounded_by_rows() -> None:
    model, exact = model_of(), model_of()
    round_to_float8(model)
    name = "model.layers.0.mlp.up_proj"
    layer, plain = model.get_submodule(name), exact.get_submodule(name)
    inputs_ND = torch.randn(7, plain.in_features).to(torch.bfloat16) * torch.logspace(-3, 3, 7)[:, None]
    inputs_ND = inputs_ND.to(torch.bfloat16)
    weight_VD = rounded(plain.weight.detach())
    torch.testing.assert_close(layer.weight.dequantize().float(), weight_VD, rtol=0.005, atol=0)
    expected, actual = rounded(inputs_ND) @ weight_VD.T, layer(inputs_ND).float()
    unrounded = plain(inputs_ND).float()
    error, change = ((other - actual).norm(dim=-1) / expected.norm(dim=-1) for other in (expected, unrounded))
    assert (error < 0.005).all()
    assert (change > 4 * error).all()
    assert torch.equal(layer(inputs_ND[2:5]), layer(inputs_ND)[2:5])  # no token depends on the others
    assert torch.equal(layer(torch.zeros_like(inputs_ND)), torch.zeros_like(layer(inputs_ND)))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("family", "settings", "router"),
    [("qwen3", {}, None), ("hunyuan_v1_moe", {"num_experts": 16}, "gate.wg"), ("jetmoe", {}, "router.layer")],
)
def test_head_embedding_and_routers_keep_their_dtype(
    family: str, settings: dict[str, Any], router: str | None
) -> None:
    model = model_of(family, **settings)
    before = weight_bytes(model)
    round_to_float8(model)
    assert not is_quantized(model.get_output_embeddings().weight)
    assert not is_quantized(model.get_input_embeddings().weight)
    routers = [module for name, module in model.named_modules() if router and name.endswith(router)]
    assert bool(routers) == (router is not None)
    assert not any(is_quantized(module.weight) for module in routers)
    linear = [module for module in model.modules() if type(module) is nn.Linear and is_quantized(module.weight)]
    assert linear
    assert weight_bytes(model) < before


@pytest.mark.usefixtures("on_cpu")
def test_a_matrix_with_a_row_of_zeros_is_not_rounded() -> None:
    model = model_of()
    layer = model.model.layers[0].mlp.up_proj
    layer.weight.data[3] = 0
    round_to_float8(model)
    assert not is_quantized(layer.weight)
    assert is_quantized(model.model.layers[1].mlp.up_proj.weight)


@pytest.mark.usefixtures("on_cpu")
def test_a_run_with_an_fp8_teacher_has_nearly_the_gradients_of_its_bfloat16_teacher(tmp_path: Path) -> None:
    def gradients(**teacher: Any) -> dict[str, Tensor]:
        keys = {f"teacher.{name}": value for name, value in ({"dtype": "bfloat16"} | teacher).items()}
        session = session_of(tmp_path, **keys)
        forward_backward(session)
        assert session.models.teacher is not None
        assert any(map(is_quantized, session.models.teacher.parameters())) == ("quantize" in teacher)
        return named_gradients(session.models.student)

    expected, actual = gradients(), gradients(quantize="fp8")
    change = torch.stack([(actual[name] - gradient).norm() for name, gradient in expected.items()]).norm()
    assert 0 < change / torch.stack([gradient.norm() for gradient in expected.values()]).norm() < 0.1


@pytest.mark.usefixtures("on_cpu")
def test_products_that_are_wrong_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scales of the weights are lost after the first passes."""
    model = model_of()
    probe = quantized._probe_logits

    def damaged(model: Any) -> Tensor:
        for weight in filter(is_quantized, model.parameters()):
            weight.scale.fill_(1.0)
        return probe(model)

    monkeypatch.setattr(quantized, "_probe_logits", damaged)
    with pytest.raises(ValueError, match="fp8 changes its logits by"):
        round_to_float8(model)


@pytest.mark.usefixtures("on_cpu")
def test_other_weights_than_bfloat16_are_refused() -> None:
    with pytest.raises(ValueError, match=r"fp8 rounds bfloat16 weights, got torch\.float32: expected dtype bfloat16"):
        round_to_float8(build("qwen3", seed=0))


def test_a_cpu_is_refused_by_name(tmp_path: Path) -> None:
    config = write_run(tmp_path, **{"teacher.quantize": "fp8"})
    message = r"fp8 needs a GPU of compute capability 8.9 or later .* got cpu: expected int8 or nf4"
    with pytest.raises(ConfigError, match=f"teacher.quantize: {message}"):
        require_models_fit(config.student, config.teacher_sections, {}, Layout(Degrees()), torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        Decoder.from_pretrained(tmp_path / "teacher", quantize="fp8")
