"""Steps, batches and the optimizer."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from stillhouse.config.section import Registered, Section, Share

#: capabilities of optimizers (see `OptimizerKind`)
SHARDED, OFFLOADED = "sharded weights", "parallel.offload"


def _checked_warmup(warmup: float) -> float:
    if warmup >= 1 and warmup != int(warmup):
        raise ValueError(f"got {warmup}, expected a share below 1 or a whole number of steps")
    return warmup


class TrainConfig(Section):
    """Steps, batches and the optimizer."""

    tokens_per_step: int = Field(default=131072, ge=1)
    """The number of tokens of one optimizer step over all processes, rounded down to whole packed sequences. It is
    the same under every layout. No effect with rollout.prompts_per_step."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """The number of tokens of one micro-batch, at least data.max_tokens. Affects memory and speed, never the loss."""
    epochs: float | None = Field(default=1.0, gt=0)
    """The number of passes over the data; it may be fractional. It is null if steps is set."""
    steps: int | None = Field(default=None, ge=1)
    """The number of optimizer steps, instead of epochs. null: the number that follows from epochs."""
    optimizer: Annotated[str, Registered("stillhouse.optimizers")] = "adamw"
    """muon: Muon for the matrices inside the layers (MTP layers and projectors too), AdamW for all other weights.
    adafactor: at most half of AdamW's memory. adamw_8bit: AdamW with moments of 8 bits (needs
    stillhouse[low-bit]). adafactor and adamw_8bit need a run of one process, or only pipeline stages."""
    learning_rate: float = Field(default=2e-5, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """How the learning rate falls from its peak to min_learning_rate after the warm-up. constant: it stays at the
    peak; wsd: it stays at the peak and falls linearly at the end."""
    warmup: Annotated[float, AfterValidator(_checked_warmup)] = Field(default=0.03, ge=0)
    """Duration of the learning rate's linear rise at the start. A value below 1 is a share of all steps, any other
    value is a number of steps."""
    min_learning_rate: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak. No effect with schedule constant."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices, embeddings and kernels, not of norms, biases and other vectors. 0: off."""
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.95)
    """AdamW's decay rates of the first and the second moment. No effect with optimizer adafactor."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon, added to the square root of the second moment. No effect with optimizer adafactor."""
    momentum: Share = 0.95
    """Muon's momentum. No effect with another optimizer."""
    clip: float | None = Field(default=1.0, ge=0)
    """Maximum norm of the whole gradient; a larger gradient is scaled down. 0 or null: off."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """bf16: the student's layers compute under bfloat16 autocast. fp32: they compute in the dtype of the weights.
    auto: bf16 on GPUs with bfloat16 units, otherwise fp32."""
    residual_dtype: Literal["bfloat16"] | None = None
    """The dtype of the student's hidden states between its layers, with precision bf16. bfloat16 halves the bytes of
    norms and additions, but rounds more. Layers of some families always return float32. null: the weights' dtype."""
    compile: bool = False
    """Compile the layers of the student and of teachers in this job with torch.compile. A step then has fewer
    kernels, but the start takes minutes longer. Generation runs the layers without compilation."""
    activation_checkpointing: bool = False
    """Recompute the layers in backward. This needs less memory, but about a third more time."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds after which the job ends if a rank sends no heartbeat or a step starts no further micro-batch (only
    under torchrun), or if no server of rollout.url has loaded new weights. With parallel.schedule gpipe, it
    must be longer than all backward passes of a step, which do not count as progress."""

    @model_validator(mode="before")
    @classmethod
    def _steps_unset_epochs(cls, content: Any) -> Any:
        if isinstance(content, Mapping) and content.get("steps") is not None:
            return {"epochs": None, **content}
        return content
