"""The metrics of an objective: sums over tokens, values per token, and the labels of two teachers' terms."""

import math

import pytest
import torch
from kit.objective_cases import (
    SIGNALS,
    T,
    V,
    every_term,
    generator,
    make_full,
    make_labels,
    make_leaves,
    make_signal,
    run,
    sums,
)
from kit.tensors import assert_equal_tensors, assert_near
from torch import Tensor

from stillhouse.objective import (
    CrossEntropy,
    DenseLogits,
    Distill,
    Divergence,
    Entropy,
    Sampled,
    Signal,
    Term,
    TopK,
    forward_kl,
    jsd,
    linear_objective,
    logits_objective,
    reverse_kl,
)
from stillhouse.objective.reference import dense_objective

TEACHER = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], dtype=torch.float64)
STUDENT = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]], dtype=torch.float64)


OF_TEACHER = ("teacher_entropy", "agreement")
STATISTICS = ("student_entropy", *OF_TEACHER)


def entropy(p: list[float]) -> float:
    return -sum(share * math.log(share) for share in p)


def metrics_of(terms: list[Term], weights_T: Tensor | None = None) -> dict[str, float]:
    output = logits_objective(STUDENT.log() + 7, terms, weights_T=weights_T, normalizer=100.0)
    return {name: total.item() for name, total in sums(output).items()}


def test_dense_statistics_by_hand() -> None:
    metrics = metrics_of([Distill(DenseLogits(TEACHER.log() - 2), forward_kl(), 0.3)])
    expected = {"forward_kl": 0.25 * math.log(2) + 0.1 * math.log(0.25) + 0.8 * math.log(8 / 6)}
    expected["student_entropy"] = entropy([0.25, 0.5, 0.25]) + entropy([0.2, 0.2, 0.6])
    expected["teacher_entropy"] = entropy([0.5, 0.25, 0.25]) + entropy([0.1, 0.1, 0.8])
    assert metrics == pytest.approx(expected | {"tokens": 2, "agreement": 1}, rel=1e-12)


def test_statistics_are_weighted_like_the_value_and_taken_at_the_terms_temperature() -> None:
    row_weights_T = torch.tensor([3.0, 0.0])
    term = Distill(DenseLogits(2 * TEACHER.log()), forward_kl(), temperature=2.0, weights_T=row_weights_T)
    metrics = metrics_of([term, Entropy(1.0)], torch.tensor([0.5, 3.0]))
    assert metrics["tokens"] == 2
    assert metrics["teacher_entropy"] == pytest.approx(0.5 * 3 * entropy([0.5, 0.25, 0.25]), rel=1e-12)
    root = [0.25**0.5, 0.5**0.5, 0.25**0.5]
    student = entropy([weight / sum(root) for weight in root])
    assert metrics["student_entropy"] == pytest.approx(0.5 * 3 * student, rel=1e-12)
    assert metrics["agreement"] == 0
    at_one = [entropy([0.25, 0.5, 0.25]), entropy([0.2, 0.2, 0.6])]
    assert metrics["entropy"] == pytest.approx(0.5 * at_one[0] + 3 * at_one[1], rel=1e-12)


def test_sparse_statistics_by_hand() -> None:
    ids = torch.tensor([[1, 0], [2, -1]])
    log_p = torch.tensor([[0.25, 0.5], [0.8, 1.0]], dtype=torch.float64).log()
    tail = torch.tensor([0.25, 0.2], dtype=torch.float64).log()
    both = {"tokens": 2, "teacher_mass": 1.55, "agreement": 1}
    both["student_entropy"] = entropy([0.25, 0.5, 0.25]) + entropy([0.2, 0.2, 0.6])
    expected = {
        "bucket": entropy([0.25, 0.5, 0.25]) + entropy([0.8, 0.2]),
        "renormalize": entropy([1 / 3, 2 / 3]),
        "drop": entropy([0.25, 0.5]) + entropy([0.8]),
    }
    for name, teacher_entropy in expected.items():
        signal = TopK(ids, log_p, name, tail if name == "bucket" else None)  # type: ignore[arg-type]
        metrics = metrics_of([Distill(signal, reverse_kl())])
        del metrics["reverse_kl"]
        assert metrics == pytest.approx(both | {"teacher_entropy": teacher_entropy}, rel=1e-12)


