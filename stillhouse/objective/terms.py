"""The terms of an objective: each adds its value and its gradient to one tile of student logits.

A term is data (labels, a signal, a scale). `add_to(tile)` gives its value per token in nats and adds the gradient of
`weight · value` with respect to the tile's logits, so that a sum of terms costs one pass over the tokens.

C rows of a chunk of T tokens, V vocabulary, K ids per token, M sampled ids per token.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

import torch
from torch import Tensor

from stillhouse.objective.divergence import Divergence, ForwardKL, WeightedSum
from stillhouse.objective.head import entropy
from stillhouse.objective.signals import Sampled, Signal, SparseSignal, first_occurrence, teacher_tail
from stillhouse.objective.tile import Tile


@dataclass(frozen=True)
class TermResult:
    """A term's value per row of the chunk, unscaled and unweighted, and what else is worth knowing of each row.

    `parts`: the values that `value_C` is made of, where it is made of several. Which names there are depends on the
    term alone, never on the rows.
    """

    value_C: Tensor
    statistics: dict[str, Tensor]
    parts: dict[str, Tensor] = field(default_factory=dict)


class Term(ABC):
    """A summand of an objective. `weights_T` multiplies the objective's own weights per token."""

    scale: float
    weights_T: Tensor | None

    @property
    @abstractmethod
    def name(self) -> str:
        """The key of its value in metrics."""

    @property
    @abstractmethod
    def tokens(self) -> int | None:
        """T of the tensors it carries; None if it carries none."""

    @abstractmethod
    def add_to(self, tile: Tile, weights_C: Tensor) -> TermResult:
        """Its value on the tile's rows; adds weights_C · ∂value/∂logits to the tile's gradient."""

    def signals(self) -> list[Signal]:
        """The teacher signals that it carries."""
        return []


@dataclass(frozen=True, eq=False)
class CrossEntropy(Term):
    """−log q(label), with label smoothing and z-loss.

    value = (1 − ε)(−log q_y) + ε·mean_v(−log q_v) + z_loss·(log Σ e^logits)²,   ε = label_smoothing

    Row t predicts labels_T[t]; shifting is done where the batch is made. A negative label has no value.
    With smoothing or z-loss the plain −log q_y is reported as well and, with z-loss, its summand.
    """

    labels_T: Tensor
    scale: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    _: KW_ONLY
    weights_T: Tensor | None = None

    def __post_init__(self) -> None:
        if self.labels_T.dim() != 1:
            raise ValueError(f"labels_T of shape {tuple(self.labels_T.shape)}: expected one dim, [tokens]")
        if self.labels_T.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"labels_T of dtype {self.labels_T.dtype}: expected int32 or int64")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing={self.label_smoothing}: expected 0 ≤ label_smoothing < 1")
        if not 0.0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss={self.z_loss}: expected a finite number, 0 or more")
        check_scale(self.scale)

    @property
    def name(self) -> str:
        return "cross_entropy"

    @property
    def tokens(self) -> int:
        return self.labels_T.shape[0]

    def add_to(self, tile: Tile, weights_C: Tensor) -> TermResult:
        label_C, log_q_CV = tile.take(self.labels_T), tile.log_probs(1.0)
        check_labels(label_C, log_q_CV.shape[1])
        has_label_C, label_C1 = label_C >= 0, label_C.clamp(min=0)[:, None].long()
        value_C = -log_q_CV.gather(1, label_C1)[:, 0]
        parts = {"negative_log_likelihood": value_C} if self.label_smoothing or self.z_loss else {}
        if self.label_smoothing:
            value_C = (1 - self.label_smoothing) * value_C - self.label_smoothing * log_q_CV.mean(1)
        if self.z_loss:
            parts["z_loss"] = self.z_loss * tile.log_normalizer_C.square()
            value_C = value_C + parts["z_loss"]
        if tile.needs_gradient:
            tile.add_gradient(self._gradient(tile, label_C1), weights_C * has_label_C)
        parts = {name: part_C.masked_fill(~has_label_C, 0.0) for name, part_C in parts.items()}
        return TermResult(value_C.masked_fill(~has_label_C, 0.0), {}, parts)

    def _gradient(self, tile: Tile, label_C1: Tensor) -> Tensor:
        """q·(1 + 2·z_loss·log Σ e^logits) − ε/V − (1 − ε)·[v = y]"""
        grad_CV = tile.log_probs(1.0).exp()
        if self.z_loss:
            grad_CV *= 1 + 2 * self.z_loss * tile.log_normalizer_C[:, None]
        if self.label_smoothing:
            grad_CV -= self.label_smoothing / grad_CV.shape[1]
        return grad_CV.scatter_add_(1, label_C1, grad_CV.new_full(label_C1.shape, self.label_smoothing - 1))


