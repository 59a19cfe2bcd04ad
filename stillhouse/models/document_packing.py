"""How a model separates several documents in one row: by position ids that restart at each document.

transformers separates the documents in attention only if there is no cache and no attention mask. With a cache or a
mask, it silently lets tokens attend to other documents. `load_proof` runs the model to prove that the model
separates them.
"""

import inspect

from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.display import name_list
from stillhouse.models.forward_modes import uses_flash_attention
from stillhouse.models.model_parts import row_windows


def require_packable(model: PreTrainedModel, what: str) -> None:
    """Raise ValueError for a model that cannot separate documents by position ids. what: the model's name."""
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise ValueError(
            f"{what} takes no position_ids: it cannot separate documents that are packed into one row "
            "(state-space and ALiBi models)"
        )
    if windows := row_windows(model.config):
        raise ValueError(
            f"{what} has layers of type {name_list(windows)}, which cut a row into windows wherever its "
            "documents begin: it cannot separate documents that are packed into one row"
        )


def packs_one_row(model: PreTrainedModel) -> bool:
    """Whether the model separates packed documents only in a batch of one row, as transformers does for flash
    attention (`_is_packed_sequence`).
    """
    return uses_flash_attention(model)


def require_separable(model: PreTrainedModel, position_ids: Tensor, attention_mask: Tensor | None, rows: int) -> None:
    """Raise ValueError if the model would not separate the documents of these inputs. rows: the batch's rows."""
    if attention_mask is None:
        if rows > 1 and packs_one_row(model):
            raise ValueError(
                f"attention '{model.config._attn_implementation}' separates packed documents only in a batch of one "
                f"row, and got position_ids for {rows} rows: expected one row, another attention, or no "
                "position_ids if every row is one document"
            )
    elif attention_mask.dim() == 2:  # a mask of more dims has a value per pair of tokens and can separate documents
        tokens = (attention_mask[:, 1:] != 0) & (attention_mask[:, :-1] != 0)
        if bool((tokens & (position_ids[:, 1:] <= position_ids[:, :-1])).any()):
            raise ValueError(
                "position_ids restart within a row and an attention_mask is given, with which the row's documents "
                "see each other: expected attention_mask=None for packed rows (padding as a separate document)"
            )
