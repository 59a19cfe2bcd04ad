"""Which attention function a model uses for packed documents: variable-length attention, or the model's usual one.

Variable-length attention (`varlen.py`) builds no mask, and its work grows with the squares of the documents' lengths
instead of the row's. It is used where the device, the dtype of the activations and the model allow it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from stillhouse.models import varlen
from stillhouse.models.forward_modes import VARLEN, attention_name
from stillhouse.models.varlen import Activations

#: the usual attention of a model for which variable-length attention is required
_USUAL = "sdpa"


class PackedAttention:
    """The attention functions of a model, by their names in its configuration.

    activations: of the forward passes; None: the model keeps its attention function.
    is_required: whether the configuration itself names variable-length attention.
    is_possible: whether it can be used.
    reason: why it is not used on a GPU; None if it is, or if the model keeps its attention function.

    Raises ValueError if it is required and cannot be used.
    """

    def __init__(self, model: PreTrainedModel, activations: Activations | None = None):
        self._model, name = model, attention_name(model)
        self.is_required = name == VARLEN
        self.reason: str | None = None
        self.usual, self.with_lengths = (_USUAL if self.is_required else name), VARLEN
        self.is_possible = self.is_required or (activations is not None and name == _USUAL)
        if not self.is_possible:
            return
        if self.is_required:
            varlen.require_varlen(model, activations)
            return
        assert activations is not None
        reason = varlen.refusal_of_model(model) or varlen.refusal(activations, model.dtype)
        self.is_possible = reason is None
        if activations.device.type == "cuda":  # nobody expects it elsewhere
            self.reason = reason

    @property
    def reads_lengths(self) -> bool:
        """Whether the model uses variable-length attention now."""
        return attention_name(self._model) == self.with_lengths

    def use(self, *, lengths: bool) -> None:
        """Use variable-length attention, or the usual one."""
        if self.is_possible:
            name, config = self.with_lengths if lengths else self.usual, self._model.config
            part = varlen.text_part(config)
            # the attention of a vision tower stays as it is
            config._attn_implementation = name if part is None else {"": name, part: name}

    @property
    def in_words(self) -> str | None:
        """The reason for the usual attention, as a sentence; None if there is none."""
        if self.reason is None or self.reads_lengths:
            return None
        return f"attention {self.usual}, because variable-length attention cannot be used: {self.reason}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the functions that the model may use."""
        return (self.usual, self.with_lengths) if self.is_possible else (self.usual,)

    def rename(self, names: Mapping[str, str]) -> None:
        """Use other functions, which are registered under new names. names: by the names of `names`."""
        reads_lengths = self.reads_lengths
        self.usual, self.with_lengths = names[self.usual], names.get(self.with_lengths, self.with_lengths)
        name, part = self.with_lengths if reads_lengths else self.usual, varlen.text_part(self._model.config)
        # the attention of a vision tower stays as it is
        self._model.set_attn_implementation(name if part is None else {"": name, part: name})

    @contextmanager
    def without_lengths(self) -> Iterator[None]:
        """Within the block, use the usual attention: for inputs with a mask, with a cache, or without documents."""
        reads_lengths = self.reads_lengths
        self.use(lengths=False)
        try:
            yield
        finally:
            self.use(lengths=reads_lengths)


def activations_for(
    attention: str | None, device: torch.device, autocast: torch.dtype | None = None
) -> Activations | None:
    """Return the activations of a model with which `PackedAttention` chooses the attention.

    attention: the name in the configuration of a run or a server; for a name other than `VARLEN`, the result is None,
    so that the model keeps this attention. autocast: the dtype under autocast; None: the dtype of the weights.
    """
    return Activations(device, autocast) if attention in (None, VARLEN) else None
