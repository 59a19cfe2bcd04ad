"""A Hugging Face causal language model as backbone and head.

    tokens ─▶ backbone ─▶ hidden states ─▶ head(processor, context) ─▶ logits, or whatever the processor makes

The model is not patched: its own base model is the backbone, its own output layer sits in `Head`, and what is
left of it (configuration, saving, generation) stays beside the two, out of the module tree. So every
parameter is there once, and what trains here is what `save_pretrained` writes.

Documents share a row by restarting position ids; transformers then keeps them apart in attention, provided
that there is no cache and no attention mask. With either of them it silently lets them see each other, which
is why the cache is always off here and a mask together with restarts is refused.

B rows, S tokens per row, T = B·S, D (a teacher's: E) width, V vocabulary.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from stillhouse.display import escaped
from stillhouse.libraries import reading
from stillhouse.models.checks import require_decoder, verify_wrapping
from stillhouse.models.head import Head, LogitRule, NoHead, OutputProcessor
from stillhouse.models.loading import load_causal_lm
from stillhouse.models.processors import full_vocab
from stillhouse.objective import FullVocab, OutputHead

if TYPE_CHECKING:
    from stillhouse.models.adapter import Lora

_HEAD_WEIGHT = "head.linear.weight"


class Decoder(nn.Module):
    """Wraps a causal language model of transformers; `decoder.pretrained` is that model, sharing all weights.

    Raises ValueError, naming the model type and what is missing, for a model without an output head, with an
    encoder, or with a head that is not a plain linear layer (a LoRA on it, a quantized one).

    `verify=True` runs a few made-up tokens and also refuses a model whose logits are not those of its head,
    that sees following tokens, or that lets documents in one row see each other. It needs the weights, on a
    device that can run them.
    """

    pretrained: PreTrainedModel
    backbone: nn.Module
    head: Head | NoHead
    tied: bool  # whether the head's weight is the input embedding's
    embedding_name: str  # of the input embedding's weight among this module's parameters
    lora: "Lora | None" = None  # the adapter that `add_lora` has put in

    def __init__(self, model: PreTrainedModel, *, verify: bool = True):
        super().__init__()
        linear = require_decoder(model)
        # not by attribute, which would register its parameters a second time
        self.__dict__["pretrained"] = model
        self.backbone = model.base_model
        self.head = Head(linear, LogitRule.from_config(model.config))
        self.training = self.head.training = model.training
        embedding = model.get_input_embeddings().weight
        self.tied = linear.weight is embedding
        self.embedding_name = next(name for name, each in self.named_parameters() if each is embedding)
        self.register_state_dict_post_hook(_drop_tied_weight)
        self.register_load_state_dict_pre_hook(_find_tied_weight)
        self.register_load_state_dict_post_hook(_tie_again)
        if verify:
            with evaluating(self), evaluating(model):
                verify_wrapping(model, self)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        revision: str | None = None,
        dtype: str | torch.dtype | None = None,
        *,
        attention: str | None = None,
        trust_remote_code: bool = False,
        device: str | torch.device | None = None,
        verify: bool = True,
    ) -> "Decoder":
        """Load a folder or a hub id; the name goes to transformers untouched.

        `dtype`: a name such as "bfloat16"; "auto" or None for the one it was saved in. `attention`:
        transformers' `attn_implementation`. `device`: where to put it before it is verified (an attention
        that only runs on a GPU cannot be verified elsewhere). Raises ValueError for what cannot be found,
        read or wrapped, and for a checkpoint that lacks weights.
        """
        model = load_causal_lm(
            name_or_path,
            revision=revision,
            dtype=dtype,
            attention=attention,
            trust_remote_code=trust_remote_code,
        )
        # a damaged configuration may fail as late as here
        with reading(f"model '{escaped(os.fspath(name_or_path))}' cannot be run", passes=ValueError):
            return cls(model if device is None else model.to(device), verify=verify)

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        processor: OutputProcessor | None = None,
        context: Any = None,
        **backbone_kwargs: Any,
    ) -> Any:
        """Logits [B, S, V], or what `processor` returns for the hidden states (see `OutputProcessor`).

        `input_ids`: [B, S]. Several documents in a row: `position_ids` [B, S] (or [1, S] for all rows) restarts at
        each, without an attention mask. `attention_mask`: [B, S], 1 for tokens and 0 for padding. `backbone_kwargs`
        go to the model; `inputs_embeds` [B, S, D] among them stands for the ids, which are None then.
        """
        if position_ids is not None:
            if attention_mask is not None:
                _refuse_masked_packing(position_ids, attention_mask)
            backbone_kwargs["position_ids"] = position_ids
        outputs = self.backbone(
            input_ids=input_ids,
            attention_mask=attention_mask,
            use_cache=False,
            return_dict=True,
            **backbone_kwargs,
        )
        return self.head(outputs.last_hidden_state, processor, context)

    @torch.no_grad()
    def signal(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **backbone_kwargs: Any,
    ) -> FullVocab:
        """What this model says as a teacher, exactly: hidden states [T, E] and its head, both without grad.

        `input_ids`: [B, S]. Computed in eval mode whatever `train()` said; the mode is put back.
        """
        with evaluating(self):
            return self(input_ids, position_ids, attention_mask, processor=full_vocab, **backbone_kwargs)

    @property
    def has_head(self) -> bool:
        """False for a part of a model whose head is elsewhere: it gives hidden states."""
        return isinstance(self.head, Head)

    def layers(self) -> list[nn.Module]:
        """The backbone's layers that are here, in their order; of all its parts, where it has several."""
        layers = (layer for each in _outermost_lists(self.backbone) for layer in each)
        return [layer for layer in layers if next(layer.parameters(), None) is not None]

    @property
    def config(self) -> PreTrainedConfig:
        return self.pretrained.config

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the head: the tokenizer's vocabulary, and any padding above it."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def output_weight(self) -> Tensor:
        """The head's [V, D], as it lies here."""
        return self._own_head.linear.weight

    def output_head(self) -> OutputHead:
        """The head's tensors outside a forward: for an unsharded model."""
        return self._own_head.tensors()

    def tie(self) -> None:
        """Make one weight of a tied embedding and head again, after something has given them one each."""
        if self.tied:
            self._own_head.linear.weight = self.pretrained.get_input_embeddings().weight

    @property
    def _own_head(self) -> Head:
        assert isinstance(self.head, Head), "the head of this decoder is on another process"
        return self.head

    def gradient_checkpointing_enable(self) -> None:
        """Recompute each layer in backward in place of keeping its activations; the head runs once as before."""
        model, options = self.pretrained, {"use_reentrant": False}
        if hasattr(model, "activation_checkpointing_enable"):  # its name in later versions of transformers
            model.activation_checkpointing_enable(options)
        else:
            model.gradient_checkpointing_enable(options)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Configuration and safetensors, as transformers reads them; tied weights are written once."""
        self.pretrained.save_pretrained(folder)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode for all submodules, each put back to its own mode afterwards."""
    training = [each for each in module.modules() if each.training]
    for each in training:
        each.training = False
    try:
        yield
    finally:
        for each in training:
            each.training = True


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _outermost_lists(child)


