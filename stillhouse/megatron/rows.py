"""The rows of a micro-batch in Megatron-Core's layers: one row of packed documents, or a padded row per document.

A context rank has a block of columns of each micro-batch, as with the torch engine. But in the layers, it has two
chunks of each document (`context_positions`), so that all ranks have the same work. Therefore the ranks gather the
tokens before the layers, and the hidden states after the layers.

B rows, S columns of the micro-batch on this rank; N rows in the layers (1 for packed documents), K columns of these
rows on all context ranks, L columns of these rows on this rank, D width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from stillhouse.data import MicroBatch
from stillhouse.document_lengths import DocumentLengths
from stillhouse.models.document_packing import COLUMNS, UnpackedRows


@dataclass(frozen=True)
class MegatronRows:
    """The rows of a micro-batch in Megatron-Core's layers on this rank.

    ids_NL, positions_NL: the tokens in the layers, and their positions in their documents.
    rows: the rows before they are divided among the context ranks.
    documents: the number of columns of each document in a row.
    packed: the documents' borders; None if each row is one document.
    """

    ids_NL: Tensor
    positions_NL: Tensor
    rows: UnpackedRows
    documents: Sequence[int]
    packed: PackedSeqParams | None

    @classmethod
    def in_pass(cls, batches: Sequence[MicroBatch], *, packs: bool, uniform_shapes: bool = False) -> list[Self]:
        """Return the rows of the micro-batches of one pass. A collective of the context ranks.

        packs: whether documents are packed. uniform_shapes: whether all micro-batches get the largest numbers of rows
        and columns.
        """
        made = [_gathered_rows(batch, packs) for batch in batches]
        # the numbers of rows and columns, over all context ranks
        shapes = [(len(ids_NK), ids_NK.shape[1]) for ids_NK, _, _ in made]
        if uniform_shapes:
            shapes = [(max(count for count, _ in shapes), max(columns for _, columns in shapes))] * len(shapes)
        multiple = COLUMNS * parallel_state.get_context_parallel_world_size()
        result = []
        for (ids_NK, rows, documents), (count, columns) in zip(made, shapes, strict=True):
            # added rows and columns repeat other tokens; with packed documents, added columns are another document
            columns += -columns % multiple
            if columns > ids_NK.shape[1]:
                documents = [*documents, columns - ids_NK.shape[1]] if packs else [columns]
            row_N = torch.arange(count, device=ids_NK.device).clamp(max=len(ids_NK) - 1)
            (columns_L, positions_L), *_ = _places(documents, parallel_state.get_context_parallel_rank())
            ids_NL = ids_NK[row_N[:, None], torch.where(columns_L < ids_NK.shape[1], columns_L, 0).to(ids_NK.device)]
            positions_NL = positions_L.to(ids_NK.device).expand_as(ids_NL)
            packed = borders(documents, ids_NK.device) if packs else None
            result.append(cls(ids_NL, positions_NL, rows, documents, packed))
        return result

    def pack_tokens(self, values: Tensor) -> Tensor:
        """Return values [N·L, …] of the layers' rows as values [B·S, …] of this rank's micro-batch (see `pack`)."""
        return self.pack(values.unflatten(0, self.ids_NL.shape)).flatten(0, 1)

    def pack(self, hidden_NLD: Tensor) -> Tensor:
        """Return the hidden states of this rank's columns, [B, S, D]. A collective of the context ranks.

        Backward sums the gradients that the context ranks have for a token.
        """
        group, columns = parallel_state.get_context_parallel_group(), self.rows.index_NL.shape[1]
        if group.size() == 1:
            return self.rows.pack(hidden_NLD[: len(self.rows.index_NL), :columns])
        hidden_KND = gather_from_sequence_parallel_region(hidden_NLD.transpose(0, 1).contiguous(), group=group)
        place_BS = self.rows.place_T.view(self.rows.shape_BS).chunk(group.size(), dim=1)[group.rank()]
        # where_K[k] is the place of a row's column k among the gathered columns
        columns_K = torch.cat([columns_L for columns_L, _ in _places(self.documents)])
        where_K = columns_K.argsort().to(place_BS.device)
        index_BS = where_K[place_BS % columns] * len(hidden_NLD) + place_BS // columns
        return hidden_KND.flatten(0, 1)[index_BS]


def _gathered_rows(batch: MicroBatch, packs: bool) -> tuple[Tensor, UnpackedRows, Sequence[int]]:
    """Return a micro-batch's tokens [N, K] of all context ranks, its rows, and the documents' numbers of columns."""
    shape_BS, count = batch.shape_BS, parallel_state.get_context_parallel_world_size()
    position_ids_BS, is_padding_BS = batch.position_ids_BS.expand(shape_BS), batch.is_padding_BS
    ids_BS = batch.input_ids_BS
    if count > 1:
        group = parallel_state.get_context_parallel_group()
        part = torch.stack([ids_BS, position_ids_BS, is_padding_BS.long()])
        parts = [torch.empty_like(part) for _ in range(count)]
        dist.all_gather(parts, part, group=group)
        ids_BS, position_ids_BS, is_padding_BS = torch.cat(parts, dim=2)
        is_padding_BS = is_padding_BS.bool()
    lengths, widths = batch.lengths or DocumentLengths.of(position_ids_BS, is_padding_BS), None
    if packs:
        multiple = 2 * count if count > 1 else 1  # each rank has two chunks of a document
        widths = [-(-length // multiple) * multiple for length in lengths.filled]
    rows = UnpackedRows.of(position_ids_BS, is_padding_BS, lengths, COLUMNS * count, widths)
    return rows.unpack(ids_BS), rows, widths or [rows.index_NL.shape[1]]


def _places(documents: Sequence[int], *ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each context rank, yield the columns of a row that the rank has, and their positions in their documents.

    The columns have the order in which the rank stores them.

    documents: the number of columns of each document.
    ranks: the context ranks, by default all.
    """
    starts = [*accumulate(documents, initial=0)][:-1]
    for rank in ranks or range(parallel_state.get_context_parallel_world_size()):
        positions = [context_positions(document, rank) for document in documents]
        columns = [start + document_positions for start, document_positions in zip(starts, positions, strict=True)]
        yield torch.cat(columns), torch.cat(positions)


def borders(documents: Sequence[int], device: torch.device) -> PackedSeqParams:
    """Return the borders of documents that follow one another. documents: the number of columns of each document."""
    stops = torch.tensor([*accumulate(documents, initial=0)], dtype=torch.int32, device=device)
    longest = max(documents)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=stops, cu_seqlens_kv=stops, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def context_positions(tokens: int, rank: int | None = None) -> Tensor:
    """Return the positions, in a document, of the tokens that a context rank has, in the rank's order.

    The document has two chunks per rank. Rank r has chunk r and the r-th chunk from the end (counted from 0), so that
    all ranks have the same work.

    tokens: the document's number of tokens, including padding. rank: by default, this rank.

    Raises ValueError if the chunks would not be equal.
    """
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return torch.arange(tokens)
    if tokens % (2 * size):
        raise ValueError(f"documents of {tokens} tokens over {size} context ranks: expected a multiple of {2 * size}")
    rank = parallel_state.get_context_parallel_rank() if rank is None else rank
    chunks = torch.arange(tokens).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[-1 - rank]])
