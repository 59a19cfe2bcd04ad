"""Variable-length attention by its reference on the CPU: hidden states, gradients, what is refused."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import causal_families
from kit.documents import random_documents
from kit.families import build
from kit.varlen_reference import attend, error, micro_batch, packed_gradients, plain_gradients, reference

from stillhouse.data import make_micro_batch
from stillhouse.libraries import is_supported
from stillhouse.models import Activations, Decoder, ProofError, prove_decoder, varlen
from stillhouse.models.processors import hidden_states
from stillhouse.rollout.generate import check_generation

FLOAT64 = Activations(torch.device("cpu"), torch.float64)


@pytest.fixture(name="reference")
def _reference() -> Iterator[None]:
    with reference():
        yield


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


#: family → why its packed documents run with the usual attention
REFUSED = {
    "qwen2_moe": "does not support windows of 5 tokens that are only in masks",
    "phimoe": "does not support windows of 5 tokens that are only in masks",
    "doge": "does not support attention_mask",
    "nemotron": "got no lengths of documents",
}


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("family", REFUSED)
def test_the_proof_finds_attention_that_the_kernel_does_not_have(family: str) -> None:
    """The windows of the first two families are in their masks only, and longer than the documents of the proof."""
    decoder = Decoder(causal_families.build(family), activations=FLOAT64)
    assert not decoder.packing.attention.reads_lengths
    assert REFUSED[family] in str(decoder.packing)


@pytest.mark.usefixtures("reference")
def test_the_language_model_of_a_larger_model_uses_it_without_images() -> None:
    decoder = Decoder(causal_families.build("gemma3"), activations=FLOAT64)
    assert decoder.packing.attention.reads_lengths
    assert decoder.config.vision_config._attn_implementation == "sdpa"
    ids_BS = torch.arange(24).view(1, 24) + 3
    with pytest.raises(ValueError, match="documents with images can be packed: expected a call of prove_images"):
        decoder(ids_BS, torch.arange(24)[None], images={"pixel_values": torch.zeros(1, 3, 8, 8)})


@pytest.mark.usefixtures("reference")
def test_the_proof_compares_the_kernel_with_the_usual_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        varlen, "attend", lambda *heads, scale, window: attend(*heads, scale=0.5 * scale, window=window)
    )
    packing = Decoder(build("llama"), activations=FLOAT64).packing
    assert not packing.attention.reads_lengths
    assert packing.name == "packed"
    assert "the hidden states with variable-length attention differ by" in str(packing)


UNLIKE = "its layers have different sizes or select tokens by scores, which the kernel does not support"


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("llama", {"attention_dropout": 0.1}, "it has dropout in its attention"),
        ("llama", {"head_dim": 264}, "its heads have a width of 264, and the kernel supports at most 256"),
        ("gemma4_text", {}, UNLIKE),
        ("gemma4", {}, UNLIKE),
        ("falcon", {}, "its attention cannot be replaced"),
    ],
)
def test_configurations_without_variable_length_attention(family: str, options: dict[str, Any], reason: str) -> None:
    assert varlen.refusal_of_model(causal_families.build(family, **options)) == reason


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [("cpu", torch.bfloat16, "CUDA devices, not on cpu"), ("cuda", None, "not in float32")],
)
def test_activations_without_variable_length_attention(device: str, dtype: torch.dtype | None, reason: str) -> None:
    assert reason in str(varlen.refusal(Activations(torch.device(device), dtype), torch.float32))


def test_variable_length_attention_that_is_required_needs_a_gpu_and_packed_documents(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    for options in ({}, {"verify": False}):
        with pytest.raises(ValueError, match="it runs on CUDA devices, not on cpu: expected"):
            Decoder.from_pretrained(tmp_path, attention="varlen", **options)
    with reference():
        with pytest.raises(ValueError, match="attention 'varlen' needs packed documents"):
            Decoder(build("llama", attention="varlen"), packing="rows")
        with pytest.raises(ProofError, match="cannot be packed with lengths"):
            Decoder(causal_families.build("nemotron", attn_implementation="varlen"))


@pytest.mark.usefixtures("reference")
def test_inputs_without_documents_use_the_usual_attention() -> None:
    decoder, usual = (Decoder(build("gemma3"), activations=activations) for activations in (FLOAT64, None))
    ids_BS = torch.arange(24).view(2, 12) + 3
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[0, :5] = 0
    for options in ({}, {"attention_mask": mask_BS}):
        assert torch.equal(decoder(ids_BS, **options), usual(ids_BS, **options))
    assert decoder.packing.attention.reads_lengths
    with pytest.raises(ValueError, match="attention 'varlen' got no lengths of documents"):
        decoder.pretrained.generate(ids_BS, attention_mask=mask_BS, max_new_tokens=2)
    check_generation(decoder, torch.device("cpu"))


@pytest.mark.skipif(not is_supported("multi-token prediction"), reason="transformers is too old")
@pytest.mark.usefixtures("reference")
def test_layers_for_multi_token_prediction_get_the_lengths() -> None:
    from stillhouse.models.mtp import add_mtp

    hidden: list[Any] = []
    for activations in (FLOAT64, None):
        decoder = Decoder(build("qwen3", dtype=torch.float64), activations=activations, packing="packed")
        add_mtp(decoder, 2, is_new=True)
        assert decoder.mtp is not None
        decoder.mtp.initialize(decoder.pretrained, 0)
        prove_decoder(decoder)
        assert decoder.packing.attention.reads_lengths == (activations is not None)
        batch = micro_batch().to("cpu")
        arguments = (batch.input_ids_BS, batch.position_ids_BS)
        hidden.append(decoder(*arguments, lengths=batch.lengths, mtp_input_ids=arguments[0], processor=hidden_states))
    for result, expected in zip(*hidden, strict=True):
        # the last tokens of a row have no label at these depths, and rows that are joined shift other tokens to them
        torch.testing.assert_close(result[:, :-2], expected[:, :-2], atol=1e-6, rtol=1e-6)


def test_a_micro_batch_has_the_lengths_of_its_documents() -> None:
    documents = random_documents([5, 9, 2, 7, 3], {"teacher": [4, 0, 1, 2, 3]})
    rows = [[0, 1], [2, 3, 4]]
    batch = make_micro_batch(documents, rows, ["teacher"], "teacher")
    moved = batch.to("cpu")
    for inputs, lengths in ((batch.inputs, moved.lengths), (batch.teacher_inputs, moved.teacher_lengths)):
        assert inputs is not None
        assert lengths is not None
        positions_BS = inputs["position_ids"]
        # each row is a multiple of documents; a document begins at each position 0
        starts = (positions_BS.flatten() == 0).nonzero()[:, 0].tolist()
        assert lengths.borders_M.tolist() == [*starts, positions_BS.numel()]
        assert lengths.longest == max(stop - start for start, stop in pairwise(lengths.borders_M.tolist()))
    assert moved.as_read_by_teacher.lengths is moved.teacher_lengths
    padded = batch.padded(3, 24)
    for number in range(2):
        part = padded.part(number, 2).to("cpu")
        assert part.lengths is not None
        assert part.lengths.borders_M.equal(padded.to("cpu").lengths.borders_M)
