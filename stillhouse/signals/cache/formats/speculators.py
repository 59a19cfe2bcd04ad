"""Hidden states in the format of the speculators project, which captures them in vLLM: one file per document.

    hs_{i}.safetensors
        token_ids       [N]             the document's tokens
        hidden_states   [N, L, E]       the outputs of L layers for each token, the model's last layer at the end

Row t is the hidden state at token t, before the model's final norm; it predicts token t + 1. `import_cache.py` runs
the teacher to check this, and applies the norm if the states need it.

N tokens, L layers, E the teacher's width.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from stillhouse.libraries import reading

NAMES = "hs_*.safetensors"


class SpeculatorsFiles:
    """The files of a folder, ordered by their numbers. Raises ValueError for a folder without such files."""

    def __init__(self, source: Path):
        numbered = {path.stem.removeprefix("hs_"): path for path in source.glob(NAMES)}
        self._paths = [numbered[number] for number in sorted(filter(str.isdecimal, numbered), key=int)]
        if not self._paths:
            raise ValueError(f"{source} has no files named hs_0.safetensors, hs_1.safetensors, …")

    def __len__(self) -> int:
        return len(self._paths)

    def where(self, document: int) -> str:
        return str(self._paths[document])

    def tokens(self) -> Iterator[np.ndarray]:
        """Yield the ids of each document, int64."""
        for path in self._paths:
            with reading(f"{path} is not a file of hidden states"):
                with safe_open(path, framework="pt") as file:
                    token_ids = file.get_tensor("token_ids")
                if token_ids.dim() != 1 or token_ids.is_floating_point() or token_ids.is_complex():
                    raise ValueError(f"token_ids is {token_ids.dtype} of shape {list(token_ids.shape)}")
            yield token_ids.to(torch.int64).numpy()

    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states of the first document."""
        return self._states(0, slice(0, 0)).dtype

    def last_layer(self, document: int, tokens: int, width: int) -> Tensor:
        """The output of the last layer, [N, E]. Raises ValueError for another shape, NaN or infinity."""
        states = self._states(document, slice(None))
        if states.dim() != 3 or states.shape[0] != tokens or states.shape[2] != width or not states.shape[1]:
            raise ValueError(
                f"{self.where(document)}: hidden_states of shape {list(states.shape)}: expected "
                f"[{tokens}, layers, {width}] for its {tokens} tokens and this teacher"
            )
        last = states[:, -1].contiguous()
        if not last.isfinite().all():
            raise ValueError(f"{self.where(document)}: hidden_states has numbers that are not finite")
        return last

    def _states(self, document: int, rows: slice) -> Tensor:
        path = self._paths[document]
        with reading(f"{path} is not a file of hidden states"), safe_open(path, framework="pt") as file:
            states: Tensor = file.get_slice("hidden_states")[rows]
        return states
