"""Models, folders, weights and lengths that the decoder refuses, and the error messages."""

import copy
import gc
import re
import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers as hf
from kit.causal_families import build as build_causal
from kit.config_cases import refused_calls
from kit.families import FAMILIES, build
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from stillhouse.models import Decoder, check_document_length, check_finite_weights, warn_of_positions
from stillhouse.models.document_packing import PackingError
from stillhouse.objective import forward_kl
from stillhouse.objective.spec import parse_objective
from stillhouse.parallel.sharded_loading import empty_decoder, load_weights

SMALL: dict[str, Any] = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 32}
SMALL |= {"num_hidden_layers": 1, "num_attention_heads": 2}


def t5() -> PreTrainedModel:
    config = hf.T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    return hf.T5ForConditionalGeneration(config)


class ScaledLlama(LlamaForCausalLM):
    """A model that scales its logits by a factor that its configuration does not contain."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * 1.001
        return outputs


@pytest.mark.parametrize(("call", "reason"), refused_calls("models that are not packed"))
def test_models_whose_code_shows_that_they_cannot_be_packed(call: str, reason: str) -> None:
    make = eval(call)
    decoder = Decoder(make())
    assert decoder.packing.name == "rows"
    assert reason in str(decoder.packing.reason)
    with pytest.raises(PackingError, match=r"data\.packing: rows"):
        Decoder(make(), packing="packed")


@pytest.mark.parametrize(("call", "message"), refused_calls("models"))
def test_models_that_cannot_be_wrapped(call: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Decoder(eval(call)())


class LoraLinear(nn.Module):
    """A layer wrapped like peft's: `weight` is only the frozen base."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base_layer(hidden) + self.lora_B(self.lora_A(hidden))


QuantizedLinear = type("QuantizedLinear", (nn.Linear,), {})


