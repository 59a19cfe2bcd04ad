"""Ways to place the documents of a micro-batch in the inputs of a backbone, so that no document sees another one.

    packed    several documents in a row; the model separates them where position ids restart
    masked    like packed, with the attention masks that transformers builds for packed sequences
    lengths   like packed, with the documents' lengths for the kernels of layers that mix tokens without attention;
              cu_seqlens is the same way with one more name for the lengths
    rows      one document per right-padded row (`UnpackedRows`)

transformers separates packed documents only if it gets neither a cache nor an attention mask. Some families ignore
position ids when they build their masks. Some layers mix tokens without attention (state-space layers, convolutions);
their kernels, if installed, separate documents by lengths. `load_proof.py` proves that a way is exact.

B rows, S columns of a micro-batch, T = B·S, D width; N documents, M = N + 1 borders of documents; F documents with at
least one token that is not padding, L columns of their rows (at least the length of the longest document).
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from stillhouse.display import name_list
from stillhouse.document_lengths import DocumentLengths, document_starts
from stillhouse.libraries import reading
from stillhouse.models.families import ModelFacts
from stillhouse.models.forward_modes import VARLEN, uses_flash_attention
from stillhouse.models.model_checks import ProofError, typename
from stillhouse.models.varlen import VARLEN_LENGTHS, Activations, PackedAttention
from stillhouse.models.vision_language import AXES, model_positions, padded_with_text, placeholder_mask

#: rows are padded to a multiple of this number of columns, so that shapes repeat and GPUs multiply aligned sizes
COLUMNS = 8
PACKED, MASKED, ROWS = "packed", "masked", "rows"
LENGTHS, CU_SEQLENS = "lengths", "cu_seqlens"
AUTO = "auto"
#: for each way, the names of the lengths that a backbone gets. DeltaNet layers rename cu_seq_lens_q to cu_seqlens
#: (the name in fla) and refuse a second cu_seqlens. Kimi's layers do not rename lengths, so they need cu_seqlens
_LENGTH_NAMES = {LENGTHS: (_LENGTHS := (*VARLEN_LENGTHS, "seq_idx")), CU_SEQLENS: (*_LENGTHS, "cu_seqlens")}
#: the modules with kernels for layers that mix tokens without attention, and the packages to install for them
KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}
_IN_ONE_ROW = (PACKED, MASKED, *_LENGTH_NAMES)
#: for each value of `data.packing`, the ways in the order in which they are tried, the cheapest way first
PACKINGS_OF = {AUTO: (*_IN_ONE_ROW, ROWS), PACKED: _IN_ONE_ROW, ROWS: (ROWS,)}
_ADVICE = "expected another attention, such as sdpa or eager, or one document per row (data.packing: rows)"
_ADVICE_WITHOUT_ROWS = "expected another attention, such as sdpa or eager, or context=1"
_IN_WORDS = {PACKED: "packed", MASKED: "packed, with masks from transformers", ROWS: "one per row"}
_IN_WORDS |= dict.fromkeys(_LENGTH_NAMES, "packed, with their lengths for the layers' kernels")


@dataclass(frozen=True, eq=False)
class UnpackedRows:
    """Places a micro-batch's documents in rows of one document each, or all documents in one row (N = 1).

    Padding follows a document's last token, so a causal model needs no mask.

    index_NL: for each place in the rows, the place of its token in the flattened micro-batch. Padding repeats the
    document's first token, or its first token that is not an image's placeholder. place_T: the place of each token in
    the flattened rows; 0 for tokens of documents without a row. shape_BS: the shape of the micro-batch.
    """

    index_NL: Tensor
    place_T: Tensor
    shape_BS: tuple[int, int]

    @classmethod
    def of(
        cls,
        position_ids_BS: Tensor,
        is_padding_BS: Tensor | None = None,
        lengths: DocumentLengths | None = None,
        multiple: int = COLUMNS,
        widths: Sequence[int] | None = None,
        is_placeholder_BS: Tensor | None = None,
    ) -> Self:
        """Return the rows of all documents. A document begins where a position id is not the previous one plus 1.

        is_padding_BS: True for padding; None gives every document a row. Documents that are only padding get no row.
            But if all documents are padding, the first document gets a row, because the backbone must run.
        lengths: the documents' lengths, computed with `is_padding_BS`. If one of these two arguments is None, the
            lengths are computed here, which waits for the device.
        multiple: without `widths`, the number of columns is a multiple of this number.
        widths: the number of columns of each document in one row of all documents; None gives each document a row.
        is_placeholder_BS: True for placeholders of images, which padding must not repeat.
        """
        if lengths is None or is_padding_BS is None:
            lengths = DocumentLengths.of(position_ids_BS, is_padding_BS)
        rows, columns = position_ids_BS.shape
        document_T = document_starts(position_ids_BS).cumsum(0) - 1
        start_N, length_N = lengths.borders_M[:-1].long(), lengths.borders_M.diff().long()
        filled_F, number_F = lengths.filled_K, torch.arange(len(lengths.filled), device=start_N.device)
        # document_NL, column_NL: each place's document, and column in it; offset_F: each document's first place
        if widths is None:
            column_L = torch.arange(-(-max(lengths.filled) // multiple) * multiple, device=start_N.device)
            document_NL, column_NL, offset_F = number_F[:, None], column_L[None], number_F * len(column_L)
        else:
            width_F = torch.tensor(widths, device=start_N.device)
            offset_F = width_F.cumsum(0) - width_F
            document_NL = number_F.repeat_interleave(width_F, output_size=sum(widths))[None]
            column_NL = torch.arange(sum(widths), device=start_N.device)[None] - offset_F[document_NL]
        filled_NL = filled_F[document_NL]
        is_token_NL = column_NL < length_N[filled_NL]
        index_NL = start_N[filled_NL] + torch.where(is_token_NL, column_NL, 0)
        if is_placeholder_BS is not None:
            assert widths is None, "several documents with images in one row"
            first_N = (~is_placeholder_BS.flatten()[index_NL]).int().argmax(1, keepdim=True)
            index_NL = torch.where(is_token_NL, index_NL, index_NL.gather(1, first_N))
        offset_N = torch.full_like(start_N, -1).index_copy_(0, filled_F, offset_F)
        column_T = torch.arange(len(document_T), device=start_N.device) - start_N[document_T]
        place_T = torch.where(offset_N[document_T] >= 0, offset_N[document_T] + column_T, 0)
        return cls(index_NL, place_T, (rows, columns))

    def position_ids(self, position_ids_BS: Tensor) -> Tensor:
        """Return the position ids of the rows' columns, [1, L]."""
        return torch.arange(self.index_NL.shape[1], device=position_ids_BS.device)[None]

    def unpack(self, values_BS: Tensor) -> Tensor:
        """Return values [B, S, …] of the micro-batch as rows [N, L, …]. Padding repeats a token of the row, because
        a special padding token may have an embedding whose gradient is not finite (Gemma 3n).
        """
        return values_BS.flatten(0, 1)[self.index_NL]

    def pack(self, values_NL: Tensor) -> Tensor:
        """Return rows' values [N, L, …] as a micro-batch [B, S, …]. Documents without a row get arbitrary values."""
        return self.pack_tokens(values_NL.flatten(0, 1)).unflatten(0, self.shape_BS)

    def pack_tokens(self, values: Tensor) -> Tensor:
        """Return values [N·L, …] of rows as values of a flattened micro-batch [T, …]."""
        return values[self.place_T]


