"""Policy gradients of other projects beside the clipped surrogate: the engine against the formulas of their sources.

These are dual clip, two-sided clipping, CISPO, sequence-level ratios, and a top-k teacher that is zero outside its
ids. The tests write each formula with plain log-probabilities in float64 and compare values and gradients.
T tokens, V vocabulary, K ids per token.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.objective_cases import (
    Leaves,
    T,
    V,
    assert_same,
    distance,
    generator,
    make_labels,
    make_leaves,
    make_signal,
    run,
)
from torch import Tensor

from stillhouse.objective import (
    Distill,
    OutputHead,
    PolicyGradient,
    Term,
    TopK,
    linear_log_probs,
    linear_objective,
    logits_objective,
    reverse_kl,
)
from stillhouse.objective.reference import dense_objective

LABELS = make_labels()
HAS_LABEL = LABELS >= 0
#: advantages of both signs; every seventh is 0
ADVANTAGES = torch.randn(T, generator=generator(50), dtype=torch.float64) * (torch.arange(T) % 7 > 0)


def plain_log_probs(leaves: Leaves, temperature: float) -> Tensor:
    """Return log q of every token, [T, V]."""
    logits_TV = OutputHead(leaves.weight, leaves.bias).logits(leaves.hidden)
    return torch.log_softmax(logits_TV / temperature, 1)


def old_log_probs(temperature: float) -> Tensor:
    """Return old log-probabilities whose ratios lie between about 0.2 and 5, beyond every clip on both sides."""
    log_q_TV = plain_log_probs(make_leaves(), temperature)
    log_q_T = log_q_TV.gather(1, LABELS.clamp_min(0)[:, None])[:, 0]
    return log_q_T - 1.6 * (2 * torch.rand(T, generator=generator(51), dtype=torch.float64) - 1)


def ppo(ratio: Tensor, advantage: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    """Schulman et al. 2017, equation 7: the objective, which is maximised."""
    return torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def dual_clip(ratio: Tensor, advantage: Tensor, log_q: Tensor) -> Tensor:
    """Ye et al. 2020 (arXiv:1912.09729), equation 5, c = 1.7."""
    return torch.where(advantage < 0, torch.max(ppo(ratio, advantage), 1.7 * advantage), ppo(ratio, advantage))


def two_sided(ratio: Tensor, advantage: Tensor, log_q: Tensor) -> Tensor:
    """INTELLECT-2 (arXiv:2505.07291), section 3.4: min(min(ρ, δ)A, clip(ρ)A), δ = 1.7; TRL's `delta`."""
    return torch.min(ratio.clamp(max=1.7) * advantage, ratio.clamp(0.8, 1.2) * advantage)


def cispo(ratio: Tensor, advantage: Tensor, log_q: Tensor) -> Tensor:
    """MiniMax-M1 (arXiv:2506.13585), equations 4 and 5: sg(clip(ρ))·A·log q."""
    return ratio.clamp(0.0, 1.5).detach() * advantage * log_q


SURROGATES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], dict[str, Any]]] = {
    "dual clip": (dual_clip, {"dual_clip": 1.7}),
    "two-sided clip": (two_sided, {"dual_clip": 1.7}),
    "cispo": (cispo, {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.5}),
}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("case", SURROGATES)
def test_surrogates_are_their_papers(case: str, temperature: float) -> None:
    formula, options = SURROGATES[case]
    old_T = old_log_probs(temperature)

    leaves = {name: leaf.clone().requires_grad_() for name, leaf in vars(make_leaves()).items()}
    log_q_TV = plain_log_probs(Leaves(**leaves), temperature)
    log_q_T = log_q_TV.gather(1, LABELS.clamp_min(0)[:, None])[:, 0]
    value_T = torch.where(HAS_LABEL, -formula((log_q_T - old_T).exp(), ADVANTAGES, log_q_T), 0.0)
    value_T.sum().backward()
    term = PolicyGradient(LABELS, ADVANTAGES, old_T, temperature=temperature, **options)
    found = run(linear_objective, make_leaves(), [term], chunk_tokens=10)
    assert distance(found.output.per_token["policy_gradient"], value_T) < 1e-12
    for name, gradient in found.gradients.items():
        assert distance(gradient, leaves[name].grad) < 1e-12, name
    assert_same(found, run(dense_objective, make_leaves(), [term]))
    plain = run(linear_objective, make_leaves(), [PolicyGradient(LABELS, ADVANTAGES, old_T, temperature=temperature)])
    assert distance(found.gradients["hidden"], plain.gradients["hidden"]) > 1e-2


def test_clipping_is_reported() -> None:
    """With a negative advantage, the dual clip also clips large ratios; CISPO counts the ratios that it clips."""
    old_T, loss = old_log_probs(1.0), torch.full((T,), -1.0, dtype=torch.float64)
    log_q_T = plain_log_probs(make_leaves(), 1.0).gather(1, LABELS.clamp_min(0)[:, None])[:, 0]
    ratio_T = (log_q_T - old_T).exp()
    for options, clipped_T in (
        ({"dual_clip": 1.7}, (ratio_T < 0.8) | (ratio_T > 1.7)),
        ({"surrogate": "cispo"}, (ratio_T < 0.8) | (ratio_T > 1.2)),
    ):
        output = run(linear_objective, make_leaves(), [PolicyGradient(LABELS, loss, old_T, **options)]).output
        assert output.metrics["clipped"] == (clipped_T & HAS_LABEL).sum()


