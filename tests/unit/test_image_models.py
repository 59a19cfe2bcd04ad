"""The tiny models that read images: their own processors prepare a picture, and the models see it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import first_is_quick
from kit.image_models import FAMILIES, picture, write_image_model
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText

from stillhouse.images.load_processor import load_processor

QUESTION = {"type": "text", "text": "two and two?"}
#: the numbers of placeholder tokens of a picture of 12 x 8 pixels
PLACEHOLDERS = {"gemma3": 4, "gemma4": 60, "idefics3": 20, "llava_onevision": 14, "internvl": 12}


def prepared(processor: Any, pictures: list[Image.Image]) -> dict[str, Tensor]:
    images = [{"type": "image", "image": image} for image in pictures]
    turns = [
        {"role": "user", "content": [*images, QUESTION]},
        {"role": "assistant", "content": [{"type": "text", "text": "four"}]},
    ]
    options = {"return_assistant_tokens_mask": True, "return_tensors": "pt", "return_dict": True}
    return dict(processor.apply_chat_template([turns], tokenize=True, **options))


@pytest.mark.parametrize("family", first_is_quick(FAMILIES))
def test_a_model_sees_its_images(tmp_path: Path, family: str) -> None:
    write_image_model(family, tmp_path)
    processor = load_processor(str(tmp_path))
    assert type(processor).__name__ == FAMILIES[family].processor["processor_class"]
    model = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()

    @torch.no_grad()
    def logits(*pictures: Image.Image) -> Tensor:
        inputs = prepared(processor, [*pictures])
        mask = inputs.pop("assistant_masks").bool()
        assert processor.tokenizer.decode(inputs["input_ids"][mask]).startswith("four<")
        return model(**inputs).logits[mask]

    one, other = picture(1), picture(2)
    inputs = prepared(processor, [one])
    token = processor.tokenizer.convert_tokens_to_ids(FAMILIES[family].tokens["image_token_id"])
    assert int((inputs["input_ids"] == token).sum()) == PLACEHOLDERS.get(family, 6)
    assert logits(one).isfinite().all()
    assert (logits(one) - logits(other)).abs().max() > 0.05
    # each of several pictures counts, and they have unlike sizes
    assert (logits(one, picture(3, 20, 16)) - logits(one, picture(4, 20, 16))).abs().max() > 0.05
    assert (logits(one) - logits()).abs().max() > 0.05


def test_what_is_no_processor_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^the processor of '{tmp_path}' cannot be loaded: "):
        load_processor(str(tmp_path))
    write_image_model("internvl", tmp_path)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "InternVLProcessor", "image_processor": 3}')
    with pytest.raises(ValueError, match=rf"^the processor of '{tmp_path}' cannot be loaded: "):
        load_processor(str(tmp_path))


def test_a_processor_without_pillow_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stillhouse.images.load_processor.is_vision_available", lambda: False)
    with pytest.raises(ValueError, match=r"needs Pillow.*pip install 'stillhouse\[images\]'$"):
        load_processor("a/model")
