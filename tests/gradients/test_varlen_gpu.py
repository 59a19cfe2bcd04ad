"""Variable-length attention on a GPU: torch's kernel against one document at a time, without a mask or a wait."""

from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.families import build
from kit.runs import forward_backward, session_of
from kit.tensors import Largest, no_waiting
from kit.varlen_reference import error, micro_batch, packed_gradients, plain_gradients, reference
from torch import Tensor, nn

from stillhouse.models import Activations, Decoder, varlen

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda")
#: with heads of width 12, which are padded (llama), grouped heads (all), windows (qwen3, gemma3, mistral)
FAMILIES = ("llama", "qwen3", "gemma3", "mistral")


def decoder_of(family: str, *, varlen: bool, verify: bool = True) -> Decoder:
    """Return a float32 student whose activations are in bfloat16."""
    activations = Activations(CUDA, torch.bfloat16) if varlen else None
    decoder = Decoder(build(family).to(CUDA), activations=activations, verify=verify)
    assert decoder.packing.attention.reads_lengths == varlen, decoder.packing.attention.reason
    return decoder


def in_bfloat16(decoder: Decoder) -> dict[str, Tensor]:
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        return packed_gradients(decoder, micro_batch().to(CUDA))


@pytest.mark.parametrize(
    ("heads", "groups", "width", "value_width", "window"),
    [(4, 4, 64, 64, None), (8, 2, 128, 128, None), (8, 1, 80, 80, 9), (2, 2, 192, 128, None), (4, 2, 256, 256, 40)],
    ids=str,
)
def test_the_kernel_has_no_larger_error_than_its_reference_in_bfloat16(
    heads: int, groups: int, width: int, value_width: int, window: int | None
) -> None:
    shapes = [(heads, width), (groups, width), (groups, value_width)]
    lengths = [1, 70, 3, 200, 126]
    borders_M = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    random = torch.Generator().manual_seed(0)
    exact = [torch.randn(1, count, sum(lengths), of_head, generator=random).bfloat16() for count, of_head in shapes]
    layer: Any = nn.Module()
    layer.config = SimpleNamespace(sliding_window=window)

    def results(device: str, dtype: torch.dtype) -> list[Tensor]:
        tensors = [value.to(device, dtype, copy=True).requires_grad_() for value in exact]
        options = {"sliding_window": window, "max_length_q": max(lengths), "scaling": 0.3}
        output_BTHD, _ = varlen.attention(layer, *tensors, None, cu_seq_lens_q=borders_M.to(device), **options)
        place = torch.arange(output_BTHD.numel(), dtype=torch.float64).view(output_BTHD.shape)
        output_BTHD.backward(place.sin().to(output_BTHD))
        return [output_BTHD.detach(), *(tensor.grad for tensor in tensors)]

    kernel = results("cuda", torch.bfloat16)
    with reference():
        expected, plain = results("cpu", torch.float64), results("cpu", torch.bfloat16)
    for name, value, right, rounded in zip(("output", "query", "key", "value"), kernel, expected, plain, strict=True):
        assert value.shape == right.shape
        errors = [float((other.double().cpu() - right).norm() / right.norm()) for other in (value, rounded)]
        print(f"{name}: error {errors[0]:.4f}, of the reference {errors[1]:.4f}")
        # the kernel also rounds the probabilities and their gradient
        assert errors[0] <= 2 * errors[1] + 2e-3, (name, errors)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_have_no_larger_error_than_those_of_sdpa(family: str) -> None:
    """Relative to float64, one document at a time. The rounding of two kernels differs by chance."""
    expected = plain_gradients(family)
    errors = [error(in_bfloat16(decoder_of(family, varlen=varlen)), expected) for varlen in (True, False)]
    print(f"{family}: error {errors[0]:.4f}, of sdpa {errors[1]:.4f}")
    assert errors[0] <= 1.25 * errors[1] + 2e-3, errors


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_does_not_wait_for_the_device(family: str, recompute: bool) -> None:
    decoder, batch = decoder_of(family, varlen=True).train(), micro_batch()
    if recompute:
        decoder.gradient_checkpointing_enable()
    in_bfloat16(decoder)  # the first call initialises libraries
    slopes_VV = torch.randn(decoder.vocabulary_rows, decoder.vocabulary_rows, device=CUDA)
    with no_waiting(), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        moved = batch.to(CUDA)
        logits_BSV = decoder(moved.input_ids_BS, moved.position_ids_BS, lengths=moved.lengths)
        (logits_BSV * slopes_VV[moved.input_ids_BS]).sum().backward()
    moved = batch.to(CUDA)
    assert moved.lengths is not None
    assert batch.with_lengths().lengths.borders_M.equal(moved.lengths.borders_M.cpu())
    for name, value in batch.inputs.items():
        assert moved.inputs[name].cpu().equal(value)
    for name in ("labels_T", "weights_T", "document_T", "valid_index"):
        assert getattr(moved, name).cpu().equal(getattr(batch, name))


@pytest.mark.parametrize("varlen", [True, False])
def test_no_result_has_an_element_per_pair_of_tokens(varlen: bool) -> None:
    """sdpa needs a mask, so the mode finds its elements."""
    decoder, moved = decoder_of("qwen3", varlen=varlen), micro_batch().to(CUDA)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False), Largest() as largest:
        hidden_BSD = decoder(moved.input_ids_BS, moved.position_ids_BS, lengths=moved.lengths, head=False)
    pairs = hidden_BSD.shape[0] * hidden_BSD.shape[1] ** 2
    assert (largest.numbers >= pairs) != varlen, (largest.numbers, pairs)


def test_a_half_precision_teacher_and_its_logits() -> None:
    decoder = Decoder(build("qwen3", dtype=torch.bfloat16).to(CUDA), activations=Activations(CUDA))
    assert decoder.packing.attention.reads_lengths
    ids_BS = torch.arange(40, device=CUDA).view(2, 20)
    with_mask = decoder(ids_BS, attention_mask=torch.ones_like(ids_BS))
    torch.testing.assert_close(decoder(ids_BS), with_mask, atol=0.2, rtol=0.05)
    assert decoder.packing.attention.reads_lengths


def test_a_run_uses_it_for_student_and_teacher(tmp_path: Path) -> None:
    losses = []
    for attention in (None, "sdpa"):
        session = session_of(
            tmp_path / str(attention),
            device="cuda",
            **{
                "train.precision": "bf16",
                "teacher.dtype": "bfloat16",
                "student.attention": attention,
                "teacher.attention": attention,
            },
        )
        decoders = [session.models.student, *session.models.teachers.values()]
        assert [decoder.packing.attention.reads_lengths for decoder in decoders] == [attention is None] * 2
        losses.append(forward_backward(session).sums["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
