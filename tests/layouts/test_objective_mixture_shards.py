"""Mixtures of teachers over vocabulary shards, in real gloo processes, against plain autograd over all columns.

T tokens, V vocabulary.
"""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from kit import shard_jobs as jobs
from kit import shard_problems as problems
from kit.objective_cases import Leaves, V, run
from kit.shard_cases import Case, Layout, check, complaints, cut, on_shards, oracle, over
from kit.shard_problems import FOUR, SHARDS, TOKENS
from kit.shard_ranks import GATHER, SUM, Failure, RankPool, shared_pool

from stillhouse.objective import linear_objective

EXPRESSIONS = [
    "forward_kl",
    "reverse_kl",
    "jsd(0.3)",
    "skew_forward_kl(0.1)",
    "skew_reverse_kl(0.1)",
    "total_variation",
    "alpha_beta(0.2, 0.5)",
    "0.9*forward_kl + 0.1*reverse_kl",
]


@pytest.fixture(scope="module")
def pool() -> RankPool:
    return shared_pool()


@pytest.mark.parametrize("ranks", SHARDS)
def test_every_divergence(pool: RankPool, ranks: int) -> None:
    """The shards are uneven. There are several chunks, two at a time, and weights of zero."""
    named = {each: partial(problems.distillation, each, "mixture") for each in EXPRESSIONS}
    check(pool, over(Layout(SHARDS[ranks]), named))
    named = {each: partial(problems.distillation, each, "mixture", torch.float64) for each in EXPRESSIONS}
    check(pool, over(Layout(SHARDS[ranks]), named), within=1e-11)


@pytest.mark.parametrize("chunk_tokens", [1, 9, None])
def test_every_number_of_chunks(pool: RankPool, chunk_tokens: int | None) -> None:
    named = {each: partial(problems.distillation, each, "mixture") for each in ("forward_kl", "jsd(0.3)")}
    check(pool, over(Layout(SHARDS[3]), named, chunk_tokens=chunk_tokens))


def test_bfloat16_and_peaked_rows(pool: RankPool) -> None:
    """With a standard deviation of 30, the largest logits of two ranks may differ by a hundred."""
    named = {each: partial(problems.distillation, each, "mixture", torch.bfloat16) for each in EXPRESSIONS}
    check(pool, over(Layout(SHARDS[2]), named, chunk_tokens=9), within=3e-3)
    peaked = {each: partial(problems.distillation, each, "mixture", sharpness=30.0) for each in EXPRESSIONS}
    check(pool, over(Layout(FOUR), peaked))


@pytest.mark.parametrize(
    ("rows", "layout"),
    [
        ((V, (V, V), None), Layout(SHARDS[3], cut(0, 7, 77, V))),
        ((V, (256, 260), None), Layout(SHARDS[3], "whole")),
        ((256, (300, 260), V), Layout(cut(0, 100, 256), "whole")),
        ((V, (256, 256), 180), Layout(FOUR, cut(0, 64, 128, 192, 256))),
        ((10, (10, 12), None), Layout(cut(0, 0, 7, 7, 10), "whole")),
    ],
    ids=["other borders", "whole teachers with more rows", "padding", "a shard of padding", "ranks without a row"],
)
def test_heads_of_other_row_counts(pool: RankPool, rows: tuple[Any, ...], layout: Layout) -> None:
    named = {each: partial(problems.mixture_of, each, *rows) for each in ("forward_kl", "jsd(0.3)")}
    for outcomes in check(pool, over(layout, named)):
        real = rows[2] or rows[0]
        for (start, _), outcome in zip(layout.student, outcomes, strict=True):
            assert not outcome.gradients["weight"][max(real - start, 0) :].any()


@pytest.mark.parametrize("teacher", [None, "whole"], ids=["its columns", "all columns"])
def test_logits_of_minus_infinity(pool: RankPool, teacher: Any) -> None:
    """A whole shard in which one teacher has no probability, or all columns but one of it, or a few columns."""
    named = {
        f"{expression}, {first} to {last}": partial(problems.masked_mixture, expression, first, last)
        for expression in ("forward_kl", "jsd(0.3)", "total_variation")
        for first, last in ((63, 125), (1, 62), (187, 190))
    }
    check(pool, over(Layout(FOUR, teacher), named))


@pytest.mark.parametrize(("expression", "gathers"), [("forward_kl", 2), ("jsd(0.3)", 3)])
def test_one_more_collective_per_chunk(pool: RankPool, expression: str, gathers: int) -> None:
    """The sums of all three teachers share one collective."""
    problem = partial(problems.counted, f"{expression} on mixture")
    cases = [
        Case("counted", problem, Layout(FOUR), chunk_tokens=each, counts_collectives=True)
        for each in (TOKENS, TOKENS // 4)
    ]
    for chunks, answer in zip((1, 4), pool.run(jobs.two_passes, cases, limit=30.0), strict=True):
        assert not isinstance(answer, Failure), answer
        for _, second in answer:
            assert second.forward == Counter({GATHER: gathers * chunks})
            assert second.backward == Counter({SUM: 1})
            assert second.largest <= 4 * TOKENS * 40


def test_metrics_are_those_of_the_whole_vocabulary(pool: RankPool) -> None:
    problem = partial(problems.distillation, "0.9*forward_kl + 0.1*jsd(0.5)", "mixture", torch.float64)
    case = Case("metrics", problem, Layout(FOUR))
    outcomes = pool.call(on_shards, case)
    whole = problem()
    assert complaints(case.layout, outcomes, whole, oracle(whole), within=1e-11) == []
    assert isinstance(whole.leaves, Leaves)
    expected = run(linear_objective, whole.leaves, whole.terms, chunk_tokens=16, **whole.options).output.metrics
    assert list(outcomes[0].metrics) == list(expected)
    for name, value in expected.items():
        assert outcomes[0].metrics[name].item() == pytest.approx(value.item(), rel=1e-11), name