def test_a_head_that_is_more_than_a_linear_layer_is_refused() -> None:
    model = build("llama")
    model.lm_head = LoraLinear(model.lm_head)
    with pytest.raises(ValueError, match=r"has a test_decoder_checks\.LoraLinear as its output head"):
        Decoder(model, verify=False)
    model.lm_head = QuantizedLinear(48, 251, bias=False)
    with pytest.raises(ValueError, match=r"QuantizedLinear as its output head: expected a plain torch\.nn\.Linear"):
        Decoder(model, verify=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_verifying_leaves_no_trace(family: str) -> None:
    model = build(family).train()
    model.base_model.get_input_embeddings().eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    decoder = Decoder(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert decoder.training
    assert decoder.head.training
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())
    assert not Decoder(model.eval()).training


def test_weights_that_are_missing_or_not_finite() -> None:
    with torch.device("meta"):
        empty = LlamaForCausalLM(LlamaConfig(**SMALL))
    with pytest.raises(ValueError, match="no weights yet"):
        Decoder(empty)
    Decoder(empty, verify=False)

    model = build("llama")
    decoder = Decoder(model)
    check_finite_weights(decoder, "student")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
        model.lm_head.weight[7, 8] = float("inf")
    with pytest.raises(ValueError, match=r"student: 1 of the 3840 values of '[\w.]*layers\.1\.mlp\.up_proj\.weight'"):
        check_finite_weights(decoder, "student")
    with pytest.raises(ValueError, match="are NaN or infinite"):
        Decoder(model)


@pytest.mark.parametrize(("call", "message"), refused_calls("buffers"))
def test_buffers_that_are_not_finite(call: str, message: str) -> None:
    family, part = eval(call)
    decoder = Decoder(build_causal(family))
    name, buffer = next(named for named in decoder.named_buffers() if named[0].endswith(part))
    buffer.view(-1)[1] = torch.nan
    problem = rf"student: 1 of the \d+ values of '{name}' are NaN or infinite: .*{message}"
    with pytest.raises(ValueError, match=problem):
        check_finite_weights(decoder, "student")


@pytest.mark.parametrize("theta", [0.0, -1e4])
def test_a_configuration_that_makes_a_buffer_not_finite(tmp_path: Path, theta: float) -> None:
    rope = {"rope_type": "default", "rope_theta": theta}
    build_causal("llama", rope_parameters=rope).save_pretrained(tmp_path)
    message = r"values of 'backbone\.rotary_emb\.inv_freq' are NaN or infinite: no file has this buffer"
    with pytest.raises(ValueError, match=message):
        Decoder.from_pretrained(tmp_path, dtype="float32")
    decoder = empty_decoder(tmp_path)
    load_weights(decoder, tmp_path, torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        check_finite_weights(decoder, "student")


_CODE = """
import torch
from transformers import LlamaForCausalLM

class Model(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("factor", torch.full((3,), 2.0), persistent=False)

    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self and self.config.initialises:
            module.factor.fill_(2.0)
"""


@pytest.mark.parametrize("initialises", [True, False])
def test_a_buffer_that_code_of_a_model_does_not_initialise(tmp_path: Path, initialises: bool) -> None:
    model = build("llama")
    model.config.initialises, model.config.auto_map = initialises, {"AutoModelForCausalLM": "modeling.Model"}
    model.save_pretrained(tmp_path)
    (tmp_path / "modeling.py").write_text(_CODE)
    if initialises:
        decoder = Decoder.from_pretrained(tmp_path, trust_remote_code=True)
        assert decoder.pretrained.factor.tolist() == [2.0] * 3  # type: ignore[operator, union-attr]
        for name, weight in model.state_dict().items():
            assert torch.equal(weight, decoder.pretrained.state_dict()[name]), name
    else:
        with pytest.raises(ValueError, match="no rule to initialise its buffer 'factor', which no file holds"):
            Decoder.from_pretrained(tmp_path, trust_remote_code=True)


def test_a_decoder_is_freed_at_once_and_its_copy_is_another_one() -> None:
    decoder = Decoder(build("llama", tied=True), verify=False)
    other = copy.deepcopy(decoder)
    other.load_state_dict(decoder.state_dict(), assign=True)
    assert other.pretrained.lm_head.weight is other.pretrained.get_input_embeddings().weight
    reference = weakref.ref(decoder)
    gc.disable()
    try:
        del decoder
        assert reference() is None
    finally:
        gc.enable()


def test_documents_longer_than_the_positions_reach() -> None:
    rotary = build("llama")
    check_document_length(rotary, 100_000, "student")  # rotary positions have no limit
    assert warn_of_positions(rotary, 128, "student") == []
    (warning,) = warn_of_positions(rotary, 129, "student")
    assert warning.startswith("student has max_position_embeddings 128, and the longest document has 129 tokens")
    learned = Decoder(build("gpt2"))
    check_document_length(learned.pretrained, 128, "student")
    with pytest.raises(ValueError, match=r"student has learned positions for 128 tokens: .* got 129"):
        check_document_length(learned.pretrained, 129, "student")


def test_documents_beyond_a_switch_of_rotary_angles() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = hf.Phi3Config(
        **SMALL, pad_token_id=0, max_position_embeddings=64, original_max_position_embeddings=16,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors},
    )  # fmt: skip
    decoder = Decoder(hf.Phi3ForCausalLM(config).eval())
    check_document_length(decoder.pretrained, 16, "teacher")
    with pytest.raises(ValueError, match=r"longrope.* longer than 16 tokens.* got 17"):
        check_document_length(decoder.pretrained, 17, "teacher")
    # the reason of the refusal: a long document in the same row changes the result of a short one
    ids, positions = torch.arange(3, 25)[None], torch.cat([torch.arange(5), torch.arange(17)])[None]
    with torch.no_grad():
        assert not torch.allclose(decoder(ids, positions)[:, :5], decoder(ids[:, :5]), atol=1e-4)


@pytest.mark.parametrize("name", ["someone/some-model", "./runs/a", "a folder/with spaces"])
def test_the_name_is_passed_on_unchanged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[Any] = []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def receive(answer: Any, name_or_path: Any, **options: Any) -> Any:
        received.append((name_or_path, options))
        return answer

    monkeypatch.setattr(AutoConfig, "from_pretrained", partial(receive, LlamaConfig(**SMALL)))
    answer = build("llama"), {"missing_keys": set[str]()}
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", partial(receive, answer))
    Decoder.from_pretrained(name, revision="abc", dtype="bfloat16", attention="eager")
    assert len(received) == 2
    for received_name, options in received:
        assert received_name is name
        assert (options["revision"], options["trust_remote_code"]) == ("abc", False)
    assert (options["dtype"], options["attn_implementation"]) == (torch.bfloat16, "eager")


@pytest.mark.parametrize("name", ["nobody-here/no-such-model", "/no/such/folder", "no_such_folder", "a/b/c"])
def test_a_model_that_does_not_exist_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert_short_error(name, f"model '{name}' is not a folder on this machine, .*Expected a folder with config.json")


def assert_short_error(name: str | Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Decoder.from_pretrained(name)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("call", "message"), refused_calls("damaged folders of models"))
def test_a_folder_that_is_not_the_models_is_named(call: str, message: str, tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    eval(call)(tmp_path)
    assert_short_error(tmp_path, f"^model '{tmp_path}' .*{message}")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(None, torch.bfloat16), ("auto", torch.bfloat16), ("float32", torch.float32), (torch.float16, torch.float16)],
)
def test_a_narrow_dtype_that_nobody_named_is_warned_of(name: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    build("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        decoder = Decoder.from_pretrained(tmp_path, dtype=name)
    assert {parameter.dtype for parameter in decoder.parameters()} == {dtype}
    messages = [str(warning.message) for warning in caught if warning.filename == __file__]
    assert len(messages) == (name is None)
    assert all("computes in bfloat16, the dtype of its saved weights" in message for message in messages)
    if dtype is torch.float32:  # float32 is what a model computes in anyway
        decoder.save_pretrained(tmp_path / "wide")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Decoder.from_pretrained(tmp_path / "wide")


def test_unknown_dtype_and_attention(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="dtype 'half': expected auto, float64, float32, bfloat16, float16"):
        Decoder.from_pretrained(tmp_path, dtype="half")
    with pytest.raises(ValueError, match="cannot be loaded"):
        Decoder.from_pretrained(tmp_path, attention="no-such-attention")


def test_an_error_of_our_own_is_not_shown_as_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_a_mistake(_: Decoder) -> None:
        raise AttributeError("a mistake of this package")

    build("llama").save_pretrained(tmp_path)
    monkeypatch.setattr("stillhouse.models.decoder.prove_decoder", with_a_mistake)
    with pytest.raises(AttributeError, match="a mistake of this package"):
        Decoder.from_pretrained(tmp_path)


@pytest.mark.parametrize("processor", [forward_kl(), parse_objective("cross_entropy"), object()])
def test_a_processor_that_cannot_be_called_is_named(processor: Any) -> None:
    decoder = Decoder(build("llama"))
    problem = f"^processor is of type {type(processor).__name__}, which has no `__call__`: expected a function of "
    with pytest.raises(ValueError, match=problem):
        decoder(torch.arange(4)[None], processor=processor)
