"""An objective in words, for the first lines of a run's output."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stillhouse.objective.spec import ObjectiveSpec


def in_words(spec: "ObjectiveSpec") -> str:
    if spec.by_origin:
        return "; ".join(f"{in_words(part)} (origin: {origin})" for origin, part in spec.by_origin.items())
    parts = []
    if spec.cross_entropy is not None:
        smoothed = f" (label smoothing {spec.label_smoothing:g})" if spec.label_smoothing else ""
        parts.append(_times(spec.cross_entropy, f"cross-entropy{smoothed}"))
    if spec.z_loss:
        parts.append(_times(spec.z_loss, "z-loss"))
    if spec.divergence is not None:
        is_several = any(teacher.temperature is not None for teacher in spec.teachers.values())
        value = "" if is_several else f", τ = {spec.temperature:g}"
        factor = f"·τ²{value}" if spec.scale_by_temperature_squared else ""
        parts.append(_times(spec.divergence_scale, f"{spec.divergence}{factor} of teacher and student"))
    if spec.uld is not None:
        parts.append(_times(spec.uld, "distance of the sorted probabilities (ULD) of teacher and student"))
    if spec.entropy is not None:
        parts.append(_times(spec.entropy, "entropy"))
    if spec.sampled_kl is not None:
        descends = "reverse" if spec.estimator == "k2" else "forward"
        what = f"sampled KL ({spec.estimator}, descends {descends} KL{_corrected(spec)})"
        parts.append(_times(spec.sampled_kl, f"{what} at the student's own tokens"))
    if spec.policy_gradient is not None:
        parts.append(_times(spec.policy_gradient, f"policy gradient ({_policy(spec)})"))
    return " + ".join(parts).replace("+ −", "− ")


def _corrected(spec: "ObjectiveSpec") -> str:
    return "" if spec.correction.kind == "none" else f", ratio {spec.correction.kind} at {spec.correction.limit:g}"


def _policy(spec: "ObjectiveSpec") -> str:
    advantage = "advantage from rewards" if spec.needs_rewards else "advantage from rewards, if any, and from "
    if spec.teacher_kl:
        discounted = f" discounted by {spec.discount:g}" if spec.discount else ""
        advantage += _times(spec.teacher_kl, f"(log p − log q){discounted} of teacher and student")
    return advantage + spec.policy.in_words(_corrected(spec))


def _times(coefficient: float, what: str) -> str:
    sign = "−" if coefficient < 0 else ""
    return what if coefficient == 1 else f"{sign}{abs(coefficient):g} × {what}"
