"""When to measure on held-out documents."""

from pydantic import Field

from stillhouse.config.section import Section


class EvalConfig(Section):
    """When to measure cross-entropy, forward KL, agreement and entropies on data.eval. No effect where that is 0."""

    every: int = Field(
        default=100, ge=0, description="Steps from one evaluation to the next. 0: at the start and the end only."
    )
    micro_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens that go through both models at once. null: as train.micro_batch_tokens.",
    )
