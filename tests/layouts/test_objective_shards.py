"""The objective over vocabulary shards in real gloo processes, against plain autograd over the whole vocabulary.

Every rank builds a problem from its name, so that the float64 oracle starts from the same numbers as the ranks.
T tokens, V vocabulary.
"""

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kit import shard_problems as problems
from kit import slow
from kit.objective_cases import (
    ALL_DIVERGENCES,
    ALL_SIGNALS,
    DIVERGENCES_OF_PEAKED_ROWS,
    F_DIVERGENCES,
    HEADS,
    TAILS,
    D,
    Leaves,
    V,
    distance,
    make_labels,
    run,
)
from kit.shard_cases import (
    Borders,
    Case,
    Layout,
    Outcome,
    check,
    complaints,
    cut,
    local_leaves,
    on_shards,
    oracle,
    over,
    shard_of,
)
from kit.shard_problems import FOUR, NARROW, ONE_ROUND, OTHER_TERMS, SHARDS, TWO_ROUNDS
from kit.shard_ranks import GATHER, Failure, Rank, RankPool, shared_pool
from torch import Tensor

from stillhouse.objective import OutputHead, linear_log_probs, linear_objective
from stillhouse.objective.tile import chunks


def in_small_tiles(rank: Rank, case: Case) -> Outcome | None:
    """Run the case with a memory budget of one token's logits, so that tiles have their smallest size."""
    with patch.dict(chunks.TILE_BYTES, cpu=V * 4):
        return on_shards(rank, case)


def log_probs(rank: Rank, case: Case) -> dict[str, Tensor] | None:
    """Return the labels' log-probabilities, the entropies, and the gradients of an objective over all tokens."""
    if rank.number >= len(case.layout.student):
        return None
    problem = case.problem()
    leaves = local_leaves(rank, case.layout, problem)
    shard = shard_of(rank, case.layout.student, case.layout.reduce_hidden_grad)
    head = OutputHead(leaves["weight"], leaves["bias"], shard=shard, **problem.head)
    log_q_T, entropy_T = linear_log_probs(leaves["hidden"], head, make_labels(), temperature=1.3)
    over_all_tokens(log_q_T, entropy_T).backward()
    return {"log_q": log_q_T.detach(), "entropy": entropy_T.detach()} | {n: each.grad for n, each in leaves.items()}


def over_all_tokens(log_q_T: Tensor, entropy_T: Tensor) -> Tensor:
    return (log_q_T.mean() * entropy_T.sum() / 50).tanh() + log_q_T.square().sum()


@pytest.fixture(scope="module")
def pool() -> RankPool:
    return shared_pool()


@pytest.mark.parametrize("signal", ALL_SIGNALS)
def test_every_divergence_on_every_signal(pool: RankPool, signal: str) -> None:
    """With uneven shards, one row, no row, several chunks, and weights of zero; in float64, too."""
    named = {name: partial(problems.distillation, name, signal) for name in ALL_DIVERGENCES}
    check(pool, over(Layout(FOUR), named))
    named = {name: partial(problems.distillation, name, signal, torch.float64) for name in ALL_DIVERGENCES}
    check(pool, over(Layout(NARROW), named), within=1e-11)


def test_every_other_term(pool: RankPool) -> None:
    named = {name: partial(problems.other_term, name) for name in OTHER_TERMS}
    check(pool, [case for n in SHARDS for case in over(Layout(SHARDS[n]), named)])
    named = {name: partial(problems.other_term, name, V, torch.float64) for name in OTHER_TERMS}
    check(pool, over(Layout(FOUR), named), within=1e-11)


def test_an_objective_for_each_origin(pool: RankPool) -> None:
    named = {signal: partial(problems.by_origin, signal) for signal in ("full", "bucket")}
    check(pool, [case for n in SHARDS for case in over(Layout(SHARDS[n]), named)])


@pytest.mark.parametrize(
    "borders",
    [cut(0, 3, 6, 9, 10), cut(0, 3, 6, 8, 10), cut(0, 0, 7, 7, 10), ((6, 9), (0, 3), (9, 10), (3, 6))],
    ids=["ceil", "balanced", "ranks without a row", "ranks in another order"],
)
def test_ten_rows_over_four_ranks(pool: RankPool, borders: Borders) -> None:
    named = {name: partial(problems.other_term, name, 10) for name in OTHER_TERMS}
    for expression in ("forward_kl", "jsd(0.3)", "alpha_beta(0, 0)"):
        for signal in ("full", "dense", "bucket"):
            named[f"{expression} on {signal}"] = partial(problems.distillation, expression, signal, vocabulary=10)
    check(pool, over(Layout(borders), named))