def test_an_overflowing_ratio_of_no_advantage_is_worth_nothing() -> None:
    nothing = torch.zeros(T, dtype=torch.float64)
    for options in ({}, {"dual_clip": 3.0}, {"surrogate": "cispo"}):
        term = PolicyGradient(LABELS, nothing, torch.full_like(nothing, -1000.0), **options)
        result = run(linear_objective, make_leaves(), [term])
        assert result.output.loss == 0
        assert all((gradient == 0).all() for gradient in result.gradients.values())


# a teacher that is zero outside its ids


def nemo(log_q_TV: Tensor, ids_TK: Tensor, log_p_TK: Tensor) -> Tensor:
    """NeMo RL's reverse KL with `zero_outside_topk`: the teacher conditioned on its ids, e^−100 outside of them."""
    log_p_TK, log_q_TK = torch.log_softmax(log_p_TK, 1), log_q_TV.gather(1, ids_TK)
    inside_T = (log_q_TK.exp() * (log_q_TK - log_p_TK)).sum(1)
    rest_T = (log_q_TV.exp() * log_q_TV).sum(1) - (log_q_TK.exp() * log_q_TK).sum(1)
    return inside_T + rest_T + 100 * (1 - log_q_TK.exp().sum(1))


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_zero_outside_the_ids_is_nemo_rls(temperature: float) -> None:
    log_p_TK, ids_TK = torch.randn(T, V, generator=generator(4), dtype=torch.float64).log_softmax(1).topk(9, dim=1)
    logits = torch.randn(T, V, generator=generator(5), dtype=torch.float64).requires_grad_()
    expected_T = nemo(torch.log_softmax(logits / temperature, 1), ids_TK, log_p_TK)
    (expected,) = torch.autograd.grad(expected_T.sum(), logits)
    output = logits_objective(
        logits, [Distill(TopK(ids_TK, log_p_TK, "zero"), reverse_kl(), temperature=temperature)]
    )
    (gradient,) = torch.autograd.grad(output.loss, logits)
    assert distance(output.per_token["reverse_kl"], expected_T) < 1e-12
    assert distance(gradient, expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_zero_outside_with_absent_and_repeated_ids(dtype: torch.dtype) -> None:
    """Some rows have absent ids, one row has no id and contributes 0, and one row's ids have the whole mass."""
    signal = make_signal("zero", dtype=dtype, temperature=1.3)
    assert isinstance(signal, TopK)
    ids_TK = signal.ids_TK.clone()
    ids_TK[4] = -1
    ids_TK[5, 1] = ids_TK[5, 0]
    terms: list[Term] = [
        Distill(TopK(ids_TK, signal.log_probs_TK, "zero"), reverse_kl(), 0.7, 1.3, scale_by_temperature_squared=True)
    ]
    found = run(linear_objective, make_leaves(dtype=dtype), terms, chunk_tokens=10)
    assert_same(
        found, run(dense_objective, make_leaves(dtype=dtype), terms), within=1e-11 if dtype == torch.float64 else 1e-5
    )
    assert found.output.per_token["reverse_kl"][4] == 0
    assert (found.gradients["hidden"][4] == 0).all()


# sequence-level ratios


def gspo(log_q_T: Tensor, old_T: Tensor, sequence_T: Tensor, advantages_S: Tensor) -> Tensor:
    """Zheng et al. 2025 (arXiv:2507.18071), equations 5 to 7, a loop over sequences; the result is maximised."""
    total = log_q_T.new_zeros(())
    for number, advantage in enumerate(advantages_S):
        of_it = (sequence_T == number) & HAS_LABEL
        ratio = ((log_q_T[of_it] - old_T[of_it]).sum() / of_it.sum()).exp()
        total = total + torch.min(ratio * advantage, ratio.clamp(1 - 3e-1, 1 + 4e-1) * advantage)
    return total / len(advantages_S)


def test_the_documentations_sequence_level_ratios_are_gspos() -> None:
    page = (Path(__file__).parents[2] / "docs" / "objective.md").read_text(encoding="utf-8")
    (code,) = (each for each in re.findall(r"```py\n(.*?)```", page, re.DOTALL) if "def gspo_loss" in each)
    names: dict[str, Any] = {}
    exec(code, names)
    sequence_T, advantages_S = torch.arange(T) // 13, torch.tensor([0.7, -1.1, 0.4], dtype=torch.float64)
    old_T = old_log_probs(1.0) * 0.9
    gradients = []
    for fused in (True, False):
        leaves = make_leaves()
        fresh = {name: leaf.clone().requires_grad_() for name, leaf in vars(leaves).items()}
        head = OutputHead(fresh["weight"], fresh["bias"])
        if fused:
            loss = names["gspo_loss"](fresh["hidden"], head, LABELS, old_T, sequence_T, advantages_S, 0.3, 0.4)
        else:
            log_q_TV = plain_log_probs(Leaves(**fresh), 1.0)
            loss = -gspo(log_q_TV.gather(1, LABELS.clamp_min(0)[:, None])[:, 0], old_T, sequence_T, advantages_S)
        loss.backward()
        gradients.append((loss.detach(), {name: leaf.grad for name, leaf in fresh.items()}))
    (loss, found), (expected_loss, expected) = gradients
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0
        assert distance(found[name], gradient) < 1e-12, name
    assert linear_log_probs is names["linear_log_probs"]
