"""Eight families of vision-language models: packed documents with images are those of plain transformers.

The plain model gets one document at a time, as its processor returns it, and computes whole logits in float64.

B rows, S tokens per row, D width, V vocabulary.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import first_is_quick, slow
from kit.families import build
from kit.image_documents import Document, Packed, documents_of, images_of, joined_images, labels_of, model_of, packed
from kit.image_models import FAMILIES
from torch import Tensor
from torch.nn.functional import cross_entropy as torch_cross_entropy

from stillhouse.config import TrainConfig
from stillhouse.engine.optimizer import make_optimizer
from stillhouse.images.proof import prove_images
from stillhouse.models import Decoder, ProofError, document_packing
from stillhouse.models.processors import cross_entropy
from stillhouse.models.vision_language import LANGUAGE, PROJECTOR, VISION, train_parts
from stillhouse.tools.parity import relative_difference

EACH_FAMILY = pytest.mark.parametrize("family", first_is_quick(FAMILIES))
#: the families whose documents with images cannot be packed: DeltaNet layers without kernels, and Gemma's image
#: blocks, which transformers' masks of sliding windows look for in the row's first document
IN_ROWS = {"qwen3_5", "gemma3"}


def decoder_of(family: str, dtype: torch.dtype = torch.float64) -> Decoder:
    model = model_of(family).to(dtype)
    if dtype == torch.float64:  # torch's grouped products have no such kernel
        model.set_experts_implementation("eager")
    return Decoder(model)


def loss_and_gradients(decoder: Decoder, batch: Packed) -> tuple[float, dict[str, Tensor]]:
    decoder.zero_grad()
    output = decoder(**batch.arguments, processor=cross_entropy(), context=batch.targets)
    output.loss.backward()
    return float(output.loss.detach()), gradients_of(decoder)


def gradients_of(decoder: Decoder) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in decoder.named_parameters() if weight.grad is not None}


def plain_loss(model: Any, document: Document) -> Tensor:
    """Sum of cross-entropies of plain transformers over whole logits."""
    inputs = {name: value for name, value in document.items() if name != "attention_mask"}
    logits_SV = model(**inputs, use_cache=False).logits[0]
    return torch_cross_entropy(logits_SV, labels_of(model, document), ignore_index=-1, reduction="sum")


def trained_names(decoder: Decoder, part: str) -> set[str]:
    train_parts(decoder, [part])
    names = {name for name, weight in decoder.named_parameters() if weight.requires_grad}
    decoder.requires_grad_(True)
    return names


@EACH_FAMILY
def test_packed_documents_are_those_of_plain_transformers(family: str, tmp_path: Path) -> None:
    """Losses and gradients of all parts; images that are exchanged change the loss, documents that are do not."""
    decoder, documents = decoder_of(family), documents_of(family, tmp_path)
    prove_images(decoder, documents, joined_images)
    assert (decoder.packing.name == "rows") == (family in IN_ROWS)
    one, two, text, last = documents
    batch = packed(decoder, [[one, two], [text, last]])
    loss, gradients = loss_and_gradients(decoder, batch)

    decoder.zero_grad()
    expected = [plain_loss(decoder.pretrained, document) for document in documents]
    torch.stack(expected).sum().backward()
    assert loss == pytest.approx(float(sum(expected).detach()), rel=1e-6)
    plain = gradients_of(decoder)
    unreached = {name for name, gradient in gradients.items() if name not in plain and not gradient.any()}
    assert gradients.keys() == plain.keys() | unreached
    assert all(relative_difference(gradients[name], plain[name], 1e-3) < 1e-5 for name in plain)
    for part in (LANGUAGE, PROJECTOR, VISION):
        assert any(plain[name].any() for name in trained_names(decoder, part) & plain.keys())

    others, _ = loss_and_gradients(decoder, packed(decoder, [[last, text, two], [one]], padding=0))
    assert others == pytest.approx(loss, rel=1e-6)
    separate = [loss_and_gradients(decoder, packed(decoder, [[document]], 0))[0] for document in documents]
    assert sum(separate) == pytest.approx(loss, rel=1e-6)
    images = [images_of(document) for document in (one, two, last)]
    swapped = batch.changed(images=joined_images([other_images(images[0]), *images[1:]]))
    assert abs(loss_and_gradients(decoder, replace(batch, arguments=swapped))[0] - loss) > 1e-3


def other_images(images: Document) -> Document:
    return {name: value.flip(-1) if value.is_floating_point() else value for name, value in images.items()}


def test_image_blocks_of_gemma_4_are_not_packed(tmp_path: Path) -> None:
    decoder = Decoder(model_of("gemma4", use_bidirectional_attention="vision"))
    prove_images(decoder, documents_of("gemma4", tmp_path), joined_images)
    assert decoder.packing.name == "rows"


SOME_PARTS = [slow("qwen3_vl", [PROJECTOR, VISION]), slow("gemma3", [LANGUAGE, PROJECTOR])]


@pytest.mark.parametrize(
    ("family", "parts"), [("qwen3_vl", [LANGUAGE]), *SOME_PARTS, slow("llava_onevision", [PROJECTOR])]
)
def test_only_the_chosen_parts_change(family: str, parts: list[str], tmp_path: Path) -> None:
    """The bytes of all other weights are those before the update, and the optimizer has no state for them."""
    decoder, documents = decoder_of(family, torch.float32), documents_of(family, tmp_path)
    prove_images(decoder, documents, joined_images)
    wanted = {name for part in parts for name in trained_names(decoder, part)}
    train_parts(decoder, parts)
    before = {name: weight.detach().clone() for name, weight in decoder.named_parameters()}
    optimizer = make_optimizer([decoder], TrainConfig(steps=1, learning_rate=0.1, micro_batch_tokens=8))
    _, gradients = loss_and_gradients(decoder, packed(decoder, [documents]))
    optimizer.step()
    assert gradients.keys() == wanted
    changed = {name for name, weight in decoder.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {name for name, gradient in gradients.items() if gradient.any()}
    states = {id(weight) for weight in optimizer.state}
    assert {name for name, weight in decoder.named_parameters() if id(weight) in states} == wanted


def test_a_part_that_a_model_does_not_have_is_refused() -> None:
    text = Decoder(build("llama"), verify=False)
    train_parts(text, [LANGUAGE])
    assert all(weight.requires_grad for weight in text.parameters())
    with pytest.raises(ValueError, match=r"LlamaForCausalLM .* has no part called vision: expected .* language"):
        train_parts(text, [LANGUAGE, VISION])


OTHER_STATES = r"differ by .* from those of the plain model on that document alone: expected"


def test_a_shifted_axis_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, documents = decoder_of("qwen3_vl", torch.float32), documents_of("qwen3_vl", tmp_path)
    positions: Any = decoder.axis_positions

    def shifted(ids_S: Tensor, types_S: Tensor, images: Document) -> Tensor:
        axes_SA: Tensor = positions(ids_S, types_S, images)
        axes_SA[types_S > 0, 2] += 1
        return axes_SA

    monkeypatch.setattr(decoder, "axis_positions", shifted, raising=False)
    with pytest.raises(ProofError, match=OTHER_STATES):
        prove_images(decoder, documents, joined_images)


@pytest.mark.parametrize("family", first_is_quick(["qwen3_vl", "gemma3", "idefics3"]))
def test_images_in_another_order_are_refused(family: str, tmp_path: Path) -> None:
    decoder, documents = decoder_of(family, torch.float32), documents_of(family, tmp_path)
    with pytest.raises(ProofError, match=OTHER_STATES):
        prove_images(decoder, documents, lambda parts: joined_images(parts[::-1]))


def test_documents_that_see_each_other_are_packed_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, documents = decoder_of("qwen3_vl", torch.float32), documents_of("qwen3_vl", tmp_path)
    positions: Any = document_packing.model_positions
    monkeypatch.setattr(document_packing, "model_positions", lambda *of, **_: positions(*of, separates=False))
    prove_images(decoder, documents, joined_images)
    assert decoder.packing.name == "masked"
    assert "differ by" in str(decoder.packing.reason)


def test_a_model_that_ignores_images_is_refused(tmp_path: Path) -> None:
    decoder, documents = decoder_of("internvl", torch.float32), documents_of("internvl", tmp_path)
    weights: Any = decoder.get_submodule("backbone.multi_modal_projector")
    for weight in weights.parameters():
        weight.data.zero_()
    with pytest.raises(ProofError, match=r"InternVLForConditionalGeneration .* ignores images"):
        prove_images(decoder, documents, joined_images)


def test_the_proof_needs_documents_with_and_without_images(tmp_path: Path) -> None:
    decoder, documents = Decoder(model_of("internvl"), verify=False), documents_of("internvl", tmp_path)
    with pytest.raises(ValueError, match=r"got 2 documents with images of 2: expected some with and some without"):
        prove_images(decoder, documents[:2], joined_images)
