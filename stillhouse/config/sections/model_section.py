"""The keys that the sections student and teacher have in common: which weights to load, and how."""

from stillhouse.config.section import PathText, Section, Text


class ModelConfig(Section):
    """A causal language model in Hugging Face's format."""

    model: PathText | None
    revision: Text | None = None
    """Branch, tag or commit of the model on the hub; null: the default branch. No effect on a folder."""
    trust_remote_code: bool = False
    """Run model code that comes with the weights. Use it only for sources that you trust. false: such code is refused
    without a question. true is not possible under torchrun. Weights are read only from safetensors files in any
    case."""
    attention: Text | None = None
    """Attention implementation, as transformers names it (sdpa, eager, flash_attention_2), or varlen: torch's
    variable-length attention for packed documents, which needs a GPU and activations of 16 bits. null: varlen where
    the device, the activations and the model allow it, else transformers' choice."""
