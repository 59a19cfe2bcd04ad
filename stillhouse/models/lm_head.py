"""The output head of a decoder, and the interface through which objectives get hidden states: the output processor.

`Head` calls the processor inside its forward, because FSDP2 gathers a module's weight for the time of the module's
forward. So the head's weight is gathered once, and the processor can use the full weight several times.

B rows, S tokens per row, D width, V vocabulary.
"""

from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from stillhouse.models.dtensors import local
from stillhouse.models.families import LogitRule, text_config
from stillhouse.models.model_checks import typename
from stillhouse.objective import OutputHead, VocabShard
from stillhouse.objective.terms import require_attribute

_TIED_KEY = "tie_word_embeddings"


class OutputProcessor(Protocol):
    """Computes a result from hidden states and head. The decoder returns this result instead of logits.

    `hidden_states` has the shape [B, S, D], after the final norm. In a forward with `mtp_input_ids` (multi-token
    prediction), `hidden_states` is a tuple with such a tensor for each depth. `context` is the argument `context` of
    the decoder's forward. `depth` is 0 for the next token and k for the k-th token after the next one. The head's
    weight is valid during the call; a result that refers to the weight keeps the weight's memory allocated.
    """

    def __call__(self, *, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> Any: ...


def require_callable(processor: OutputProcessor) -> None:
    """Raise ValueError for an object that cannot be called, such as a divergence."""
    expected = "a function of hidden_states, head, context and depth, such as cross_entropy() or StepLoss(objective)"
    require_attribute("processor", processor, "__call__", expected)


class Head(nn.Module):
    """The projection onto the vocabulary. Its forward calls an output processor."""

    def __init__(self, linear: nn.Linear, rule: LogitRule):
        super().__init__()
        self.linear, self.rule = linear, rule
        self.shard: VocabShard | None = None  # this process's vocabulary rows, if the weight is sharded

    def tensors(self) -> OutputHead:
        """Return the `OutputHead` for the objective. It has the layer's own weight and bias, which get gradients."""
        weight_VD, bias = local(self.linear.weight), local(self.linear.bias)
        return OutputHead(weight_VD, bias, scale=self.rule.scale, softcap=self.rule.softcap, shard=self.shard)

    def forward(
        self, hidden_BSD: Tensor, processor: OutputProcessor | None = None, context: Any = None, depth: int = 0
    ) -> Any:
        """Return the processor's result, or logits [B, S, V] without a processor."""
        head = self.tensors()
        if processor is None:
            return head.logits(hidden_BSD)
        require_callable(processor)
        return processor(hidden_states=hidden_BSD, head=head, context=context, depth=depth)


class PassThrough(nn.Module):
    """Replaces a part of a model that is on another process, such as a layer or the head; returns its input."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def input_embedding(model: PreTrainedModel) -> Any:
    """Return the token embedding, or None on a pipeline stage without it."""
    embedding = model.get_input_embeddings()
    return None if isinstance(embedding, PassThrough) else embedding


def match_tied_flag(model: PreTrainedModel) -> None:
    """Set `tie_word_embeddings` in the configuration to True if the head has the embedding's weight, else to False.

    transformers does not tie weights that differ in the files, but other readers of the configuration would. Raises
    ValueError if the key is true and also shares weights between layers (Zamba 2), but some of the weights that it
    shares differ: then neither True nor False describes the model.
    """
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    is_tied, config = head is embedding, model.config
    if getattr(config, _TIED_KEY, False):
        names = model.get_expanded_tied_weights_keys(all_submodels=True).items()
        pairs = {name: [model.get_parameter_or_buffer(part) for part in (name, other)] for name, other in names}
        separate = [name for name, (weight, other) in pairs.items() if weight is not other]
        if separate and any(weight is not head for weight, _ in pairs.values()):
            raise ValueError(
                f"{typename(model)} has {_TIED_KEY} true, but '{separate[0]}' differs from the weight to which this "
                "key ties it. In this family, the key also ties weights of layers: expected equal values of tied "
                "weights"
            )
    for part in (config, text_config(config)):
        if getattr(part, _TIED_KEY, is_tied) != is_tied:
            setattr(part, _TIED_KEY, is_tied)
