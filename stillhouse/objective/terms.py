"""The terms of an objective. A term reads the statistics of a tile of student logits and adds to the tile's gradient.

Before the first chunk, a term requests its statistics (`request`). For each chunk, `add_to(tile)` returns the term's
value per token in nats and adds the gradient of `weight · value` with respect to the tile's logits, as coefficients
per row. So a sum of terms needs only one pass over the tokens.

C rows of a chunk of T tokens. q is the student's probability, τ the temperature, V the size of the vocabulary.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from stillhouse.objective.divergence import Divergence, WeightedSum, weighted_parts
from stillhouse.objective.divergences import ForwardKL, ReverseKL
from stillhouse.objective.numerics import expect, is_readable
from stillhouse.objective.signals import RowIndex, Sampled, Signal, SparseSignal, check_temperature
from stillhouse.objective.sparse import sampled, sparse
from stillhouse.objective.tile.tile import TermResult, Tile
from stillhouse.objective.tile.tile_plan import TilePlan


class Term(ABC):
    """A summand of an objective. `weights_T` is multiplied by the objective's own weights per token."""

    scale: float
    temperature: float = 1.0
    #: if True, the value is multiplied by τ², so that the size of gradients depends little on the temperature
    scale_by_temperature_squared: bool = False
    weights_T: Tensor | None
    #: distinguishes terms of the same class in metrics
    label: str | None = None

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        check_scale(self.scale)

    @property
    @abstractmethod
    def name(self) -> str:
        """The key of the term's value in metrics."""

    @property
    def tokens(self) -> int | None:
        """The number T of rows of the term's tensors; None if the term has no tensors."""
        return None

    @property
    def factor(self) -> float:
        """τ² with `scale_by_temperature_squared`, 1 without it."""
        return self.temperature**2 if self.scale_by_temperature_squared else 1.0

    @abstractmethod
    def request(self, plan: TilePlan) -> None:
        """Request every statistic and every gradient coefficient of a tile that `add_to` uses."""

    def check(self, tile: Tile) -> None:  # noqa: B027 (most terms support all values)
        """Raise ValueError for values on the tile's rows that the term does not support.

        Values are checked only on a CPU, since a check would wait for a GPU.
        """

    @abstractmethod
    def add_to(self, tile: Tile, weights_C: Tensor) -> TermResult:
        """Return the value on the tile's rows, and add weights_C · ∂value/∂logits to the tile's gradient."""

    def signals(self) -> list[Signal]:
        """The term's teacher signals."""
        return []

    def counted(self, rows: RowIndex, weights_C: Tensor) -> Tensor:
        """Return a mask [C] of the rows that have a value, and a non-zero weight in the objective and in the term."""
        return weights_C != 0 if self.weights_T is None else (weights_C != 0) & (self.weights_T[rows] != 0)


class LabelTerm(Term):
    """A term that reads log q at labels_T. A row with a negative label has no value."""

    labels_T: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        labels_T = self.labels_T
        if labels_T.dim() != 1 or labels_T.dtype not in (torch.int32, torch.int64):
            shape_and_type = f"shape {tuple(labels_T.shape)} and dtype {labels_T.dtype}"
            raise ValueError(f"labels_T of {shape_and_type}: expected one id per token, [tokens] of int32 or int64")

    @property
    def tokens(self) -> int:
        return len(self.labels_T)

    def counted(self, rows: RowIndex, weights_C: Tensor) -> Tensor:
        return super().counted(rows, weights_C) & (self.labels_T[rows] >= 0)

    def request(self, plan: TilePlan) -> None:
        plan.softmax(self.temperature)
        plan.logits_at(self.labels_T)

    def check(self, tile: Tile) -> None:
        label_C = tile.take(self.labels_T)
        if is_readable(label_C) and bool((label_C >= tile.vocabulary).any()):
            raise ValueError(
                f"labels_T holds {int(label_C.max())}: expected labels below {tile.vocabulary}, the size of the "
                "vocabulary, or a negative label for a row without a target"
            )


