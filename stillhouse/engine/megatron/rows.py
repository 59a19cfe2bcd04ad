"""A micro-batch as Megatron-Core's layers get it: one document per right-padded row, sharded over context ranks.

    rows = LayerRows.of(micro_batch)
    hidden_BSD = rows.micro_batch_order(hidden_NLD)

A context rank has a block of columns of each micro-batch, as with the other engine: its labels, signals and loss are
of these tokens. In the layers, it has two chunks of each document's row instead (`context_positions`), so that all
ranks have the same work. So the ranks gather the tokens before the layers and the hidden states behind them.

B rows, S columns of the micro-batch on this rank; N documents, L columns of their rows on this rank, D width.
"""

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
    def of(cls, batch: MicroBatch) -> Self:
        """Return the rows of a micro-batch. A collective of the context ranks."""
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
        ids_NK = rows.unpack(ids_BS)
        positions_L = context_positions(ids_NK.shape[1]).to(ids_NK.device)
        ids_NL = ids_NK[:, positions_L]
        return cls(ids_NL, positions_L.expand_as(ids_NL), rows)

    def micro_batch_order(self, hidden_NLD: Tensor) -> Tensor:
        """Return the hidden states of this rank's columns [B, S, D]. A collective of the context ranks.

        Backward adds up the gradients that the context ranks have for a token.
        """
        group = parallel_state.get_context_parallel_group()
        if group.size() == 1:
            return self.rows.pack(hidden_NLD)
        columns = self.rows.index_NL.shape[1]
        hidden_KND = gather_from_sequence_parallel_region(hidden_NLD.transpose(0, 1).contiguous(), group=group)
        place_BS = self.rows.place_T.view(self.rows.shape_BS).chunk(group.size(), dim=1)[group.rank()]
        # where the gathered chunks have the columns of a row
        where_K = all_positions(columns).argsort().to(place_BS.device)
        index_BS = where_K[place_BS % columns] * len(hidden_NLD) + place_BS // columns
        return hidden_KND.flatten(0, 1)[index_BS]
