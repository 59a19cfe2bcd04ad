"""A training step on a GPU: the proof at load, loss and gradients against those of a CPU, and the optimizer."""

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kit.fused_adamw import state_of
from kit.parity_cases import SPEC, Case, batches
from kit.parity_models import configurations, decoder
from kit.tensors import assert_equal_tensors, no_waiting
from torch import Tensor

from stillhouse.config import TrainConfig
from stillhouse.data import StepMicroBatches
from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.models import Activations, Decoder, NotFiniteError
from stillhouse.parallel import Layout, single_process_runner
from stillhouse.parallel.host_memory import BufferedHead, HeadBuffers, copied_to, pin_weights
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


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_steady_step_waits_once_for_the_device(optimizer: str) -> None:
    """The metrics are read together with the norm: after AdamW's step, before that of Muon.

    With variable-length attention; transformers builds the masks of the others, and waits once for each.
    """
    engine = engine_on(DEVICE, "qwen3", torch.bfloat16, varlen=True, optimizer=optimizer, clip=1e-3)
    inputs = inputs_of(engine, "qwen3")
    for _ in range(2):  # the first step proves kernels and allocates moments
        engine.update(1e-3, engine.forward_backward(*inputs))
    with waits() as places:
        output = engine.forward_backward(*inputs)
        norm = engine.update(1e-3, output)
        loss = output.sums["loss"]
    assert len(places) == 1, "\n\n".join(places)
    assert norm > 1e-3
    assert loss > 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(optimizer: str, value: float) -> None:
    engine = engine_on(DEVICE, "qwen3", None, optimizer=optimizer, clip=1.0)
    inputs = inputs_of(engine, "qwen3")
    engine.update(1e-3, engine.forward_backward(*inputs))
    before = state_of(engine)
    output = engine.forward_backward(*inputs)
    gradient = next(
        parameter.grad for _, parameter in engine.student.named_parameters() if parameter.grad is not None
    )
    gradient.view(-1)[-1] = value
    with pytest.raises(NotFiniteError) as caught:
        engine.update(1e-3, output)
    assert not torch.isfinite(torch.tensor(caught.value.norm))
    assert_equal_tensors(state_of(engine), before)
    assert output.sums["loss"] > 0
    engine.zero_grad()
    engine.update(1e-3, engine.forward_backward(*inputs))
    after = state_of(engine)
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())
    changed = [name for name, tensor in before.items() if not torch.equal(after[name], tensor)]
    assert any(name.endswith(" weight") for name in changed)


@pytest.mark.parametrize("tied", [True, False])
def test_heads_in_host_memory_are_copied_without_a_wait(tied: bool) -> None:
    teacher = decoder(configurations("qwen3")[1], 0)
    if not tied:
        teacher.head.linear.weight = torch.nn.Parameter(teacher.head.linear.weight.detach().clone())
    expected_VE = teacher.output_head().weight_VD.detach().to(DEVICE, copy=True)
    pin_weights(teacher, torch.device(DEVICE))
    assert all(parameter.is_pinned() for parameter in teacher.parameters())
    head = BufferedHead("teacher", teacher, HeadBuffers(torch.device(DEVICE)))
    with no_waiting():
        with head.opened() as opened:
            copied_VE = opened.weight_VD.clone()
        copied_T = copied_to(torch.arange(7), torch.device(DEVICE))
    assert torch.equal(copied_VE, expected_VE)
    assert copied_T.tolist() == list(range(7))


def test_experts_are_multiplied_in_bfloat16_under_autocast() -> None:
    """T tokens of width D in three groups, one for each expert; F is the width of an expert."""
    tokens_TD = torch.randn(48, 32, device=DEVICE, requires_grad=True)
    weights_3DF = torch.randn(3, 32, 16, device=DEVICE, requires_grad=True)
    ends = torch.tensor([16, 24, 48], dtype=torch.int32, device=DEVICE)
    with no_waiting():
        with torch.autocast(DEVICE, torch.bfloat16):
            output_TF = torch.ops.aten._grouped_mm(tokens_TD, weights_3DF, ends)
        output_TF.float().square().sum().backward()
    assert output_TF.dtype == torch.bfloat16
    computed = [output_TF.detach(), tokens_TD.grad, weights_3DF.grad]
    exact = [tensor.detach().double().requires_grad_() for tensor in (tokens_TD, weights_3DF)]
    parts = zip(exact[0].split([16, 8, 24]), exact[1], strict=True)
    exact_TF = torch.cat([part @ weight for part, weight in parts])
    exact_TF.square().sum().backward()
    for value, expected in zip(computed, [exact_TF.detach(), exact[0].grad, exact[1].grad], strict=True):
        assert value is not None
        assert expected is not None
        assert float((value.double() - expected).norm() / expected.norm()) < 0.02


def step_of(device: str, family: str, autocast: torch.dtype | None) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of a step of two micro-batches with two rows each, and update the weights."""
    engine = engine_on(device, family, autocast)
    output = engine.forward_backward(*inputs_of(engine, family))
    gradients = {name: gradient.cpu() for name, gradient in engine.gradients() if gradient is not None}
    assert engine.update(1e-3, output) > 0
    return output.sums["loss"], gradients


def engine_on(
    device: str, family: str, autocast: torch.dtype | None, *, varlen: bool = False, **train: Any
) -> TorchEngine:
    """Return an engine with a small student and teacher. train: the optimizer's settings."""
    student, teacher = (decoder(config, seed).to(device) for seed, config in enumerate(configurations(family)))
    if varlen:
        student = Decoder(student.pretrained, activations=Activations(torch.device(device), autocast), verify=False)
        teacher = Decoder(
            teacher.pretrained.to(autocast), activations=Activations(torch.device(device)), verify=False
        )
        assert student.packing.attention.reads_lengths
        assert teacher.packing.attention.reads_lengths
    settings = TrainConfig(**{"betas": (0.9, 0.999), "clip": None} | train)
    return TorchEngine(single_process_runner(student, teacher), SPEC, train=settings, autocast=autocast)


def inputs_of(engine: TorchEngine, family: str) -> tuple[Any, Any, float]:
    """Return the arguments of `forward_backward` for the same step at each call."""
    micro_batches = engine.student.shard(StepMicroBatches(batches(Case(Layout(), family), 0)))
    signals = InStageTeacher().request(micro_batches).result()
    return micro_batches, signals, micro_batches.all_ranks.normalizer


@contextmanager
def waits() -> Iterator[list[str]]:
    """Yield a list of the calls that wait for the device, each with its innermost frames."""
    places: list[str] = []

    def show(message: Any, *_: Any, **__: Any) -> None:
        # torch's notice about this mode has the word "synchronizing", too
        if "called a synchronizing" in str(message):
            places.append("".join(traceback.format_stack()[-8:-1]))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        with no_waiting("warn"):
            yield places
