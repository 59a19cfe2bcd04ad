"""On a GPU, steps of the engine on Megatron-Core are those of PyTorch's engine on a CPU, in one process."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: `make test` does")

from collections.abc import Sequence
from functools import partial
from unittest.mock import patch

from kit.megatron_engine_jobs import LEARNING_RATE, TRAIN, Job, decoder, distance, micro_batches, values
from kit.megatron_weights_jobs import Case
from torch import Tensor

from stillhouse.data import StepMicroBatches
from stillhouse.engine.engine import Engine
from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.megatron.build import build_megatron_student
from stillhouse.megatron.engine import MegatronEngine
from stillhouse.models import Activations, Decoder, varlen
from stillhouse.objective.spec import parse_objective
from stillhouse.parallel import Layout, Mesh, ModelSource, single_process_runner, start_alone
from stillhouse.signals import InStageTeacher
from stillhouse.tools.parity import relative_difference

Gradients = dict[str, Tensor]


def float32_differences(job: Job, device: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the relative differences of the gradients of a step, and of the weights after it, by name."""
    torch_engine, student = of_torch(job, torch.device("cpu"))
    exact = step(torch_engine, job, torch.device("cpu"))
    engine = of_megatron(job, torch.device(device))
    gradients = step(engine, job, torch.device(device))
    least = 1e-3 * float(torch.stack([gradient.norm() for gradient in exact.values()]).norm())
    weights, expected = values(engine), student.state_dict()
    return (
        {name: relative_difference(gradients[name], gradient, least) for name, gradient in exact.items()},
        {name: relative_difference(weight.cpu(), expected[name]) for name, weight in weights.items()},
    )


def bfloat16_distances(job: Job, device: str) -> tuple[float, float, int]:
    """Return the distances of both engines' gradients in bfloat16 from those in float64, and the calls of
    variable-length attention in Megatron-Core's layers.
    """
    on = torch.device(device)
    exact = step(of_torch(job, torch.device("cpu"), torch.float64)[0], job, torch.device("cpu"))
    of_torch_engine = step(of_torch(job, on, autocast=torch.bfloat16)[0], job, on)
    engine = of_megatron(job, on, torch.bfloat16)
    with patch.object(varlen, "attend_padded", wraps=varlen.attend_padded) as attend:
        of_megatron_engine = step(engine, job, on)
    return distance(of_torch_engine, exact), distance(of_megatron_engine, exact), attend.call_count


def of_torch(
    job: Job, device: torch.device, dtype: torch.dtype = torch.float32, autocast: torch.dtype | None = None
) -> tuple[TorchEngine, Decoder]:
    """The teacher computes in its weights' dtype, without variable-length attention."""
    student, teacher = (
        Decoder(decoder(job, seed).pretrained.to(device, dtype), activations=activations, packing=job.packing)
        for seed, activations in enumerate([None if autocast is None else Activations(device, autocast), None])
    )
    runner = single_process_runner(student, teacher)
    return TorchEngine(runner, parse_objective(job.loss), train=TRAIN, autocast=autocast), student


def of_megatron(job: Job, device: torch.device, autocast: torch.dtype | None = None) -> MegatronEngine:
    start_alone(device)
    layout = Layout(autocast=autocast, recompute=job.recompute)
    sources = [ModelSource(partial(decoder, job, seed), name="model") for seed in range(2)]
    student = build_megatron_student(layout, Mesh(layout.degrees, device), *sources)
    return MegatronEngine(student, parse_objective(job.loss), train=TRAIN)


def step(engine: Engine, job: Job, device: torch.device) -> Gradients:
    """Make a step, and return its gradients on the CPU."""
    made = StepMicroBatches([batch.to(device) for batch in micro_batches(0, job.uneven)])
    shards = engine.student.shard(made)
    signals: Sequence[dict[str, object]] = [{}] * len(shards)
    if engine.needs_teacher:
        signals = InStageTeacher().request(shards).result()  # type: ignore[arg-type]
    output = engine.forward_backward(shards, signals, made.normalizer)
    # copies, because the update clips the gradients where they are
    entries = [(name, gradient) for name, gradient in engine.gradients() if gradient is not None]
    gradients = {name: gradient.to("cpu", torch.float32, copy=True) for name, gradient in entries}
    engine.update(LEARNING_RATE, output)
    return gradients


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def in_a_process(job: Callable[..., Any], *arguments: Any) -> Any:
    """Megatron-Core has state of the whole process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(job, *arguments).result()


@pytest.mark.parametrize(
    "job",
    [
        Job(Case("qwen3", tied=True)),
        Job(Case("qwen3"), uneven=True),
        Job(Case("llama"), uneven=True, recompute=True),
        Job(Case("gemma3_text"), uneven=True),
        Job(Case("qwen3_moe"), "0.5*cross_entropy + reverse_kl"),
    ],
    ids=lambda job: job.name,
)
def test_gradients_and_weights_in_float32_are_those_of_a_cpu(job: Job) -> None:
    gradients, weights = in_a_process(float32_differences, job, "cuda")
    assert max(gradients.values()) < 1e-3, gradients
    assert max(weights.values()) < 1e-3, weights


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_documents_have_variable_length_attention_in_bfloat16(family: str) -> None:
    """About as exact as those of PyTorch's engine on the same GPU; Megatron-Core rounds the weights, too."""
    job = Job(Case(family), uneven=True)
    of_torch, of_megatron, calls = in_a_process(bfloat16_distances, job, "cuda")
    assert calls > 0
    assert of_megatron < 1.5 * of_torch
