"""Vocabulary shards inside a layout: gradients are summed once, and collectives are counted.

T tokens, D student width, V vocabulary.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit import shard_problems as problems
from kit import slow
from kit.objective_cases import D, Leaves, Result, V, distance, make_leaves, run
from kit.shard_cases import (
    Case,
    Layout,
    Outcome,
    check,
    complaints,
    cut,
    engine,
    local_leaves,
    one_pass,
    oracle,
    over,
    plain,
    prepared,
)
from kit.shard_problems import FOUR, ONE_ROUND, OTHER_TERMS, SHARDS, TOKENS, TWO_ROUNDS
from kit.shard_ranks import EXCHANGE, GATHER, SUM, Failure, Rank, RankPool, shared_pool
from torch import Tensor

from stillhouse.objective import VocabShard, linear_objective


def two_passes(rank: Rank, case: Case) -> tuple[Outcome, Outcome] | None:
    """Run two passes. As in a run's second step, the second pass has the same shards and teacher heads."""
    if rank.number >= len(case.layout.student):
        return None
    ready = prepared(rank, case)
    return one_pass(rank, case, *ready), one_pass(rank, case, *ready)


def after_writing(rank: Rank, case: Case) -> Outcome:
    """Run a pass, double the teacher heads in place, and return the outcome of another pass."""
    problem, terms = prepared(rank, case)
    one_pass(rank, case, problem, terms)
    double_teachers(terms)
    return one_pass(rank, case, problem, terms)


def double_teachers(terms: list[Any]) -> None:
    heads = [head for term in terms for signal in term.signals() for head in signal.heads()]
    for weight_VD in {id(head.weight_VD): head.weight_VD for head in heads}.values():
        weight_VD.mul_(2)


def values_only(rank: Rank, case: Case) -> tuple[Outcome, Outcome] | None:
    with torch.no_grad():
        return two_passes(rank, case)


def two_backwards(rank: Rank, case: Case) -> list[dict[str, Tensor]]:
    """Return the gradients of two backward passes through the same graph."""
    problem, terms = prepared(rank, case)
    leaves = local_leaves(rank, case.layout, problem)
    loss = engine(rank, case, problem, leaves, terms).loss
    names, inputs = zip(*leaves.items(), strict=True)
    passes = [torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2)]
    return [dict(zip(names, gradients, strict=True)) for gradients in passes]


class GatherTokens(torch.autograd.Function):
    """Gather the tokens of all ranks, as sequence parallelism does.

    Backward sums the gradient over the ranks and returns the part of this rank's tokens.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.rows = group, own.shape[0]
        everyone = own.new_empty(own.shape[0] * group.size(), own.shape[1])
        dist.all_gather_into_tensor(everyone, own.contiguous(), group=group)
        return everyone

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.rows * ctx.group.rank() :][: ctx.rows], None


def layer_below_head(rank: Rank, case: Case) -> dict[str, Tensor] | None:
    """Return this rank's gradients of a linear layer below the head: of its input and of its weight.

    Without `reduce_hidden_grad` the layer sees only this rank's tokens, and its weight's gradient is their sum.
    """
    if rank.number >= len(case.layout.student):
        return None
    problem, terms = prepared(rank, case)
    leaves = local_leaves(rank, case.layout, problem)
    tokens_here = tokens_of(rank.number, case)
    input_TD = problem.leaves.hidden[tokens_here].clone().requires_grad_()
    layer_DD = make_layer().requires_grad_()
    hidden_TD = input_TD @ layer_DD
    if not case.layout.reduce_hidden_grad:
        hidden_TD = GatherTokens.apply(hidden_TD, rank.groups[len(case.layout.student)])
    engine(rank, case, problem, leaves | {"hidden": hidden_TD}, terms).loss.backward()
    return {"input": input_TD.grad, "layer": layer_DD.grad, "weight": leaves["weight"].grad}


def make_layer() -> Tensor:
    return make_leaves(D, V, D, dtype=torch.float32, seed=21).hidden / D**0.5


def tokens_of(number: int, case: Case) -> slice:
    """Return the tokens of a rank: all tokens if the layout replicates them, a part under sequence parallelism."""
    tokens, ranks = len(case.problem().leaves.hidden), len(case.layout.student)
    assert tokens % ranks == 0
    return slice(None) if case.layout.reduce_hidden_grad else slice(*(tokens // ranks * (number + n) for n in (0, 1)))


@pytest.fixture(scope="module")
def pool() -> RankPool:
    return shared_pool()


def test_partial_gradients_of_the_hidden_states(pool: RankPool) -> None:
    """With reduce_hidden_grad=False each rank has its shard's part of the gradient; the parts sum to the whole."""
    named: dict[str, Any] = {name: partial(problems.other_term, name) for name in OTHER_TERMS}
    for expression in (*ONE_ROUND, *TWO_ROUNDS):
        for signal in ("full", "bucket"):
            named[f"{expression} on {signal}"] = partial(problems.distillation, expression, signal)
    cases = over(Layout(FOUR, reduce_hidden_grad=False), named)
    for outcomes in check(pool, cases):
        first, second = (outcome.gradients["hidden"] for outcome in outcomes[:2])
        assert distance(first, second) > 0.1


