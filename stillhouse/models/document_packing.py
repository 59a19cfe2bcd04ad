"""How the documents of a micro-batch lie in the inputs of a backbone, so that no document sees another one.

    packed    several documents in a row; the model separates them where position ids restart
    masked    the same, with the attention masks that transformers builds for packed sequences
    rows      one document per right-padded row (`document_rows.py`)

transformers separates packed documents in attention only if there is no cache and no attention mask. With a cache or
a mask, it silently lets tokens attend to other documents. Some families build their masks without position ids, and
some layers mix tokens without attention (state-space layers, convolutions). `load_proof` runs the model to prove
that a way is exact.

B rows, S columns of a micro-batch, D width.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from stillhouse.display import name_list
from stillhouse.libraries import reading
from stillhouse.models.document_rows import DocumentRows
from stillhouse.models.forward_modes import uses_flash_attention
from stillhouse.models.model_checks import ProofError, describe
from stillhouse.models.model_parts import row_windows

PACKED, MASKED, ROWS = "packed", "masked", "rows"
AUTO = "auto"
#: the values of `data.packing`, with the ways in the order in which they are tried: the cheapest one first
PACKINGS_OF = {AUTO: (PACKED, MASKED, ROWS), PACKED: (PACKED, MASKED), ROWS: (ROWS,)}
_ADVICE = "expected another attention, such as sdpa or eager, or documents in rows of their own (data.packing: rows)"
_ADVICE_WITHOUT_ROWS = "expected another attention, such as sdpa or eager, or context=1"
_IN_WORDS = {PACKED: "packed", MASKED: "packed, with masks from transformers", ROWS: "one per row"}


class PackingError(ProofError):
    """Documents that are packed in this way influence each other, or depend on their places."""


class Packing:
    """The way in which a model's documents are packed: the first one that has not been refused.

    setting: "packed", "rows", or "auto" for the cheapest way that is exact.
    name: the way that is used. reason: why an earlier way was refused; None if none was.

    Raises PackingError if the model's code shows that no way of this setting is exact.
    """

    def __init__(self, model: PreTrainedModel, backbone: nn.Module, setting: str = AUTO):
        self._ways, self._advice = list(PACKINGS_OF[setting]), _ADVICE
        self.reason: str | None = None
        while error := _refusal(model, backbone, self.name):
            self.refuse(error)

    @property
    def name(self) -> str:
        return self._ways[0]

    def refuse(self, error: PackingError) -> None:
        """Use the next way, because of this error. Raises PackingError if there is no other way."""
        if len(self._ways) == 1:
            raise PackingError(f"{error}: {self._advice}") from error
        del self._ways[0]
        self.reason = self.reason or str(error)

    def exclude_rows(self) -> None:
        """Exclude rows, because context parallelism shards documents. Raises ValueError if there is no other way."""
        if self.name == ROWS:
            raise ValueError(f"documents are {self}, and context parallelism shards documents: expected context=1")
        self._ways = [way for way in self._ways if way != ROWS]
        self._advice = _ADVICE_WITHOUT_ROWS

    def __str__(self) -> str:
        return _IN_WORDS[self.name] + (f", because {self.reason}" if self.reason else "")


def _refusal(model: PreTrainedModel, backbone: nn.Module, packing: str) -> PackingError | None:
    """Return the reason that the model's code shows against a way of packing; None if it shows none."""
    if packing == ROWS:
        return None
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        return PackingError(
            f"{describe(model)} takes no position_ids, so it cannot separate documents that share a row (state-space "
            "and ALiBi models)"
        )
    if windows := row_windows(model.config):
        return PackingError(
            f"{describe(model)} has {name_list(windows)}, which depends on a token's column in its row, so it cannot "
            "separate documents that share a row"
        )
    if getattr(model.config, "alibi", None):
        return PackingError(f"{describe(model)} has ALiBi, whose positions are those of the row")
    if packing == MASKED:
        try:
            with reading(f"{describe(model)} cannot be packed with masks"):
                masks = packed_masks(model, torch.tensor([[0, 1, 0]]))
        except ValueError as error:
            return PackingError(str(error))
        if masks is None:
            return PackingError(f"transformers builds no attention masks for {describe(model)}")
    return None


