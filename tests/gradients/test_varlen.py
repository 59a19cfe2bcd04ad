"""Variable-length attention by its reference on the CPU: hidden states, gradients, what is refused."""

import pytest
import torch
from kit.families import build
from kit.varlen_cases import error, micro_batch, packed_gradients, plain_gradients
from kit.varlen_reference import use_reference

from stillhouse.models import Activations, Decoder, varlen

FLOAT64 = Activations(torch.device("cpu"), torch.float64)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("attend", "refusal"):
        monkeypatch.setattr(varlen, name, getattr(varlen, name))
    use_reference()


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "mistral", "granite", "qwen3_moe"])
def test_gradients_of_packed_documents(family: str, recompute: bool) -> None:
    decoder = Decoder(build(family, dtype=torch.float64), activations=FLOAT64).train()
    assert decoder.packing.attention.reads_lengths
    assert decoder.packing.name == "packed"
    if recompute:
        decoder.gradient_checkpointing_enable()
    assert error(packed_gradients(decoder, micro_batch().to("cpu")), plain_gradients(family)) <= 1e-6