@pytest.mark.parametrize("signal", ["full", "dense", "bucket", "mixture"])
def test_peaked_rows(pool: RankPool, signal: str) -> None:
    """The logits have standard deviation 30: the maxima of two ranks may differ by a hundred."""
    peaked = partial(problems.distillation, signal=signal, sharpness=30.0)
    check(pool, over(Layout(FOUR), {name: partial(peaked, name) for name in DIVERGENCES_OF_PEAKED_ROWS}))


@pytest.mark.parametrize(
    "borders", [cut(0, 4, 8, 9, 10), ((8, 9), (0, 8), (9, 10), (10, 10))], ids=["last", "first and third"]
)
def test_shards_of_padded_rows_alone(pool: RankPool, borders: Borders) -> None:
    named = {
        f"{expression} on {signal}": partial(problems.distillation, expression, signal, vocabulary=10, vocab_size=8)
        for expression in ALL_DIVERGENCES
        for signal in ("full", "bucket")
    }
    check(pool, over(Layout(borders), named))


def test_heads_with_a_scale_a_softcap_and_no_bias(pool: RankPool) -> None:
    heads = {name: tuple(HEADS[name].items()) for name in ("scaled", "capped", "both")}
    named = {
        f"{head}, {bias}": partial(problems.through_head, heads[head], bias) for head in heads for bias in (0, 1)
    }
    check(pool, over(Layout(SHARDS[3]), named))


def test_half_precision(pool: RankPool) -> None:
    """The allowed error is that of one rounding to bfloat16: a sum over ranks is rounded once, not on every rank."""
    make = partial(problems.distillation, dtype=torch.bfloat16)
    divergences = ONE_ROUND + TWO_ROUNDS
    kinds = ("full", "bucket", "mixture")
    named = {f"{name} on {kind}": partial(make, name, kind) for name in divergences for kind in kinds}
    check(pool, over(Layout(FOUR), named), within=3e-3)


#: student borders, and teacher borders over the same rows
TEACHERS: dict[str, Layout] = {
    "equal borders": Layout(FOUR, FOUR),
    "whole": Layout(FOUR, "whole"),
    "other borders": Layout(FOUR, cut(0, 1, 64, 200, V)),
    "rows that nobody has on both sides": Layout(cut(0, 10, 20, 30, V), cut(0, 221, 231, 241, V)),
    "in another order": Layout(FOUR, ((189, V), (0, 63), (126, 189), (63, 126))),
    "both in another order": Layout(((100, V), (0, 100)), ((7, V), (0, 7))),
    "all on one rank": Layout(SHARDS[3], cut(0, 0, V, V)),
    "student on one rank": Layout(cut(0, 0, V, V), SHARDS[3]),
}


def test_teachers_with_other_borders(pool: RankPool) -> None:
    problem = partial(problems.heads_of, V, V, None, None)
    check(pool, [Case(name, problem, layout) for name, layout in TEACHERS.items()])


#: student rows, teacher rows, vocab_size of the student's head and of the teacher's
PADDED: dict[str, tuple[tuple[int, int, int | None, int | None], Layout]] = {
    "padding within a shard": ((V, V, 240, None), Layout(FOUR)),
    "padding over a border": ((V, V, 180, 180), Layout(FOUR)),
    "padding from a border on": ((V, V, 189, None), Layout(FOUR)),
    "two shards of padding": ((V, V, 126, None), Layout(FOUR)),
    "stated by the teacher": ((V, V, None, 180), Layout(FOUR)),
    "student has more rows": ((256, V, None, None), Layout(cut(0, 64, 128, 192, 256), FOUR)),
    "teacher has more rows": ((V, 256, None, None), Layout(FOUR, cut(0, 64, 128, 192, 256))),
    "both are padded": ((256, 300, V, None), Layout(cut(0, 64, 128, 192, 256), cut(0, 75, 150, 225, 300))),
    "student's last shard is padding": ((300, V, None, None), Layout(cut(0, 100, V, 300), SHARDS[3])),
    "teacher's last shards are padding": ((V, 300, None, V), Layout(SHARDS[3], cut(0, 251, 260, 300))),
    "whole teacher with more rows": ((V, 256, 250, None), Layout(SHARDS[3], "whole")),
    "whole teacher with fewer rows": ((256, V, 250, None), Layout(cut(0, 252, 256), "whole")),
}


def test_padded_rows_and_other_row_counts(pool: RankPool) -> None:
    cases = [Case(name, partial(problems.heads_of, *rows), layout) for name, (rows, layout) in PADDED.items()]
    for case, outcomes in zip(cases, check(pool, cases), strict=True):
        vocabulary = min(rows for rows in PADDED[case.name][0] if rows is not None)
        for (start, _), outcome in zip(case.layout.student, outcomes, strict=True):
            padding = slice(max(vocabulary - start, 0), None)
            assert not outcome.gradients["weight"][padding].any(), case.name
            assert not outcome.gradients["bias"][padding].any(), case.name


