"""Differentiable log-probabilities and entropies of given tokens, against plain autograd over all logits.

T tokens, V vocabulary.
"""

from typing import Any

import pytest
import torch
from kit.objective_cases import HEADS, Leaves, V, distance, make_labels, make_leaves
from kit.tensors import assert_near
from torch import Tensor

from stillhouse.objective import OutputHead, linear_log_probs
from stillhouse.objective.tile import chunks


def plain_log_probs(
    leaves: Leaves, labels_T: Tensor, temperature: float, head: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    options = dict(head)
    rows = options.pop("vocab_size", V)
    logits_TV = OutputHead(leaves.weight, leaves.bias, **options).logits(leaves.hidden)[:, :rows]
    log_q_TV = torch.log_softmax(logits_TV / temperature, 1)
    log_q_T = log_q_TV.gather(1, labels_T.clamp_min(0)[:, None])[:, 0].masked_fill(labels_T < 0, 0.0)
    return log_q_T, -(log_q_TV.exp() * log_q_TV).sum(1)


def sequence_objective(log_q_T: Tensor, entropy_T: Tensor) -> Tensor:
    """Compute an objective that is not a sum over tokens."""
    return (
        (log_q_T[:20].sum() / 20).exp() - (log_q_T[20:].mean() * entropy_T.sum()).tanh() + entropy_T.square().mean()
    )


def of_leaves(make: Any, leaves: Leaves) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    fresh = {name: leaf.clone().requires_grad_() for name, leaf in vars(leaves).items() if leaf is not None}
    log_q_T, entropy_T = make(Leaves(fresh["hidden"], fresh["weight"], fresh.get("bias")))
    sequence_objective(log_q_T, entropy_T).backward()
    return log_q_T, entropy_T, {name: leaf.grad for name, leaf in fresh.items()}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_logits(head: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunks.TILE_ROWS, "cpu", (1, 10))
    options, labels_T = HEADS[head], make_labels(vocabulary=240)
    expected = of_leaves(lambda new: plain_log_probs(new, labels_T, temperature, options), make_leaves())
    actual = of_leaves(
        lambda new: linear_log_probs(
            new.hidden, OutputHead(new.weight, new.bias, **options), labels_T, temperature=temperature
        ),
        make_leaves(),
    )
    assert distance(actual[0], expected[0]) < 1e-12
    assert distance(actual[1], expected[1]) < 1e-12
    assert_near(actual[2], expected[2], 1e-12)


@pytest.mark.parametrize("autocast", [False, True])
def test_log_probs_in_bfloat16_are_as_exact_as_plain_ones(autocast: bool) -> None:
    """The reference is float64 on the same numbers. Backward computes in the dtype of forward."""
    dtype = torch.float32 if autocast else torch.bfloat16
    leaves, labels_T = make_leaves(dtype=dtype, bias=False), make_labels()
    exact = of_leaves(
        lambda new: plain_log_probs(new, labels_T, 1.0, {}),
        Leaves(leaves.hidden.double(), leaves.weight.double(), None),
    )

    def called(make: Any) -> Any:
        def inside(new: Leaves) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return make(new)

        return inside

    plain = of_leaves(called(lambda new: plain_log_probs(new, labels_T, 1.0, {})), leaves)
    actual = of_leaves(called(lambda new: linear_log_probs(new.hidden, OutputHead(new.weight), labels_T)), leaves)
    assert actual[0].dtype == torch.float32
    for name, gradient in exact[2].items():
        assert actual[2][name].dtype == dtype
        assert distance(actual[2][name], gradient) <= distance(plain[2][name], gradient) + 1e-3, name


def test_only_the_gradients_that_are_asked_for() -> None:
    leaves, labels_T = make_leaves(), make_labels()
    hidden_TD = leaves.hidden.clone().requires_grad_()
    log_q_T, entropy_T = linear_log_probs(hidden_TD, OutputHead(leaves.weight, leaves.bias), labels_T)
    log_q_T.sum().backward()
    assert not linear_log_probs(leaves.hidden, OutputHead(leaves.weight, leaves.bias), labels_T)[0].requires_grad
    assert entropy_T.requires_grad