@dataclass(frozen=True)
class JoinedRow:
    """Joins all rows of a micro-batch to one row, because some functions separate documents only in a single row.

    shape_BS: the shape of the micro-batch.
    """

    shape_BS: tuple[int, int]

    def position_ids(self, position_ids_BS: Tensor) -> Tensor:
        return self.unpack(position_ids_BS.expand(self.shape_BS))

    def unpack(self, values_BS: Tensor) -> Tensor:
        """Return values [B, S, …] of the micro-batch as values of the row, [1, T, …]."""
        return values_BS.flatten(0, 1)[None]

    def pack(self, values_1T: Tensor) -> Tensor:
        """Return values [1, T, …] of the row as a micro-batch [B, S, …]."""
        return values_1T[0].unflatten(0, self.shape_BS)

    def pack_tokens(self, values: Tensor) -> Tensor:
        return values


class PackingError(ProofError):
    """With this way of packing, documents influence each other, or a document's result depends on its place."""


class KernelError(PackingError):
    """A layer has no kernel that separates packed documents by their lengths, or does not accept lengths."""


class Packing:
    """Selects the way in which a model's documents are packed: the first way that has not been refused.

    setting: "packed", "rows", or "auto" for the cheapest way that is exact.
    activations: see `PackedAttention`.
    name: the way that is used.
    reason: why an earlier way was refused; None if no way was refused.
    attention: the attention functions. If variable-length attention is possible, each way is first tried with it.
    is_sharded: whether context parallelism shards the documents.
    reads_media: whether `prove_images` has proven the present way for documents with images.

    Raises PackingError if the model's code shows that no way of this setting is exact. Raises ValueError if the
    model's configuration names variable-length attention and this attention cannot be used.
    """

    def __init__(
        self, model: PreTrainedModel, backbone: nn.Module, setting: str = AUTO, activations: Activations | None = None
    ):
        self._model, self._advice = model, _ADVICE
        self.is_sharded = self.reads_media = False
        self.takes_positions = "position_ids" in inspect.signature(backbone.forward).parameters
        self.reason: str | None = None
        self.attention = PackedAttention(model, activations)
        # each way, and whether it uses variable-length attention
        self._ways: list[tuple[str, bool]] = []
        for way in PACKINGS_OF[setting]:
            if self.attention.is_possible and way in (PACKED, *_LENGTH_NAMES):
                self._ways.append((way, True))
            if not self.attention.is_required:
                self._ways.append((way, False))
        if not self._ways:
            raise ValueError(f"attention '{VARLEN}' needs packed documents: expected another attention, such as sdpa")
        self._use_next(None)

    @property
    def name(self) -> str:
        return self._ways[0][0]

    @property
    def joins_rows(self) -> bool:
        """Whether the model gets all rows as one row. Flash attention (transformers' `_is_packed_sequence`) and
        functions that get lengths separate documents only in a batch of one row.
        """
        return not self.is_sharded and (
            self.name in _LENGTH_NAMES
            or self.attention.reads_lengths
            or (self.name != ROWS and uses_flash_attention(self._model))
        )

    @property
    def length_names(self) -> tuple[str, ...]:
        return _LENGTH_NAMES.get(self.name, VARLEN_LENGTHS if self.attention.reads_lengths else ())

    @property
    def has_arguments(self) -> bool:
        """Whether the backbone gets masks or lengths. Some backbones do not accept them."""
        return self.name == MASKED or bool(self.length_names)

    def refuse(self, error: PackingError) -> None:
        """Refuse the present way with this error, and use the next way. Raises PackingError if no way is left."""
        name, reads_lengths = self._ways[0]
        self.reads_media = False
        if reads_lengths and (name, False) in self._ways:
            self.attention.reason = str(error)
            del self._ways[0]
            self._use_next(None)
        else:
            self._use_next(error)

    def shard_documents(self) -> None:
        """Use only ways in which context parallelism can shard documents. Raises ValueError if there is none."""
        if self.name not in (PACKED, MASKED):
            raise ValueError(f"context parallelism needs packed documents, but they are {self}: expected context=1")
        self._ways = [way for way in self._ways if way[0] in (PACKED, MASKED)]
        self._advice, self.is_sharded = _ADVICE_WITHOUT_ROWS, True

    def _use_next(self, error: PackingError | None) -> None:
        """Drop the present way if there is an error; then use the first way that `_refusal` does not refuse."""
        while error := error or _refusal(self._model, self.name, takes_positions=self.takes_positions):
            if self.reason is None:
                self.reason = str(error)
            elif isinstance(error, KernelError) and self.name == LENGTHS:
                self.reason += f"; {error}"
            remaining = [way for way in self._ways if way[0] != self.name]
            if not remaining:
                raise PackingError(f"{self.reason}: {self._advice}") from error
            self._ways, error = remaining, None
        self.attention.use(lengths=self._ways[0][1])

    def __str__(self) -> str:
        words = _IN_WORDS[self.name] + (f", because {self.reason}" if self.reason else "")
        return "; ".join(filter(None, [words, self.attention.in_words]))


