"""A micro-batch as Megatron-Core's layers get it: one document per right-padded row, sharded over context ranks.

    (rows,) = LayerRows.of_pass([micro_batch])
    hidden_BSD = rows.pack(hidden_NLD)

A context rank has a block of columns of each micro-batch, as with the other engine: its labels, signals and loss are
of these tokens. In the layers, it has two chunks of each document's row instead (`context_positions`), so that all
ranks have the same work. So the ranks gather the tokens before the layers and the hidden states behind them.

B rows, S columns of the micro-batch on this rank; N documents, K columns of their rows on all
context ranks, L on this rank, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from stillhouse.data import MicroBatch
from stillhouse.engine.megatron.attention import all_positions, context_positions
from stillhouse.models.document_rows import COLUMNS, DocumentRows


@dataclass(frozen=True)
class LayerRows:
    """ids_NL, positions_NL: the tokens in the layers, and their positions. rows: of all context ranks."""

    ids_NL: Tensor
    positions_NL: Tensor
    rows: DocumentRows

    @classmethod
    def of_pass(cls, batches: Sequence[MicroBatch], *, uniform_shapes: bool = False) -> list[Self]:
        """Return the rows of the micro-batches of one pass. A collective of the context ranks.

        uniform_shapes: all get the largest numbers of rows and columns.
        """
        documents = [_documents(batch) for batch in batches]
        shapes = [(len(ids_NK), ids_NK.shape[1]) for ids_NK, _ in documents]
        if uniform_shapes:
            shapes = [(max(rows for rows, _ in shapes), max(columns for _, columns in shapes))] * len(shapes)
        return [cls._of_shape(*of_one, *shape) for of_one, shape in zip(documents, shapes, strict=True)]

    @classmethod
    def _of_shape(cls, ids_NK: Tensor, rows: DocumentRows, count: int, columns: int) -> Self:
        """count, columns: of the rows of all context ranks. Those without tokens repeat a token of others."""
        row_N = torch.arange(count, device=ids_NK.device).clamp(max=len(ids_NK) - 1)
        positions_L = context_positions(columns).to(ids_NK.device)
        ids_NL = ids_NK[row_N[:, None], torch.where(positions_L < ids_NK.shape[1], positions_L, 0)]
        return cls(ids_NL, positions_L.expand_as(ids_NL), rows)

    def pack_tokens(self, values: Tensor) -> Tensor:
        """Return values [N·L, …] of the rows as those of this rank's columns [B·S, …], in the same way as `pack`."""
        return self.pack(values.unflatten(0, self.ids_NL.shape)).flatten(0, 1)

    def pack(self, hidden_NLD: Tensor) -> Tensor:
        """Return the hidden states of this rank's columns [B, S, D]. A collective of the context ranks.

        Backward adds up the gradients that the context ranks have for a token.
        """
        group, columns = parallel_state.get_context_parallel_group(), self.rows.index_NL.shape[1]
        if group.size() == 1:
            return self.rows.pack(hidden_NLD[: len(self.rows.index_NL), :columns])
        hidden_KND = gather_from_sequence_parallel_region(hidden_NLD.transpose(0, 1).contiguous(), group=group)
        place_BS = self.rows.place_T.view(self.rows.shape_BS).chunk(group.size(), dim=1)[group.rank()]
        # where the gathered chunks have the columns of a row
        where_K = all_positions(len(hidden_KND)).argsort().to(place_BS.device)
        index_BS = where_K[place_BS % columns] * len(hidden_NLD) + place_BS // columns
        return hidden_KND.flatten(0, 1)[index_BS]


def _documents(batch: MicroBatch) -> tuple[Tensor, DocumentRows]:
    """Return the tokens [N, K] of a micro-batch's documents on all context ranks, and the documents' places."""
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
    rows = DocumentRows.of(position_ids_BS, is_padding_BS, batch.lengths, multiple=COLUMNS * count)
    return rows.unpack(ids_BS), rows
