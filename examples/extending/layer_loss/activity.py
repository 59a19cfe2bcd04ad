from pydantic import Field

from stillhouse.engine.loss_part_kinds import PartKind


class ActivityKind(PartKind):
    field = float, Field(default=0.0, ge=0, description="Coefficient of the activity loss. 0: off.")

    @classmethod
    def rules(cls):
        from stillhouse.config.rule import excludes

        yield excludes("train.compile", "objective.activity", because="compiled layers run no hooks")

    @classmethod
    def part(cls):
        from activity_loss import Activity

        return Activity
