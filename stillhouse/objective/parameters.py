"""The parameters of divergences and policy gradients that an expression can set, with their allowed values.

This file needs no torch, so that a command refuses a misspelt loss before it imports torch. `divergences.py` has the
maths of each divergence, and `PolicyGradient` in `sampled_terms.py` has the maths of policy gradients. The entry
points of the group `stillhouse.divergences` refer to these classes.
"""

import math
from abc import ABC
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, get_args


class Definition(NamedTuple):
    """The texts about a divergence for expressions, error messages and docs/objective.md.

    name: the divergence's name in expressions and metrics. value, slope: formulas of f, and of h up to a constant.
    domain: the allowed parameters. infinite: which probabilities of zero make the divergence infinite.
    example: example parameters, if some are required. synonyms: other projects' names for the divergence.
    """

    name: str
    value: str
    slope: str
    domain: str = ""
    infinite: str = ""
    example: str = ""
    synonyms: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Parameters(ABC):
    """The parameters of a divergence are the fields of a subclass, which is a frozen dataclass."""

    definition: ClassVar[Definition]

    @classmethod
    def divergence(cls) -> Any:
        """Return the `Divergence` class of another package. `DIVERGENCES` has the classes of this package."""
        raise NotImplementedError

    def __str__(self) -> str:
        """The expression that `parse_divergence` turns into this divergence."""
        shown = [
            shortest(value) if field.default is MISSING else f"{field.name}={type(field.default)(value)}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{self.definition.name}({', '.join(shown)})" if shown else self.definition.name

    def require(self, in_domain: bool, reason: str) -> None:
        """Raise ValueError with `reason` unless `in_domain`."""
        if not in_domain:
            raise ValueError(f"{self}: expected {self.definition.domain}; {reason}")


@dataclass(frozen=True)
class ForwardKLParameters(Parameters):
    definition = Definition(
        "forward_kl", "p log(p/q)", "−p/q", infinite="q = 0 < p", synonyms=("kl", "fkl", "kld", "kl_div", "soft_loss")
    )


@dataclass(frozen=True)
class ReverseKLParameters(Parameters):
    definition = Definition(
        "reverse_kl", "q log(q/p)", "log(q/p)", infinite="p = 0 < q", synonyms=("rkl", "mode_seeking")
    )


@dataclass(frozen=True)
class JensenShannonParameters(Parameters):
    definition = Definition(
        "jsd",
        "βp log(p/m) + (1−β) q log(q/m), m = βp + (1−β)q; normalized: divided by β(1−β)",
        "(1−β) log(q/m); normalized: divided by β(1−β)",
        "0 < beta < 1",
        example="0.5",
        synonyms=("js", "gkd"),
    )
    beta: float
    normalized: bool = False

    def __post_init__(self) -> None:
        self.require(0 < self.beta < 1, "use forward_kl or reverse_kl, or normalized=True near 0 or 1")
        if self.normalized not in (True, False):
            raise ValueError(f"jsd(normalized={self.normalized}): expected True or False")


@dataclass(frozen=True)
class _SkewParameters(Parameters):
    alpha: float

    def __post_init__(self) -> None:
        self.require(0 <= self.alpha < 1, "it is zero everywhere at alpha = 1")


class SkewForwardKLParameters(_SkewParameters):
    definition = Definition(
        "skew_forward_kl",
        "p log(p/m), m = αp + (1−α)q",
        "−(1−α) p/m",
        "0 ≤ alpha < 1",
        infinite="q = 0 < p, if α = 0",
        example="0.1",
    )


class SkewReverseKLParameters(_SkewParameters):
    definition = Definition(
        "skew_reverse_kl",
        "q log(q/m), m = (1−α)p + αq",
        "log(q/m) − α q/m",
        "0 ≤ alpha < 1",
        infinite="p = 0 < q, if α = 0",
        example="0.1",
    )


@dataclass(frozen=True)
class TotalVariationParameters(Parameters):
    definition = Definition("total_variation", "½ abs(p − q)", "½ sign(q − p)")


@dataclass(frozen=True)
class AlphaBetaParameters(Parameters):
    definition = Definition(
        "alpha_beta",
        "−(p^α q^β − α/(α+β) p^(α+β) − β/(α+β) q^(α+β)) / (αβ)",
        "−(p^α q^(β−1) − q^(α+β−1)) / α",
        "finite alpha ≥ 0 and beta ≥ 0, or alpha + beta = 0",
        infinite="q = 0 < p, if β = 0; p = 0 < q, if α = 0; both, if α + β = 0",
        example="0.2, 0.7",
    )
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        is_finite = math.isfinite(self.alpha) and math.isfinite(self.beta)
        in_domain = is_finite and (self.alpha + self.beta == 0 or min(self.alpha, self.beta) >= 0)
        self.require(in_domain, "a negative exponent is infinite at a probability of zero")


#: parameters of divergences by their names in expressions
DivergenceKinds = Mapping[str, type[Parameters]]
#: the parameters of this package's divergences. A run's configuration also knows those of other packages
PARAMETERS: DivergenceKinds = {
    kind.definition.name: kind
    for kind in (
        ForwardKLParameters,
        ReverseKLParameters,
        JensenShannonParameters,
        SkewForwardKLParameters,
        SkewReverseKLParameters,
        TotalVariationParameters,
        AlphaBetaParameters,
    )
}


def require_weight(weight: float, part: Parameters) -> None:
    """Require that the weight of a divergence in a sum is a positive number."""
    if isinstance(weight, bool) or not (weight > 0 and math.isfinite(weight)):
        raise ValueError(f"weight {weight} of {part}: expected a positive number")


def shortest(number: float) -> str:
    """Return a short text that reads back as the same number; 1.0 becomes "1"."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


Surrogate = Literal["clip", "cispo", "corrected"]
RatioOf = Literal["token", "sequence"]


@dataclass(frozen=True)
class PolicySettings:
    """clip_low, clip_high: the limits of the surrogates clip and cispo; a limit that is not given is 0.2.
    dual_clip: the bound of the surrogate clip at negative advantages, a number above 1, or None for no bound.
    surrogate: None means "clip" if a limit or dual_clip is given, and "corrected" otherwise.
    ratio: whether a token has its own probability ratio, or the geometric mean over its sequence (GSPO).
    kl_scale: the factor of the penalty e^r − 1 − r with r = log p(y) − log q(y) (GRPO); p is the teacher.

    Raises ValueError for values out of range, and for arguments that have no effect together.
    """

    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    surrogate: Surrogate | None = None
    ratio: RatioOf = "token"
    kl_scale: float = 0.0

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "dual_clip", "kl_scale"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not 0 <= value < math.inf):
                raise _refused(name, value, "a finite number, not below 0")
        if self.clip_low is not None and self.clip_low > 1:
            raise _refused("clip_low", self.clip_low, "0 ≤ clip_low ≤ 1 (1: no lower limit)")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise _refused("dual_clip", self.dual_clip, "a number above 1, such as 3")
        for name, words in (("surrogate", get_args(Surrogate)), ("ratio", get_args(RatioOf))):
            if getattr(self, name) not in (None, *words):
                raise _refused(name, getattr(self, name), f"one of {', '.join(words)}")
        if self.surrogate == "corrected" and self._limits:
            name, value = next(iter(self._limits.items()))
            expected = "surrogate=clip" if name == "dual_clip" else "surrogate=clip or cispo"
            raise _refused(name, value, f"{expected}: the only limit of surrogate=corrected is rollout.limit")
        if self.dual_clip is not None and self.kind != "clip":
            expected = f"none: the gradient of surrogate={self.kind} is bounded already"
            raise _refused("dual_clip", self.dual_clip, expected)

    @property
    def kind(self) -> Surrogate:
        """The given surrogate, or the default."""
        return self.surrogate or ("clip" if self._limits else "corrected")

    @property
    def clips(self) -> tuple[float, float]:
        """clip_low and clip_high, each with its default."""
        return 0.2 if self.clip_low is None else self.clip_low, 0.2 if self.clip_high is None else self.clip_high

    @property
    def _limits(self) -> dict[str, float]:
        limits = {"clip_low": self.clip_low, "clip_high": self.clip_high, "dual_clip": self.dual_clip}
        return {name: value for name, value in limits.items() if value is not None}

    def in_words(self, corrected: str) -> str:
        """Return the words about the ratio and the penalty, for a place after the words about the advantage.

        corrected: the words about the importance correction, for the surrogate "corrected".
        """
        ratio = "ratio" if self.ratio == "token" else "ratio of each sequence"
        (low, high), words = self.clips, corrected.replace("ratio", ratio, 1)
        if self.kind != "corrected":
            words = f", {ratio} clipped to {1 - low:g} … {1 + high:g}"
            words += " (cispo)" if self.kind == "cispo" else ""
            words += f", dual clip {self.dual_clip:g}" if self.dual_clip is not None else ""
        return words + (f", plus {self.kl_scale:g} × k3 penalty to the teacher" if self.kl_scale else "")


def policy_fields(
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    surrogate: Surrogate | None = None,
    ratio: RatioOf = "token",
    kl_scale: float = 0.0,
    teacher_kl: float | None = None,
) -> dict[str, Any]:
    """Return the fields of `ObjectiveSpec` for these arguments of policy_gradient in an expression."""
    if teacher_kl is not None and (isinstance(teacher_kl, bool) or not 0 < teacher_kl < math.inf):
        raise _refused("teacher_kl", teacher_kl, "a positive number; omit teacher_kl to use only rewards")
    policy = PolicySettings(clip_low, clip_high, dual_clip, surrogate, ratio, kl_scale)
    return {"policy": policy, "teacher_kl": teacher_kl or 0.0}


def _refused(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"policy_gradient({name}={value}): expected {expected}")
