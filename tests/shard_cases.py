"""Objectives over vocabulary shards: what lies on which rank, what the ranks make of it, and what they should have.

A `Case` describes a problem and a `Layout` of its heads. The ranks make the problem for themselves, take their
shards of it and run the engine (`on_shards`); the test makes it too and runs plain autograd in float64 over the whole
vocabulary (`oracle`); `complaints` says where the two differ.

T tokens, V vocabulary.
"""

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal

import torch
from objective_cases import Leaves, Result, converted, distance, run
from shard_ranks import Collectives, Failure, Rank, RankPool
from torch import Tensor

from stillhouse.objective import (
    DenseLogits,
    Distill,
    FullVocab,
    ObjectiveOutput,
    OutputHead,
    Signal,
    Term,
    VocabShard,
    linear_objective,
    logits_objective,
)
from stillhouse.objective.reference import dense_objective

#: (start, stop) of every rank
Borders = tuple[tuple[int, int], ...]
#: the relative error that float32 may have, or twice that of plain float32 autograd over the whole vocabulary
WITHIN = 2e-5


def cut(*points: int) -> Borders:
    """Shards that follow one another: cut(0, 3, 5) is 0:3 and 3:5."""
    return tuple(pairwise(points))


@dataclass(frozen=True)
class Layout:
    """What lies where. teacher: the borders of its heads; "whole": every rank has all rows, or all columns of dense
    logits; None: the student's borders, for dense logits too.
    """

    student: Borders
    teacher: Borders | Literal["whole"] | None = None
    reduce_hidden_grad: bool = True


@dataclass(frozen=True)
class Logits:
    """The leaf of `logits_objective`, [T, V]."""

    logits: Tensor


@dataclass(frozen=True)
class Problem:
    """An objective over the whole vocabulary. head: further arguments of the student's head; options: of the
    objective; frozen: the leaves that take no gradient; upstream: the factor between the loss and what is minimised.
    """

    leaves: Leaves | Logits
    terms: list[Term]
    head: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    upstream: float = 1.0


@dataclass(frozen=True)
class Case:
    """problem: a function of a module, with arguments that read well in a failure."""

    name: str
    problem: "partial[Problem]"
    layout: Layout
    chunk_tokens: int | None = 16
    #: every operation takes its time then
    counts_collectives: bool = False


@dataclass(frozen=True)
class Outcome:
    """What one rank has after a pass; gradients of the leaves as they lie there; collectives where the case counts
    them, with the elements of the largest tensor in any.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    per_token: dict[str, Tensor]
    gradients: dict[str, Tensor]
    forward: Counter[str]
    backward: Counter[str]
    largest: int


def on_shards(rank: Rank, case: Case) -> Outcome | None:
    """A job: the case on this rank; None on a rank that the layout does not count."""
    return one_pass(rank, case, *prepared(rank, case)) if rank.number < len(case.layout.student) else None


def prepared(rank: Rank, case: Case) -> tuple[Problem, list[Term]]:
    """The problem, with its terms as they are on this rank."""
    problem = case.problem()
    return problem, local_terms(rank, case.layout, problem.terms)


def one_pass(rank: Rank, case: Case, problem: Problem, terms: list[Term]) -> Outcome:
    leaves = local_leaves(rank, case.layout, problem)
    forward, backward = Collectives(), Collectives()
    with forward if case.counts_collectives else nullcontext():
        output = engine(rank, case, problem, leaves, terms)
    with backward if case.counts_collectives else nullcontext():
        if output.loss.requires_grad:
            (output.loss * problem.upstream).backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    counts = forward.counts, backward.counts, forward.largest
    return Outcome(output.loss.detach(), dict(output.metrics), dict(output.per_token), gradients, *counts)


def engine(rank: Rank, case: Case, problem: Problem, leaves: dict[str, Tensor], terms: list[Term]) -> ObjectiveOutput:
    shard = shard_of(rank, case.layout.student, case.layout.reduce_hidden_grad)
    if "logits" in leaves:
        return logits_objective(leaves["logits"], terms, shard=shard, **problem.options)
    head = OutputHead(leaves["weight"], leaves.get("bias"), shard=shard, **problem.head)
    return linear_objective(leaves["hidden"], head, terms, chunk_tokens=case.chunk_tokens, **problem.options)


def local_leaves(rank: Rank, layout: Layout, problem: Problem) -> dict[str, Tensor]:
    """Fresh copies of what lies here: all hidden states, the shard's rows of the head, its columns of logits."""
    start, stop = layout.student[rank.number]
    here = {"logits": (slice(None), slice(start, stop)), "hidden": (slice(None),)}
    return {
        name: leaf[here.get(name, (slice(start, stop),))].clone().requires_grad_(name not in problem.frozen)
        for name, leaf in vars(problem.leaves).items()
        if leaf is not None
    }