def _refuse_masked_packing(position_ids: Tensor, attention_mask: Tensor) -> None:
    """Positions that fall back between two unmasked tokens are a second document."""
    if attention_mask.dim() != 2:  # a ready-made mask says itself who sees whom
        return
    tokens = (attention_mask[:, 1:] != 0) & (attention_mask[:, :-1] != 0)
    if bool((tokens & (position_ids[:, 1:] <= position_ids[:, :-1])).any()):
        raise ValueError(
            "position_ids restart within a row and an attention_mask is given, with which the row's documents "
            "see each other: expected attention_mask=None for packed rows (padding as a document of its own)"
        )


def _drop_tied_weight(decoder: nn.Module, state: dict[str, Any], prefix: str, _: dict[str, Any]) -> None:
    """A tied weight is in the state once, as the embedding, so that a checkpoint does not hold it twice."""
    assert isinstance(decoder, Decoder)
    if decoder.tied:
        state.pop(prefix + _HEAD_WEIGHT, None)


def _find_tied_weight(decoder: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The other way: a state without the tied weight has it in the embedding."""
    assert isinstance(decoder, Decoder)
    if decoder.tied and prefix + decoder.embedding_name in state:
        state.setdefault(prefix + _HEAD_WEIGHT, state[prefix + decoder.embedding_name])


def _tie_again(decoder: nn.Module, _: Any) -> None:
    """`load_state_dict(assign=True)` gives the embedding and the head a parameter each."""
    assert isinstance(decoder, Decoder)
    decoder.tie()
