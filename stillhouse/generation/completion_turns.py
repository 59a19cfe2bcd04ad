"""The turns of a completion as texts: what the model has generated, and the replies to it.

N tokens of a completion.
"""

from itertools import pairwise

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.user_code.functions import Turn


def turn_texts(tokenizer: PreTrainedTokenizerBase, ids_N: np.ndarray, is_generated_N: np.ndarray) -> list[Turn]:
    """The texts of the turns and the replies in their order, without special tokens.

    is_generated_N: bool, whether the model has generated the token. There is a token of a reply between two turns of
        the model, so that the tokens of a checkpoint give the same turns.
    """
    borders = [0, *(np.flatnonzero(np.diff(is_generated_N)) + 1).tolist(), len(ids_N)]
    return [
        {
            "role": "student" if is_generated_N[start] else "environment",
            "text": tokenizer.decode(ids_N[start:stop], skip_special_tokens=True),
        }
        for start, stop in pairwise(borders)
    ]
