"""Signals of a teacher outside the student's stages: for every token, hidden states or log-probabilities of ids.

N rows, E the teacher's width, K ids per row (with a label: K + 1), M draws per row. Row t of a document is the
teacher's distribution of token t + 1. The tensors of a signal, in memory, in a cache and on the wire, are:

    hidden          [N, E]              "hidden": the teacher's hidden states after its last norm
    ids             [N, K] int32        "top_k": the teacher's top-k ids, the most likely one first
                                        "chosen": ids that the caller chooses
    log_probs       [N, K]              the log-probabilities of these ids over the full vocabulary
    tail_log_prob   [N] float32         the log of the teacher's mass outside these ids
    ids             [N, M] int32        "sampled": the distinct ids among M draws from the teacher, padded with -1
    counts          [N, M] uint8        the number of draws of each of these ids, padded with 0
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from stillhouse.data.media import DocumentMedia
from stillhouse.objective import Chosen, Sampled, Signal, TopK
from stillhouse.objective.signals import Tail

SignalKind = Literal["hidden", "top_k", "chosen", "sampled"]
#: for each tensor: the shape of a row, and the dtype
TensorForms = dict[str, tuple[tuple[int, ...], torch.dtype]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: the maximum number of draws per token, because a count has one byte
MAX_SAMPLES = 255
#: the largest allowed difference between 1 and the total mass of a row, by the dtype of the log-probabilities
MASS_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.01}


@dataclass(frozen=True)
class SignalSpec:
    """The kind and the sizes of a signal. Raises ValueError if the values do not fit together.

    kind: "hidden": the exact distribution at any temperature. "top_k": the K most likely ids. "chosen": K ids of the
        caller. "sampled": draws (random sampling distillation, arXiv 2503.16870)
    dtype: the dtype of the hidden states or log-probabilities; must be "float32" for "sampled"
    top_k: K for "top_k" and "chosen"; M for "sampled"
    temperature: divides the teacher's logits before log-probabilities are computed or ids are sampled
    with_label: whether "top_k" has an additional entry for the document's next token; the tail then excludes it. If
        this token is among the K ids, the entry has id -1 and log-probability -inf
    """

    kind: SignalKind
    dtype: str
    top_k: int | None = None
    temperature: float | None = None
    with_label: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(SignalKind):
            raise ValueError(f"signal '{self.kind}': expected one of {', '.join(get_args(SignalKind))}")
        if self.dtype not in DTYPES or (self.kind == "sampled" and self.dtype != "float32"):
            raise ValueError(f"dtype '{self.dtype}' of {self.kind}: expected one of {', '.join(DTYPES)}")
        if self.with_label and self.kind != "top_k":
            raise ValueError(f"a label (the next token) with {self.kind}: expected a label only with top_k")
        if self.kind == "hidden":
            if (self.top_k, self.temperature) != (None, None):
                raise ValueError("hidden states have neither top_k nor a temperature: they give every temperature")
            return
        if self.top_k is None or self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: expected 1 or more ids per token")
        if self.kind == "sampled" and self.top_k > MAX_SAMPLES:
            raise ValueError(f"top_k={self.top_k} sampled ids per token: expected at most {MAX_SAMPLES}")
        if not (self.temperature is not None and 0 < self.temperature < math.inf):
            raise ValueError(f"temperature={self.temperature} of {self.kind}: expected a positive number")

    @property
    def is_exact(self) -> bool:
        """Whether the signal determines the full distribution at every temperature."""
        return self.kind == "hidden"

    @property
    def has_tail(self) -> bool:
        """Whether `teacher.tail` determines how the mass outside the ids is treated."""
        return self.kind in ("top_k", "chosen")

    @property
    def entries(self) -> int:
        """K or M, without the label's entry."""
        assert self.top_k is not None
        return self.top_k

    def tensors(self, width: int) -> TensorForms:
        """For each tensor: the shape of a row, and the dtype. width: E"""
        dtype = DTYPES[self.dtype]
        if self.kind == "hidden":
            return {"hidden": ((width,), dtype)}
        ids = (self.entries + self.with_label,), torch.int32
        if self.kind == "sampled":
            return {"ids": ids, "counts": ((self.entries,), torch.uint8)}
        return {"ids": ids, "log_probs": (ids[0], dtype), "tail_log_prob": ((), torch.float32)}

    def bytes_per_token(self, width: int) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors(width).values())

    def as_signal(self, tensors: dict[str, Tensor], tail: Tail) -> Signal:
        """Convert the tensors of "top_k", "chosen" or "sampled" to the objective's signal."""
        if self.kind == "sampled":
            return Sampled(tensors["ids"], tensors["counts"].to(torch.float32) / self.entries)
        kind = TopK if self.kind == "top_k" else Chosen
        log_probs_TK = tensors["log_probs"].to(torch.float32)
        return kind(tensors["ids"], log_probs_TK, tail, tensors["tail_log_prob"], self.temperature)

    def __str__(self) -> str:
        if self.kind == "hidden":
            return f"hidden states in {self.dtype}"
        if self.kind == "sampled":
            return f"{self.top_k} draws at temperature {self.temperature:g}"
        which = "top" if self.kind == "top_k" else "the student's"
        label = " and the actual token's" if self.with_label else ""
        return f"{which} {self.top_k}{label} log-probabilities in {self.dtype} at temperature {self.temperature:g}"


