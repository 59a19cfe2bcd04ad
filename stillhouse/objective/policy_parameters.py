"""The arguments of `policy_gradient` that an expression can set, with their allowed values; without torch.

`PolicyGradient` in `sampled_terms.py` has the maths.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

Surrogate = Literal["clip", "cispo", "corrected"]
RatioOf = Literal["token", "sequence"]


@dataclass(frozen=True)
class PolicySettings:
    """The settings of `policy_gradient`.

    clip_low, clip_high: clip and cispo limit the ratio to 1 − clip_low … 1 + clip_high; None means 0.2.
    dual_clip: a number c > 1. If the advantage A is negative, the loss of clip is at most −c·A. None means no limit.
    surrogate: None means "clip" if a limit or dual_clip is given, and "corrected" otherwise.
    ratio: "token" for a probability ratio of each token, "sequence" for its geometric mean over a sequence (GSPO).
    kl_scale: the factor of the penalty e^r − 1 − r with r = log p(y) − log q(y) (GRPO); the teacher gives p.

    Raises ValueError for values out of range, and for an argument that has no effect with the others.
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
            expected = f"None, because surrogate={self.kind} already bounds the gradient"
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
        """Return the words that describe the ratio and the penalty. They follow a description of the advantage.

        corrected: the words that describe the importance correction, for the surrogate "corrected".
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
