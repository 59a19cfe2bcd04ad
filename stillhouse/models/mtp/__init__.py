"""Multi-token prediction (see `multi_token_decoder.py`). It needs a later transformers than other features."""

from stillhouse.libraries import require_feature
from stillhouse.models.mtp.mtp_layers import find_layers
from stillhouse.models.mtp.multi_token_decoder import MultiTokenDecoder, add_mtp, freeze_main

require_feature("multi-token prediction")

__all__ = ["MultiTokenDecoder", "add_mtp", "find_layers", "freeze_main"]
