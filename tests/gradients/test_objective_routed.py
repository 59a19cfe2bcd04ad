"""Different terms for different rows: the sum of separate passes, with one set of gradients."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from kit.objective_cases import generator
from kit.processor_cases import OpenHeads
from torch import Tensor

from stillhouse.engine.loss import StepLoss
from stillhouse.models.targets import DistillTargets
from stillhouse.objective import (
    CrossEntropy,
    Distill,
    FullVocab,
    OutputHead,
    RoutedSignal,
    Term,
    TopK,
    forward_kl,
    jsd,
    linear_objective,
    reverse_kl,
    routed_objective,
)
from stillhouse.objective.spec import TeacherShare, parse_objective

T, D, V = 37, 24, 251


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = generator(3)
    hidden_TD = torch.randn(T, D, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    weight_VD = torch.randn(V, D, generator=draw, dtype=torch.float64).mul(0.4).to(dtype).requires_grad_()
    labels_T = torch.randint(0, V, (T,), generator=draw)
    return hidden_TD, weight_VD, labels_T


def exact(width: int, seed: int) -> FullVocab:
    draw = generator(seed)
    head = OutputHead(torch.randn(V, width, generator=draw, dtype=torch.float64) * 0.5)
    return FullVocab(torch.randn(T, width, generator=draw, dtype=torch.float64), head)


def groups(labels_T: Tensor) -> list[tuple[Tensor, Sequence[Term]]]:
    """Three kinds of terms; the rows 0, 9, 18, … have none."""
    ids_TK = torch.stack([torch.randperm(V, generator=generator(5))[:7] for _ in range(T)])
    top = TopK(ids_TK, torch.full((T, 7), -3.0, dtype=torch.float64))
    rows = [
        torch.tensor([each for each in range(T) if each % 9 in chosen]) for chosen in ((1, 2), (3, 4, 5), (6, 7, 8))
    ]
    return [
        (rows[0], [CrossEntropy(labels_T, 0.3), Distill(exact(17, 1), jsd(0.5), 0.7, 2.0)]),
        (rows[1], [CrossEntropy(labels_T, 0.3), Distill(exact(31, 2), reverse_kl(), 0.5)]),
        (rows[2], [Distill(top, forward_kl(), 2.0)]),
    ]


@pytest.mark.parametrize("chunk_tokens", [None, 3])
def test_the_sum_of_separate_passes(chunk_tokens: int | None) -> None:
    hidden_TD, weight_VD, labels_T = inputs()
    weights_T = torch.rand(T, generator=generator(8), dtype=torch.float64)
    weights_T[::9] = 0
    given = groups(labels_T)
    separate = [
        linear_objective(
            hidden_TD, OutputHead(weight_VD), terms, weights_T=weights_T, normalizer=5.0, valid_index=rows
        )
        for rows, terms in given
    ]
    torch.stack([each.loss for each in separate]).sum().backward()
    expected = hidden_TD.grad, weight_VD.grad
    hidden_TD.grad = weight_VD.grad = None
    together = routed_objective(
        hidden_TD, OutputHead(weight_VD), given, weights_T=weights_T, normalizer=5.0, chunk_tokens=chunk_tokens
    )
    together.loss.backward()
    for found, reference in zip((hidden_TD.grad, weight_VD.grad), expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-11, atol=1e-13)
    assert torch.equal(hidden_TD.grad[::9], torch.zeros_like(hidden_TD.grad[::9]))
    for name in {name for each in separate for name in each.metrics} - {"chunk_tokens"}:
        total = sum(each.metrics[name] for each in separate if name in each.metrics)
        torch.testing.assert_close(together.metrics[name], total, rtol=1e-11, atol=1e-12)
    for name in {name for each in separate for name in each.per_token}:
        total = sum(each.per_token[name] for each in separate if name in each.per_token)
        torch.testing.assert_close(together.per_token[name], total, rtol=1e-11, atol=1e-12)


def test_one_weight_gradient_for_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a head is as large as the head: a second one would not fit."""
    from stillhouse.objective.tile import logits_provider

    made: list[int] = []
    zeros = logits_provider.LogitsProvider._zeros

    def counted(self: logits_provider.LogitsProvider, leaves: Sequence[Tensor | None]) -> list[Tensor | None]:
        made.append(1)
        return zeros(self, leaves)

    monkeypatch.setattr(logits_provider.LogitsProvider, "_zeros", counted)
    hidden_TD, weight_VD, labels_T = inputs()
    routed_objective(hidden_TD, OutputHead(weight_VD), groups(labels_T)).loss.backward()
    assert sum(made) == 1


def test_an_empty_group_gives_an_exact_zero() -> None:
    hidden_TD, weight_VD, labels_T = inputs(torch.float32)
    empty = torch.zeros(0, dtype=torch.int64)
    output = routed_objective(hidden_TD, OutputHead(weight_VD), [(empty, [CrossEntropy(labels_T)])])
    output.loss.backward()
    assert float(output.loss) == 0
    assert not hidden_TD.grad.any()
    assert not weight_VD.grad.any()


def test_no_group_is_refused() -> None:
    hidden_TD, weight_VD, _ = inputs()
    with pytest.raises(ValueError, match="no group of rows: expected at least one"):
        routed_objective(hidden_TD, OutputHead(weight_VD), [])


def test_one_head_is_open_at_a_time() -> None:
    """The processor opens a teacher's signal for its rows, and closes it before it opens the next one."""
    hidden_TD, weight_VD, labels_T = inputs()
    signals, heads = {"math": exact(17, 1), "code": exact(31, 2)}, OpenHeads()
    rows = {"math": torch.arange(0, 20), "code": torch.arange(20, T)}
    shares = {"math": TeacherShare(2.0), "code": TeacherShare(1.0, temperature=3.0)}
    spec = replace(parse_objective("0.3*cross_entropy + 0.7*reverse_kl"), teachers=shares)
    processor = StepLoss(spec, normalizer=7.0, chunk_tokens=5)
    routed = {name: RoutedSignal(heads.signal(name, each), rows[name]) for name, each in signals.items()}
    context = DistillTargets(labels_T, signals=routed)
    output = processor(hidden_states=hidden_TD[None], head=OutputHead(weight_VD), context=context)
    output.loss.backward()
    assert (heads.most, heads.names) == (1, [])
    found = hidden_TD.grad, weight_VD.grad
    hidden_TD.grad = weight_VD.grad = None
    total = torch.zeros((), dtype=torch.float64)
    for name, index in rows.items():
        terms = spec.terms(labels_T, {name: signals[name]})
        head = OutputHead(weight_VD)
        total = total + linear_objective(hidden_TD, head, terms, normalizer=7.0, valid_index=index).loss
    total.backward()
    for one, other in zip(found, (hidden_TD.grad, weight_VD.grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
    assert output.metrics["tokens/math"] == 20
    assert output.metrics["tokens/code"] == T - 20


def test_signals_of_several_teachers_are_for_the_same_tokens() -> None:
    hidden_TD, weight_VD, labels_T = inputs()
    shares = {"one": TeacherShare(), "other": TeacherShare()}
    processor = StepLoss(replace(parse_objective("forward_kl"), teachers=shares))
    some = {"one": exact(17, 1), "other": exact(17, 1).rows(slice(0, 3))}
    for signals, message in ((some, "has 3 tokens, the student 37"), ({}, "signal is missing")):
        with pytest.raises(ValueError, match=message):
            processor(
                hidden_states=hidden_TD[None],
                head=OutputHead(weight_VD),
                context=DistillTargets(labels_T, signals=signals),
            )