#: a divergence of each kind of slope; each is also reported by itself
ALL_KINDS = "forward_kl + 0.5*reverse_kl + 0.5*jsd(0.3)"


@pytest.mark.parametrize("tail", [tail if tail == "bucket" else slow(tail) for tail in TAILS])
def test_top_k_ids_anywhere(pool: RankPool, tail: str) -> None:
    """The ids are at every border, repeated, absent, all in one shard, or a whole shard."""
    named = {
        f"ids {ids}, tail sent {sent}": partial(problems.top_k, ids, tail, ALL_KINDS, sent)
        for ids in problems.IDS
        for sent in ([True, False] if tail == "bucket" else [False])
    }
    named["ids in the padding"] = partial(problems.top_k, "at the borders", tail, "forward_kl", True, 126)
    check(pool, over(Layout(FOUR), named))


def test_tokens_that_are_all_in_one_shard(pool: RankPool) -> None:
    ranges = [*((start, stop - 1) for start, stop in FOUR), *((start - 1, start) for start, _ in FOUR[1:]), (63, 63)]
    named = {f"labels {first} to {last}": partial(problems.labelled, first, last) for first, last in ranges}
    check(pool, over(Layout(FOUR), named))


@pytest.mark.parametrize("chunk_tokens", [7, 36, None])
def test_weights_valid_index_and_chunks(pool: RankPool, chunk_tokens: int | None) -> None:
    """A micro-batch whose weights are all zero gives a loss and gradients of exactly 0."""
    named = {
        f"weights: {weights}, valid_index {known}": partial(problems.weighted, weights, known)
        for weights in ("some are zero", "one is not", "all are zero", "none")
        for known in (False, True)
    }
    check(pool, over(Layout(SHARDS[3]), named, chunk_tokens=chunk_tokens))


@pytest.mark.parametrize("borders", [cut(0, 3, V), cut(0, 0, 100, V)], ids=str)
def test_ranks_that_would_choose_different_chunk_sizes(pool: RankPool, borders: Borders) -> None:
    """By its memory budget, a rank with few rows of the head could choose larger chunks than the others."""
    problem = partial(problems.of_tokens, 150)
    case = Case("small tiles", problem, Layout(borders), chunk_tokens=None, counts_collectives=True)
    outcomes = pool.call(in_small_tiles, case)[: len(borders)]
    assert complaints(case.layout, outcomes, problem(), oracle(problem())) == []
    assert outcomes[0].forward[GATHER] > 2


def test_no_tokens_at_all(pool: RankPool) -> None:
    """The result has all its parts, and all of them are zero."""
    one = check(pool, [Case("1 token", partial(problems.of_tokens, 1), Layout(SHARDS[3]))])[0]
    none = pool.call(on_shards, Case("0 tokens", partial(problems.of_tokens, 0), Layout(SHARDS[3])))[:3]
    for full, empty in zip(one, none, strict=True):
        assert empty.loss == 0
        assert empty.metrics.keys() == full.metrics.keys()
        assert not any(empty.metrics.values())
        assert {name: gradient.shape for name, gradient in empty.gradients.items() if name != "hidden"} == {
            name: gradient.shape for name, gradient in full.gradients.items() if name != "hidden"
        }
        assert empty.gradients["hidden"].shape == (0, D)
        assert not any(gradient.any() for gradient in empty.gradients.values())


def test_rows_without_weight_may_hold_anything(pool: RankPool) -> None:
    outcomes = pool.call(on_shards, Case("NaN", problems.with_nan, Layout(FOUR)))
    clean = problems.weighted("some are zero")
    assert complaints(Layout(FOUR), outcomes, clean, oracle(clean)) == []


@pytest.mark.parametrize("teacher", [None, slow("whole")], ids=["its columns", "all columns"])
def test_logits_objective(pool: RankPool, teacher: Any) -> None:
    """Every rank has its columns of the student's logits, and the same or all of the teacher's. Some are −inf."""
    named = {
        f"{expression}, masked: {masked}": partial(problems.from_logits, expression, masked)
        for masked in ("nothing", "columns", "a shard", "tokens' own")
        for expression in F_DIVERGENCES
    }
    for expression in ("forward_kl", "jsd(0.3)", "skew_forward_kl(0.1)", "skew_reverse_kl(0.1)", "total_variation"):
        named[f"{expression}, masked: the teacher's"] = partial(problems.from_logits, expression, "the teacher's")
    check(pool, over(Layout(FOUR, teacher), named))


