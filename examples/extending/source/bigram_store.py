from pathlib import Path

import torch
from safetensors.torch import load_file

from stillhouse.hashing import file_hash
from stillhouse.signals import SignalSpec, SignalStore


class BigramStore(SignalStore):
    """The log-probabilities of the next token, given one token: log_probs [vocabulary, vocabulary] in a file."""

    def __init__(self, file):
        self.name, self.identity = file, file_hash(Path(file))
        self._log_probs_VV = load_file(file)["log_probs"]
        self.vocabulary = len(self._log_probs_VV)
        self.signal = SignalSpec("top_k", "float32", self.vocabulary, temperature=1.0)

    def require(self, documents, what, media_inputs=None):
        documents.check_ids(self.vocabulary, "teacher")

    def read(self, wanted):
        ids_K, tail = torch.arange(self.vocabulary, dtype=torch.int32), torch.tensor(-torch.inf)
        rows = [self._log_probs_VV[document.tokens[list(document.rows)]] for document in wanted]
        return [{"ids": ids_K.expand_as(p), "log_probs": p, "tail_log_prob": tail.expand(len(p))} for p in rows]