@pytest.mark.parametrize("ranks", SHARDS)
@pytest.mark.parametrize("reduce_hidden_grad", [True, False], ids=["replicated", "sequence parallel"])
def test_a_layer_below_the_head(pool: RankPool, reduce_hidden_grad: bool, ranks: int) -> None:
    """A replicated layer has whole gradients on every rank. Under sequence parallelism, the sum of the ranks' weight
    gradients is the whole one.
    """
    case = Case("below", partial(problems.of_tokens, 36), Layout(SHARDS[ranks], None, reduce_hidden_grad))
    answers = pool.call(layer_below_head, case)[:ranks]
    problem = case.problem()
    assert isinstance(problem.leaves, Leaves)
    input_TD, layer_DD = problem.leaves.hidden, make_layer()
    hidden_grad_TD = oracle(replace(problem, leaves=replace(problem.leaves, hidden=input_TD @ layer_DD))).gradients[
        "hidden"
    ]
    input_grad_TD, layer_grad_DD = hidden_grad_TD @ layer_DD.double().t(), input_TD.double().t() @ hidden_grad_TD
    for number, answer in enumerate(answers):
        assert distance(answer["input"], input_grad_TD[tokens_of(number, case)]) < 2e-5
        if reduce_hidden_grad:
            assert distance(answer["layer"], layer_grad_DD) < 2e-5
    if not reduce_hidden_grad:
        assert distance(sum(answer["layer"] for answer in answers), layer_grad_DD) < 2e-5


@pytest.mark.parametrize("reduce_hidden_grad", [True, False])
def test_a_second_backward_gives_the_same(pool: RankPool, reduce_hidden_grad: bool) -> None:
    case = Case("twice", partial(problems.of_tokens, 10), Layout(FOUR, None, reduce_hidden_grad))
    for first, second in pool.call(two_backwards, case):
        assert first.keys() == second.keys() == {"hidden", "weight", "bias"}
        for name, gradient in first.items():
            assert torch.equal(gradient, second[name]), name


def test_frozen_leaves_and_an_incoming_gradient(pool: RankPool) -> None:
    frozen = [("hidden",), ("weight", "bias"), ("hidden", "weight"), ("bias",)]
    named = {f"frozen {names}": partial(problems.of_tokens, 10, names, -3.0) for names in frozen}
    for case, outcomes in zip(
        cases := over(Layout(FOUR), named, counts_collectives=True), check(pool, cases), strict=True
    ):
        expected = {} if "hidden" in case.problem().frozen else {SUM: 1}
        assert all(outcome.backward == expected for outcome in outcomes), case.name


