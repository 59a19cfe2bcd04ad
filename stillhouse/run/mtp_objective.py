"""The objective of multi-token prediction, as the section student.mtp names it, and in words."""

from dataclasses import replace

from stillhouse.config import ConfigError, MtpConfig, ObjectiveConfig, as_config_error
from stillhouse.engine.parts import MtpLoss
from stillhouse.models import Decoder
from stillhouse.objective.spec import ObjectiveSpec, parse_objective


def mtp_objective(mtp: MtpConfig, objective: ObjectiveConfig, spec: ObjectiveSpec, *, has_teacher: bool) -> MtpLoss:
    """The objective of the student's MTP layers.

    objective, spec: the run's objective, as it is configured and parsed
    has_teacher: whether the run has a teacher

    Raises ConfigError if it cannot be parsed, or needs a teacher and has none.
    """
    if mtp.objective is not None:
        with as_config_error("student.mtp.objective"):
            parsed = parse_objective(mtp.objective, objective.temperature, objective.scale_by_temperature_squared)
        if parsed.needs_rollouts or parsed.uld is not None:
            raise ConfigError(
                "student.mtp.objective",
                f"got '{mtp.objective}': expected a sum of cross_entropy, z_loss, entropy and divergences",
            )
        spec = replace(parsed, teachers=spec.teachers, is_mixture=spec.is_mixture)
    if mtp.signal == "student":
        if spec.divergence is None:
            raise ConfigError("student.mtp.signal", f"got student, but '{spec.in_words()}' has no divergence")
        return MtpLoss(replace(spec, teachers={}, is_mixture=False), mtp.depths, mtp.scale, of_student=True)
    if spec.needs_teacher and not has_teacher:
        raise ConfigError(
            "student.mtp.objective",
            f"got '{mtp.objective}', which needs a teacher: set teacher.model, or student.mtp.signal=student",
        )
    return MtpLoss(spec, mtp.depths, mtp.scale)


def depths_in_words(mtp: MtpConfig | None) -> str:
    """The part of the objective in words that the depths add; empty without them."""
    if mtp is None:
        return ""
    what = "the same" if mtp.objective is None else mtp.objective
    signal = " from the student itself" if mtp.signal == "student" else ""
    frozen = ", the student is frozen" if mtp.train == "heads" else ""
    return f" (+ {mtp.scale:g} × {what}{signal} at {_tokens(mtp)}{frozen})"


def mtp_in_words(mtp: MtpConfig, part: Decoder, objective: MtpLoss) -> str:
    """The student's MTP layers. part: this process's part of the student."""
    count = "on the last stage"
    if part.mtp is not None:
        parameters = sum(parameter.numel() for parameter in part.mtp.parameters())
        count = f"{parameters:,} parameters, {'new' if part.mtp.is_new else 'from the checkpoint'}"
    signal = " from the student itself" if objective.of_student else ""
    trained = "with the student" if mtp.train == "all" else "alone, the student is frozen"
    words = f"{mtp.scale:g} × ({objective.objective.in_words()}){signal}"
    return f"{_tokens(mtp)}, {count}; minimise {words}, trained {trained}"


def _tokens(mtp: MtpConfig) -> str:
    return f"{mtp.depths} further token{'s' if mtp.depths > 1 else ''}"
