"""Trains only the tokens at which a statistic is large; the statistic is in the tile already.

    weight of a token = 1 / share if statistic ≥ threshold, otherwise 0

The threshold of a step is a quantile of the step before, so a step needs no second pass. `share` is the share of that
step's tokens at or above the threshold: a little more than the wanted share, because the quantile comes from a
histogram with fixed bins, whose tokens are kept or dropped together. The counts are integers, so their sum over
micro-batches and ranks depends neither on the order nor on the packing. A first step, without a step before it, keeps
all tokens.

T tokens, C rows of a chunk, B bins.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from stillhouse.objective.metric_keys import GATE
from stillhouse.objective.signals import Sampled, Signal, SparseSignal, check_per_token
from stillhouse.objective.terms import Distill, Term
from stillhouse.objective.tile.tile import TermResult, Tile
from stillhouse.objective.tile.tile_plan import Plan

GateStatistic = Literal["teacher_entropy", "student_entropy", "divergence"]

#: the bins divide each octave from 2^FIRST to 2^LAST nats into PARTS; the first and the last bin also have all below
#: and above. A bin is 1.6 % wide, or narrower
FIRST, LAST, PARTS = -24, 8, 64
BINS = (LAST - FIRST) * PARTS
_MANTISSA = 23 - int(math.log2(PARTS))
_EXPONENT_BIAS = 127


@dataclass(frozen=True)
class TokenGateSettings:
    """keep: the share of tokens to train, between 0 and 1. by: the statistic."""

    keep: float
    by: GateStatistic

    def __post_init__(self) -> None:
        if isinstance(self.keep, bool) or not 0 < self.keep < 1:
            raise ValueError(f"keep={self.keep} of the token gate: expected a number above 0 and below 1")
        if self.by not in get_args(GateStatistic):
            raise ValueError(
                f"by={self.by!r} of the token gate: expected one of {', '.join(get_args(GateStatistic))}"
            )


@dataclass(frozen=True)
class GateThreshold:
    """value: in nats. share: the share of the tokens of the step before at or above the threshold."""

    value: float
    share: float


@dataclass(frozen=True, eq=False)
class TokenGate(Term):
    """The statistic of each row as its value, which is only reported, and the rows' factors for all other terms.

    distilled: the objective's divergences. "teacher_entropy" is that of the first one, whose signal must be dense;
        "divergence" is their sum, with the terms' scales and weights per token.
    thresholds_T, shares_T: float32, those of a `GateThreshold` at each row, so that a changed threshold needs no
        newly compiled function; −inf and 1 keep all tokens.
    temperature: of "student_entropy".
    """

    by: GateStatistic
    distilled: tuple[Distill, ...]
    thresholds_T: Tensor
    shares_T: Tensor
    temperature: float = 1.0
    _: KW_ONLY
    weights_T: Tensor | None = None

    name = GATE
    scale = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_per_token(len(self.thresholds_T), shares_T=self.shares_T)
        signals = [term.signal for term in self.distilled]
        if self.by != "student_entropy" and not signals:
            raise ValueError(f"a token gate by {self.by} without a divergence: expected one in the objective")
        kinds: tuple[type[Signal], ...] = () if self.by == "student_entropy" else (Sampled,)
        kinds += (SparseSignal,) if self.by == "teacher_entropy" else ()
        if refused := [signal for signal in signals if isinstance(signal, kinds)]:
            raise ValueError(
                f"a token gate by {self.by} with {type(refused[0]).__name__}: expected a signal over the full "
                "vocabulary, or by student_entropy"
            )

    @classmethod
    def of(
        cls, settings: TokenGateSettings, terms: Sequence[Term], tokens: Tensor, threshold: GateThreshold | None
    ) -> "TokenGate":
        """Return the gate of an objective's terms. tokens: any tensor [T]. threshold: None keeps all tokens."""
        distilled = tuple(term for term in terms if isinstance(term, Distill))
        value, share = (-math.inf, 1.0) if threshold is None else (threshold.value, threshold.share)
        return cls(
            settings.by,
            distilled,
            torch.full_like(tokens, value, dtype=torch.float32),
            torch.full_like(tokens, share, dtype=torch.float32),
            distilled[0].temperature if distilled else 1.0,
        )

    @property
    def tokens(self) -> int:
        return len(self.thresholds_T)

    def request(self, plan: Plan) -> None:
        if self.by == "student_entropy":
            plan.softmax(self.temperature)
        for term in self.distilled:
            term.request(plan)

    def add_to(self, tile: Tile, weights_C: Tensor) -> TermResult:
        match self.by:
            case "student_entropy":
                return TermResult(tile.entropy(self.temperature), {})
            case "teacher_entropy":
                first = self.distilled[0]
                return TermResult(tile.teacher_entropy(first.signal, first.temperature), {})
        without_gradient, total_C = tile.without_gradient(), torch.zeros_like(weights_C)
        for term in self.distilled:
            value_C = term.scale * term.add_to(without_gradient, weights_C).value_C
            if term.weights_T is not None:
                weights_of_term_C = tile.take(term.weights_T)
                value_C = (value_C * weights_of_term_C).masked_fill(weights_of_term_C == 0, 0.0)
            total_C = total_C + value_C
        return TermResult(total_C, {})

    def factors(self, tile: Tile, statistic_C: Tensor) -> Tensor:
        """Return the rows' factors for the weights of all terms with a scale, [C]."""
        dropped_C = is_below(statistic_C, tile.take(self.thresholds_T))
        return tile.take(self.shares_T).to(statistic_C.dtype).reciprocal().masked_fill(dropped_C, 0.0)


def is_below(statistic_T: Tensor, threshold_T: Tensor | float) -> Tensor:
    """True where a row is dropped. A NaN is not below, so that it is trained and ends the run."""
    return statistic_T.float() < threshold_T


def histogram(statistic_T: Tensor) -> Tensor:
    """Count the statistics in the bins, int64 [B], without the rows of −inf, which do not count."""
    # the bits of positive floats are in the order of the floats, and those of negative ones are negative
    bits_T = statistic_T.float().view(torch.int32) >> _MANTISSA
    bins_T = (bits_T - (_EXPONENT_BIAS + FIRST) * PARTS).clamp(0, BINS - 1)
    counts_B = torch.zeros(BINS, dtype=torch.int64, device=statistic_T.device)
    return counts_B.scatter_add_(0, bins_T.long(), (statistic_T != -math.inf).long())


def threshold_of(counts: Sequence[int], keep: float) -> GateThreshold | None:
    """Return the largest lower border of a bin with at least the share `keep` of all tokens at or above it.

    None: all tokens, because fewer than the share are above the first bin, or because nothing was counted.
    """
    total, above = sum(counts), 0
    for number in range(len(counts) - 1, 0, -1):
        above += counts[number]
        if above and above >= keep * total:
            octave, part = divmod(number, PARTS)
            return GateThreshold(math.ldexp(1 + part / PARTS, FIRST + octave), above / total)
    return None
