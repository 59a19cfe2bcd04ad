"""Terms whose value at a row is a function φ of the student's log-probability of the row's label y.

    value = φ(log q_y),   ∂value/∂z_v = φ'(log q_y) · ([v = y] − q_v) / τ

q is the student's probability, z its logits, τ the temperature. In on-policy training, y is sampled from q. Training
then follows the expectation over y of the term's gradient. This is not the gradient of the term's expected value:
these two gradients differ for the estimators k1, k2, k3 of a KL (Schulman 2020).

If a token was sampled with older weights, or by an engine that computes differently, its distribution was q_old and
not q. Weighting by ρ = q(y) / q_old(y) turns an expectation over q_old into an expectation over q, but a few large
ratios would dominate a step. So a `Correction` weights the token by a limited ρ, with q at the temperature of q_old.

C rows of a chunk of T tokens.
"""

import math
from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from stillhouse.objective.expression import check_estimator
from stillhouse.objective.numerics import expect
from stillhouse.objective.policy_parameters import Surrogate
from stillhouse.objective.row_temperatures import RowTemperatures, Temperatures, distinct_temperatures, select_rows
from stillhouse.objective.signals import check_temperature
from stillhouse.objective.terms import LabelTerm, check_scale, labelled
from stillhouse.objective.tile.tile import TermResult, Tile
from stillhouse.objective.tile.tile_plan import TilePlan

CorrectionKind = Literal["none", "truncated", "masked"]