def _refusal(model: PreTrainedModel, packing: str, *, takes_positions: bool) -> PackingError | None:
    """Return an error if the model's code shows that a way of packing is not exact, otherwise None."""
    if packing == ROWS:
        return None
    if not takes_positions and packing not in _LENGTH_NAMES:
        return PackingError(
            f"{typename(model)} takes no position_ids, so it cannot separate documents that share a row (state-space "
            "and ALiBi models)"
        )
    facts = ModelFacts(model.config)
    if facts.row_windows:
        return PackingError(
            f"{typename(model)} has {name_list(facts.row_windows)}, which depends on a token's column in its row, so "
            "it cannot separate documents that share a row"
        )
    if facts.has_alibi:
        return PackingError(f"{typename(model)} has ALiBi, whose positions are the columns of the row")
    if packing == MASKED:
        try:
            with reading(f"{typename(model)} cannot be packed with masks"):
                masks = packed_masks(model, torch.tensor([[0, 1, 0]]))
        except ValueError as error:
            return PackingError(str(error))
        if masks is None:
            return PackingError(f"transformers builds no attention masks for {typename(model)}")
    if packing in _LENGTH_NAMES and not any(find_spec(module) for module in KERNELS):
        return KernelError(
            f"no package with kernels that separate documents by lengths is installed ({name_list(KERNELS.values())})"
        )
    return None