def test_sampled_value_is_a_cross_entropy() -> None:
    """If each id's weight is its probability, the value is forward KL plus the teacher's entropy."""
    draws = Sampled(torch.tensor([[0, 1, 2], [0, 1, 2]]), TEACHER)
    metrics = metrics_of([Distill(draws, forward_kl())])
    assert set(metrics) == {"tokens", "sampled_cross_entropy", "student_entropy"}
    value = metrics["sampled_cross_entropy"]
    dense = metrics_of([Distill(DenseLogits(TEACHER.log()), forward_kl())])
    assert value == pytest.approx(dense["forward_kl"] + dense["teacher_entropy"], rel=1e-12)


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
def test_parts_of_a_cross_entropy_are_seen(smoothing: float, z_loss: float) -> None:
    """Row 1 has no label and only NaN logits: it adds nothing to any metric."""
    logits = torch.stack([STUDENT[0].log() + 7, torch.full((3,), math.nan, dtype=torch.float64)])
    term = CrossEntropy(torch.tensor([1, -1]), 0.5, smoothing, z_loss, weights_T=torch.tensor([3.0, 1.0]))
    metrics = {key: value.item() for key, value in sums(logits_objective(logits, [term])).items()}
    mean = -(2 * math.log(0.25) + math.log(0.5)) / 3
    total = (1 - smoothing) * math.log(2) + smoothing * mean + z_loss * 49
    expected = {"tokens": 2.0, "cross_entropy": 3 * total}
    if smoothing or z_loss:
        expected["negative_log_likelihood"] = 3 * math.log(2)
    if z_loss:
        expected["z_loss"] = 3 * z_loss * 49
    assert metrics == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", SIGNALS)
@pytest.mark.parametrize("squared", [False, True])
def test_summands_of_a_divergence_are_seen(kind: str, squared: bool) -> None:
    """Each summand is reported as if it were a separate term; the term's value is their weighted sum."""
    leaves, signal, row_weights_T = make_leaves(), make_signal(kind, temperature=2.0), torch.rand(T)
    summands = [forward_kl(), jsd(0.3), reverse_kl()]

    def totals(divergence: Divergence) -> dict[str, float]:
        term = Distill(signal, divergence, 0.3, 2.0, squared, weights_T=row_weights_T)
        metrics = run(linear_objective, leaves, [term], chunk_tokens=9).output.metrics
        return {key: value.item() for key, value in metrics.items()}

    metrics = totals(0.5 * forward_kl() + 2 * jsd(0.3) + reverse_kl() + 0.5 * forward_kl())
    for summand in summands:
        assert metrics[str(summand)] == pytest.approx(totals(summand)[str(summand)], rel=1e-12)
    total = metrics["forward_kl"] + 2 * metrics["jsd(0.3)"] + metrics["reverse_kl"]
    assert metrics["0.5*forward_kl + 2*jsd(0.3) + reverse_kl + 0.5*forward_kl"] == pytest.approx(total, rel=1e-12)
    assert metrics.keys() - totals(forward_kl()).keys() == {str(summand) for summand in summands[1:]} | {
        "0.5*forward_kl + 2*jsd(0.3) + reverse_kl + 0.5*forward_kl"
    }


def test_no_two_sums_share_a_key() -> None:
    """Values are numbered by name, statistics by distillation term. A summand is not added to the term of its name,
    and parts of two terms have different keys.
    """
    dense, labels = DenseLogits(TEACHER.log()), torch.tensor([0, 2])
    draws = Sampled(torch.tensor([[0, 1, 2], [0, 1, 2]]), TEACHER)
    mixed = 0.5 * forward_kl() + 0.5 * reverse_kl()
    terms: list[Term] = [
        *(Distill(dense, mixed, temperature=3.0), CrossEntropy(labels), Distill(dense, mixed, temperature=2.0)),
        *(Distill(dense, forward_kl()), CrossEntropy(labels, z_loss=0.1), Entropy(0.1)),
        *(Distill(TopK(torch.tensor([[0], [2]]), TEACHER[:, :1].log()), jsd(0.5)), Entropy(0.2, temperature=2.0)),
        *(Distill(dense, forward_kl(), label="a"), Distill(dense, forward_kl(), label="a")),
        Distill(draws, forward_kl(), label="a"),
    ]
    metrics = metrics_of(terms)
    assert set(metrics) == {
        "tokens",
        *(str(mixed), f"{mixed}#2", "forward_kl", "cross_entropy", "cross_entropy#2"),
        *("negative_log_likelihood#2", "z_loss#2", "entropy", "entropy#2", "jsd(0.5)", "teacher_mass#4"),
        *(f"{key}{suffix}" for key in STATISTICS for suffix in ("", "#2", "#3", "#4")),
        *("reverse_kl", "reverse_kl#2", "forward_kl#2", "forward_kl#3"),
        *("forward_kl/a", "forward_kl/a#2", "sampled_cross_entropy/a", "student_entropy/a#3"),
        *(f"{key}{suffix}" for key in STATISTICS for suffix in ("/a", "/a#2")),
    }
    for key, temperature in [("forward_kl", 1.0), ("forward_kl#2", 3.0), ("forward_kl#3", 2.0)]:
        single = metrics_of([Distill(dense, forward_kl(), temperature=temperature)])
        assert metrics[key] == pytest.approx(single["forward_kl"], rel=1e-12)
    assert metrics["student_entropy"] > metrics["student_entropy#3"] == metrics["student_entropy#4"]
    assert metrics["negative_log_likelihood#2"] == pytest.approx(metrics["cross_entropy"])
    assert list(metrics) == list(metrics_of(terms, torch.zeros(2)))  # the keys do not depend on the rows


