"""The parameters of divergences that an expression can set, with their allowed values.

This file needs no torch, so that a command refuses a misspelt loss before it imports torch. `divergences.py` has the
maths of each divergence. The entry points of the group `stillhouse.divergences` refer to these classes.
"""

import math
from abc import ABC
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, NamedTuple


class Definition(NamedTuple):
    """The texts about a divergence for expressions, error messages and docs/objective.md.

    name: the divergence's name in expressions and metrics.
    value, slope: formulas of the functions f and h of `divergence.py`; the formula of h is up to a constant.
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
        self.require(0 < self.beta < 1, "for 0 or 1, use forward_kl or reverse_kl; near them, use normalized=True")
        if self.normalized not in (True, False):
            raise ValueError(f"jsd(normalized={self.normalized}): expected True or False")


@dataclass(frozen=True)
class _SkewParameters(Parameters):
    alpha: float

    def __post_init__(self) -> None:
        self.require(0 <= self.alpha < 1, "for alpha = 1, the divergence is always zero")


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
        self.require(in_domain, "a probability of zero with a negative exponent is infinite")


#: parameters of divergences by their names in expressions
DivergenceKinds = Mapping[str, type[Parameters]]
#: the parameters of this package's divergences. A run's configuration also knows the divergences of other packages
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


def require_weight(weight: float, part: Parameters | str) -> None:
    """Raise ValueError unless the weight of a divergence in a sum is a positive number.

    part: the divergence, or the path of a user's class.
    """
    if isinstance(weight, bool) or not (weight > 0 and math.isfinite(weight)):
        raise ValueError(f"weight {weight} of {part}: expected a positive number")


def shortest(number: float) -> str:
    """Return a short text that reads back as the same number; 1.0 becomes "1"."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)