def packed_masks(model: PreTrainedModel, position_ids_BS: Tensor) -> Any:
    """Return transformers' attention masks for packed documents: a mask, a dict of masks by layer type, or None."""
    # transformers reads only the shape, dtype and device of the embeddings
    embeddings = torch.empty((), dtype=model.dtype, device=position_ids_BS.device).expand(*position_ids_BS.shape, 1)
    return create_masks_for_generate(model.config, embeddings, None, None, position_ids=position_ids_BS)


def packing_errors(model: PreTrainedModel, packing: Packing) -> AbstractContextManager[None]:
    """Return a context that converts a library's error to PackingError if the model gets masks or lengths."""
    if not packing.has_arguments:
        return nullcontext()
    inputs = "masks" if packing.name == MASKED else "lengths"
    kind = KernelError if packing.name in _LENGTH_NAMES else PackingError
    return library_errors(f"{typename(model)} cannot be packed with {inputs}", kind)


@contextmanager
def library_errors(what: str, kind: type[PackingError] = PackingError) -> Iterator[None]:
    """Convert a library's error in the block to an error of this kind, whose message begins with `what`."""
    try:
        with reading(what, passes=ProofError):
            yield
    except ProofError:
        raise
    except ValueError as error:
        raise kind(str(error)) from error


