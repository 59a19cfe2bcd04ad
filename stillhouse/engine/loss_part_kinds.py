"""The entries of the group `stillhouse.parts`: keys and rules of the losses that are added to the objective.

The losses, which need torch, are in `engine/losses/`. Their hooks in the student's layers are in `models/`.

The configuration reads the entries while its sections are defined, so this module imports no section at its top.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from stillhouse.config.rule import Rule
    from stillhouse.engine.losses import LossPart


class PartKind(Protocol):
    """An entry of the group `stillhouse.parts`.

    field: the type and the pydantic `Field` of the key `objective.<name of the entry>`. It is None for the losses
        of this project, because the configuration's sections have their keys.
    """

    field: ClassVar[tuple[Any, Any] | None] = None

    @classmethod
    def rules(cls) -> "Iterator[Rule]":
        """Yield rules for the combinations of keys that this loss does not allow."""
        yield from ()

    @classmethod
    def part(cls) -> "type[LossPart]":
        """Return the class of the loss, which needs torch."""
        ...


class HiddenStatesKind(PartKind):
    @classmethod
    def rules(cls) -> "Iterator[Rule]":
        from stillhouse.config.rule import Rule, excludes

        yield Rule(
            ("objective.hidden", "teacher"),
            lambda pairs, teacher: bool(pairs) and (teacher is None or not teacher.source_kind.runs_model),
            "[], or the section teacher with model and without url",
            "the teacher's layers have to be in this job",
        )
        because = "the teacher has to run in the student's stages"
        for key in ("parallel", "cross_tokenizer", "offload"):
            yield excludes(f"teacher.{key}", "objective.hidden", because=because)
        yield excludes("objective.hidden", "rollout")
        yield excludes("objective.hidden", "student.mtp.train=heads", because="the student's layers are frozen")

    @classmethod
    def part(cls) -> "type[LossPart]":
        from stillhouse.engine.losses.hidden_states import HiddenStates

        return HiddenStates


class MtpKind(PartKind):
    @classmethod
    def rules(cls) -> "Iterator[Rule]":
        from stillhouse.config.rule import Rule, excludes

        for key in ("student.adapter", "rollout", "parallel.expert", "teachers.route", "teacher.cross_tokenizer"):
            yield excludes(key, "student.mtp")
        # torch (2.13) runs backward twice through the graph that MTP depths share; the first run frees its buffers
        yield Rule(
            ("parallel.schedule", "parallel.pipeline", "student.mtp"),
            lambda schedule, stages, mtp: mtp is not None and stages > 1 and schedule in ("zero_bubble", "zbv"),
            "gpipe, 1f1b or interleaved",
        )
        yield excludes("parallel.pipeline", "student.mtp.train=heads", expected="1, or student.mtp.train=all")

    @classmethod
    def part(cls) -> "type[LossPart]":
        from stillhouse.engine.losses.mtp import MtpLoss

        return MtpLoss


class RouterKind(PartKind):
    @classmethod
    def rules(cls) -> "Iterator[Rule]":
        from stillhouse.config.rule import excludes

        yield excludes("objective.router_aux_loss", "student.mtp")
        yield excludes(
            "train.compile", "objective.router_aux_loss", because="compiled layers run no hooks in routers"
        )

    @classmethod
    def part(cls) -> "type[LossPart]":
        from stillhouse.engine.losses.router_balancing import RouterBalancing

        return RouterBalancing
