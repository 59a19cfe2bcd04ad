"""A run's objective, and its terms for one batch. `expression.py` has the grammar of its expression."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from stillhouse.objective.divergence import Divergence, weighted_parts
from stillhouse.objective.divergence_parameters import PARAMETERS, DivergenceKinds
from stillhouse.objective.divergences import weighted_sum
from stillhouse.objective.expression import expression_fields
from stillhouse.objective.head import OutputHead
from stillhouse.objective.metrics import ADVANTAGES, OLD_LOG_PROBS, SAMPLING
from stillhouse.objective.policy_parameters import PolicySettings
from stillhouse.objective.row_temperatures import RowTemperatures, Temperatures, distinct_temperatures, term_options
from stillhouse.objective.sampled_terms import (
    NO_CORRECTION,
    Continuation,
    Correction,
    LogRatio,
    PolicyGradient,
    SampledKL,
    SampledTerm,
)
from stillhouse.objective.sampled_tokens import SampledTokens, origin_masks
from stillhouse.objective.signals import Mixture, Signal, Signals, SpanSignal
from stillhouse.objective.terms import CrossEntropy, Distill, Entropy, Term


@dataclass(frozen=True)
class TeacherShare:
    """The settings of one of several teachers.

    weight: the factor of the divergence from this teacher or, in a mixture, of the teacher's probabilities.
    temperature: the temperature of the divergence from this teacher, or None for the objective's temperature.
    """

    weight: float = 1.0
    temperature: float | None = None


@dataclass(frozen=True)
class ObjectiveSpec:
    """The objective of a run, without the data of a batch. The coefficient of an absent term is None.

    teachers: the settings of several teachers, by name.
    is_mixture: True for one divergence from the weighted sum of the teachers' probabilities, False for one divergence
        from each teacher.
    teacher_kl: the factor of log p(y) − log q_old(y), the negative k1 estimator of reverse KL, in the advantage. p
        and q_old are at the sampling temperature, also if a divergence has another temperature.
    discount: γ in 0 … 1. teacher_kl · γ^(u−t) times the log-ratio of a later token u is added to token t's advantage.
    correction: the correction of sampled_kl, and of policy_gradient with the surrogate "corrected".
    sampling_temperature: the temperature at which the student samples tokens.
    sampling_temperatures: all temperatures, if the student samples tokens at several. `per_token[SAMPLING]` has the
        index of each row's temperature.
    by_origin: the objective of each origin (`sampled_tokens.py`), in place of the coefficients above. All of these
        objectives must have the same temperatures and scale_by_temperature_squared. Rows of an origin without an
        objective have no loss.
    """

    cross_entropy: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    divergence: Divergence | None = None
    divergence_scale: float = 1.0
    entropy: float | None = None
    temperature: float = 1.0
    scale_by_temperature_squared: bool = False
    sampled_kl: float | None = None
    estimator: Literal["k2", "k3"] = "k2"
    policy_gradient: float | None = None
    policy: PolicySettings = field(default_factory=PolicySettings)
    teacher_kl: float = 0.0
    discount: float = 0.0
    correction: Correction = NO_CORRECTION
    sampling_temperature: float = 1.0
    sampling_temperatures: tuple[float, ...] = ()
    teachers: Mapping[str, TeacherShare] = field(default_factory=dict)
    is_mixture: bool = False
    by_origin: Mapping[str, "ObjectiveSpec"] = field(default_factory=dict)

    @classmethod
    def from_origins(cls, by_origin: Mapping[str, "ObjectiveSpec"]) -> "ObjectiveSpec":
        """Return the objective with one objective for each origin, or one of these objectives if all are equal."""
        first, *others = by_origin.values()
        if all(other == first for other in others):
            return first
        return cls(
            temperature=first.temperature,
            scale_by_temperature_squared=first.scale_by_temperature_squared,
            sampling_temperature=first.sampling_temperature,
            sampling_temperatures=first.sampling_temperatures,
            by_origin=dict(by_origin),
        )

    @property
    def parts(self) -> "list[ObjectiveSpec]":
        """The objectives of all origins, or only this objective."""
        return list(self.by_origin.values()) or [self]

    @property
    def needs_teacher(self) -> bool:
        return any(
            any(term is not None for term in (part.divergence, part.sampled_kl))
            or bool(part.policy_gradient and (part.teacher_kl or part.policy.kl_scale))
            for part in self.parts
        )

    @property
    def needs_rollouts(self) -> bool:
        """True if a term needs tokens that the student has sampled, and their old log-probabilities."""
        return any(part.sampled_kl is not None or part.policy_gradient is not None for part in self.parts)

    @property
    def uses_ratios(self) -> bool:
        """True if a term depends on q / q_old, the ratio of a token's probability now to that at its sampling."""
        return any(
            (part.policy_gradient is not None and part.policy.kind != "corrected")
            or (part.needs_rollouts and part.correction.kind != "none")
            for part in self.parts
        )

    @property
    def needs_rewards(self) -> bool:
        """True if rewards are the only source of advantages. With teacher_kl, rewards are optional."""
        return self.policy_gradient is not None and not self.teacher_kl

    def at_mtp_depths(self) -> "ObjectiveSpec":
        """Return the objective of the MTP depths > 0: without sampled_kl and policy_gradient.

        The two terms need sampled tokens, and tokens are sampled only from depth 0. Raises ValueError if no term
        remains, and for an objective by origin.
        """
        if self.by_origin:
            raise ValueError(
                "an objective by origin for multi-token prediction: expected one objective for all origins at the "
                "depths after the first; set student.mtp.objective"
            )
        rest = replace(self, sampled_kl=None, policy_gradient=None, teacher_kl=0.0, discount=0.0)
        if all(term is None for term in (rest.cross_entropy, rest.divergence, rest.entropy)):
            raise ValueError(
                f"{self.in_words()} at the depths of multi-token prediction after the first: expected an objective "
                "that also has a divergence or cross_entropy, because tokens are sampled only from depth 0; add one, "
                "or set student.mtp.objective"
            )
        return rest

    def terms(
        self,
        labels_T: Tensor,
        signals: Signals,
        per_token: Mapping[str, Tensor] | None = None,
        *,
        document_T: Tensor | None = None,
        valid_index: Tensor | None = None,
        student: OutputHead | None = None,
        hidden_TD: Tensor | None = None,
    ) -> list[Term]:
        """Return the terms for one batch.

        signals: the signals of all teachers that score rows of the batch, by teacher name; empty without teachers.
        per_token: the tensors of `metrics.py` for a batch of rollouts. `OLD_LOG_PROBS` among them adds a `LogRatio`.
        document_T: the document of each row, needed for a discount and for ratio=sequence.
        valid_index: the rows that count, or None for all rows. The sampled terms read only these rows of a signal.
        student: the student's head; needed if it is sharded, if its vocabulary is smaller than a teacher's, and for
            ratio=sequence, which also needs `hidden_TD`, the student's hidden states.

        Raises ValueError if a signal is missing, or belongs to a teacher that the objective does not name.
        """
        self._require_signals(signals, len(labels_T))
        heads = [head for signal in signals.values() for head in signal.heads()]
        tokens = SampledTokens(labels_T, per_token or {}, document_T, valid_index, student, heads, hidden_TD)
        terms = self._terms(tokens, signals)
        if OLD_LOG_PROBS in tokens.per_token and tokens.weights_T is not None:
            old_T = tokens.at_sampled(OLD_LOG_PROBS)
            options = term_options(self._temperatures(tokens))
            terms.append(LogRatio(labels_T, old_T, weights_T=tokens.weights_T, **options))
        return terms

    def _terms(self, tokens: SampledTokens, signals: Signals) -> list[Term]:
        """Return the terms. The terms of an origin have the weight 0 at rows of other origins."""
        labels_T, terms = tokens.labels_T, list[Term]()
        masks = origin_masks(labels_T, tokens.per_token) if self.by_origin else {}
        for origin, part in self.by_origin.items():
            for term in part._terms(tokens, signals):
                mask_T = masks[origin]
                weights_T = mask_T.float() if term.weights_T is None else term.weights_T * mask_T
                # a `SampledTerm` needs no label with its origin, because only the origin "student" has such terms
                if isinstance(term, SampledTerm):
                    terms.append(replace(term, weights_T=weights_T))  # type: ignore[type-var]
                else:
                    terms.append(replace(term, weights_T=weights_T, label=origin))  # type: ignore[type-var]
        if self.by_origin:
            return terms
        if self.cross_entropy is not None:
            # the term's scale also multiplies z-loss, so the coefficient of z-loss is divided by this scale
            settings = (self.cross_entropy, self.label_smoothing, self.z_loss / self.cross_entropy)
            others_T = None if tokens.weights_T is None else 1 - tokens.weights_T
            terms.append(CrossEntropy(labels_T, *settings, weights_T=others_T))
        if self.divergence is not None:
            terms += self._divergence_terms(self.divergence, labels_T, signals)
        if self.entropy is not None:
            terms.append(Entropy(self.entropy, self.temperature))
        if self.sampled_kl is not None:
            old_T = None if self.correction.kind == "none" else tokens.at_sampled(OLD_LOG_PROBS)
            terms += [
                SampledKL(
                    labels_T,
                    tokens.log_probs([signal], temperature),
                    self.estimator,
                    self.sampled_kl * weight,
                    temperature,
                    weights_T=tokens.weights_T,
                    correction=self.correction,
                    old_log_probs_T=old_T,
                    sampling_temperature=None if old_T is None else self._temperatures(tokens),
                    label=label,
                )
                for label, signal, weight, temperature in self._shares(signals, self.temperature)
            ]
        if self.policy_gradient is not None:
            terms.append(self._policy_gradient_term(self.policy_gradient, tokens, signals))
        return terms

    def _require_signals(self, signals: Signals, tokens: int) -> None:
        if not self.needs_teacher:
            return
        if not signals:
            raise ValueError(f"signal is missing: expected a teacher's signal for {tokens} tokens")
        if not self.teachers and len(signals) > 1:
            raise ValueError(
                f"signals of {', '.join(signals)}: expected one signal, or the share of each teacher in `teachers`"
            )
        unknown = signals.keys() - self.teachers.keys() if self.teachers else set()
        # only a mixture needs all signals: without one, a teacher to which no rows are routed sends no signal
        missing = self.teachers.keys() - signals.keys() if self.is_mixture else set()
        if unknown or missing:
            raise ValueError(
                f"signals of {', '.join(signals)}: expected those of {', '.join(self.teachers)}"
                + ", all of which a mixture needs" * self.is_mixture
            )

    def _shares(self, signals: Signals, temperature: float) -> list[tuple[str | None, Signal, float, float]]:
        """Return the label, signal, weight and temperature of each distribution that the student is compared with."""
        if not self.teachers:
            return [(None, signal, 1.0, temperature) for signal in signals.values()]
        shares = [self.teachers[name] for name in signals]
        if self.is_mixture:
            mixture = Mixture(list(signals.values()), [share.weight for share in shares], temperature)
            return [(None, mixture, 1.0, temperature)]
        return [
            (name, signal, share.weight, temperature if share.temperature is None else share.temperature)
            for (name, signal), share in zip(signals.items(), shares, strict=True)
        ]

    def _divergence_terms(self, divergence: Divergence, labels_T: Tensor, signals: Signals) -> list[Term]:
        terms: list[Term] = []
        for label, signal, weight, temperature in self._shares(signals, self.temperature):
            scale, settings = self.divergence_scale * weight, (temperature, self.scale_by_temperature_squared)
            if not isinstance(signal, SpanSignal):
                terms.append(Distill(signal, divergence, scale, *settings, label=label))
                continue
            # `Continuation` is the same for all divergences of a sum, so it is scaled by the sum of coefficients
            total = scale * sum(coefficient for coefficient, _ in weighted_parts(divergence))
            first_T, later_T = signal.first_weights_T, signal.continuation_weights_T
            terms.append(Distill(signal.first, divergence, scale, *settings, weights_T=first_T, label=label))
            terms.append(Continuation(labels_T, total, *settings, weights_T=later_T, label=label))
        return terms

    def _policy_gradient_term(self, scale: float, tokens: SampledTokens, signals: Signals) -> PolicyGradient:
        """Return the term at the sampling temperature, the temperature of the policy that samples the tokens."""
        old_T = tokens.at_sampled(OLD_LOG_PROBS)
        has_rewards = self.needs_rewards or ADVANTAGES in tokens.per_token
        advantages_T = tokens.at_sampled(ADVANTAGES) if has_rewards else None
        reference_T, temperatures, policy = None, self._temperatures(tokens), self.policy
        if self.teacher_kl or policy.kl_scale:
            # an element of `shares` has one teacher's signal at each of the temperatures
            at_temperatures = (self._shares(signals, value) for value in distinct_temperatures(temperatures))
            shares = list(zip(*at_temperatures, strict=True))
            if policy.kl_scale and len(shares) > 1:
                raise ValueError(f"kl_scale={policy.kl_scale} with {len(shares)} teachers: expected one teacher")
            for teacher in shares:
                weight = teacher[0][2]
                reference_T = tokens.log_probs([signal for _, signal, *_ in teacher], temperatures)
                if self.teacher_kl:
                    added_T = self.teacher_kl * weight * tokens.log_ratio(reference_T, self.discount)
                    advantages_T = added_T if advantages_T is None else advantages_T + added_T
        assert advantages_T is not None
        clip_low, clip_high = policy.clips
        return PolicyGradient(
            tokens.labels_T,
            advantages_T,
            old_T,
            reference_T if policy.kl_scale else None,
            clip_low=clip_low,
            clip_high=clip_high,
            kl_scale=policy.kl_scale,
            scale=scale,
            weights_T=tokens.weights_T,
            dual_clip=policy.dual_clip,
            surrogate=policy.kind,
            correction=self.correction if policy.kind == "corrected" else NO_CORRECTION,
            sequence_ratios_T=tokens.sequence_ratios(temperatures) if policy.ratio == "sequence" else None,
            **term_options(temperatures),
        )

    def _temperatures(self, tokens: SampledTokens) -> Temperatures:
        values = self.sampling_temperatures or (self.sampling_temperature,)
        return values[0] if len(values) == 1 else RowTemperatures(values, tokens.at_sampled(SAMPLING))

    def in_words(self) -> str:
        """Return the objective in words, for the first lines of a run's output."""
        if self.by_origin:
            return "; ".join(f"{part.in_words()} (origin: {origin})" for origin, part in self.by_origin.items())
        parts = []
        if self.cross_entropy is not None:
            smoothed = f" (label smoothing {self.label_smoothing:g})" if self.label_smoothing else ""
            parts.append(_times(self.cross_entropy, f"cross-entropy{smoothed}"))
        if self.z_loss:
            parts.append(_times(self.z_loss, "z-loss"))
        if self.divergence is not None:
            is_several = any(teacher.temperature is not None for teacher in self.teachers.values())
            value = "" if is_several else f", τ = {self.temperature:g}"
            factor = f"·τ²{value}" if self.scale_by_temperature_squared else ""
            parts.append(_times(self.divergence_scale, f"{self.divergence}{factor} of teacher and student"))
        if self.entropy is not None:
            parts.append(_times(self.entropy, "entropy"))
        correction = self.correction
        corrected = "" if correction.kind == "none" else f", ratio {correction.kind} at {correction.limit:g}"
        if self.sampled_kl is not None:
            descends = "reverse" if self.estimator == "k2" else "forward"
            words = f"sampled KL ({self.estimator}, descends {descends} KL{corrected}) at the student's own tokens"
            parts.append(_times(self.sampled_kl, words))
        if self.policy_gradient is not None:
            words = "advantage from rewards" if self.needs_rewards else "advantage from rewards, if any, and from "
            if self.teacher_kl:
                discounted = f" discounted by {self.discount:g}" if self.discount else ""
                words += _times(self.teacher_kl, f"(log p − log q){discounted} of teacher and student")
            words += self.policy.in_words(corrected)
            parts.append(_times(self.policy_gradient, f"policy gradient ({words})"))
        return " + ".join(parts).replace("+ −", "− ")


def parse_objective(text: str, temperature: float = 1.0, scale_by_temperature_squared: bool = False) -> ObjectiveSpec:
    """Return the objective of an expression (`expression.py`). Raises ValueError where `expression_fields` does."""
    return read_objective(text, PARAMETERS, temperature, scale_by_temperature_squared)


def read_objective(
    text: str, kinds: DivergenceKinds, temperature: float = 1.0, scale_by_temperature_squared: bool = False
) -> ObjectiveSpec:
    """Return the objective of an expression. kinds: the divergences that the expression can name."""
    fields, divergences = expression_fields(text, kinds)
    if divergences:
        total = weighted_sum(divergences, kinds)
        (scale, first), *others = weighted_parts(total)
        # a single divergence keeps its coefficient as the scale, so that its reported value is unscaled
        fields |= {"divergence": total} if others else {"divergence": first, "divergence_scale": scale}
    return ObjectiveSpec(**fields, temperature=temperature, scale_by_temperature_squared=scale_by_temperature_squared)


def _times(coefficient: float, words: str) -> str:
    sign = "−" if coefficient < 0 else ""
    return words if coefficient == 1 else f"{sign}{abs(coefficient):g} × {words}"
