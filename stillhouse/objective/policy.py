"""The arguments of `policy_gradient(…)` in an expression: the surrogate of PPO, GRPO and GSPO, and a penalty.

    policy_gradient(clip_low=0.2, clip_high=0.28, dual_clip=3)
    policy_gradient(surrogate=cispo, clip_low=1, clip_high=0.5)
    policy_gradient(ratio=sequence, clip_low=3e-4, clip_high=4e-4)

`PolicyGradient` in `sampled_terms.py` has the formulas. This file needs no torch.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from stillhouse.objective.importance_correction import Correction

Surrogate = Literal["clip", "cispo", "corrected"]
RatioOf = Literal["token", "sequence"]


@dataclass(frozen=True)
class PolicySettings:
    """clip_low, clip_high: the limits of the surrogates clip and cispo; a limit that is not given is 0.2.
    dual_clip: a number above 1: the bound of the surrogate clip at negative advantages. None: no bound.
    surrogate: None is "clip" if a limit or dual_clip is given, and "corrected" otherwise.
    ratio: the probability ratio of a token: its own, or the geometric mean over its sequence (GSPO).
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
            raise _refused(name, value, "surrogate=clip or cispo: corrected has no limits but rollout.limit")
        if self.dual_clip is not None and self.kind != "clip":
            expected = f"none: the gradient of surrogate={self.kind} is bounded already"
            raise _refused("dual_clip", self.dual_clip, expected)

    @property
    def kind(self) -> Surrogate:
        """The surrogate."""
        return self.surrogate or ("clip" if self._limits else "corrected")

    @property
    def clips(self) -> tuple[float, float]:
        """clip_low and clip_high, with their default."""
        return 0.2 if self.clip_low is None else self.clip_low, 0.2 if self.clip_high is None else self.clip_high

    @property
    def _limits(self) -> dict[str, float]:
        limits = {"clip_low": self.clip_low, "clip_high": self.clip_high, "dual_clip": self.dual_clip}
        return {name: value for name, value in limits.items() if value is not None}

    def options(self, correction: "Correction") -> dict[str, Any]:
        """Return the arguments of `PolicyGradient`."""
        options: dict[str, Any] = {"surrogate": self.kind, "kl_scale": self.kl_scale}
        if self.kind == "corrected":
            return options | {"correction": correction}
        low, high = self.clips
        return options | {"clip_low": low, "clip_high": high, "dual_clip": self.dual_clip}

    def in_words(self, corrected: str) -> str:
        """Return what follows the advantage in the words of an objective.

        corrected: the words of the importance correction, for the surrogate that has one.
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
        raise ValueError(
            f"policy_gradient(teacher_kl={teacher_kl}): expected a positive number; leave teacher_kl out for rewards "
            "alone"
        )
    policy = PolicySettings(clip_low, clip_high, dual_clip, surrogate, ratio, kl_scale)
    return {"policy": policy, "teacher_kl": teacher_kl or 0.0}


def _refused(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"policy_gradient({name}={value}): expected {expected}")
