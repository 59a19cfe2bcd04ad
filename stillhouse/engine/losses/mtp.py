"""The loss of multi-token prediction: one objective for all depths k ≥ 1.

    loss = objective + scale · Σ_k (depth k)

The loss of depth k is a sum over the rows t for which row t + k has a label and is in the same document. All sums are
divided by the same normalizer, the step's number of target tokens. So the loss does not depend on the layout.

B rows, S tokens per row, T = B·S tokens in the rows' order, D width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from stillhouse.config import ConfigError, MtpConfig, StudentConfig, TeacherConfig, as_config_error
from stillhouse.data import MicroBatch
from stillhouse.engine.losses.loss_part import LossPart, LossSections, configured_objective
from stillhouse.libraries import require_feature
from stillhouse.models import Decoder
from stillhouse.models.families import ModelFacts
from stillhouse.models.processors import DistillTargets, full_vocab
from stillhouse.objective import TEACHER, ObjectiveOutput, OutputHead
from stillhouse.objective.divergences import total_variation
from stillhouse.objective.metrics import CHUNK_TOKENS
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import DistributedStudent, NextTokens
from stillhouse.parallel.layer_loss import MtpLayersRun

#: the prefix of a depth's metrics: mtp_1/forward_kl is the forward KL of depth 1
PREFIX = "mtp_"
#: the held-out objective at MTP depths. 1 − total variation is the acceptance rate of sampled drafts, and the top-1
#: agreement is the acceptance rate of greedy drafts
ACCEPTANCE = ObjectiveSpec(cross_entropy=1.0, divergence=total_variation())


@dataclass(frozen=True)
class MtpLoss(LossPart):
    """The objective at the MTP depths. The depths' metrics and values per token have the prefix `mtp_<depth>/`.

    scale: the factor of the depths' loss in the step's loss.
    from_student: whether the signal is the student's distribution of the same token at depth 0, without gradients,
        instead of the teacher's distribution.
    group: the context ranks, over which sequences are sharded, or None if this process has full sequences.
    """

    objective: ObjectiveSpec
    depths: int = 1
    scale: float = 0.3
    from_student: bool = False
    group: ProcessGroup | None = None

    key = "student.mtp"

    @property
    def needs_teacher(self) -> bool:
        return self.objective.needs_teacher and not self.from_student

    @classmethod
    def from_config(cls, sections: LossSections) -> Self | None:
        mtp, objective, spec = sections.student.mtp, sections.objective, sections.spec
        if mtp is None:
            return None
        if mtp.objective is not None:
            temperature, is_squared = objective.temperature, objective.scale_by_temperature_squared
            parsed = configured_objective("student.mtp.objective", mtp.objective, temperature, is_squared)
            if parsed.needs_rollouts:
                raise ConfigError(
                    "student.mtp.objective",
                    f"got '{mtp.objective}': expected a sum of cross_entropy, z_loss, entropy and divergences",
                )
            spec = replace(parsed, teachers=spec.teachers, is_mixture=spec.is_mixture)
        if mtp.signal == "student":
            if spec.divergence is None:
                raise ConfigError(
                    "student.mtp.signal",
                    f"got student, but '{spec.in_words()}' has no divergence: expected teacher, or a divergence in "
                    "student.mtp.objective",
                )
            return cls(replace(spec, teachers={}, is_mixture=False), mtp.depths, mtp.scale, from_student=True)
        if spec.needs_teacher and not sections.has_teacher:
            raise ConfigError(
                "student.mtp.objective",
                f"got '{mtp.objective}', which needs a teacher: set teacher.model, or student.mtp.signal=student",
            )
        return cls(spec, mtp.depths, mtp.scale)

    @classmethod
    def in_words(cls, sections: LossSections) -> str:
        mtp = sections.student.mtp
        if mtp is None:
            return ""
        objective = "the same" if mtp.objective is None else mtp.objective
        signal = " from the student itself" if mtp.signal == "student" else ""
        frozen = ", the student is frozen" if mtp.train == "heads" else ""
        return f" (+ {mtp.scale:g} × {objective}{signal} at {_tokens(mtp)}{frozen})"

    def check_rows(self, decoder: Decoder, student: StudentConfig) -> Mapping[str, str]:
        mtp, count = student.mtp, "on the last stage"
        assert mtp is not None
        if decoder.mtp is not None:
            parameters = sum(parameter.numel() for parameter in decoder.mtp.parameters())
            count = f"{parameters:,} parameters, {'new' if decoder.mtp.is_new else 'from the checkpoint'}"
        signal = " from the student itself" if self.from_student else ""
        trained = "with the student" if mtp.train == "all" else "alone, the student is frozen"
        objective = f"{mtp.scale:g} × ({self.objective.in_words()}){signal}"
        return {"mtp": f"{_tokens(mtp)}, {count}; minimise {objective}, trained {trained}"}

    def prepare(self, decoder: Decoder, student: StudentConfig, teacher: TeacherConfig | None) -> None:
        mtp = student.mtp
        assert mtp is not None
        with as_config_error(self.key):
            require_feature("multi-token prediction")
        from stillhouse.models.mtp import add_mtp, freeze_main

        declared = ModelFacts(decoder.config).declared_depths if mtp.init == "auto" else 0
        if declared not in (0, mtp.depths):
            raise ConfigError(
                "student.mtp.depths",
                f"got {mtp.depths}, but the student's configuration has num_mtp_layers={declared}: expected "
                f"{declared}, or student.mtp.init=new",
            )
        with as_config_error(self.key):
            add_mtp(decoder, mtp.depths, is_new=not declared)
        if mtp.train == "heads":
            freeze_main(decoder)

    def distributed(self, student: DistributedStudent) -> Self:
        return replace(self, group=student.mesh.group("context"))

    def student_inputs(self, micro_batch: MicroBatch, student: Decoder) -> Mapping[str, Tensor]:
        return MtpLayersRun(NextTokens(self.depths, self.group)).student_inputs(micro_batch, student)

    def at_head(
        self,
        loss: Any,
        output: ObjectiveOutput,
        hidden_by_depth: Sequence[Tensor],
        head: OutputHead,
        context: DistillTargets,
    ) -> ObjectiveOutput:
        first_BSD, *later = hidden_by_depth
        if self.from_student:
            signal = full_vocab(hidden_states=first_BSD, head=head, context=None)
            context = replace(context, signals={TEACHER: signal})
        shifted = self._shifted(context, len(later))
        depth_loss = replace(loss, objective=self.objective, parts=(), with_teacher_cross_entropy=False)
        total, metrics, per_token = output.loss, dict(output.metrics), dict(output.per_token)
        for depth, hidden_BSD in enumerate(later, start=1):
            result = depth_loss(hidden_states=hidden_BSD, head=head, context=shifted, depth=depth)
            total, prefix = total + self.scale * result.loss, f"{PREFIX}{depth}/"
            metrics |= {prefix + name: value for name, value in result.metrics.items() if name != CHUNK_TOKENS}
            per_token |= {prefix + name: value_T for name, value_T in result.per_token.items()}
        return ObjectiveOutput(total, metrics, per_token)

    def held_out(self) -> Self:
        return replace(self, objective=ACCEPTANCE, scale=1.0, from_student=True)

    def silent(self) -> Self:
        return replace(self, scale=0.0)

    def _shifted(self, targets: DistillTargets, depths: int) -> DistillTargets:
        """Return the targets of this rank's columns, with `mtp_targets` for all depths."""
        position_ids_BS = targets.position_ids_BS
        assert position_ids_BS is not None
        if self.group is None:
            return targets.shift_for_mtp(position_ids_BS, depths)
        rows, columns = position_ids_BS.shape
        next_tokens = NextTokens(self.depths, self.group)
        more_BS = next_tokens(position_ids_BS)
        extended = targets.extended(next_tokens, (rows, columns)).shift_for_mtp(more_BS, depths)
        place_BS = torch.arange(more_BS.numel(), device=more_BS.device).view(more_BS.shape)
        return extended.rows(place_BS[:, :columns].flatten())


def _tokens(mtp: MtpConfig) -> str:
    return f"{mtp.depths} further token{'s' if mtp.depths > 1 else ''}"