def packed_masks(model: PreTrainedModel, position_ids_BS: Tensor) -> Any:
    """Return the attention masks, or a dict of them by the kind of layer, for documents that are packed in rows."""
    # transformers reads only shape, dtype and device of the embeddings
    embeddings = torch.empty((), dtype=model.dtype, device=position_ids_BS.device).expand(*position_ids_BS.shape, 1)
    return create_masks_for_generate(model.config, embeddings, None, None, position_ids=position_ids_BS)


@contextmanager
def packing_errors(model: PreTrainedModel, packing: str) -> Iterator[None]:
    """Raise a library's error in the block as a PackingError, for a model that may not accept masks."""
    if packing != MASKED:
        yield
        return
    try:
        with reading(f"{describe(model)} cannot be packed with masks", passes=ProofError):
            yield
    except ProofError:
        raise
    except ValueError as error:
        raise PackingError(str(error)) from error


def backbone_inputs(
    model: PreTrainedModel,
    packing: str,
    position_ids_BS: Tensor,
    is_padding_BS: Tensor | None,
    inputs: Mapping[str, Any],
) -> tuple[dict[str, Any], DocumentRows | None]:
    """Return the arguments of a backbone that gets no attention mask, and the rows of its outputs; None: as packed.

    inputs: `input_ids` [B, S] or `inputs_embeds` [B, S, D], and other arguments.
    is_padding_BS: bool; see `DocumentRows.of`.
    Raises ValueError for several rows, if the model's attention separates documents only in one row, and for inputs
    beside the tokens, such as images, unless the model is simply packed.
    """
    tokens: Tensor = inputs["inputs_embeds"] if inputs["input_ids"] is None else inputs["input_ids"]
    shape_BS = tokens.shape[:2]
    more = [name for name, value in inputs.items() if value is not tokens and value is not None]
    if packing != PACKED and more:
        raise ValueError(
            f"{describe(model)}, whose documents are {_IN_WORDS[packing]}, got {name_list(more)} with position_ids: "
            "expected tokens alone, or no position_ids if every row is one document"
        )
    if packing == ROWS:
        rows = DocumentRows.of(position_ids_BS.expand(shape_BS), is_padding_BS)
        name = "inputs_embeds" if inputs["input_ids"] is None else "input_ids"
        return {"input_ids": None, name: rows.unpack(tokens)}, rows
    if packs_one_row(model, packing) and shape_BS[0] > 1:
        raise ValueError(
            f"attention '{model.config._attn_implementation}' separates packed documents only in a batch of one "
            f"row, and got position_ids for {shape_BS[0]} rows: expected one row, another attention, or no "
            "position_ids if every row is one document"
        )
    arguments = {**inputs, "position_ids": position_ids_BS}
    if packing == MASKED:
        arguments["attention_mask"] = packed_masks(model, position_ids_BS.expand(shape_BS))
    return arguments, None


def packs_one_row(model: PreTrainedModel, packing: str) -> bool:
    """Whether the model separates packed documents only in a batch of one row, as transformers does for flash
    attention (`_is_packed_sequence`).
    """
    return packing != ROWS and uses_flash_attention(model)


def require_separable(position_ids: Tensor, attention_mask: Tensor) -> None:
    """Raise ValueError if the attention mask of these inputs would not separate their documents."""
    if attention_mask.dim() != 2:  # a mask per pair of tokens can separate documents itself
        return
    tokens = (attention_mask[:, 1:] != 0) & (attention_mask[:, :-1] != 0)
    if bool((tokens & (position_ids[:, 1:] <= position_ids[:, :-1])).any()):
        raise ValueError(
            "position_ids restart within a row and an attention_mask is given, with which the row's documents "
            "see each other: expected attention_mask=None for packed rows (padding as a separate document)"
        )
