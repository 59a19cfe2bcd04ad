"""A run's objective as one expression: `0.3*cross_entropy + 0.7*jsd(0.5) + 1e-4*z_loss`.

The grammar is that of `parse_divergence` with four more names: `cross_entropy(label_smoothing=…)`, `z_loss`,
`entropy` (an entropy bonus has a negative coefficient) and `uld` (`sorted_l1.py`). All divergences of the sum become
one term, so that they share one pass over the tile; the term's name in metrics is the divergences' expression.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from stillhouse.objective.divergence import DIVERGENCES, Divergence, weighted_parts
from stillhouse.objective.expression import Part, parse_sum, unknown_name
from stillhouse.objective.mixture import Mixture
from stillhouse.objective.several import SeveralSignals
from stillhouse.objective.signals import Signal
from stillhouse.objective.sorted_l1 import SortedL1, SortedTopK
from stillhouse.objective.spans import Continuation, SpanSignal
from stillhouse.objective.terms import CrossEntropy, Distill, Entropy, Term

#: the names of the grammar that are no divergences
OTHERS = ("cross_entropy", "z_loss", "entropy", "uld")


@dataclass(frozen=True)
class TeacherShare:
    """The part of one of several teachers in an objective.

    weight: multiplies its divergence, or, in a mixture, its probabilities. temperature: of its divergence; None: the
    objective's.
    """

    weight: float = 1.0
    temperature: float | None = None


@dataclass(frozen=True)
class ObjectiveSpec:
    """The objective of a run, without the data of a batch.

    teachers: the shares of several teachers, by their names. is_mixture: the student has one divergence, from the
    weighted sum of the teachers' probabilities, instead of one from each teacher.
    """

    cross_entropy: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    divergence: Divergence | None = None
    divergence_scale: float = 1.0
    entropy: float | None = None
    temperature: float = 1.0
    scale_by_temperature_squared: bool = False
    uld: float | None = None
    teachers: Mapping[str, TeacherShare] = field(default_factory=dict)
    is_mixture: bool = False

    @property
    def needs_teacher(self) -> bool:
        return self.divergence is not None or self.uld is not None

    def terms(self, labels_T: Tensor, signal: Signal | None) -> list[Term]:
        """Return the terms for one batch. `signal` may be None only if no term needs a teacher.

        With several teachers, it is `SeveralSignals` of all of them, or of the one to which the rows belong.
        """
        terms: list[Term] = []
        if self.cross_entropy is not None:
            # the term's scale multiplies its whole value, but in the expression z-loss has its own coefficient
            z_loss = self.z_loss / self.cross_entropy
            terms.append(CrossEntropy(labels_T, self.cross_entropy, self.label_smoothing, z_loss))
        if self.divergence is not None:
            assert signal is not None
            terms += self._distill_terms(self.divergence, labels_T, signal)
        if self.uld is not None:
            if not isinstance(signal, SortedTopK):
                raise ValueError(f"uld with {type(signal).__name__}: expected sorted probabilities, SortedTopK")
            settings = (self.uld, self.temperature, self.scale_by_temperature_squared)
            terms.append(SortedL1(signal, *settings, weights_T=signal.weights_T))
        if self.entropy is not None:
            terms.append(Entropy(self.entropy, self.temperature))
        return terms

    def _distill_terms(self, divergence: Divergence, labels_T: Tensor, signal: Signal) -> list[Term]:
        if not isinstance(signal, SeveralSignals):
            return self._of_one_teacher(divergence, labels_T, signal, TeacherShare())
        if self.is_mixture:
            weights = [self.teachers[name].weight for name in signal.named]
            mixture = Mixture(list(signal.named.values()), weights, self.temperature)
            return self._of_one_teacher(divergence, labels_T, mixture, TeacherShare())
        shares = [(name, each, self.teachers[name]) for name, each in signal.named.items()]
        return [
            term
            for name, each, share in shares
            for term in self._of_one_teacher(divergence, labels_T, each, share, label=name)
        ]

    def _of_one_teacher(
        self, divergence: Divergence, labels_T: Tensor, signal: Signal, share: TeacherShare, label: str | None = None
    ) -> list[Term]:
        if isinstance(signal, SortedTopK):
            raise ValueError(f"{divergence} with sorted probabilities: expected uld, which alone needs no ids")
        scale = self.divergence_scale * share.weight
        temperature = self.temperature if share.temperature is None else share.temperature
        squared = self.scale_by_temperature_squared
        if not isinstance(signal, SpanSignal):
            return [Distill(signal, divergence, scale, temperature, squared, label=label)]
        # a sum has its coefficients inside: the continuation has their sum as its scale
        whole = scale * sum(coefficient for coefficient, _ in weighted_parts(divergence))
        first, later_T = signal.first, signal.continuation_weights_T
        return [
            Distill(first, divergence, scale, temperature, squared, weights_T=signal.first_weights_T, label=label),
            Continuation(labels_T, whole, temperature, squared, weights_T=later_T, label=label),
        ]

    def in_words(self) -> str:
        """Return the objective in words, for the first lines of a run's output."""
        parts = []
        if self.cross_entropy is not None:
            smoothed = f" (label smoothing {self.label_smoothing:g})" if self.label_smoothing else ""
            parts.append(_times(self.cross_entropy, f"cross-entropy{smoothed}"))
        if self.z_loss:
            parts.append(_times(self.z_loss, "z-loss"))
        if self.divergence is not None:
            own = any(each.temperature is not None for each in self.teachers.values())
            value = "" if own else f", τ = {self.temperature:g}"
            factor = f"·τ²{value}" if self.scale_by_temperature_squared else ""
            parts.append(_times(self.divergence_scale, f"{self.divergence}{factor} of teacher and student"))
        if self.uld is not None:
            parts.append(_times(self.uld, "distance of the sorted probabilities (ULD) of teacher and student"))
        if self.entropy is not None:
            parts.append(_times(self.entropy, "entropy"))
        return " + ".join(parts).replace("+ −", "− ")


