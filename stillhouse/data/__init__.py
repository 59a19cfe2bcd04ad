"""Reads records, tokenizes them, and packs the tokens into micro-batches. No other package shifts labels.

The public names are imported at their first use, so that importing the package does not import torch.
"""

from typing import TYPE_CHECKING

from stillhouse.first_use import names_at_first_use

if TYPE_CHECKING:
    from stillhouse.data.public import *  # noqa: F403

__getattr__, __dir__ = names_at_first_use(__name__)
