"""Labels of distillation terms: two teachers with the same divergence, and what each of them adds to the metrics."""

import pytest
import torch
from kit.objective_cases import (
    T,
    V,
    generator,
    make_full,
    make_leaves,
    make_mixture,
    make_signal,
    run,
    sums,
)
from kit.tensors import assert_equal_tensors, assert_near
from torch import Tensor

from stillhouse.objective import (
    CrossEntropy,
    Distill,
    Entropy,
    Sampled,
    Signal,
    Term,
    forward_kl,
    jsd,
    linear_objective,
    reverse_kl,
)
from stillhouse.objective.reference import dense_objective

STATISTICS = ("teacher_entropy", "agreement")
DRAWS = Sampled(torch.randint(0, V, (T, 3), generator=generator(6)), torch.ones(T, 3))


def teachers() -> tuple[Signal, Signal]:
    return make_full(), make_signal("dense")


def metrics_of(terms: list[Term], weights_T: Tensor | None = None) -> dict[str, float]:
    output = run(linear_objective, make_leaves(), terms, weights_T=weights_T, chunk_tokens=9).output
    return {name: total.item() for name, total in sums(output).items()}


def test_two_teachers_give_the_sum_of_both_gradients_and_their_own_metrics() -> None:
    code, prose = teachers()
    terms: list[Term] = [
        Distill(code, forward_kl(), 0.7, label="code"),
        Distill(prose, forward_kl(), 0.2, label="prose"),
    ]
    both = run(linear_objective, make_leaves(), terms, chunk_tokens=9)
    alone = [run(linear_objective, make_leaves(), [term]) for term in terms]
    first, second = (result.gradients for result in alone)
    assert_near(both.gradients, {name: gradient + second[name] for name, gradient in first.items()}, 1e-12)
    assert set(sums(both.output)) == {
        *("tokens", "student_entropy", "forward_kl/code", "forward_kl/prose"),
        *(f"{name}/{label}" for name in STATISTICS for label in ("code", "prose")),
    }
    assert set(both.output.per_token) == {"forward_kl/code", "forward_kl/prose"}
    for result in alone:
        for numbers, expected in (
            (both.output.metrics, sums(result.output)),
            (both.output.per_token, result.output.per_token),
        ):
            torch.testing.assert_close({name: numbers[name] for name in expected}, expected, rtol=1e-12, atol=1e-12)
    reference = run(dense_objective, make_leaves(), terms).output
    assert reference.per_token.keys() == both.output.per_token.keys()


@pytest.mark.parametrize("kind", ["full", "mixture", "bucket"])
def test_a_label_changes_only_names(kind: str) -> None:
    signal, divergence = make_signal(kind), 0.5 * forward_kl() + 2 * jsd(0.3)
    plain, named = (
        run(linear_objective, make_leaves(), [Distill(signal, divergence, 0.7, label=label)]) for label in (None, "a")
    )
    assert torch.equal(named.output.loss, plain.output.loss)
    assert_equal_tensors(named.gradients, plain.gradients)
    unlabelled = ("tokens", "student_entropy", "chunk_tokens")
    expected = {name if name in unlabelled else f"{name}/a": total for name, total in plain.output.metrics.items()}
    assert list(named.output.metrics) == list(expected)
    assert {"forward_kl/a", "jsd(0.3)/a", f"{divergence}/a", "teacher_entropy/a", "agreement/a"} < expected.keys()
    assert_equal_tensors(named.output.metrics, expected)


def test_the_students_entropy_is_reported_once() -> None:
    code, prose = teachers()
    row_weights_T = torch.rand(T, generator=generator(5))

    def entropies(*terms: Term) -> dict[str, float]:
        actual = metrics_of(list(terms))
        return {name: total for name, total in actual.items() if name.startswith("student_entropy")}

    cold = metrics_of([Distill(code, forward_kl())])["student_entropy"]
    warm = metrics_of([Distill(code, forward_kl(), temperature=2.0)])["student_entropy"]
    scaled = metrics_of([Distill(code, forward_kl(), weights_T=row_weights_T)])["student_entropy"]
    first, second = Distill(code, forward_kl(), label="a"), Distill(prose, forward_kl(), label="b")
    assert entropies(first, second) == pytest.approx({"student_entropy": cold})
    assert entropies(Distill(code, jsd(0.5)), second) == pytest.approx({"student_entropy": cold})
    assert entropies(first, Distill(prose, jsd(0.5))) == pytest.approx({"student_entropy": cold})
    hot = Distill(prose, forward_kl(), temperature=2.0, label="b")
    assert entropies(first, hot) == pytest.approx({"student_entropy/a": cold, "student_entropy/b": warm})
    weighted = Distill(prose, forward_kl(), weights_T=row_weights_T, label="b")
    assert entropies(first, weighted) == pytest.approx({"student_entropy/a": cold, "student_entropy/b": scaled})
    assert entropies(Distill(code, forward_kl()), weighted) == pytest.approx(
        {"student_entropy": cold, "student_entropy/b": scaled}
    )


def test_terms_of_one_name_and_label_are_numbered() -> None:
    code, prose = teachers()
    metrics = metrics_of(
        [
            Distill(code, forward_kl(), label="a"),
            CrossEntropy(torch.zeros(T, dtype=torch.int64)),
            Distill(prose, forward_kl(), label="a"),
            Distill(DRAWS, forward_kl(), label="a"),
            Distill(make_mixture(), 0.5 * forward_kl() + reverse_kl(), label="b"),
            Distill(code, forward_kl()),
            Entropy(0.1),
        ]
    )
    assert set(metrics) == {
        *("tokens", "student_entropy", "cross_entropy", "entropy"),
        *("forward_kl/a", "forward_kl/a#2", "sampled_cross_entropy/a", "forward_kl"),
        *("0.5*forward_kl + reverse_kl/b", "forward_kl/b", "reverse_kl/b"),
        *(f"{name}{suffix}" for name in STATISTICS for suffix in ("/a", "/a#2", "/b", "")),
    }
    empty = metrics_of([Distill(code, forward_kl(), label="a")], torch.zeros(T))
    assert list(empty) == list(metrics_of([Distill(code, forward_kl(), label="a")]))