@dataclass(frozen=True, eq=False)
class Distill(Term):
    """A divergence between the teacher of `signal` and the student, at a temperature that divides both logits.

    `scale_by_temperature_squared` multiplies by τ², which keeps gradients of one size over temperatures.
    Of a sum of divergences each one's value is reported as well, with that τ² and without its coefficient.
    """

    signal: Signal
    divergence: Divergence
    scale: float = 1.0
    temperature: float = 1.0
    scale_by_temperature_squared: bool = False
    _: KW_ONLY
    weights_T: Tensor | None = None

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        check_scale(self.scale)
        signal = self.signal
        if isinstance(signal, SparseSignal) and signal.temperature not in (None, self.temperature):
            raise ValueError(
                f"the teacher's log-probabilities were taken at temperature {signal.temperature}, the term asks for "
                f"{self.temperature}; expected the same: take them again, or set the term's temperature"
            )
        if isinstance(signal, Sampled) and not isinstance(self.divergence, ForwardKL):
            raise ValueError(
                f"sampled teacher ids estimate forward_kl only, not {self.divergence}; send top-k ids for it"
            )

    @property
    def name(self) -> str:
        # what draws can estimate is forward KL plus the teacher's entropy: not a KL, so not under its name
        return "sampled_cross_entropy" if isinstance(self.signal, Sampled) else str(self.divergence)

    @property
    def tokens(self) -> int:
        return self.signal.tokens

    def signals(self) -> list[Signal]:
        return [self.signal]

    def add_to(self, tile: Tile, weights_C: Tensor) -> TermResult:
        factor = self.temperature**2 if self.scale_by_temperature_squared else 1.0
        if isinstance(self.signal, SparseSignal):
            result, grad_CV = _sparse(tile, self.signal.rows(tile.rows), self.divergence, self.temperature)
        elif isinstance(self.signal, Sampled):
            result, grad_CV = _sampled(tile, self.signal.rows(tile.rows), self.temperature)
        else:
            result, grad_CV = _dense(tile, self.signal, self.divergence, self.temperature)
        if grad_CV is not None:
            tile.add_gradient(grad_CV, weights_C * (factor / self.temperature))
        parts = {name: part_C * factor for name, part_C in result.parts.items()}
        return TermResult(result.value_C * factor, result.statistics, parts)


@dataclass(frozen=True, eq=False)
class Entropy(Term):
    """The student's entropy: adds scale × entropy to the loss, so that a bonus has a negative scale."""

    scale: float
    temperature: float = 1.0
    _: KW_ONLY
    weights_T: Tensor | None = None

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        check_scale(self.scale)

    @property
    def name(self) -> str:
        return "entropy"

    @property
    def tokens(self) -> None:
        return None

    def add_to(self, tile: Tile, weights_C: Tensor) -> TermResult:
        entropy_C = tile.entropy(self.temperature)
        if tile.needs_gradient:
            log_q_CV = tile.log_probs(self.temperature)
            grad_CV = log_q_CV.exp() * -(log_q_CV + entropy_C[:, None]).masked_fill(log_q_CV == -math.inf, 0.0)
            tile.add_gradient(grad_CV, weights_C / self.temperature)
        return TermResult(entropy_C, {})


