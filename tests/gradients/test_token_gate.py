"""Training only the tokens with the largest statistic: gradients, the histogram, and what the statistic depends on.

T tokens, V vocabulary.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.objective_cases import (
    DTYPES,
    Leaves,
    Result,
    T,
    converted,
    distance,
    make_labels,
    make_leaves,
    make_signal,
    run,
    some_weights,
)
from kit.rollout_cases import fused, make_batch
from torch import Tensor

from stillhouse.objective import TEACHER, Distill, OutputHead, Signal, Term, forward_kl, linear_objective
from stillhouse.objective.metric_keys import GATE
from stillhouse.objective.reference import dense_objective
from stillhouse.objective.spec import ObjectiveSpec, parse_objective
from stillhouse.objective.tile import compiled
from stillhouse.objective.token_gate import (
    BINS,
    FIRST,
    GateThreshold,
    TokenGate,
    TokenGateSettings,
    histogram,
    is_below,
    threshold_of,
)

LOSS = "0.3*cross_entropy + 0.7*jsd(0.3) - 0.01*entropy"
CASES = [
    *((by, "full") for by in ("teacher_entropy", "student_entropy", "divergence")),
    *(("divergence", signal) for signal in ("mixture", "bucket", "renormalize")),
    ("student_entropy", "bucket"),
]
WITHIN = {"float64": 1e-11, "float32": 1e-5, "bfloat16": 4e-3}


def gated(by: Any, keep: float = 0.3) -> ObjectiveSpec:
    return replace(parse_objective(LOSS), token_gate=TokenGateSettings(keep, by))


def terms_of(spec: ObjectiveSpec, signal: Signal, threshold: GateThreshold | None) -> list[Term]:
    return spec.terms(make_labels(), {TEACHER: signal}, threshold=threshold)


def middle(spec: ObjectiveSpec, signal: Signal, leaves: Leaves) -> GateThreshold:
    """A threshold between two statistics, from float64, so that rounding moves no row."""
    head = OutputHead(leaves.weight, leaves.bias)
    statistic_T = dense_objective(leaves.hidden, head, terms_of(spec, signal, None)).per_token[GATE]
    ordered_T = statistic_T.sort(descending=True).values
    return GateThreshold(float(ordered_T[10:12].mean()), 0.3)


@pytest.mark.parametrize("rows_are_compiled", [False, True])
@pytest.mark.parametrize("dtype", WITHIN)
@pytest.mark.parametrize(("by", "kind"), CASES)
def test_gradients_of_the_kept_rows(by: str, kind: str, dtype: str, rows_are_compiled: bool) -> None:
    """rows_are_compiled: the terms are rebuilt from the tensors of a chunk, as on a GPU."""
    spec, signal, leaves = gated(by), make_signal(kind), make_leaves(dtype=DTYPES[dtype])
    exact = converted(leaves, torch.float64)
    threshold, weights_T = middle(spec, signal, exact), some_weights()
    narrow = converted(signal, DTYPES["float64" if dtype == "float64" else "float32"])
    try:
        if rows_are_compiled:
            compiled.ROW_DEVICES.add("cpu")
        with torch._dynamo.config.patch(disable=True):
            actual = run(
                linear_objective, leaves, terms_of(spec, narrow, threshold), weights_T=weights_T, chunk_tokens=9
            )
    finally:
        compiled.ROW_DEVICES.discard("cpu")
    expected = run(dense_objective, exact, terms_of(spec, signal, threshold), weights_T=weights_T.double())
    assert 0 < int((expected.gradients["hidden"] != 0).any(1).sum()) <= 11
    assert_same(actual, expected, WITHIN[dtype])


def assert_same(actual: Result, expected: Result, within: float) -> None:
    assert distance(actual.output.loss, expected.output.loss) < within
    for name, gradient in expected.gradients.items():
        assert distance(actual.gradients[name], gradient) < within, name
    for name in ("cross_entropy", "entropy", GATE):
        assert distance(actual.output.metrics[name], expected.output.metrics[name]) < max(within, 1e-6), name


def test_a_kept_row_has_its_gradient_divided_by_the_share_and_the_others_have_none() -> None:
    spec, signal, leaves = gated("divergence"), make_signal("full"), make_leaves()
    threshold = middle(spec, signal, leaves)
    actual = run(linear_objective, leaves, terms_of(spec, signal, threshold))
    plain = run(linear_objective, leaves, terms_of(replace(spec, token_gate=None), signal, None))
    kept_T = ~is_below(actual.output.per_token[GATE], threshold.value)
    assert int(kept_T.sum()) == 11
    expected = torch.where(kept_T[:, None], plain.gradients["hidden"] / threshold.share, 0.0)
    assert distance(actual.gradients["hidden"], expected) < 1e-7
    # statistics and the values per token describe all rows, and a gate that keeps all rows changes no bit
    assert torch.equal(actual.output.metrics["agreement"], plain.output.metrics["agreement"])
    assert torch.equal(actual.output.per_token["cross_entropy"], plain.output.per_token["cross_entropy"])
    whole = run(linear_objective, leaves, terms_of(spec, signal, None))
    assert torch.equal(whole.output.loss, plain.output.loss)
    assert all(torch.equal(whole.gradients[name], gradient) for name, gradient in plain.gradients.items())


def test_a_row_with_an_infinite_value_can_be_dropped_and_one_that_is_no_number_cannot() -> None:
    signal, leaves = make_signal("dense"), make_leaves()
    bias_V = torch.zeros_like(leaves.bias)
    bias_V[3] = -math.inf  # forward KL is infinite
    leaves = replace(leaves, bias=bias_V)
    value, thresholds = Distill(signal, forward_kl()), torch.full((T,), 1.0)
    by_entropy = TokenGate("student_entropy", (value,), thresholds * 100, thresholds)
    dropped = run(linear_objective, leaves, [value, by_entropy])
    assert dropped.output.loss == 0
    assert all((gradient == 0).all() for gradient in dropped.gradients.values())
    assert not is_below(torch.tensor([math.nan, math.inf]), 1.0).any()


def test_the_kept_rows_and_the_counts_do_not_depend_on_the_chunks() -> None:
    batch = make_batch(dtype=torch.float32)
    spec = replace(parse_objective("reverse_kl"), token_gate=TokenGateSettings(0.25, "teacher_entropy"))
    signal = make_signal("full", dtype=torch.float32)
    counts, leaves = [], make_leaves(dtype=torch.float32)
    for chunk_tokens in (3, 7, None):
        output, _ = fused(spec, leaves, batch, signal, chunk_tokens)
        counts.append(histogram(output.per_token[GATE]))
        assert output.metrics["kept"] == (batch.weights_T != 0).sum() == counts[-1].sum()
    assert torch.equal(counts[0], counts[1])
    assert torch.equal(counts[0], counts[2])


def test_the_threshold_is_the_quantile_but_for_the_width_of_a_bin() -> None:
    generator = torch.Generator().manual_seed(0)
    statistic_T = torch.rand(20_000, generator=generator).pow(6) * 12
    counts = histogram(torch.cat([statistic_T, torch.full((9,), -math.inf)])).tolist()
    assert sum(counts) == 20_000
    for keep in (0.01, 0.05, 0.2, 0.9):
        threshold = threshold_of(counts, keep)
        assert threshold is not None
        kept = int((~is_below(statistic_T, threshold.value)).sum())
        assert kept == round(threshold.share * 20_000)
        assert keep <= threshold.share < keep * 1.02 + 2e-3
        assert threshold.value == pytest.approx(float(statistic_T.quantile(1 - keep)), rel=2 / 64)


def test_the_borders_of_bins_are_exact() -> None:
    """A statistic that is equal to a border is at or above it, and the float before it is below."""
    for number in (1, 63, 64, 65, 1500, BINS - 1):
        octave, part = divmod(number, 64)
        border = math.ldexp(1 + part / 64, FIRST + octave)
        before = float(torch.nextafter(torch.tensor(border), torch.tensor(0.0)))
        assert histogram(torch.tensor([border, before])).nonzero()[:, 0].tolist() == [number - 1, number]
        threshold = threshold_of(histogram(torch.tensor([border, before])).tolist(), 0.5)
        assert threshold == GateThreshold(border, 0.5)
        assert is_below(torch.tensor([border, before]), border).tolist() == [False, True]


@pytest.mark.parametrize(
    ("statistic", "kept"),
    [([0.0] * 9 + [1.0], 1.0), ([-1.0] * 4, 1.0), ([], 1.0), ([0.0] * 5 + [2.0] * 5, 0.5), ([math.inf] * 4, 1.0)],
)
def test_ties_are_kept_together(statistic: list[float], kept: float) -> None:
    """With keep=0.2: a threshold that would keep too few tokens keeps those of the next bin, too."""
    threshold = threshold_of(histogram(torch.tensor(statistic)).tolist(), 0.2)
    assert (1.0 if threshold is None else threshold.share) == kept


@pytest.mark.parametrize(
    ("by", "kind", "problem"),
    [("teacher_entropy", "bucket", "with TopK: expected a signal over the full vocabulary")],
)
def test_a_statistic_that_a_signal_does_not_have_is_refused(by: str, kind: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        terms_of(gated(by), make_signal(kind), None)


def test_a_gate_without_its_statistic_is_refused() -> None:
    ones_T: Tensor = torch.ones(T)
    with pytest.raises(ValueError, match="by divergence without a divergence"):
        TokenGate("divergence", (), ones_T, ones_T)
    for settings in ((0.0, "divergence"), (1.0, "divergence"), (0.5, "entropy")):
        with pytest.raises(ValueError, match="of the token gate"):
            TokenGateSettings(*settings)  # type: ignore[arg-type]