def shard_of(rank: Rank, borders: Borders, reduce_hidden_grad: bool = True) -> VocabShard:
    """This rank's shard: the same object each time, as a training run has it."""
    return _shard(rank.groups[len(borders)], rank.number, borders, reduce_hidden_grad)


@cache
def _shard(group: Any, number: int, borders: Borders, reduce_hidden_grad: bool) -> VocabShard:
    return VocabShard(*borders[number], group, reduce_hidden_grad)


def local_terms(rank: Rank, layout: Layout, terms: list[Term]) -> list[Term]:
    """The terms with what this rank has of their signals; those that share a signal go on sharing it."""
    whole = {id(signal): signal for term in terms for signal in term.signals()}
    local = {key: _local_signal(rank, layout, signal) for key, signal in whole.items()}
    return [replace(each, signal=local[id(each.signal)]) if isinstance(each, Distill) else each for each in terms]


def _local_signal(rank: Rank, layout: Layout, signal: Signal) -> Signal:
    borders = layout.teacher or layout.student
    if borders == "whole" or not isinstance(signal, FullVocab | DenseLogits):
        return signal
    rows = slice(*borders[rank.number])
    if isinstance(signal, DenseLogits):
        return DenseLogits(signal.logits_TV[:, rows])
    head, bias = signal.head, signal.head.bias
    local = {"weight_VD": head.weight_VD[rows].clone(), "bias": None if bias is None else bias[rows].clone()}
    return replace(signal, head=replace(head, shard=shard_of(rank, borders), **local))


def oracle(problem: Problem) -> Result:
    """Plain autograd in float64 over the whole vocabulary, on the very numbers that the ranks have."""
    double = [converted(each, torch.float64) for each in problem.terms]
    options = {name: converted(each, torch.float64) for name, each in problem.options.items()}
    return plain(replace(problem, leaves=converted(problem.leaves, torch.float64), terms=double, options=options))


def plain(problem: Problem) -> Result:
    """Plain autograd over the whole vocabulary in the problem's own dtype."""
    if isinstance(problem.leaves, Leaves):
        extra = {"head": problem.head, "upstream": problem.upstream, **problem.options}
        return run(dense_objective, problem.leaves, problem.terms, **extra)
    logits_TV = problem.leaves.logits.clone().requires_grad_()
    output = _plain_logits(logits_TV, problem)
    (output.loss * problem.upstream).backward()
    assert logits_TV.grad is not None
    return Result(output, {"logits": logits_TV.grad})


def _plain_logits(logits_TV: Tensor, problem: Problem) -> ObjectiveOutput:
    """An identity for a head gives the reference logits; a masked column is one whose bias is −inf."""
    masked_TV = logits_TV.detach() == -torch.inf
    if (masked_TV != masked_TV[:1]).any():  # masks that differ from token to token have no such head
        return logits_objective(logits_TV, problem.terms, **problem.options)
    bias_V = torch.zeros_like(logits_TV[0]).masked_fill(masked_TV[0], -torch.inf).detach()
    head = OutputHead(torch.eye(logits_TV.shape[1], dtype=logits_TV.dtype), bias_V)
    return dense_objective(logits_TV.masked_fill(masked_TV, 0.0), head, problem.terms, **problem.options)


