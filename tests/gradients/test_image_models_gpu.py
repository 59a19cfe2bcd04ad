"""On a GPU, vision-language models are proven with images, and their gradients are as exact as those of a CPU."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.image_documents import Document, Packed, documents_of, joined_images, model_of, packed
from torch import Tensor

from stillhouse.images.proof import prove_images
from stillhouse.models import Activations, Decoder
from stillhouse.models.processors import cross_entropy
from stillhouse.parallel import choose_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["qwen3_vl", "internvl", "idefics3", "gemma4"])
def test_documents_with_images_have_gradients_as_exact_as_on_a_cpu(
    family: str, autocast: torch.dtype | None, tmp_path: Path
) -> None:
    """In bfloat16, the language model has variable-length attention on the GPU."""
    documents = documents_of(family, tmp_path)
    exact = gradients(Decoder(model_of(family).double()), documents, None)
    errors = {}
    for device in (torch.device("cpu"), choose_device("cuda")):
        activations = None if autocast is None else Activations(device, autocast)
        decoder = Decoder(model_of(family).to(device), activations=activations)
        errors[device.type] = distance(gradients(decoder, documents, autocast), exact)
    assert errors["cuda"] < 1.5 * errors["cpu"] + 1e-5


def gradients(decoder: Decoder, documents: list[Document], autocast: torch.dtype | None) -> dict[str, Tensor]:
    """Return the gradients of a step on two rows, in float64 on the CPU."""
    model = decoder.pretrained
    with torch.autocast(model.device.type, autocast, enabled=autocast is not None, cache_enabled=False):
        prove_images(decoder, documents, joined_images)
        batch = packed(decoder, [documents[:2], documents[2:]])
        batch = Packed(moved(batch.arguments, model), batch.labels_BS.to(model.device))
        decoder(**batch.arguments, processor=cross_entropy(), context=batch.targets).loss.backward()
    weights = decoder.named_parameters()
    return {name: weight.grad.double().cpu() for name, weight in weights if weight.grad is not None}


def distance(made: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference, relative to that of the exact gradients."""
    errors = torch.stack([(made[name] - expected).norm() for name, expected in exact.items()])
    return float(errors.norm() / torch.stack([expected.norm() for expected in exact.values()]).norm())


def moved(values: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return the tensors of nested mappings on the device of a model, and pixels in its dtype."""
    return {
        name: moved(value, model)
        if isinstance(value, Mapping)
        else value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in values.items()
    }