def counted_passes(pool: RankPool, named: dict[str, Any], job: Any = two_passes) -> dict[str, list[Outcome]]:
    """Return the second pass of the first rank, in one chunk and in two."""
    options = [{"counts_collectives": True, "chunk_tokens": tokens} for tokens in (TOKENS, TOKENS // 2)]
    cases = [case for option in options for case in over(Layout(FOUR), named, **option)]
    answers = pool.run(job, cases, limit=30.0)
    assert not (failed := [answer.text for answer in answers if isinstance(answer, Failure)]), failed
    for answer in answers:
        assert len({tuple(second.forward.items()) for _, second in answer}) == 1
    seconds = [answer[0][1] for answer in answers]
    return {name: [seconds[index], seconds[index + len(named)]] for index, name in enumerate(named)}


#: the collectives of a chunk. Most divergences need both normalisers first. All terms together need no more. A
#: mixture needs one more, which the sums of its three teachers share
GATHERS = {
    **dict.fromkeys(("one round", "sampled ids", "forward_kl on full", "jsd(0.3) on bucket"), 1),
    **dict.fromkeys(("all", "alpha_beta(0, 0) on dense", "forward_kl on mixture"), 2),
    "jsd(0.3) on mixture": 3,
}


@pytest.mark.parametrize("job", [two_passes, slow(values_only)])
def test_collectives_of_a_chunk(pool: RankPool, job: Any) -> None:
    """Values, gradient and metrics share them; backward only sums the hidden states' gradient.

    The divergence of a sparse signal needs only sums and the logits at its ids, which the same collective gathers.
    For each token, a rank sends fewer numbers than its 63 logits.
    """
    named = {name: partial(problems.counted, name) for name in GATHERS}
    backward = Counter({SUM: 1} if job is two_passes else {})
    for name, (in_one, in_two) in counted_passes(pool, named, job).items():
        assert in_one.forward == Counter({GATHER: GATHERS[name]}), name
        assert in_two.forward == Counter({GATHER: 2 * GATHERS[name]}), name
        assert in_one.backward == in_two.backward == backward, name
        assert bool(in_one.gradients) == (job is two_passes), name
        assert in_one.largest <= 4 * TOKENS * 40 or name in ("one round", "all")


@pytest.mark.parametrize("teacher", [cut(0, 7, 77, 177, V), "whole"], ids=["other borders", "whole"])
def test_a_teachers_rows_are_sent_once(pool: RankPool, teacher: Any) -> None:
    """The first pass exchanges the borders and moves the rows; the second pass reuses both."""
    layout = Layout(cut(0, 9, 99, 199, V), teacher)
    case = Case("teacher", partial(problems.heads_of, V, V, None, None), layout, None, True)
    for first, second in pool.call(two_passes, case):
        assert second.forward.keys() == {GATHER}
        assert second.forward[GATHER] <= 2
        once = first.forward - second.forward
        assert once.keys() <= {GATHER, EXCHANGE}
        assert once[GATHER] <= 2
        # two heads, one of them with a bias
        assert once[EXCHANGE] == (0 if teacher == "whole" else 3)


def test_the_rows_of_a_changed_teacher_are_sent_again(pool: RankPool) -> None:
    case = Case("written to", partial(problems.heads_of, V, V, None, None), Layout(FOUR, cut(0, 1, 64, 200, V)))
    outcomes, problem = pool.call(after_writing, case), case.problem()
    double_teachers(problem.terms)
    assert complaints(case.layout, outcomes, problem, oracle(problem)) == []


@pytest.mark.parametrize("rows", [V, 240])
def test_a_group_of_one_is_no_shard(pool: RankPool, rows: int) -> None:
    """With a group of one rank, as without a group, no collective is called, and the results are the same."""
    leaves = make_leaves(dtype=torch.float32)
    terms = problems.other_term("all", rows).terms
    size = {"vocab_size": rows}
    expected = run(linear_objective, leaves, terms, head=size)
    actual = run(linear_objective, leaves, terms, head=size | {"shard": VocabShard(0, V, None)})
    assert torch.equal(actual.output.loss, expected.output.loss)
    assert torch.equal(actual.gradients["hidden"], expected.gradients["hidden"])
    case = Case("one rank", partial(problems.other_term, "all"), Layout(cut(0, V)), counts_collectives=True)
    (outcome,) = check(pool, [case])[0]
    assert not outcome.forward + outcome.backward


def split(layout: Layout, result: Result, share_hidden: bool) -> list[Outcome]:
    """Split the whole vocabulary's result into the outcomes that the ranks would have."""
    output, gradients = result.output, result.gradients
    outcomes = []
    for start, stop in layout.student:
        local = {name: gradient if name == "hidden" else gradient[start:stop] for name, gradient in gradients.items()}
        local["hidden"] = local["hidden"] / (len(layout.student) if share_hidden else 1)
        outcomes.append(
            Outcome(output.loss.detach(), output.metrics, output.per_token, local, Counter(), Counter(), 0)
        )
    return outcomes


@pytest.mark.parametrize("reduce_hidden_grad", [True, False])
def test_mistakes_are_noticed(reduce_hidden_grad: bool) -> None:
    problem, layout = problems.other_term("all"), Layout(FOUR, None, reduce_hidden_grad)
    expected, outcomes = oracle(problem), split(layout, plain(problem), not reduce_hidden_grad)
    good = outcomes[2]

    def changed(rank: int, **fields: Any) -> list[str]:
        made = [replace(outcome, **fields) if place == rank else outcome for place, outcome in enumerate(outcomes)]
        return [each.split(":")[0] for each in complaints(layout, made, problem, expected)]

    assert complaints(layout, outcomes, problem, expected) == []
    assert changed(2, loss=good.loss * (1 + 1e-6)) == ["loss"]
    assert changed(2, loss=good.loss * torch.nan) == ["loss", "loss"]
    rolled = good.per_token | {"entropy": good.per_token["entropy"].roll(1)}
    assert changed(2, per_token=rolled) == 2 * ["per_token[entropy]"]
    lost_row = good.gradients["weight"].clone().index_fill(0, torch.tensor([0]), 0.0)
    assert changed(2, gradients=good.gradients | {"weight": lost_row}) == ["gradient of weight"]
    assert changed(0, gradients={}) != []
    for outcome in outcomes:
        outcome.gradients["hidden"] = outcome.gradients["hidden"] * 4
    (complaint,) = complaints(layout, outcomes, problem, expected)
    assert complaint.startswith("gradient of hidden: error 3.0e+00")