def flattened(output: Any, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Everything that can be compared. output: anything with a loss, metrics and values per token."""
    return {
        "loss": output.loss.detach(),
        **{f"metrics[{name}]": value for name, value in output.metrics.items()},
        **{f"per_token[{name}]": value for name, value in output.per_token.items()},
        **{f"gradient of {name}": value for name, value in gradients.items()},
    }


def assembled(layout: Layout, outcomes: list[Outcome]) -> list[dict[str, Tensor]]:
    """What each rank would have over the whole vocabulary: shards put together, partial gradients summed."""
    held = sorted(zip(layout.student, outcomes, strict=True), key=lambda each: each[0])
    together = {}
    for name in outcomes[0].gradients:
        parts = [outcome.gradients[name] for _, outcome in held]
        if name != "hidden":
            together[name] = torch.cat(parts, 1 if name == "logits" else 0)
        elif not layout.reduce_hidden_grad:
            together[name] = torch.stack(parts).sum(0)
    return [flattened(each, each.gradients | together) for each in outcomes]


def complaints(
    layout: Layout, outcomes: list[Outcome], problem: Problem, expected: Result, within: float = WITHIN
) -> list[str]:
    """Where the ranks are further from the expected result than `within` or twice what plain autograd is."""
    wanted = flattened(expected.output, expected.gradients)
    wanted = {name: each for name, each in wanted.items() if name.removeprefix("gradient of ") not in problem.frozen}
    ranks = assembled(layout, outcomes)
    found = [f"{name}: missing" for name in wanted for rank in ranks[:1] if name not in rank]
    found += [f"{name}: not expected" for name in ranks[0] if name.startswith("gradient") and name not in wanted]
    errors = {name: _worst(ranks, name, each) for name, each in wanted.items() if name in ranks[0]}
    if not all(error <= within for error in errors.values()):  # NaN is no error that is small enough
        own = flattened(*vars(plain(problem)).values())
        own_errors = {name: distance(own[name], each) for name, each in wanted.items()}
        found += [
            f"{name}: error {error:.1e}, plain autograd {own_errors[name]:.1e}"
            for name, error in errors.items()
            if not error <= max(within, 2 * own_errors[name])
        ]
    return found + _disagreements(layout, ranks)


def _worst(ranks: list[dict[str, Tensor]], name: str, wanted: Tensor) -> float:
    """The largest error of any rank; NaN if there is one."""
    return float(torch.tensor([distance(rank[name], wanted) for rank in ranks], dtype=torch.float64).max())


def _disagreements(layout: Layout, ranks: list[dict[str, Tensor]]) -> list[str]:
    """What is not the same number on every rank, to the last bit: ranks that branch on it would part."""
    return [
        f"{name}: differs between ranks"
        for name, value in ranks[0].items()
        for other in ranks[1:]
        if name not in other or not torch.equal(value, other[name])
    ]


def check(pool: RankPool, cases: list[Case], within: float = WITHIN) -> list[list[Outcome]]:
    """Run the cases on the ranks, hold each against the oracle, and report all that went wrong by name."""
    __tracebackhide__ = True
    answers = pool.run(on_shards, cases, limit=30.0)
    expected: dict[str, tuple[Problem, Result]] = {}
    found, outcomes = [], []
    for case, answer in zip(cases, answers, strict=True):
        if isinstance(answer, Failure):
            found.append(f"{case.name}: {answer.text}")
            continue
        key = repr(case.problem)
        if key not in expected:
            problem = case.problem()
            expected[key] = problem, oracle(problem)
        outcomes.append(answer[: len(case.layout.student)])
        found += [f"{case.name}: {each}" for each in complaints(case.layout, outcomes[-1], *expected[key], within)]
    assert not found, f"{len(found)} complaints about {len(cases)} cases\n" + "\n".join(found)
    return outcomes