@dataclass(frozen=True, eq=False)
class CrossEntropy(LabelTerm):
    """(1 − ε)(−log q_y) + ε·mean_v(−log q_v) + z_loss·(log Σ e^logits)² for ε = label_smoothing and the label y.

    Row t predicts labels_T[t]: the code that makes the batch has already shifted the labels. A row with a negative
    label has no value. With smoothing or z-loss, the plain −log q_y is a further metric, and so is the z-loss
    summand.
    """

    labels_T: Tensor
    scale: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    _: KW_ONLY
    weights_T: Tensor | None = None
    label: str | None = None

    @property
    def name(self) -> str:
        return labelled("cross_entropy", self.label)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing={self.label_smoothing}: expected 0 ≤ label_smoothing < 1")
        if not 0.0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss={self.z_loss}: expected a finite number, 0 or more")

    def request(self, plan: TilePlan) -> None:
        super().request(plan)
        if self.label_smoothing:
            plan.uniform()

    def add_to(self, tile: Tile, weights_C: Tensor) -> TermResult:
        label_C = tile.take(self.labels_T)
        has_label_C = label_C >= 0
        value_C = -tile.log_probs_at(self.labels_T, self.temperature)[:, 0].masked_fill(~has_label_C, 0.0)
        parts = {"negative_log_likelihood": value_C} if self.label_smoothing or self.z_loss else {}
        if self.label_smoothing:
            value_C = (1 - self.label_smoothing) * value_C - self.label_smoothing * tile.mean_log_prob()
        if self.z_loss:
            parts["z_loss"] = self.z_loss * tile.log_normalizer(1.0).square()
            value_C = value_C + parts["z_loss"]
        if tile.needs_gradient:
            # q·(1 + 2·z_loss·log Σ e^logits) − ε/V − (1 − ε)·[v = y]
            weights_C = weights_C * has_label_C
            z_loss_C = 2 * self.z_loss * tile.log_normalizer(1.0) if self.z_loss else 0.0
            tile.add_probability(1.0, expect(weights_C, torch.ones_like(weights_C) + z_loss_C))
            tile.add_at(label_C[:, None], (weights_C * (self.label_smoothing - 1))[:, None])
            if self.label_smoothing:
                tile.add_uniform(weights_C * -self.label_smoothing)
        parts = {name: part_C.masked_fill(~has_label_C, 0.0) for name, part_C in parts.items()}
        return TermResult(value_C.masked_fill(~has_label_C, 0.0), {}, parts)


@dataclass(frozen=True, eq=False)
class Distill(Term):
    """A divergence between the teacher of `signal` and the student. The temperature divides the logits of both.

    For a sum of divergences, the metrics also have the value of each divergence without its coefficient (multiplied
    by τ² with `scale_by_temperature_squared`). `label`, for example the teacher's name, is appended with a slash to
    the names of the term and its statistics.
    """

    signal: Signal
    divergence: Divergence
    scale: float = 1.0
    temperature: float = 1.0
    scale_by_temperature_squared: bool = False
    _: KW_ONLY
    weights_T: Tensor | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.signal, Signal):
            raise ValueError(
                f"signal is of type {type(self.signal).__name__}: expected the result of a teacher's `signal(ids)`, "
                "or FullVocab(hidden, head), DenseLogits(logits), TopK(…)"
            )
        _require_divergence(self.divergence)
        super().__post_init__()
        if self.label is not None and (not self.label or "#" in self.label):
            raise ValueError(
                f"label={self.label!r}: expected None, or a name without '#' (metrics number terms with '#')"
            )
        signal = self.signal
        signal.require_temperature(self.temperature)
        if isinstance(signal, Sampled) and not isinstance(self.divergence, ForwardKL):
            raise ValueError(
                f"sampled teacher ids with {self.divergence}: expected forward_kl; for another divergence, send "
                "top-k ids"
            )
        if isinstance(signal, SparseSignal) and signal.tail == "zero" and not isinstance(self.divergence, ReverseKL):
            raise ValueError(
                f"tail='zero' with {self.divergence}: expected reverse_kl, the only divergence with this "
                "tail; use the tail 'bucket', or a separate term for reverse_kl"
            )

    @property
    def tokens(self) -> int:
        return self.signal.tokens

    def signals(self) -> list[Signal]:
        return [self.signal]

    @property
    def name(self) -> str:
        # sampled ids estimate forward KL plus the teacher's entropy, which is not a KL and needs another name
        name = "sampled_cross_entropy" if isinstance(self.signal, Sampled) else str(self.divergence)
        return labelled(name, self.label)

    def request(self, plan: TilePlan) -> None:
        plan.softmax(self.temperature)
        match self.signal:
            case Sampled():
                plan.logits_at(self.signal.ids_TM)
            case SparseSignal():
                plan.logits_at(self.signal.ids_TK)
                if self.signal.tail in ("bucket", "zero"):
                    plan.outside(self.signal, self.temperature)
                if self.signal.tail == "zero":
                    plan.entropy(self.temperature)
            case _:
                for _, part in weighted_parts(self.divergence):
                    plan.pair(part, self.signal, self.temperature)

    def add_to(self, tile: Tile, weights_C: Tensor) -> TermResult:
        # the logits are divided by the temperature, so the gradient is divided by it, too
        weights_C = weights_C * (self.factor / self.temperature)
        match self.signal:
            case Sampled():
                result = sampled(tile, self.signal, self.temperature, weights_C)
            case SparseSignal():
                result = sparse(tile, self.signal, self.divergence, self.temperature, weights_C)
            case _:
                result = _dense(tile, self.signal, self.divergence, self.temperature, weights_C)
        parts = {name: part_C * self.factor for name, part_C in result.parts.items()}
        return TermResult(result.value_C * self.factor, result.statistics, parts)


