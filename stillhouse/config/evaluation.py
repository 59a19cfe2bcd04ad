"""When to measure on held-out documents."""

from pydantic import Field

from stillhouse.config.section import Section


class EvalConfig(Section):
    """When to measure cross-entropy, forward KL, agreement and entropies on data.eval. No effect if it is 0."""

    every: int = Field(
        default=100, ge=0, description="Steps between two evaluations. 0: only at the start and at the end."
    )
    micro_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of one micro-batch of an evaluation. null: the value of train.micro_batch_tokens.",
    )
