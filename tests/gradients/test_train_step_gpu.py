"""A training step on a GPU: the proof at load, and loss and gradients against those of a CPU."""

import pytest
import torch
from kit.parity_cases import SPEC, Case, batches
from kit.parity_models import configurations, decoder
from torch import Tensor

from stillhouse.data import StepMicroBatches
from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.models import Decoder
from stillhouse.parallel import (
    BufferedHead,
    HeadBuffers,
    Layout,
    copied_to,
    pin_weights,
    single_process_runner,
)
from stillhouse.signals import InStageTeacher

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = "cuda"
#: the experts of the tiny model are too narrow for bfloat16, whose grouped products need strides of 16 bytes
CASES = [
    *((family, dtype) for family in ("qwen3", "llama") for dtype in (torch.float32, torch.bfloat16)),
    ("qwen3_moe", torch.float32),
]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("family", "dtype"), CASES, ids=str)
def test_documents_of_several_packed_rows_are_separate(family: str, attention: str, dtype: torch.dtype) -> None:
    """The proof runs rows of two documents each, in evaluation and in training mode."""
    model = decoder(configurations(family)[0], 0).pretrained.to(DEVICE, dtype)
    model.set_attn_implementation(attention)
    assert Decoder(model).packing.name == "packed"


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=str)
def test_a_step_equals_that_of_a_cpu(family: str, dtype: torch.dtype) -> None:
    autocast, rounding = (None, 1e-4) if dtype == torch.float32 else (dtype, 0.15)
    exact_loss, exact = step_of("cpu", family, None)
    loss, gradients = step_of(DEVICE, family, autocast)
    assert loss == pytest.approx(exact_loss, rel=rounding)
    total = torch.stack([gradient.norm() for gradient in exact.values()]).norm()
    errors = torch.stack([(gradients[name] - expected).norm() for name, expected in exact.items()])
    assert float(errors.norm() / total) < rounding


def step_of(device: str, family: str, autocast: torch.dtype | None) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of a step of two micro-batches with two rows each, and update the weights."""
    student, teacher = (decoder(config, seed).to(device) for seed, config in enumerate(configurations(family)))
    runner = single_process_runner(student, teacher)
    engine = TorchEngine(runner, SPEC, autocast=autocast)
    micro_batches = runner.shard(StepMicroBatches(batches(Case(Layout(), family), 0)))
    signals = InStageTeacher(runner).request(micro_batches).result()
    output = engine.forward_backward(micro_batches, signals, micro_batches.of_all_ranks.normalizer)
    gradients = {name: gradient.cpu() for name, gradient in engine.gradients() if gradient is not None}
    assert engine.update(1e-3) > 0
    return output.sums["loss"], gradients


@pytest.mark.parametrize("tied", [True, False])
def test_heads_in_host_memory_are_copied_without_a_wait(tied: bool) -> None:
    teacher = decoder(configurations("qwen3")[1], 0)
    if not tied:
        teacher.head.linear.weight = torch.nn.Parameter(teacher.head.linear.weight.detach().clone())
    expected_VE = teacher.output_head().weight_VD.detach().to(DEVICE, copy=True)
    pin_weights(teacher, torch.device(DEVICE))
    assert all(parameter.is_pinned() for parameter in teacher.parameters())
    head = BufferedHead("teacher", teacher, HeadBuffers(torch.device(DEVICE)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        with head.opened() as opened:
            copied_VE = opened.weight_VD.clone()
        copied_T = copied_to(torch.arange(7), torch.device(DEVICE))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(copied_VE, expected_VE)
    assert copied_T.tolist() == list(range(7))