def test_loss_is_the_scaled_sum_of_the_metrics() -> None:
    terms, weights_T = every_term(), torch.rand(T)
    output = run(linear_objective, make_leaves(), terms, weights_T=weights_T, normalizer=7.0).output
    names = list(output.per_token)
    total = sum(term.scale * output.metrics[name] for name, term in zip(names, terms, strict=True))
    torch.testing.assert_close(output.loss.detach(), total / 7)
    teacher = DenseLogits(torch.zeros(T, V).index_fill(1, torch.tensor([7]), -math.inf))
    terms = [CrossEntropy(make_labels())]
    expected = run(linear_objective, make_leaves(), terms)
    actual = run(linear_objective, make_leaves(), [*terms, Distill(teacher, reverse_kl(), 0.0)])
    assert torch.equal(actual.output.loss, expected.output.loss)
    assert torch.equal(actual.gradients["hidden"], expected.gradients["hidden"])
    assert actual.output.metrics["reverse_kl"] == math.inf


def test_sums_over_many_chunks_lose_nothing() -> None:
    """With one token per chunk, a running sum in float32 would be wrong in its sixth digit."""
    tokens = 1500
    leaves = make_leaves(tokens, 5, 2, dtype=torch.float32)
    terms = [CrossEntropy(torch.zeros(tokens, dtype=torch.int64))]
    output = run(linear_objective, leaves, terms, chunk_tokens=1).output
    total = output.per_token["cross_entropy"].double().sum().item()
    assert output.metrics["cross_entropy"].item() == pytest.approx(total, rel=1e-7)


def teachers() -> tuple[Signal, Signal]:
    return make_full(), make_signal("dense")


def pass_metrics(terms: list[Term]) -> dict[str, float]:
    output = run(linear_objective, make_leaves(), terms, chunk_tokens=9).output
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
        *(f"{name}/{label}" for name in OF_TEACHER for label in ("code", "prose")),
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
        actual = pass_metrics(list(terms))
        return {name: total for name, total in actual.items() if name.startswith("student_entropy")}

    cold = pass_metrics([Distill(code, forward_kl())])["student_entropy"]
    warm = pass_metrics([Distill(code, forward_kl(), temperature=2.0)])["student_entropy"]
    scaled = pass_metrics([Distill(code, forward_kl(), weights_T=row_weights_T)])["student_entropy"]
    first, second = Distill(code, forward_kl(), label="a"), Distill(prose, forward_kl(), label="b")
    assert entropies(first, second) == pytest.approx({"student_entropy": cold})
    assert entropies(Distill(code, jsd(0.5)), second) == pytest.approx({"student_entropy": cold})
    assert entropies(first, Distill(prose, jsd(0.5))) == pytest.approx({"student_entropy": cold})
    hot = Distill(prose, forward_kl(), temperature=2.0, label="b")
    assert entropies(first, hot) == pytest.approx({"student_entropy/a": cold, "student_entropy/b": warm})
    weighted = Distill(prose, forward_kl(), weights_T=row_weights_T, label="b")
    assert entropies(first, weighted) == pytest.approx({"student_entropy/a": cold, "student_entropy/b": scaled})
    cases = {"student_entropy": cold, "student_entropy/b": scaled}
    assert entropies(Distill(code, forward_kl()), weighted) == pytest.approx(cases)
