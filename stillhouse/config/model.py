"""What the student's and the teacher's section have in common: which weights, and how to load them."""

from pydantic import Field

from stillhouse.config.section import PathText, Section, Text


class ModelConfig(Section):
    """A causal language model in Hugging Face's format."""

    model: PathText = Field(
        description="Hugging Face id, or the path of a folder with config.json, safetensors and tokenizer.",
        examples=["Qwen/Qwen3-0.6B"],
    )
    revision: Text | None = Field(
        default=None,
        description="Branch, tag or commit of the Hugging Face id; null: its default. No effect on a folder.",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run model code that comes with the weights. Only for sources that you trust; never under"
        " torchrun, and never after a question. Weights are read from safetensors alone in any case.",
    )
    attention: Text | None = Field(
        default=None,
        description="Attention implementation, as transformers names it (sdpa, eager, flash_attention_2);"
        " null: transformers' choice.",
    )
