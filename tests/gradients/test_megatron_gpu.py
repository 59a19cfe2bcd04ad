"""On a GPU, steps of the engine on Megatron-Core are those of PyTorch's engine on a CPU, in one process."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed: `make test` does")

from kit.megatron_engine_jobs import Job
from kit.megatron_gpu_jobs import bfloat16_distances, float32_differences
from kit.megatron_weights_jobs import Case

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