@dataclass(frozen=True, eq=False)
class Entropy(Term):
    """A term that adds scale · entropy of the student to the loss. An entropy bonus has a negative scale."""

    scale: float
    temperature: float = 1.0
    _: KW_ONLY
    weights_T: Tensor | None = None
    label: str | None = None

    @property
    def name(self) -> str:
        return labelled("entropy", self.label)

    def request(self, plan: TilePlan) -> None:
        plan.entropy(self.temperature)

    def add_to(self, tile: Tile, weights_C: Tensor) -> TermResult:
        entropy_C = tile.entropy(self.temperature)
        if tile.needs_gradient:
            # −q (log q + entropy) / τ
            tile.add_log_probability(self.temperature, weights_C / -self.temperature)
            tile.add_probability(self.temperature, expect(weights_C / -self.temperature, entropy_C))
        return TermResult(entropy_C, {})


def require_terms(terms: object) -> None:
    """Require a sequence of terms. A common mistake is a divergence in place of a `Distill` with this divergence."""
    if not isinstance(terms, Sequence):
        raise ValueError(f"terms is of type {type(terms).__name__}: expected a list of terms")
    for at, term in enumerate(terms):
        if not isinstance(term, Term):
            expected = "a subclass of Term, such as CrossEntropy(labels) or Distill(signal, forward_kl())"
            if isinstance(term, Divergence):
                expected = f"Distill(signal, {type(term).__name__}(…)), a term with this divergence"
            raise ValueError(f"terms[{at}] is of type {type(term).__name__}, which is no term: expected {expected}")


def require_attribute(role: str, value: object, name: str, expected: str) -> None:
    """Raise ValueError for a value that lacks an attribute or a method that its role needs."""
    if not hasattr(value, name):
        raise ValueError(f"{role} is of type {type(value).__name__}, which has no `{name}`: expected {expected}")


def _require_divergence(divergence: object) -> None:
    if isinstance(divergence, type) and issubclass(divergence, Divergence):
        name = divergence.__name__
        raise ValueError(f"divergence is the class {name}: expected an object, such as forward_kl(); write {name}(…)")
    if not isinstance(divergence, Divergence):
        raise ValueError(
            f"divergence is of type {type(divergence).__name__}: expected a divergence such as forward_kl() or "
            "jsd(0.5); your own class must be a frozen dataclass that derives from Divergence and has balanced and "
            "balanced_slope"
        )


def labelled(name: str, label: str | None) -> str:
    """Return the name of a value or statistic of a term with this label."""
    return name if label is None else f"{name}/{label}"


def check_scale(scale: float) -> None:
    if isinstance(scale, bool) or not math.isfinite(scale):
        raise ValueError(f"scale={scale}: expected a finite number")


def _dense(tile: Tile, signal: Signal, divergence: Divergence, temperature: float, weights_C: Tensor) -> TermResult:
    parts: dict[str, Tensor] = {}
    value_C = torch.zeros_like(weights_C)
    for coefficient, part in weighted_parts(divergence):
        parts[str(part)], slope_C = tile.divergence(part, signal, temperature)
        value_C = value_C + coefficient * parts[str(part)]
        if tile.needs_gradient:
            tile.add_slope(part, signal, temperature, coefficient * weights_C)
            tile.add_probability(temperature, expect(coefficient * weights_C, -slope_C))
    statistics = {
        "student_entropy": tile.entropy(temperature),
        "teacher_entropy": tile.teacher_entropy(signal, temperature),
        "agreement": tile.agreement(signal),
    }
    return TermResult(value_C, statistics, parts if isinstance(divergence, WeightedSum) else {})