@dataclass(frozen=True)
class Correction:
    """Constant importance weights for tokens whose probability has changed since they were sampled.

    kind: the formula of a token's weight. "truncated": min(ρ, limit), truncated importance sampling (TIS, Yao et al.
        2025). "masked": ρ if 1/limit ≤ ρ ≤ limit, and 0 for any other ρ, as in IcePop (Ring-1T, arXiv:2510.18855).
        "none": 1.
    limit: a number above 1, or infinity for no limit.
    """

    kind: CorrectionKind = "none"
    limit: float = 2.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(CorrectionKind):
            raise ValueError(f"correction {self.kind!r}: expected one of {', '.join(get_args(CorrectionKind))}")
        if isinstance(self.limit, bool) or not self.limit > 1:
            raise ValueError(f"limit={self.limit} of the correction: expected a number above 1 (or math.inf)")

    def weights(self, ratio_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight of each ratio, and a mask of the weights that the limit changed. A ratio can be inf."""
        if self.kind == "none":
            return torch.ones_like(ratio_C), torch.zeros_like(ratio_C, dtype=torch.bool)
        is_changed_C = ratio_C > self.limit
        if self.kind == "truncated":
            return ratio_C.clamp(max=self.limit), is_changed_C
        # with an infinite limit, only an infinite ratio is changed
        is_changed_C = is_changed_C | (ratio_C < 1 / self.limit) | (ratio_C == math.inf)
        return ratio_C.masked_fill(is_changed_C, 0.0), is_changed_C


NO_CORRECTION = Correction()


class SampledTerm(LabelTerm):
    """A term with the value φ(log q) at the labels.

    row_temperatures: a temperature for each row, in place of `temperature`; None if all rows have `temperature`.
    """

    row_temperatures: RowTemperatures | None = None

    @property
    def temperatures(self) -> Temperatures:
        return self.temperature if self.row_temperatures is None else self.row_temperatures

    def request(self, plan: TilePlan) -> None:
        for value in distinct_temperatures(self.temperatures):
            plan.softmax(value)
        plan.logits_at(self.labels_T)

    @abstractmethod
    def of(self, tile: Tile, log_q_C: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return φ(log q), φ'(log q) and further statistics for the metrics, [C] each."""

    def add_to(self, tile: Tile, weights_C: Tensor) -> TermResult:
        label_C = tile.take(self.labels_T)
        has_label_C = label_C >= 0
        log_q_C = _log_probs(tile, self.labels_T, self.temperatures).masked_fill(~has_label_C, 0.0)
        value_C, slope_C, statistics = self.of(tile, log_q_C)
        if tile.needs_gradient and self.scale:
            values, number_C = distinct_temperatures(self.temperatures), _numbers(tile, self.temperatures)
            divided = [weights_C * has_label_C / value for value in values]
            # a row of weight 0 may contain any values, so its slope can be infinite
            weighted_C = expect(select_rows(divided, number_C), slope_C)
            for number, value in enumerate(values):
                here_C = -weighted_C if number_C is None else (-weighted_C).masked_fill(number_C != number, 0.0)
                tile.add_probability(value, here_C)
            tile.add_at(label_C[:, None], weighted_C[:, None])
        statistics = {name: values_C.masked_fill(~has_label_C, 0.0) for name, values_C in statistics.items()}
        return TermResult(value_C.masked_fill(~has_label_C, 0.0), statistics)


@dataclass(frozen=True, eq=False)
class SampledKL(SampledTerm):
    """KL between student q and teacher p, estimated at tokens y that the student sampled; r = log p(y) − log q(y).

    estimator: "k2" is r²/2; its expected on-policy gradient is the gradient of reverse KL, KL(q‖p). "k3" is
        e^r − 1 − r; its expected on-policy gradient is the gradient of forward KL, KL(p‖q), although its expected
        value is the reverse KL. For tokens that another policy sampled, the expected gradients need a correction.
    teacher_log_probs_T: log p(y) at the term's temperature.
    correction: weights each value by a limited ρ = q(y) / q_old(y), which needs old_log_probs_T. It adds the
        statistics `ratio`, which is ρ, and `clipped`, which is 1 where the limit changed the weight.
    old_log_probs_T: log q_old(y) at `sampling_temperature`.
    sampling_temperature: the temperature at which y was sampled, by default the term's temperature.
    label: see `Distill`.
    """

    labels_T: Tensor
    teacher_log_probs_T: Tensor
    estimator: Literal["k2", "k3"] = "k2"
    scale: float = 1.0
    temperature: float = 1.0
    _: KW_ONLY
    weights_T: Tensor | None = None
    correction: Correction = NO_CORRECTION
    old_log_probs_T: Tensor | None = None
    sampling_temperature: Temperatures | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_estimator(self.estimator)
        if self.old_log_probs_T is None and self.correction.kind != "none":
            raise ValueError(
                f"correction={self.correction.kind!r} without old_log_probs_T: expected old_log_probs_T, the "
                "log-probabilities with which the tokens were sampled"
            )
        check_sampled_tokens(
            self.labels_T, teacher_log_probs_T=self.teacher_log_probs_T, old_log_probs_T=self.old_log_probs_T
        )
        for value in distinct_temperatures(self._sampling_temperature):
            check_temperature(value)

    @property
    def _sampling_temperature(self) -> Temperatures:
        return self.temperature if self.sampling_temperature is None else self.sampling_temperature

    @property
    def descends(self) -> str:
        """The divergence whose gradient equals the expected on-policy gradient of the estimator."""
        return "reverse_kl" if self.estimator == "k2" else "forward_kl"

    @property
    def name(self) -> str:
        return labelled(f"sampled_{self.descends}", self.label)

    def request(self, plan: TilePlan) -> None:
        super().request(plan)
        if self.correction.kind != "none":
            for value in distinct_temperatures(self._sampling_temperature):
                plan.softmax(value)

    def of(self, tile: Tile, log_q_C: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        r_C = tile.take(self.teacher_log_probs_T).to(log_q_C.dtype) - log_q_C
        value_C, slope_C = (r_C.square() / 2, -r_C) if self.estimator == "k2" else _k3(r_C)
        if self.correction.kind == "none":
            return value_C, slope_C, {}
        assert self.old_log_probs_T is not None
        sampled_log_q_C = _log_probs(tile, self.labels_T, self._sampling_temperature)
        ratio_C = (sampled_log_q_C - tile.take(self.old_log_probs_T).to(log_q_C.dtype)).exp()
        weight_C, is_limited_C = self.correction.weights(ratio_C)
        statistics = {"ratio": ratio_C, "clipped": is_limited_C.to(log_q_C.dtype)}
        return expect(weight_C, value_C), expect(weight_C, slope_C), statistics


@dataclass(frozen=True, eq=False)
class PolicyGradient(SampledTerm):
    """The clipped surrogate of PPO and GRPO at sampled tokens y, and a penalty for deviating from a reference policy.

    value = −min(ρA, clip(ρ)·A) + kl_scale·(e^r − 1 − r)

    A is the advantage, ρ = q(y) / q_old(y), clip(ρ) is ρ limited to 1 − clip_low … 1 + clip_high, and
    r = log q_ref(y) − log q(y) for the reference policy q_ref
    (Schulman et al. 2017, arXiv:1707.06347, eq. 7; Shao et al. 2024, arXiv:2402.03300, eqs. 3 and 4).

    dual_clip: a number c > 1, or None for no dual clipping. Where A < 0, min(ρA, clip(ρ)·A) is replaced by
        max(min(ρA, clip(ρ)·A), c·A), so that the gradient of a token that has become much more likely stays bounded
        (Ye et al. 2020, arXiv:1912.09729, eq. 5). For c > 1 + clip_high, the value equals
        −min(min(ρ, δ)·A, clip(ρ)·A) with δ = c: the two-sided clipping of INTELLECT-2 (arXiv:2505.07291), and `delta`
        of TRL.
    surrogate: "clip" is the formula above. "cispo" is value = −clip(ρ)·A·log q(y) with clip(ρ) as a constant, so that
        every token keeps a gradient of bounded size (MiniMax-M1, arXiv:2506.13585, eqs. 4 and 5, with clip_low=1).
        "corrected" is value = −w·A·log q(y) without clipping, where w is the constant weight of `correction`.
    sequence_ratios_T: constant ratios that replace ρ, such as the ratios of whole sequences (`sequence_ratios`). The
        derivative of −ρA is still −ρA·∂log q(y). The result is GSPO-token (Zheng et al. 2025, arXiv:2507.18071, eqs.
        13 to 17), which equals GSPO if all tokens of a sequence have the same advantage and weight.

    The penalty is that of GRPO. Its expected on-policy gradient is the gradient of KL(q_ref‖q). For KL(q‖q_ref), use
    kl_scale=0 and add SampledKL(…, "k2") with the reference as the teacher. To use distillation as a reward, set
    advantages_T = log p − log q, with the teacher's probability p. All log-probabilities are at the term's
    temperature.

    Statistics: `ratio` is ρ. `clipped` is 1 where clipping has set the surrogate's gradient to 0 ("clip"), where ρ
    was clipped ("cispo"), or where the limit changed the weight ("corrected"). `reference_kl` is e^r − 1 − r.
    """

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
    dual_clip: float | None = None
    surrogate: Surrogate = "clip"
    correction: Correction = NO_CORRECTION
    sequence_ratios_T: Tensor | None = None
    row_temperatures: RowTemperatures | None = None

    name = "policy_gradient"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sampled_tokens(
            self.labels_T,
            advantages_T=self.advantages_T,
            old_log_probs_T=self.old_log_probs_T,
            reference_log_probs_T=self.reference_log_probs_T,
            sequence_ratios_T=self.sequence_ratios_T,
        )
        if not (0 <= self.clip_low <= 1 and self.clip_high >= 0):
            raise ValueError(
                f"clip_low={self.clip_low}, clip_high={self.clip_high}: expected 0 ≤ clip_low ≤ 1 and clip_high ≥ 0 "
                "(math.inf for no upper limit)"
            )
        if self.surrogate not in get_args(Surrogate):
            raise ValueError(f"surrogate={self.surrogate!r}: expected 'clip', 'cispo' or 'corrected'")
        if self.correction.kind != "none" and self.surrogate != "corrected":
            raise ValueError(
                f"correction={self.correction.kind!r} with surrogate={self.surrogate!r}: expected "
                "surrogate='corrected', because 'clip' and 'cispo' limit the ratio themselves"
            )
        if self.dual_clip is not None and not 1 < self.dual_clip < math.inf:
            raise ValueError(f"dual_clip={self.dual_clip}: expected a number above 1, or None for no bound")
        if self.dual_clip is not None and self.surrogate != "clip":
            raise ValueError(
                f"dual_clip={self.dual_clip} with surrogate={self.surrogate!r}: expected dual_clip=None, because "
                "the gradient of this surrogate is bounded without it"
            )
        if self.kl_scale and self.reference_log_probs_T is None:
            raise ValueError(f"kl_scale={self.kl_scale} without reference_log_probs_T: expected both, or kl_scale=0")
        check_scale(self.kl_scale)

    def of(self, tile: Tile, log_q_C: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        advantage_C = tile.take(self.advantages_T).to(log_q_C.dtype)
        if self.sequence_ratios_T is None:
            ratio_C = (log_q_C - tile.take(self.old_log_probs_T).to(log_q_C.dtype)).exp()
        else:
            ratio_C = tile.take(self.sequence_ratios_T).to(log_q_C.dtype)
        value_C, slope_C, is_clipped_C = self._surrogate(ratio_C, advantage_C, log_q_C)
        statistics = {"ratio": ratio_C, "clipped": is_clipped_C.to(log_q_C.dtype)}
        if self.reference_log_probs_T is not None:
            r_C = tile.take(self.reference_log_probs_T).to(log_q_C.dtype) - log_q_C
            statistics["reference_kl"], penalty_slope_C = _k3(r_C)
            if self.kl_scale:
                value_C = value_C + self.kl_scale * statistics["reference_kl"]
                slope_C = slope_C + self.kl_scale * penalty_slope_C
        return value_C, slope_C, statistics

    def _surrogate(self, ratio_C: Tensor, advantage_C: Tensor, log_q_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the surrogate's value, its derivative with respect to log q, and the statistic `clipped`."""
        if self.surrogate == "corrected":
            weight_C, is_limited_C = self.correction.weights(ratio_C)
            return -expect(weight_C * advantage_C, log_q_C), -weight_C * advantage_C, is_limited_C
        clipped_ratio_C = ratio_C.clamp(1 - self.clip_low, 1 + self.clip_high)
        gain_C, clipped_C = expect(advantage_C, ratio_C), clipped_ratio_C * advantage_C
        if self.surrogate == "cispo":
            return -clipped_C * log_q_C, -clipped_C, clipped_ratio_C != ratio_C
        is_clipped_C, least_C = clipped_C < gain_C, torch.minimum(gain_C, clipped_C)
        if self.dual_clip is not None:
            bound_C = self.dual_clip * advantage_C
            is_beyond_C = (advantage_C < 0) & (bound_C > least_C)
            is_clipped_C, least_C = is_clipped_C | is_beyond_C, torch.where(is_beyond_C, bound_C, least_C)
        return -least_C, -gain_C.masked_fill(is_clipped_C, 0.0), is_clipped_C


@dataclass(frozen=True, eq=False)
class LogRatio(SampledTerm):
    """The metric |log q(y) − log q_old(y)|, a distance of the student from the policy that sampled y.

    old_log_probs_T: log q_old(y) at the term's temperature, which is the sampling temperature.

    The statistic `sampled` is 1 at every row with a value, so that `log_ratio` / `sampled` is a mean.
    """

    labels_T: Tensor
    old_log_probs_T: Tensor
    temperature: float = 1.0
    _: KW_ONLY
    weights_T: Tensor | None = None
    row_temperatures: RowTemperatures | None = None

    name = "log_ratio"
    scale = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sampled_tokens(self.labels_T, old_log_probs_T=self.old_log_probs_T)

    def of(self, tile: Tile, log_q_C: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        value_C = (log_q_C - tile.take(self.old_log_probs_T).to(log_q_C.dtype)).abs()
        return value_C, torch.zeros_like(value_C), {"sampled": torch.ones_like(value_C)}


@dataclass(frozen=True, eq=False)
class LogProb(SampledTerm):
    """A term with the value log q_y, for `linear_log_probs`."""

    labels_T: Tensor
    temperature: float = 1.0
    _: KW_ONLY
    weights_T: Tensor | None = None
    scale: float = 1.0
    row_temperatures: RowTemperatures | None = None

    name = "log_prob"

    def of(self, tile: Tile, log_q_C: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return log_q_C, torch.ones_like(log_q_C), {}


@dataclass(frozen=True, eq=False)
class Continuation(SampledTerm):
    """A term with the value −log q(label), at all tokens of a span after its first (`SpanSignal`).

    Its metric is `continuation`, not cross-entropy, because the value is a part of a divergence. For the options,
    see `Distill`.
    """

    labels_T: Tensor
    scale: float = 1.0
    temperature: float = 1.0
    scale_by_temperature_squared: bool = False
    _: KW_ONLY
    weights_T: Tensor | None = None
    label: str | None = None

    @property
    def name(self) -> str:
        return labelled("continuation", self.label)

    def of(self, tile: Tile, log_q_C: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return -log_q_C * self.factor, torch.full_like(log_q_C, -self.factor), {}


def _log_probs(tile: Tile, labels_T: Tensor, temperatures: Temperatures) -> Tensor:
    """Return log q of each row's label at the row's temperature, [C]."""
    log_probs = [tile.log_probs_at(labels_T, value)[:, 0] for value in distinct_temperatures(temperatures)]
    return select_rows(log_probs, _numbers(tile, temperatures))


def _numbers(tile: Tile, temperatures: Temperatures) -> Tensor | None:
    return tile.take(temperatures.number_T) if isinstance(temperatures, RowTemperatures) else None


def _k3(r_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return e^r − 1 − r and its derivative with respect to log q, where r = log p − log q."""
    return torch.expm1(r_C) - r_C, -torch.expm1(r_C)


def check_sampled_tokens(labels_T: Tensor, **per_token: Tensor | None) -> None:
    """Require that each tensor has one constant number per token, finite at every label. None is skipped."""
    for name, values_T in per_token.items():
        if values_T is None:
            continue
        if values_T.shape != labels_T.shape or not values_T.is_floating_point():
            raise ValueError(
                f"{name} of shape {tuple(values_T.shape)} and dtype {values_T.dtype}: expected ({len(labels_T)},), a "
                "floating-point number per token"
            )
        if values_T.requires_grad:
            raise ValueError(f"{name} requires grad: expected a constant; detach it")
        has_label_T = labels_T >= 0
        if values_T.device.type == "cpu" == labels_T.device.type and not values_T[has_label_T].isfinite().all():
            worst = values_T[has_label_T & ~values_T.isfinite()][0]
            raise ValueError(f"{name} holds {float(worst):g} at a sampled token: expected a finite number")
