"""Jobs for ranks besides one pass over a case: consecutive passes, a layer below the objective, refusals.

T tokens, D student width, V vocabulary.
"""

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from kit.objective_cases import D, T, V, make_labels, make_leaves
from kit.shard_cases import Case, Outcome, engine, local_leaves, on_shards, one_pass, prepared, shard_of
from kit.shard_ranks import Collectives, Rank
from torch import Tensor

from stillhouse.objective import (
    CrossEntropy,
    DenseLogits,
    Distill,
    FullVocab,
    OutputHead,
    VocabShard,
    forward_kl,
    linear_log_probs,
    linear_objective,
    logits_objective,
)
from stillhouse.objective.tile import chunks


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


def refusal(rank: Rank, mistake: str) -> str:
    """Return the engine's error for a mistake that every rank makes."""
    try:
        _MISTAKES[mistake](rank)
    except Exception as error:  # noqa: BLE001 the test says which one it should be
        return f"{type(error).__name__}: {error}"
    return "accepted"


def _borders(*borders: tuple[int, int]) -> Callable[[Rank], None]:
    return lambda rank: _objective(rank, borders[rank.number])


def _objective(
    rank: Rank,
    border: tuple[int, int],
    *,
    rows: int | None = None,
    vocab_size: int | None = None,
    label: int = 3,
    teacher: Callable[[Rank], FullVocab | DenseLogits] | None = None,
    sharded: bool = True,
) -> None:
    start, stop = border
    shard = VocabShard(start, stop, rank.groups[4]) if sharded else None
    weight_VD = torch.zeros(stop - start if rows is None else rows, D)
    head = OutputHead(weight_VD, shard=shard, vocab_size=vocab_size)
    terms: list[Any] = [CrossEntropy(torch.full((T,), label))]
    terms += [Distill(teacher(rank), forward_kl())] if teacher else []
    linear_objective(torch.zeros(T, D), head, terms)


def _quarter(number: int) -> tuple[int, int]:
    return 10 * number, 10 * number + 10


def _teacher(border: Callable[[Rank], tuple[int, int]], group: Callable[[Rank], Any]) -> Callable[[Rank], FullVocab]:
    def of_rank(rank: Rank) -> FullVocab:
        start, stop = border(rank)
        shard = VocabShard(start, stop, group(rank))
        return FullVocab(torch.zeros(T, 24), OutputHead(torch.zeros(stop - start, 24), shard=shard))

    return of_rank


_HALF = _teacher(lambda rank: (20 * (rank.number % 2), 20 * (rank.number % 2) + 20), lambda rank: rank.pair)
_SAME = _teacher(lambda rank: _quarter(rank.number), lambda rank: rank.groups[4])
_GAP = _teacher(lambda rank: (11 * rank.number, 11 * rank.number + 10), lambda rank: rank.groups[4])

#: each mistake is made by every rank
_MISTAKES: dict[str, Callable[[Rank], None]] = {
    "gap": _borders((0, 10), (10, 20), (21, 30), (30, 40)),
    "overlap": _borders((0, 10), (10, 20), (19, 30), (30, 40)),
    "not from 0": _borders((1, 10), (10, 20), (20, 30), (30, 40)),
    "all rows on every rank": _borders(*4 * [(0, 40)]),
    "rows that are not the shard's": lambda rank: _objective(rank, _quarter(rank.number), rows=11),
    "vocab_size beyond all rows": lambda rank: _objective(rank, _quarter(rank.number), vocab_size=41),
    "label beyond all rows": lambda rank: _objective(rank, _quarter(rank.number), label=40),
    "label in the padding": lambda rank: _objective(rank, _quarter(rank.number), vocab_size=25, label=25),
    "teacher on another group": lambda rank: _objective(rank, _quarter(rank.number), teacher=_HALF),
    "teacher with a gap": lambda rank: _objective(rank, _quarter(rank.number), teacher=_GAP),
    "sharded teacher, whole student": lambda rank: _objective(rank, (0, 40), teacher=_SAME, sharded=False),
    "teacher's columns": lambda rank: _objective(
        rank, _quarter(rank.number), teacher=lambda _: DenseLogits(torch.zeros(T, 13))
    ),
    "columns that are not the shard's": lambda rank: _columns(rank, 11),
}


def _columns(rank: Rank, columns: int) -> None:
    shard = VocabShard(*_quarter(rank.number), rank.groups[4])
    logits_objective(torch.zeros(T, columns), [CrossEntropy(torch.full((T,), 3))], shard=shard)


def some_collectives(rank: Rank, _: None) -> tuple[dict[str, int], int]:
    """Test the counter: call four collectives, one of them in a backward pass."""
    with Collectives() as collectives:
        own = torch.ones(3, requires_grad=True)
        GatherTokens.apply(own[:, None], rank.groups[4]).sum().backward()
        dist.broadcast(torch.zeros(2), 0)
        dist.all_gather([torch.zeros(2) for _ in range(4)], torch.zeros(2))
        dist.all_to_all_single(torch.zeros(4), torch.zeros(4))
    return dict(collectives.counts), collectives.largest


def failing_on_one_rank(rank: Rank, how: str) -> float:
    """A job that fails on one rank, while the others wait in a collective."""
    if how == "raises" and rank.number == 2:
        raise ValueError("the second rank's own words")
    if how == "waits" and rank.number == 1:
        time.sleep(1000)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()
