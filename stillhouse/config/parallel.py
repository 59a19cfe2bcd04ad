"""How a run is spread over processes."""

from typing import Literal

from pydantic import Field

from stillhouse.config.section import Section


class ParallelConfig(Section):
    """How a run is spread over the processes that torchrun starts; their number is the product of the degrees."""

    fsdp: int | None = Field(
        default=None,
        ge=1,
        description="Processes that share weights, gradients and optimizer state, and split the data. null: all that"
        " the other degrees leave.",
    )
    tensor: int = Field(default=1, ge=1, description="Processes that share each matrix, the vocabulary's included.")
    pipeline: int = Field(default=1, ge=1, description="Ranks of consecutive layers, of student and teacher.")
    context: int = Field(default=1, ge=1, description="Processes that share each sequence.")
    replicate: int = Field(default=1, ge=1, description="Whole copies of the layout above, which split the data.")
    expert: int = Field(
        default=1,
        ge=1,
        description="Processes among which the experts of each layer are dealt out: some of those of fsdp, context"
        " and tensor, to which it adds none. A multiple of tensor; 1: those of tensor.",
    )
    schedule: Literal["gpipe", "1f1b", "1f1b_ahead", "interleaved", "zero_bubble", "zbv"] = Field(
        default="1f1b",
        description="Of the pipeline. The last three have two stages on each rank, and less idle time; 1f1b_ahead"
        " runs the next step's teacher in idle time, where that is a model of its own without a layout of its own.",
    )
    gather_dtype: Literal["bfloat16"] | None = Field(
        default=None,
        description="What the student's layers and untied head are gathered in by fsdp: bfloat16 halves that traffic"
        " and memory, gradients are summed in float32. null: the weights' own type.",
    )
    offload: bool = Field(
        default=False,
        description="Keep what fsdp shares of both models in host memory between uses: weights, gradients, optimizer"
        " state; the optimizer steps there.",
    )
