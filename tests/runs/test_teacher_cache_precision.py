"""How much the rounding of stored signals changes the gradient of forward KL: the table in docs/caches.md.

The teacher is synthetic: 2,048 ids, of which the likeliest 64 have 83 % of the mass on average. The student's hidden
states are the teacher's and noise; forward KL between the two is 0.5 nats per token (a student early in a run) or
0.005 (a late one).
"""

import pytest
import torch
from torch import Tensor

from stillhouse.objective import Distill, FullVocab, OutputHead, Signal, TopK, linear_objective, parse_divergence
from stillhouse.signals.extract import top_k_log_probs

ROWS, WIDTH, VOCABULARY, K = 512, 64, 2048, 64

#: signal, dtype: the error of the gradient relative to its norm, with 0.5 and with 0.005 nats
ERRORS = {
    ("hidden", "bfloat16"): (0.0048, 0.046),
    ("hidden", "float16"): (0.0006, 0.0057),
    ("top_k", "bfloat16"): (0.0034, 0.031),
    ("top_k", "float16"): (0.00042, 0.0039),
}


def gradient(signal: Signal, student_TD: Tensor, head: OutputHead) -> Tensor:
    hidden_TD = student_TD.clone().requires_grad_()
    loss = linear_objective(hidden_TD, head, [Distill(signal, parse_divergence("forward_kl"))]).loss
    return torch.autograd.grad(loss, hidden_TD)[0].double()


def measured(kind: str, dtype: torch.dtype, noise: float) -> tuple[float, float]:
    """The relative error of the gradient, and the forward KL in nats per token."""
    torch.manual_seed(0)
    teacher_TE = torch.randn(ROWS, WIDTH)
    head = OutputHead(torch.randn(VOCABULARY, WIDTH) * 3 / WIDTH**0.5)
    student_TD = teacher_TE + noise * torch.randn(ROWS, WIDTH)
    exact = FullVocab(teacher_TE, head)
    terms = [Distill(exact, parse_divergence("forward_kl"))]
    nats = float(linear_objective(student_TD, head, terms).loss) / ROWS
    if kind == "hidden":
        rounded: Signal = FullVocab(teacher_TE.to(dtype).float(), head)
        reference = gradient(exact, student_TD, head)
    else:
        tensors = top_k_log_probs(teacher_TE, head, K, 1.0)
        ids, log_probs, tail = tensors["ids"], tensors["log_probs"], tensors["tail_log_prob"]
        rounded = TopK(ids, log_probs.to(dtype).float(), "bucket", tail)
        reference = gradient(TopK(ids, log_probs, "bucket", tail), student_TD, head)
    error = gradient(rounded, student_TD, head) - reference
    return float(error.norm() / reference.norm()), nats


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), ERRORS)
def test_rounded_signals_have_the_gradient_errors_of_the_documentation(kind: str, dtype: str) -> None:
    errors_and_nats = [measured(kind, getattr(torch, dtype), noise) for noise in (0.356, 0.0356)]
    assert [nats for _, nats in errors_and_nats] == pytest.approx([0.5, 0.005], rel=0.1)
    assert [error for error, _ in errors_and_nats] == pytest.approx(ERRORS[kind, dtype], rel=0.15)
