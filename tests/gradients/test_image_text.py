"""Vision-language models as decoders: their class, and their results with and without images.

B rows, S tokens per row.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from kit.families import build
from kit.image_documents import documents_of, model_of
from kit.teacher_gradients import named_gradients

from stillhouse.models import Decoder
from stillhouse.models.pretrained import auto_class
from stillhouse.models.processors import Targets, cross_entropy
from stillhouse.parallel.sharded_loading import empty_decoder

IMAGE_TEXT = ("llava_onevision", "internvl", "qwen3_vl")
EACH_DECODER = pytest.mark.parametrize("family", ["gemma3", "llava_onevision", "qwen3_vl"])


def with_image(family: str, folder: Path) -> dict[str, Any]:
    """Return a row of tokens with one image."""
    document = documents_of(family, folder, [[(12, 8)]])[0]
    return {name: value for name, value in document.items() if name != "attention_mask"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        *((lambda family=family: model_of(family).config, hf.AutoModelForImageTextToText) for family in IMAGE_TEXT),
        # transformers lists the image-text model in this class, too
        (lambda: model_of("gemma3").config, hf.AutoModelForCausalLM),
        (lambda: build("llama").config, hf.AutoModelForCausalLM),
        (hf.T5Config, hf.AutoModelForCausalLM),  # this class refuses T5 with an error that names it
    ],
)
def test_the_class_follows_from_the_configuration(config: Callable[[], hf.PreTrainedConfig], expected: Any) -> None:
    assert auto_class(config()) is expected


@EACH_DECODER
def test_gradients_reach_the_image_and_recomputation_changes_nothing(family: str, tmp_path: Path) -> None:
    gradients, inputs = [], with_image(family, tmp_path)
    for recomputed in (False, True):
        decoder = Decoder(model_of(family), verify=False).train()
        if recomputed:
            decoder.gradient_checkpointing_enable()
        targets = Targets(inputs["input_ids"].roll(-1, 1))
        decoder(**inputs, processor=cross_entropy(), context=targets).loss.backward()
        gradients.append(named_gradients(decoder))
    assert any("vis" in name and gradient.any() for name, gradient in gradients[0].items())
    torch.testing.assert_close(gradients[1], gradients[0])


def test_what_cannot_be_run_with_images_is_refused(tmp_path: Path) -> None:
    decoder, inputs = Decoder(model_of("internvl"), verify=False), with_image("internvl", tmp_path)
    ids_BS, images = inputs.pop("input_ids"), inputs
    positions = torch.arange(ids_BS.shape[1])[None]
    with pytest.raises(
        ValueError, match=r"got pixel_values with position_ids: expected tensors whose shape begins with \[1, \d+\]"
    ):
        decoder(ids_BS, positions, **images)
    with pytest.raises(ValueError, match=r"student\.mtp: .* but the data has images: expected mtp null"):
        decoder(ids_BS, positions, images=images, mtp_input_ids=ids_BS)
    text = Decoder(build("llama"), verify=False)
    with pytest.raises(ValueError, match=r"got pixel_values, and its backbone reads none of them: expected a vision"):
        text(ids_BS, positions, images=images)


def test_code_that_comes_with_such_a_model_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_of("llava_onevision").save_pretrained(tmp_path)
    marker = tmp_path / "has run"
    (tmp_path / "foreign.py").write_text(f"open({str(marker)!r}, 'w')\nclass Foreign: pass\n")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForImageTextToText": "foreign.Foreign"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for load in (Decoder.from_pretrained, empty_decoder):
        assert type(load(tmp_path).pretrained).__name__ == "LlavaOnevisionForConditionalGeneration"
    assert not marker.exists()