def parse_objective(text: str, temperature: float = 1.0, scale_by_temperature_squared: bool = False) -> ObjectiveSpec:
    """Return the objective of an expression.

    Raises ValueError for an unknown or repeated name, and for a coefficient that is not finite or, except for
    `entropy`, not positive.
    """
    own: dict[str, Part] = {}
    divergences: list[Part] = []
    for part in parse_sum(text):
        if part.name in DIVERGENCES:
            divergences.append(part)
        elif part.name not in OTHERS:
            raise unknown_name(part.name, [*DIVERGENCES, *OTHERS])
        elif part.name in own:
            raise ValueError(f"{part.name} comes twice in {text!r}; expected one coefficient for it")
        else:
            own[part.name] = part
    _check_coefficients(own, text)
    divergence, divergence_scale = _sum_of(divergences)
    return ObjectiveSpec(
        cross_entropy=own["cross_entropy"].coefficient if "cross_entropy" in own else None,
        label_smoothing=own["cross_entropy"].call(_label_smoothing) if "cross_entropy" in own else 0.0,
        z_loss=own["z_loss"].coefficient if "z_loss" in own else 0.0,
        divergence=divergence,
        divergence_scale=divergence_scale,
        entropy=own["entropy"].coefficient if "entropy" in own else None,
        uld=own["uld"].coefficient if "uld" in own else None,
        temperature=temperature,
        scale_by_temperature_squared=scale_by_temperature_squared,
    )


def _check_coefficients(own: dict[str, Part], text: str) -> None:
    for name, part in own.items():
        if not math.isfinite(part.coefficient):
            raise ValueError(f"{part.coefficient:g}*{name} in {text!r}: expected a finite coefficient")
    for name in ("cross_entropy", "z_loss", "uld"):
        if name in own and not own[name].coefficient > 0:
            raise ValueError(f"{own[name].coefficient:g}*{name} in {text!r}: expected a positive coefficient")
    if "z_loss" in own and "cross_entropy" not in own:
        raise ValueError(f"z_loss without cross_entropy in {text!r}: expected both, it steadies the cross-entropy")
    for name in ("z_loss", "entropy", "uld"):
        if name in own and (own[name].arguments or own[name].keywords):
            raise ValueError(f"{name} takes no arguments (in {text!r}); write coefficient*{name}")


def _label_smoothing(label_smoothing: float = 0.0) -> float:
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"cross_entropy(label_smoothing={label_smoothing}): expected 0 ≤ label_smoothing < 1")
    return label_smoothing


def _sum_of(parts: list[Part]) -> tuple[Divergence | None, float]:
    """Return one divergence and its scale.

    A single divergence keeps its coefficient as the scale, so that its reported value is unscaled; a sum has scale 1.
    """
    if not parts:
        return None, 1.0
    made: list[Divergence] = [part.call(DIVERGENCES[part.name]) for part in parts]
    first = parts[0].coefficient * made[0]  # raises ValueError for a weight that is not positive
    if len(parts) == 1:
        return made[0], parts[0].coefficient
    for part, divergence in zip(parts[1:], made[1:], strict=True):
        first = first + part.coefficient * divergence
    return first, 1.0


def _times(coefficient: float, what: str) -> str:
    sign = "−" if coefficient < 0 else ""
    return what if coefficient == 1 else f"{sign}{abs(coefficient):g} × {what}"