def backbone_inputs(
    model: PreTrainedModel,
    packing: Packing,
    position_ids_BS: Tensor,
    is_padding_BS: Tensor | None,
    inputs: Mapping[str, Any],
    lengths: DocumentLengths | None = None,
    images: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, Any], UnpackedRows | JoinedRow | None]:
    """Return the arguments of a backbone for inputs without an attention mask, and the rows of its outputs.

    The returned rows are None if the backbone runs the micro-batch's own rows.

    inputs: `input_ids` [B, S] or `inputs_embeds` [B, S, D], and other tensors [B, S, …] of the tokens, which are
        placed in rows like the ids. `axis_position_ids` [B, S, A] become a part of the backbone's positions.
    is_padding_BS, lengths, images: see `Decoder.forward`.

    Raises ValueError if `inputs` contain other tensors, such as images, and for `images` if no proof has shown that
    packed documents with images are exact.
    """
    images = images or {}
    token_inputs = {key: value for key, value in inputs.items() if value is not None}
    name = "inputs_embeds" if inputs["input_ids"] is None else "input_ids"
    shape_BS = token_inputs[name].shape[:2]
    _require_inputs(model, packing, token_inputs, shape_BS, images)
    placeholder_BS = placeholder_mask(model, token_inputs)  # pipeline stages without images also need it
    if name == "input_ids" and placeholder_BS is not None and is_padding_BS is not None:
        token_inputs[name] = padded_with_text(token_inputs[name], placeholder_BS, is_padding_BS)
    layout: UnpackedRows | JoinedRow | None = None
    if packing.name == ROWS:
        expanded_BS = position_ids_BS.expand(shape_BS)
        layout = UnpackedRows.of(expanded_BS, is_padding_BS, lengths, is_placeholder_BS=placeholder_BS)
    elif packing.joins_rows and shape_BS[0] > 1:
        layout = JoinedRow((shape_BS[0], shape_BS[1]))
        position_ids_BS = layout.unpack(position_ids_BS.expand(shape_BS))
    if layout is not None:
        token_inputs = {key: layout.unpack(value) for key, value in token_inputs.items()}
    axes_BSA = token_inputs.pop(AXES, None)
    arguments = {"input_ids": None, **token_inputs, **images}
    if packing.name == ROWS:
        if axes_BSA is not None:
            arguments["position_ids"] = model_positions(position_ids_BS, axes_BSA, separates=False)
        return arguments, layout
    if packing.takes_positions:
        arguments["position_ids"] = model_positions(position_ids_BS, axes_BSA, separates=True)
    laid_out_BS = position_ids_BS.expand(token_inputs[name].shape[:2])
    if packing.name == MASKED:
        arguments["attention_mask"] = packed_masks(model, laid_out_BS)
    if names := packing.length_names:
        if lengths is None:
            assert not packing.is_sharded, "a context rank cannot compute lengths of documents from its own columns"
            lengths = DocumentLengths.of(laid_out_BS)  # this waits for the device
        arguments |= dict.fromkeys((key for key in names if key.startswith("cu_seq")), lengths.borders_M)
        arguments |= {"max_length_q": lengths.longest, "max_length_k": lengths.longest}
        if "seq_idx" in names:
            arguments["seq_idx"] = (document_starts(laid_out_BS).cumsum(0, dtype=torch.int32) - 1)[None]
    return arguments, layout


def _require_inputs(
    model: PreTrainedModel,
    packing: Packing,
    token_inputs: Mapping[str, Any],
    shape_BS: Sequence[int],
    images: Mapping[str, Tensor],
) -> None:
    if images and not packing.reads_media and packing.name != ROWS:
        raise ValueError(
            f"{typename(model)} got images, but no proof has shown that documents with images can be "
            f"{_IN_WORDS[packing.name]}: expected a call of prove_images before, or data.packing: rows"
        )
    if others := [key for key, value in token_inputs.items() if getattr(value, "shape", ())[:2] != shape_BS]:
        raise ValueError(
            f"{typename(model)} got {name_list(others)} with position_ids: expected tensors whose shape begins with "
            f"{list(shape_BS)}, and tensors of images only in `images`"
        )