class _Announced(Term):
    """A term whose signature is final and whose maths is not in this version."""

    name = "announced"
    tokens = None

    def __post_init__(self) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} is not in this version of stillhouse; Distill takes TopK and Chosen signals"
        )

    def add_to(self, tile: Tile, weights_C: Tensor) -> TermResult:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class SampledKL(_Announced):
    """KL estimated at sampled tokens. "k2" descends reverse KL on-policy, "k3" forward KL. Not in this version."""

    labels_T: Tensor
    teacher_log_probs_T: Tensor
    estimator: Literal["k2", "k3"] = "k2"
    scale: float = 1.0
    temperature: float = 1.0
    _: KW_ONLY
    weights_T: Tensor | None = None


@dataclass(frozen=True, eq=False)
class PolicyGradient(_Announced):
    """The clipped policy gradient at sampled tokens. Not in this version."""

    labels_T: Tensor
    advantages_T: Tensor
    old_log_probs_T: Tensor
    reference_log_probs_T: Tensor | None = None
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_scale: float = 0.0
    scale: float = 1.0
    temperature: float = 1.0
    _: KW_ONLY
    weights_T: Tensor | None = None


def check_labels(label_C: Tensor, vocabulary: int) -> None:
    """Refuse a label beyond the vocabulary, on a CPU: on a GPU the question alone would wait for it."""
    if label_C.device.type == "cpu" and bool((label_C >= vocabulary).any()):
        raise ValueError(
            f"labels_T holds {int(label_C.max())}: expected labels below {vocabulary}, the size of the vocabulary, "
            "or a negative one where there is nothing to predict"
        )


def check_temperature(temperature: float) -> None:
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature={temperature}: expected a positive number")


def check_scale(scale: float) -> None:
    if isinstance(scale, bool) or not math.isfinite(scale):
        raise ValueError(f"scale={scale}: expected a finite number")


def _through_softmax(q: Tensor, slope: Tensor) -> Tensor:
    """∂D/∂(z/τ) = q·h − q Σ q·h from the slope q·h, over the last dim."""
    return slope - q * slope.sum(-1, keepdim=True)