@dataclass(frozen=True, eq=False)
class DocumentRows:
    """The rows of a document for which signals are requested.

    tokens: all ids of the document. ids_NK: for "chosen", the K ids of each requested row; -1 is an absent entry
    source: the document's source, for messages; "" if unknown
    """

    tokens: np.ndarray
    rows: range
    ids_NK: Tensor | None = None
    source: str = ""
    media: DocumentMedia | None = None


def problem_in(spec: SignalSpec, vocabulary: int, tensors: Mapping[str, Tensor]) -> str:
    """Describe the first impossible value, or return "". vocabulary: the number of rows of the teacher's head"""
    if spec.kind == "hidden":
        return "" if tensors["hidden"].isfinite().all() else "'hidden' is not finite"
    ids_NK = tensors["ids"]
    if (ids_NK >= vocabulary).any() or (ids_NK < -1).any():
        return f"'ids' has an id that is not in the vocabulary of {vocabulary}"
    if spec.kind == "sampled":
        counts_NK, is_id_NK = tensors["counts"], ids_NK >= 0
        if (is_id_NK != (counts_NK > 0)).any() or is_id_NK[:, 1:][~is_id_NK[:, :-1]].any():
            return "'ids' and 'counts' do not fit each other"
        if ((ids_NK[:, 1:] <= ids_NK[:, :-1]) & is_id_NK[:, 1:]).any():
            return "'ids' has an id twice in a row, or not in ascending order"
        if (counts_NK.sum(1, dtype=torch.int64) != spec.entries).any():
            return f"'counts' of a row do not add up to {spec.entries} draws"
        return ""
    log_probs_NK, tail_N = tensors["log_probs"], tensors["tail_log_prob"]
    if log_probs_NK.isnan().any() or tail_N.isnan().any():
        return "'log_probs' or 'tail_log_prob' has NaN"
    if (log_probs_NK > 0).any() or (tail_N > MASS_TOLERANCE["float32"]).any():
        return "'log_probs' or 'tail_log_prob' has a positive number"
    ordered_NK = ids_NK.sort(1).values
    if ((ordered_NK[:, 1:] == ordered_NK[:, :-1]) & (ordered_NK[:, 1:] >= 0)).any():
        return "'ids' has an id twice in a row"
    mass_N = log_probs_NK.double().exp().masked_fill(ids_NK < 0, 0.0).sum(1) + tail_N.double().exp()
    if spec.kind == "top_k" and ((mass_N - 1).abs() > MASS_TOLERANCE[spec.dtype]).any():
        return "'log_probs' and 'tail_log_prob' of a row do not add up to 1"
    return ""
