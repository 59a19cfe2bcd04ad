"""The parameters of a decoder with layers for multi-token prediction: initial, tied, frozen; refusals."""

import json
from pathlib import Path

import pytest
import torch
from kit.causal_families import build as build_causal
from kit.families import build
from kit.mtp_cases import MAKERS, documents, labels_of, make, packed, positions
from transformers import AutoModelForCausalLM

from stillhouse.models import Decoder, prove_decoder
from stillhouse.models.mtp import MultiTokenDecoder, add_mtp
from stillhouse.models.processors import Targets, cross_entropy


def test_a_frozen_main_model_leaves_the_layers_to_train() -> None:
    source = make()
    decoder = MultiTokenDecoder(source.main, source.mtp, train_main=False)
    context = Targets(packed([labels_of(ids_N) for ids_N in documents()])).shift_for_mtp(positions(), 2)
    outputs = decoder(packed(documents()), positions(), processor=cross_entropy(), context=context)
    assert not outputs[0].loss.requires_grad
    sum(output.loss for output in outputs[1:]).backward()
    for name, weight in decoder.named_parameters():
        assert (weight.grad is not None) is name.startswith("main.mtp."), name


def test_fresh_layers_are_drawn_by_the_familys_rule_and_the_main_model_stays() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MAKERS["glm4_moe"]())
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    layers = MultiTokenDecoder.new(Decoder(model.eval()), 1).layers
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    for name, weight in layers.named_parameters():
        if weight.ndim > 1:
            assert 0.2 < weight.std() < 0.3, name
            assert abs(weight.mean()) < 0.05, name


def test_refusals(tmp_path: Path) -> None:
    for family, why in (("cohere", "no rms_norm_eps"), ("gpt2", "no rms_norm_eps .*, no list `layers`")):
        with pytest.raises(ValueError, match=rf"model type '{family}'\) cannot have layers .* it has {why}"):
            MultiTokenDecoder.new(Decoder(build(family)), 1)
    main = Decoder(AutoModelForCausalLM.from_config(MAKERS["glm4_moe"]()).eval())
    with pytest.raises(ValueError, match=r"0 MTP layers for a .*'glm4_moe'.*expected 1 or more"):
        MultiTokenDecoder.new(main, 0)
    with pytest.raises(ValueError, match=r"2 MTP layers for a .*'mellum'.*expected 1"):
        make("mellum", 2)
    main.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks weights of its 1 MTP layers: expected tensors model\.layers\.2\.\*"):
        MultiTokenDecoder.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    make("glm4_moe", 1).save_pretrained(tmp_path)  # a model.safetensors with other MTP layers
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"transformers_weights": "other.safetensors"}))
    with pytest.raises(
        ValueError, match=r"main model was read from 'other\.safetensors', .* only from model\.safetensors"
    ):
        MultiTokenDecoder.from_pretrained(tmp_path)


@pytest.mark.parametrize(("family", "what"), [("jamba", "have"), ("zamba", "have"), ("hy_v4", "run")])
def test_an_error_of_transformers_names_the_model(family: str, what: str) -> None:
    decoder = Decoder(build_causal(family), verify=False)
    problem = rf"model type '{family}'\) cannot {what} layers for multi-token prediction: "
    with pytest.raises(ValueError, match=problem):  # noqa: PT012 (either of the last two lines raises it)
        add_mtp(decoder, 1, is_new=True)
        decoder.mtp.initialize(decoder.pretrained, 3)  # type: ignore[union-attr]
        prove_decoder(decoder)