def _values(divergence: Divergence, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """D of each row and, where it is a sum, each divergence's own value under its expression."""
    if not isinstance(divergence, WeightedSum):
        return divergence.value(log_p, log_q).sum(1), {}
    parts = {str(part): part.value(log_p, log_q).sum(1) for _, part in divergence.parts}
    first, *rest = (weight * parts[str(part)] for weight, part in divergence.parts)
    return sum(rest, start=first), parts


def _dense(
    tile: Tile, signal: Signal, divergence: Divergence, temperature: float
) -> tuple[TermResult, Tensor | None]:
    log_p_CV = tile.teacher_log_probs(signal, temperature)
    log_q_CV = tile.log_probs(temperature)
    value_C, parts = _values(divergence, log_p_CV, log_q_CV)
    grad_CV = None
    if tile.needs_gradient:
        grad_CV = _through_softmax(log_q_CV.exp(), divergence.weighted_slope(log_p_CV, log_q_CV))
    statistics = {
        "student_entropy": tile.entropy(temperature),
        "teacher_entropy": entropy(log_p_CV),
        "agreement": (log_p_CV.argmax(1) == tile.logits_CV.argmax(1)).to(value_C.dtype),
    }
    return TermResult(value_C, statistics, parts), grad_CV


def _sparse(
    tile: Tile, signal: SparseSignal, divergence: Divergence, temperature: float
) -> tuple[TermResult, Tensor | None]:
    """A divergence over the K ids of a row and, with tail "bucket", one outcome more for the rest.

    Absent ids have no mass on either side, which is worth nothing: f(−inf, −inf) = 0, slope 0.
    """
    log_q_CV = tile.log_probs(temperature)
    present_CK = first_occurrence(signal.ids_TK, log_q_CV.shape[1])
    ids_CK = signal.ids_TK.masked_fill(~present_CK, 0).long()
    log_p_CK = signal.log_probs_TK.detach().to(log_q_CV.dtype).masked_fill(~present_CK, -math.inf)
    log_q_CK = log_q_CV.gather(1, ids_CK).masked_fill(~present_CK, -math.inf)
    likeliest_C = signal.ids_TK.gather(1, log_p_CK.argmax(1, keepdim=True))[:, 0]
    statistics = {
        "student_entropy": tile.entropy(temperature),
        "agreement": (likeliest_C == tile.logits_CV.argmax(1)).to(log_q_CV.dtype),
        "teacher_mass": log_p_CK.exp().sum(1),
    }
    outside_CV = None
    if signal.tail == "renormalize":
        log_p_CK, log_q_CK = _conditioned(log_p_CK), _conditioned(log_q_CK)
    elif signal.tail == "bucket":
        outside_CV = _without(log_q_CV, ids_CK, present_CK)
        log_q_tail_C = torch.logsumexp(outside_CV, 1)
        log_p_tail_C = teacher_tail(signal, log_p_CK, log_q_tail_C)
        log_p_CK = torch.cat([log_p_CK, log_p_tail_C[:, None]], 1)
        log_q_CK = torch.cat([log_q_CK, log_q_tail_C[:, None]], 1)
    statistics["teacher_entropy"] = entropy(log_p_CK)
    value_C, parts = _values(divergence, log_p_CK, log_q_CK)
    result = TermResult(value_C, statistics, parts)
    if not tile.needs_gradient:
        return result, None
    slope_CK = divergence.weighted_slope(log_p_CK, log_q_CK)
    if signal.tail == "renormalize":
        grad_CK = _through_softmax(log_q_CK.exp(), slope_CK)
        return result, torch.zeros_like(log_q_CV).scatter_add_(1, ids_CK, grad_CK)
    return result, _sparse_gradient(log_q_CV, ids_CK, slope_CK, outside_CV)


def _sparse_gradient(log_q_CV: Tensor, ids_CK: Tensor, slope_CB: Tensor, outside_CV: Tensor | None) -> Tensor:
    """∂D/∂(z/τ) of a sum over B outcomes b: the K ids and, last, the bucket of `outside_CV` if there is one.

    It is q_v (h_b(v) − Σ_b q_b h_b): the mean, which every token pays; an id's own slope q·h; and the bucket's, which
    the tokens in it share in proportion to q.
    """
    grad_CV = log_q_CV.exp() * -slope_CB.sum(1, keepdim=True)
    grad_CV.scatter_add_(1, ids_CK, slope_CB[:, : ids_CK.shape[1]])
    if outside_CV is not None:
        grad_CV += _conditioned(outside_CV).exp() * slope_CB[:, -1:]
    return grad_CV


def _sampled(tile: Tile, signal: Sampled, temperature: float) -> tuple[TermResult, Tensor | None]:
    log_q_CV = tile.log_probs(temperature)
    present_CM = (signal.ids_TM >= 0) & (signal.ids_TM < log_q_CV.shape[1])
    ids_CM = signal.ids_TM.masked_fill(~present_CM, 0).long()
    p_CM = signal.weights_TM.detach().to(log_q_CV.dtype).masked_fill(~present_CM, 0.0)
    log_q_CM = log_q_CV.gather(1, ids_CM).masked_fill(p_CM == 0, 0.0)
    result = TermResult(-(p_CM * log_q_CM).sum(1), {"student_entropy": tile.entropy(temperature)})
    if not tile.needs_gradient:
        return result, None
    grad_CV = (log_q_CV.exp() * p_CM.sum(1, keepdim=True)).scatter_add_(1, ids_CM, -p_CM)
    return result, grad_CV


def _conditioned(log_probs: Tensor) -> Tensor:
    """Renormalised over the last dim; a row without any mass stays without (−inf, not NaN)."""
    return torch.log_softmax(log_probs, -1).masked_fill(log_probs == -math.inf, -math.inf)


def _without(log_q_CV: Tensor, ids_CK: Tensor, present_CK: Tensor) -> Tensor:
    """The log-probabilities with the present ids taken out (−inf)."""
    taken_CV = torch.zeros_like(log_q_CV, dtype=torch.bool)
    # absent entries carry id 0: scatter with a reduction, so that they never undo a present one
    taken_CV = taken_CV.to(torch.uint8).scatter_reduce_(1, ids_CK, present_CK.to(torch.uint8), "amax").bool()
    return log_q_CV.masked_fill(taken_CV, -math.inf)