def test_all_metrics_are_those_of_the_whole_vocabulary(pool: RankPool) -> None:
    """Entropies, agreement, the teacher's mass and the parts of a term have the same names and values."""
    named = {"every term": partial(problems.other_term, "all", V, torch.float64)}
    for signal in ALL_SIGNALS:
        named[signal] = partial(problems.distillation, "0.9*forward_kl + 0.1*jsd(0.5)", signal, torch.float64)
    cases = over(Layout(FOUR), named)
    for case, outcomes in zip(cases, check(pool, cases, within=1e-11), strict=True):
        problem = case.problem()
        assert isinstance(problem.leaves, Leaves)
        options = problem.options | {"chunk_tokens": case.chunk_tokens}
        whole = run(linear_objective, problem.leaves, problem.terms, **options).output.metrics
        assert list(outcomes[0].metrics) == list(whole), case.name
        for name, value in whole.items():
            actual = outcomes[0].metrics[name]
            assert actual == pytest.approx(float(value), rel=1e-11, abs=1e-11), f"{name} of {case.name}"


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
def test_mixtures_of_heads_with_other_row_counts(pool: RankPool, rows: tuple[Any, ...], layout: Layout) -> None:
    named = {name: partial(problems.mixture_of, name, *rows) for name in ("forward_kl", "jsd(0.3)")}
    for outcomes in check(pool, over(layout, named)):
        for (start, _), outcome in zip(layout.student, outcomes, strict=True):
            assert not outcome.gradients["weight"][max((rows[2] or rows[0]) - start, 0) :].any()


@pytest.mark.parametrize("teacher", [None, "whole"], ids=["its columns", "all columns"])
def test_mixtures_with_logits_of_minus_infinity(pool: RankPool, teacher: Any) -> None:
    """A whole shard in which one teacher has no probability, or all columns but one of it, or a few columns."""
    named = {
        f"{expression}, {first} to {last}": partial(problems.masked_mixture, expression, first, last)
        for expression in ("forward_kl", "jsd(0.3)", "total_variation")
        for first, last in ((63, 125), (1, 62), (187, 190))
    }
    check(pool, over(Layout(FOUR, teacher), named))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_layouts(pool: RankPool, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)

    def borders(rows: int, ranks: int) -> Borders:
        held = cut(0, *sorted(torch.randint(0, rows + 1, (ranks - 1,), generator=random).tolist()), rows)
        return tuple(held[place] for place in torch.randperm(ranks, generator=random).tolist())

    cases = []
    for ranks in (2, 3, 4):
        student, teacher, size = torch.randint(20, 60, (3,), generator=random).tolist()
        size = min(student, teacher, size)
        for reduce_hidden_grad in (True, False):
            layout = Layout(borders(student, ranks), borders(teacher, ranks), reduce_hidden_grad)
            problem = partial(problems.heads_of, student, teacher, size, None)
            cases.append(Case(f"vocab_size {size}, {layout}", problem, layout))
    check(pool, cases)


@pytest.mark.slow
@pytest.mark.parametrize("expression", ["jsd(0.3)", "forward_kl"])
def test_shards_of_which_some_are_compiled(pool: RankPool, expression: str) -> None:
    """Pointwise work is compiled from 2048 columns on, so one rank here compiles and the others do not."""
    named = {expression: partial(problems.distillation, expression, "full", vocabulary=3000)}
    answers = pool.run(on_shards, over(Layout(cut(0, 2500, 2600, 3000)), named), limit=300.0)
    for problem, answer in zip(named.values(), answers, strict=True):
        assert not isinstance(answer, Failure), answer
        layout = Layout(cut(0, 2500, 2600, 3000))
        assert complaints(layout, answer[:3], problem(), oracle(problem())) == []


@pytest.mark.parametrize("borders", [SHARDS[2], FOUR, NARROW], ids=str)
def test_log_probs_are_those_of_one_process(pool: RankPool, borders: Borders) -> None:
    """The gradient of an objective over all tokens with respect to the hidden states is summed once."""
    problem = partial(problems.distillation, "forward_kl", "full")
    actual = pool.call(log_probs, Case("log probs", problem, Layout(borders)))
    leaves = problem().leaves
    assert isinstance(leaves, Leaves)
    whole = {name: leaf.double().requires_grad_() for name, leaf in vars(leaves).items()}
    log_q_TV = ((whole["hidden"] @ whole["weight"].T + whole["bias"]) / 1.3).log_softmax(1)
    labels_T = make_labels()
    log_q_T = log_q_TV.gather(1, labels_T.clamp_min(0)[:, None])[:, 0] * (labels_T >= 0)
    entropy_T = -(log_q_TV.exp() * log_q_TV).sum(1)
    over_all_tokens(log_q_T, entropy_T).backward()
    for rank, (start, stop) in enumerate(borders):
        expected = {"log_q": log_q_T, "entropy": entropy_T, "hidden": whole["hidden"].grad}
        expected |= {name: whole[name].grad[start:stop] for name in ("weight", "bias")}
        for name, tensor in expected.items():
            assert distance(actual[rank][name], tensor) < 2e-5, (rank, name)
