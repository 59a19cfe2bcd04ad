"""The output head of a decoder, and the boundary where everything meets hidden states: the output processor.

`Head` owns the layer that projects onto the vocabulary. Whoever has an objective passes a processor, and the
head calls it inside its own forward: a wrapper that gathers the weight around a module's forward (FSDP2)
fires exactly once, and the processor sees the whole weight however often it projects.

B rows, S tokens per row, D width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from stillhouse.objective import OutputHead, VocabShard


class OutputProcessor(Protocol):
    """What to do with hidden states and head in place of logits; its return value is the decoder's.

    `hidden_states` is [B, S, D] after the final norm, `context` whatever the decoder was called with, `depth`
    0 for the next token and more for further ones (multi-token prediction). The head's weight is valid during
    the call: a result that keeps it keeps memory, and under sharding more than that.
    """

    def __call__(self, *, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> Any: ...


@dataclass(frozen=True)
class LogitRule:
    """What a family does to its logits after the projection: softcap(scale · logits)."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "LogitRule":
        """Read from the names that transformers' configurations use (of a composite one, its text part's).

        One name can mean two things in two families (`logits_scaling` divides in Granite and multiplies in
        HyperCLOVA X). This is the common reading of each; `verify` is what makes sure of it.
        """
        text = config.get_text_config()
        scale = 1.0
        for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
            scale *= _number(text, name, 1.0)
        softcap = _number(text, "final_logit_softcapping", 0.0)
        return cls(scale / _number(text, "logits_scaling", 1.0), softcap or None)


class Head(nn.Module):
    """The projection onto the vocabulary, as a module that runs a processor.

    `shard`: which rows of the weight are on this process, once someone has laid it over several.
    """

    def __init__(self, linear: nn.Linear, rule: LogitRule):
        super().__init__()
        self.linear = linear
        self.rule = rule
        self.shard: VocabShard | None = None

    def tensors(self) -> OutputHead:
        """The head as the objective takes it, sharing weight and bias, so that gradients reach them."""
        weight_VD, bias = local(self.linear.weight), local(self.linear.bias)
        return OutputHead(weight_VD, bias, scale=self.rule.scale, softcap=self.rule.softcap, shard=self.shard)

    def forward(
        self,
        hidden_BSD: Tensor,
        processor: OutputProcessor | None = None,
        context: Any = None,
        depth: int = 0,
    ) -> Any:
        """Logits [B, S, V] without a processor, else what the processor returns."""
        head = self.tensors()
        if processor is None:
            return head.logits(hidden_BSD)
        return processor(hidden_states=hidden_BSD, head=head, context=context, depth=depth)


class NoHead(nn.Module):
    """In the place of a head that is on another process: hands the hidden states on."""

    def forward(
        self, hidden_BSD: Tensor, processor: OutputProcessor | None = None, context: Any = None, depth: int = 0
    ) -> Tensor:
        return hidden_BSD


def local(tensor: Any) -> Any:
    """What of a tensor is on this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _number(config: PreTrainedConfig, name: str, absent: float) -> float:
    value = getattr(config, name, None)
    return absent if value is None else float(value)
