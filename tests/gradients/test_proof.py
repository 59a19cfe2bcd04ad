"""What a model's proof at load refuses and accepts, in every dtype, on one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import causal_families
from kit.families import build
from kit.varlen_reference import FLASH, register_flash
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from stillhouse.models import Decoder, ProofError, document_packing, prove_decoder
from stillhouse.models.document_packing import PackingError
from stillhouse.models.load_proof import ProbeDocuments

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
#: families whose documents in one row see each other
LEAKING = (
    *("gpt_oss", "qwen3_next", "qwen3_5_text", "nemotron_h", "granitemoehybrid", "bamba", "zamba2", "jamba"),
    *("lfm2", "opt", "falcon_h1"),
)
#: those that separate documents with the masks that transformers builds for packed sequences
MASKED = ("gpt_oss", "opt")
#: families that separate documents: earlier thresholds in half precision refused them at times
SEPARATING = ("glm4_moe_lite", "gemma3n_text", "deepseek_v32", "gemma4_text")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", LEAKING)
def test_families_whose_documents_see_each_other_in_one_row(family: str, dtype: str) -> None:
    model = causal_families.build(family, DTYPES[dtype], usual=True)
    refused = "lets documents that share a row see each other"
    decoder = Decoder(model)
    assert decoder.packing.name == ("masked" if family in MASKED else "rows")
    assert refused in str(decoder.packing.reason)
    if family not in MASKED:
        with pytest.raises(PackingError, match=refused):
            Decoder(model, packing="packed")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", SEPARATING)
def test_families_that_separate_documents_are_accepted(family: str, dtype: str, seed: int) -> None:
    Decoder(causal_families.build(family, DTYPES[dtype], seed, usual=True))


def with_embeddings(change: Callable[[nn.Module, Tensor], Tensor]) -> PreTrainedModel:
    """Return a Llama whose embeddings are changed by a function of the embedding and its output."""
    model = build("llama")
    model.get_input_embeddings().register_forward_hook(lambda module, _, hidden_BSD: change(module, hidden_BSD))
    return model


def leaks_in_training(module: nn.Module, hidden_BSD: Tensor) -> Tensor:
    """Add a sum over all tokens before, but only in train mode, as the kernels of a family may differ by mode."""
    return hidden_BSD + 0.01 * hidden_BSD.cumsum(1) if module.training else hidden_BSD


def test_a_leak_in_train_mode_alone_is_refused() -> None:
    model = with_embeddings(leaks_in_training)
    with pytest.raises(ProofError, match="see each other"):
        Decoder(model, packing="packed")
    assert not model.training


def add_column(_: nn.Module, hidden_BSD: Tensor) -> Tensor:
    """Add an embedding of a token's column in its row, whatever position_ids says."""
    return hidden_BSD + torch.arange(hidden_BSD.shape[1], dtype=hidden_BSD.dtype)[:, None].sin()


@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_of_the_row_are_refused(dtype: str) -> None:
    with pytest.raises(ProofError, match="does not number tokens by position_ids"):
        Decoder(with_embeddings(add_column).to(DTYPES[dtype]), packing="packed")


def row_0_for_all(*args: Any, **options: Any) -> Any:
    """A mask that takes the borders of the first row for those of all rows."""
    mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **options)
    return None if mask is None else mask[:1]


def first_tokens_for_all(*args: Any, **options: Any) -> Tensor:
    """A mask that separates documents, but lets all tokens see the first two of their row."""
    options["allow_is_causal_skip"] = False
    mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **options).clone()
    mask[..., 2:, :2] = True
    return mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [row_0_for_all, first_tokens_for_all])
def test_masks_through_which_documents_see_each_other_are_refused(mask: Callable[..., Any], dtype: str) -> None:
    AttentionInterface.register(mask.__name__, sdpa_attention_forward)
    AttentionMaskInterface.register(mask.__name__, mask)
    model = build("llama", attention=mask.__name__).to(DTYPES[dtype])
    with pytest.raises(ProofError, match=f"'{mask.__name__}' lets documents that share a row see each other"):
        Decoder(model, packing="packed")
    Decoder(model, verify=False)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_packing, "uses_flash_attention", document_packing.uses_flash_attention)
    register_flash()


@pytest.mark.usefixtures("flash")
def test_flash_attention_gets_one_row() -> None:
    """transformers finds the documents of flash attention only in a batch of one row."""
    decoder = Decoder(build("llama"), verify=False)
    ids_BS, positions_BS = torch.arange(12).view(2, 6), torch.tensor([[0, 1, 0, 1, 2, 3]] * 2)
    embeds_BSD = torch.randn(2, 6, decoder.config.hidden_size)
    for positions in (positions_BS, positions_BS[:1]):
        for inputs in ({"input_ids": ids_BS}, {"input_ids": None, "inputs_embeds": embeds_BSD}):
            decoder.pretrained.set_attn_implementation("sdpa")
            expected = decoder(position_ids=positions, **inputs)
            decoder.pretrained.set_attn_implementation(FLASH)
            torch.testing.assert_close(decoder(position_ids=positions, **inputs), expected)
    with pytest.raises(ValueError, match="got cache_position with position_ids: expected tensors whose shape"):
        decoder(ids_BS, positions_BS, cache_position=torch.arange(6))


def test_mtp_layers_are_proven_with_their_decoder() -> None:
    from stillhouse.models.mtp import add_mtp

    decoder = Decoder(build("qwen3"), packing="packed")
    add_mtp(decoder, 2, is_new=True)
    assert decoder.mtp is not None
    decoder.mtp.initialize(decoder.pretrained, 0)
    prove_decoder(decoder)
    decoder.mtp.layers[1].register_forward_hook(lambda _, __, hidden: hidden + 0.01 * hidden.cumsum(1))
    with pytest.raises(ProofError, match="see each other"):
        prove_decoder(decoder)


@pytest.mark.parametrize("multiple", [1, 2, 3, 8, 24])
@pytest.mark.parametrize("depths", [0, 3])
def test_only_what_lies_around_a_beginning_changes(multiple: int, depths: int) -> None:
    probe = ProbeDocuments.of(251, depths=depths, multiple=multiple)
    rows, columns = probe.ids_BS.shape
    assert columns % multiple == 0
    for row in range(4):
        first, second = probe.beginnings(row, depths)
        changed_S = probe.ids_BS[row] != probe.exchanged_ids_BS[row]
        start = probe.starts_B[row]
        assert probe.position_ids_BS[row].tolist() == [*range(start), *range(columns - start)]
        for part, end in ((first, start), (second, columns)):
            assert part.start < part.stop
            assert not changed_S[part.start : part.stop + depths].any()
            assert changed_S[part.stop + depths : end].all()
    assert torch.equal(probe.ids_BS[4, : probe.starts_B[4]], probe.ids_BS[2, probe.starts_B[2] :])
    start = probe.starts_B[5]
    assert torch.equal(probe.exchanged_ids_BS[5:, :start], probe.ids_BS[5:, :start].flip(0))
    assert (probe.exchanged_ids_BS != probe.ids_BS)[5:, :start].all()
    assert torch.equal(probe.exchanged_ids_BS[5:, start:], probe.ids_BS[5:, start:])
    assert rows == 7
