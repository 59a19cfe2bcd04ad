"""Objectives over vocabulary shards: the shards of each rank, the ranks' results, and the expected results.

A `Case` describes a problem and a `Layout` of its heads. Each rank builds the problem, takes its shards and runs the
engine (`on_shards`). The test builds the same problem and runs plain autograd in float64 over the whole vocabulary
(`oracle`). `complaints` lists the differences between the two.

T tokens, V vocabulary.
"""

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal

import torch
from kit.objective_cases import Leaves, Result, converted, distance, run
from kit.shard_ranks import Collectives, Failure, Rank, RankPool
from torch import Tensor

from stillhouse.objective import (
    DenseLogits,
    Distill,
    FullVocab,
    Mixture,
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
#: the allowed relative error; twice the error of plain float32 autograd is allowed too, if that is more
WITHIN = 2e-5


def cut(*points: int) -> Borders:
    """Return consecutive shards: cut(0, 3, 5) is 0:3 and 3:5."""
    return tuple(pairwise(points))


@dataclass(frozen=True)
class Layout:
    """The vocabulary shards of each rank.

    teacher: the borders of the teacher's heads or dense logits. "whole": every rank has all of them. None: the
    teacher has the student's borders.
    """

    student: Borders
    teacher: Borders | Literal["whole"] | None = None
    reduce_hidden_grad: bool = True


@dataclass(frozen=True)
class Logits:
    """The logits that `logits_objective` takes, [T, V]."""

    logits: Tensor


@dataclass(frozen=True)
class Problem:
    """An objective over the whole vocabulary.

    head: further arguments of the student's head. options: further arguments of the objective. frozen: the leaves
    without a gradient. upstream: the factor by which the loss is multiplied before backward.
    """

    leaves: Leaves | Logits
    terms: list[Term]
    head: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    upstream: float = 1.0


@dataclass(frozen=True)
class Case:
    """problem: a module's function with plain arguments, so that its repr names the problem and it can be sent."""

    name: str
    problem: "partial[Problem]"
    layout: Layout
    chunk_tokens: int | None = 16
    #: counting slows down every operation
    counts_collectives: bool = False


@dataclass(frozen=True)
class Outcome:
    """One rank's results of a pass.

    gradients: of the leaves on this rank. forward, backward: the number of collectives, if the case counts them.
    largest: the number of elements of the largest tensor in a collective.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    per_token: dict[str, Tensor]
    gradients: dict[str, Tensor]
    forward: Counter[str]
    backward: Counter[str]
    largest: int


def over(layout: Layout, named: dict[str, "partial[Problem]"], **options: Any) -> list[Case]:
    return [Case(name, problem, layout, **options) for name, problem in named.items()]


def on_shards(rank: Rank, case: Case) -> Outcome | None:
    """A job: run the case on this rank. Return None if the layout does not use this rank."""
    return one_pass(rank, case, *prepared(rank, case)) if rank.number < len(case.layout.student) else None


def prepared(rank: Rank, case: Case) -> tuple[Problem, list[Term]]:
    """Return the problem and its terms with this rank's part of their signals."""
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
    """Copy this rank's leaves: all hidden states, the shard's rows of the head, the shard's columns of the logits."""
    start, stop = layout.student[rank.number]
    here = {"logits": (slice(None), slice(start, stop)), "hidden": (slice(None),)}
    return {
        name: leaf[here.get(name, (slice(start, stop),))].clone().requires_grad_(name not in problem.frozen)
        for name, leaf in vars(problem.leaves).items()
        if leaf is not None
    }


def shard_of(rank: Rank, borders: Borders, reduce_hidden_grad: bool = True) -> VocabShard:
    """Return this rank's shard. As in a training run, it is the same object each time."""
    return _shard(rank.groups[len(borders)], rank.number, borders, reduce_hidden_grad)


@cache
def _shard(group: Any, number: int, borders: Borders, reduce_hidden_grad: bool) -> VocabShard:
    return VocabShard(*borders[number], group, reduce_hidden_grad)


def local_terms(rank: Rank, layout: Layout, terms: list[Term]) -> list[Term]:
    """Return the terms with this rank's part of their signals. Terms that shared a signal still share it."""
    whole = {id(signal): signal for term in terms for signal in term.signals()}
    local = {key: _local_signal(rank, layout, signal) for key, signal in whole.items()}
    return [replace(each, signal=local[id(each.signal)]) if isinstance(each, Distill) else each for each in terms]


def _local_signal(rank: Rank, layout: Layout, signal: Signal) -> Signal:
    borders = layout.teacher or layout.student
    if isinstance(signal, Mixture):
        return replace(signal, signals=[_local_signal(rank, layout, each) for each in signal.signals])
    if borders == "whole" or not isinstance(signal, FullVocab | DenseLogits):
        return signal
    rows = slice(*borders[rank.number])
    if isinstance(signal, DenseLogits):
        return DenseLogits(signal.logits_TV[:, rows])
    head, bias = signal.head, signal.head.bias
    local = {"weight_VD": head.weight_VD[rows].clone(), "bias": None if bias is None else bias[rows].clone()}
    return replace(signal, head=replace(head, shard=shard_of(rank, borders), **local))


def oracle(problem: Problem) -> Result:
    """Run plain autograd in float64 over the whole vocabulary, on exactly the ranks' float32 numbers."""
    double = {name: converted(getattr(problem, name), torch.float64) for name in ("leaves", "terms", "options")}
    return plain(replace(problem, **double))


def plain(problem: Problem) -> Result:
    """Run plain autograd over the whole vocabulary in the problem's dtype."""
    if isinstance(problem.leaves, Leaves):
        extra = {"head": problem.head, "upstream": problem.upstream, **problem.options}
        return run(dense_objective, problem.leaves, problem.terms, **extra)
    logits_TV = problem.leaves.logits.clone().requires_grad_()
    output = _plain_logits(logits_TV, problem)
    (output.loss * problem.upstream).backward()
    return Result(output, {"logits": logits_TV.grad})


def _plain_logits(logits_TV: Tensor, problem: Problem) -> ObjectiveOutput:
    """Give the reference logits through an identity as the head; the bias of a masked column is −inf."""
    masked_TV = logits_TV.detach() == -torch.inf
    if (masked_TV != masked_TV[:1]).any():  # no bias can express a mask that differs between tokens
        return logits_objective(logits_TV, problem.terms, **problem.options)
    bias_V = torch.zeros_like(logits_TV[0]).masked_fill(masked_TV[0], -torch.inf).detach()
    head = OutputHead(torch.eye(logits_TV.shape[1], dtype=logits_TV.dtype), bias_V)
    return dense_objective(logits_TV.masked_fill(masked_TV, 0.0), head, problem.terms, **problem.options)


def flattened(output: Any, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return all results by name. output: any object with a loss, metrics and values per token."""
    return {
        "loss": output.loss.detach(),
        **{f"metrics[{name}]": value for name, value in output.metrics.items()},
        **{f"per_token[{name}]": value for name, value in output.per_token.items()},
        **{f"gradient of {name}": value for name, value in gradients.items()},
    }


def assembled(layout: Layout, outcomes: list[Outcome]) -> list[dict[str, Tensor]]:
    """Return each rank's results over the whole vocabulary: concatenate shards and sum partial gradients."""
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
    """List the results whose error is above `within` and above twice the error of plain autograd."""
    wanted = flattened(expected.output, expected.gradients)
    wanted = {name: each for name, each in wanted.items() if name.removeprefix("gradient of ") not in problem.frozen}
    ranks = assembled(layout, outcomes)
    messages = [f"{name}: missing" for name in wanted for rank in ranks[:1] if name not in rank]
    messages += [f"{name}: not expected" for name in ranks[0] if name.startswith("gradient") and name not in wanted]
    errors = {
        # NaN if one of the errors is NaN
        name: float(torch.tensor([distance(rank[name], each) for rank in ranks], dtype=torch.float64).max())
        for name, each in wanted.items()
        if name in ranks[0]
    }
    if not all(error <= within for error in errors.values()):  # written with `not` so that a NaN counts as too large
        own = flattened(*vars(plain(problem)).values())
        own_errors = {name: distance(own[name], each) for name, each in wanted.items()}
        messages += [
            f"{name}: error {error:.1e}, plain autograd {own_errors[name]:.1e}"
            for name, error in errors.items()
            if not error <= max(within, 2 * own_errors[name])
        ]
    # ranks that branch on results which differ by a bit would call other collectives
    return messages + [
        f"{name}: differs between ranks"
        for name, value in ranks[0].items()
        for other in ranks[1:]
        if name not in other or not torch.equal(value, other[name])
    ]


#: problems and their oracles' results, by what makes the problem: many layouts have the same problems
_EXPECTED: dict[str, tuple[Problem, Result]] = {}


def check(pool: RankPool, cases: list[Case], within: float = WITHIN) -> list[list[Outcome]]:
    """Run the cases on the ranks, compare each with the oracle, and report all failed cases by name."""
    __tracebackhide__ = True
    answers = pool.run(on_shards, cases, limit=30.0)
    messages, outcomes = [], []
    for case, answer in zip(cases, answers, strict=True):
        if isinstance(answer, Failure):
            messages.append(f"{case.name}: {answer.text}")
            continue
        outcomes.append(answer[: len(case.layout.student)])
        if (key := repr(case.problem)) not in _EXPECTED:
            problem = case.problem()
            _EXPECTED[key] = problem, oracle(problem)
        errors = complaints(case.layout, outcomes[-1], *_EXPECTED[key], within)
        messages += [f"{case.name}: {error}" for error in errors]
    assert not messages, f"{len(messages)} complaints about {len(cases)} cases\n" + "\n".join(messages)
    return outcomes
