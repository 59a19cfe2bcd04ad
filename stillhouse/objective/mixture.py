"""A mixture of dense teachers: the weighted mean of their distributions.

    p = Σ_i w_i softmax(z_i / τ),   Σ_i w_i = 1

A pass stores p as one tile of logits τ·log p. The softmax of this tile at temperature τ is p, so terms, statistics
and gradients treat a mixture like any other dense teacher. p is exact: every member is normalized over the whole
vocabulary before it is added.

C rows of a chunk, V vocabulary of this rank, R ranks, X statistics of a row. z_i are the logits of member i.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stillhouse.objective.head import OutputHead
from stillhouse.objective.signals import DenseLogits, FullVocab, Signal, check_temperature
from stillhouse.objective.tile.compiled import pointwise
from stillhouse.objective.tile.local_sums import local_sums, row_blocks
from stillhouse.objective.tile.pointwise import log_mean
from stillhouse.objective.tile.statistics import statistics
from stillhouse.objective.tile.tile_plan import STUDENT, PointwisePlan
from stillhouse.objective.vocab import AsyncAllGather, VocabShard


@dataclass(frozen=True, eq=False)
class Mixture(Signal):
    """The mean of the distributions of several dense teachers, at the temperature of the term.

    signals: `FullVocab` or `DenseLogits`, all over the same tokens.
    weights: a positive number for each signal; they are divided by their sum.
    """

    signals: Sequence[Signal]
    weights: Sequence[float]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        # tuples, because a caller could change a list after these checks
        object.__setattr__(self, "signals", tuple(self.signals))
        object.__setattr__(self, "weights", tuple(self.weights))
        check_temperature(self.temperature)
        if not self.signals or len(self.signals) != len(self.weights):
            raise ValueError(
                f"a mixture of {len(self.signals)} signals with {len(self.weights)} weights: expected one signal or "
                "more, and one weight for each"
            )
        for at, signal in enumerate(self.signals):
            _check_member(f"signals[{at}]", signal, self.tokens)
        for at, weight in enumerate(self.weights):
            if isinstance(weight, bool) or not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"weights[{at}]={weight}: expected a positive number; leave out signals of weight 0")

    @property
    def tokens(self) -> int:
        return self.signals[0].tokens

    @property
    def log_weights(self) -> list[float]:
        """log w_i."""
        logs = [math.log(weight) for weight in self.weights]
        # in log space, so that neither the sum of the weights nor a quotient overflows or underflows
        largest = max(logs)
        total = largest + math.log(math.fsum(math.exp(log - largest) for log in logs))
        return [log - total for log in logs]

    def heads(self) -> list[OutputHead]:
        return [head for signal in self.signals for head in signal.heads()]


def add_members(
    total_CV: Tensor,
    members_CV: Sequence[Tensor],
    log_weights: Sequence[float],
    temperature: float,
    shard: VocabShard | None,
) -> None:
    """Add w_i p_i of these members to the sum over the earlier members, which `total_CV` stores as τ·log(sum).

    members_CV: the members' logits. If the first member is `total_CV` itself, there is no earlier member.
    Over several ranks, one all-gather exchanges the sums of all these members.
    """
    plan = PointwisePlan(temperatures=(temperature,))
    local_CX = torch.cat([local_sums(plan, [member_CV]) for member_CV in members_CV], 1)
    gathered_RCX = AsyncAllGather(local_CX, shard).wait()
    columns = []
    for raw_RCX, log_weight in zip(gathered_RCX.split(len(plan.raw_sums), 2), log_weights, strict=True):
        teacher_rows = statistics(plan, raw_RCX)
        columns += [teacher_rows.references[STUDENT], teacher_rows.student_log_mass[0] - log_weight]
    tiles_CV = list(members_CV)
    if members_CV[0] is not total_CV:
        # the total is added as one more tile; it is already normalized
        tiles_CV = [total_CV, *tiles_CV]
        columns = [torch.zeros_like(columns[0])] * 2 + columns
    rows_CX = torch.stack(columns, 1)
    plan = replace(plan, tiles=len(tiles_CV))
    for block in row_blocks(total_CV):
        pointwise(log_mean, plan, [tile_CV[block] for tile_CV in tiles_CV], rows_CX[block])


def _check_member(name: str, signal: Signal, tokens: int) -> None:
    if isinstance(signal, Mixture):
        raise ValueError(
            f"{name} is a Mixture: expected FullVocab or DenseLogits; give that mixture's own signals instead, with "
            "its weight multiplied into theirs"
        )
    if not isinstance(signal, FullVocab | DenseLogits):
        raise ValueError(
            f"{name} is of type {type(signal).__name__}: expected FullVocab or DenseLogits, which give every token's "
            "probability; give another signal a term of its own"
        )
    if signal.tokens != tokens:
        raise ValueError(
            f"{name} has {signal.tokens} tokens, signals[0] {tokens}; expected one row per token in both"
        )
