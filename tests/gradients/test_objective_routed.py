"""Different terms for different rows: the sum of separate passes, with one set of gradients."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from kit.objective_cases import D, T, V, generator, make_full, make_labels, make_leaves, run, some_weights, sums
from kit.processor_cases import OpenHeads
from torch import Tensor

from stillhouse.engine.loss import StepLoss
from stillhouse.models.processor_targets import DistillTargets
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
from stillhouse.objective.tile import logits_provider

LABELS = make_labels().clamp(min=0)


def other_teacher() -> FullVocab:
    leaves = make_leaves(width=31, bias=False, seed=9)
    return FullVocab(leaves.hidden, OutputHead(leaves.weight))


def groups() -> list[tuple[Tensor, Sequence[Term]]]:
    """Three kinds of terms; the rows 0, 9, 18, … have none."""
    ids_TK = torch.stack([torch.randperm(V, generator=generator(5))[:7] for _ in range(T)])
    top = TopK(ids_TK, torch.full((T, 7), -3.0, dtype=torch.float64))
    rows = [torch.tensor([row for row in range(T) if row % 9 in chosen]) for chosen in ((1, 2), (3, 4, 5), (6, 7, 8))]
    return [
        (rows[0], [CrossEntropy(LABELS, 0.3), Distill(make_full(), jsd(0.5), 0.7, 2.0)]),
        (rows[1], [CrossEntropy(LABELS, 0.3), Distill(other_teacher(), reverse_kl(), 0.5)]),
        (rows[2], [Distill(top, forward_kl(), 2.0)]),
    ]


@pytest.mark.parametrize("chunk_tokens", [None, 3])
def test_the_sum_of_separate_passes(chunk_tokens: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups share one weight gradient, because it is as large as the head."""
    gradients_made: list[int] = []
    zero_gradient = logits_provider.zero_gradient
    options = {"weights_T": some_weights(), "normalizer": 5.0, "chunk_tokens": chunk_tokens}
    separate = [run(linear_objective, make_leaves(), terms, valid_index=rows, **options) for rows, terms in groups()]
    monkeypatch.setattr(
        logits_provider, "zero_gradient", lambda *args: gradients_made.append(1) or zero_gradient(*args)
    )
    together = run(routed_objective, make_leaves(), groups(), **options)  # type: ignore[arg-type]
    assert len(gradients_made) == 3  # one for each leaf
    for name, gradient in together.gradients.items():
        expected = torch.stack([result.gradients[name] for result in separate]).sum(0)
        torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-13)
    assert not together.gradients["hidden"][::9].any()
    outputs = [result.output for result in separate]
    for numbers, parts in (
        (sums(together.output), [sums(output) for output in outputs]),
        (together.output.per_token, [output.per_token for output in outputs]),
    ):
        assert numbers.keys() == {name for part in parts for name in part}
        for name, value in numbers.items():
            expected = torch.stack([part[name] for part in parts if name in part]).sum(0)
            torch.testing.assert_close(value, expected, rtol=1e-11, atol=1e-12)


def test_an_empty_group_gives_an_exact_zero() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    result = run(routed_objective, make_leaves(), [(empty, [CrossEntropy(LABELS)])])  # type: ignore[list-item]
    assert result.output.loss == 0
    assert not any(gradient.any() for gradient in result.gradients.values())


def test_no_group_is_refused() -> None:
    with pytest.raises(ValueError, match="no group of rows: expected at least one"):
        run(routed_objective, make_leaves(), [])


def test_one_head_is_open_at_a_time() -> None:
    """The processor opens a teacher's signal for its rows, and closes it before it opens the next one."""
    signals, heads = {"math": make_full(), "code": other_teacher()}, OpenHeads()
    rows = {"math": torch.arange(0, 20), "code": torch.arange(20, T)}
    shares = {"math": TeacherShare(2.0), "code": TeacherShare(1.0, temperature=3.0)}
    spec = replace(parse_objective("0.3*cross_entropy + 0.7*reverse_kl"), teachers=shares)
    routed = {name: RoutedSignal(heads.signal(name, signal), rows[name]) for name, signal in signals.items()}
    context = DistillTargets(LABELS, signals=routed)
    leaves = {name: leaf.requires_grad_() for name, leaf in vars(make_leaves()).items()}
    head = OutputHead(leaves["weight"], leaves["bias"])
    processor = StepLoss(spec, normalizer=7.0, chunk_tokens=5)
    output = processor(hidden_states=leaves["hidden"][None], head=head, context=context)
    gradients = torch.autograd.grad(output.loss, list(leaves.values()))
    assert (heads.most, heads.names) == (1, [])
    separate = [
        run(
            linear_objective,
            make_leaves(),
            spec.terms(LABELS, {name: signals[name]}),
            normalizer=7.0,
            valid_index=index,
        )
        for name, index in rows.items()
    ]
    for name, gradient in zip(leaves, gradients, strict=True):
        expected = separate[0].gradients[name] + separate[1].gradients[name]
        torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-13)
    assert output.metrics["tokens/math"] == 20
    assert output.metrics["tokens/code"] == T - 20


def test_signals_of_several_teachers_are_for_the_same_tokens() -> None:
    shares = {"one": TeacherShare(), "other": TeacherShare()}
    processor = StepLoss(replace(parse_objective("forward_kl"), teachers=shares))
    hidden_1TD, head = torch.zeros(1, T, D, dtype=torch.float64), OutputHead(make_leaves().weight)
    for signals, message in (
        ({"one": make_full(), "other": make_full(3)}, "has 3 tokens, the student 37"),
        ({}, "signal is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            processor(hidden_states=hidden_1TD, head=head, context=DistillTargets(LABELS, signals=signals))
