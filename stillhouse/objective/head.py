"""The output head as plain tensors, and its two directions: hidden states to logits, logit gradients back.

    logits = softcap(scale · (hidden Wᵀ + bias)),   softcap(x) = c·tanh(x / c)

C rows of a chunk (T rows in all), D width, V vocabulary. "Rows" of a weight are vocabulary entries.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from stillhouse.objective.vocab import VocabShard, require_whole_vocabulary


@dataclass(frozen=True, eq=False)
class OutputHead:
    """What turns hidden states into logits. Tensors only: whoever owns the module builds this inside its forward.

    `vocab_size`: the number of real rows over the whole vocabulary; rows from there on are padding and get no
    probability. None: all rows are real, as Hugging Face's own loss takes them.
    """

    weight_VD: Tensor
    bias: Tensor | None = None
    _: KW_ONLY
    vocab_size: int | None = None
    scale: float = 1.0
    softcap: float | None = None
    shard: VocabShard | None = None

    def __post_init__(self) -> None:
        if self.weight_VD.dim() != 2:
            raise ValueError(f"head weight of shape {tuple(self.weight_VD.shape)}: expected [vocabulary, width]")
        rows = self.weight_VD.shape[0]
        if self.bias is not None and self.bias.shape != (rows,):
            raise ValueError(
                f"head bias of shape {tuple(self.bias.shape)}: expected ({rows},), one per row of the weight"
            )
        if self.shard is None and self.vocab_size is not None and not 0 < self.vocab_size <= rows:
            raise ValueError(f"vocab_size={self.vocab_size}: expected 1 to {rows}, the rows of the head")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap={self.softcap}: expected a positive number, or None for none")

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of all rows, [..., V], in plain differentiable operations and the hidden states' dtype."""
        logits = torch.nn.functional.linear(hidden, self.weight_VD, self.bias)
        return soft_cap(logits * self.scale if self.scale != 1.0 else logits, self.softcap)


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """c·tanh(x / c): the identity for None."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def common_vocabulary(heads: Sequence[OutputHead], logit_columns: int | None = None) -> int:
    """The number of rows that get probability: all of them, or the real ones where any head says so.

    Heads with different row counts share a tokenizer and differ in padding (151,936 and 152,064 rows for 151,665
    tokens): the rows that only one of them has are padding. `logit_columns`: those of logits that have no head here.
    """
    for each in heads:
        require_whole_vocabulary(each.shard, each.weight_VD.shape[0])
    stated = {each.vocab_size for each in heads if each.vocab_size is not None}
    if len(stated) > 1:
        raise ValueError(f"the heads state different vocabularies: vocab_size {sorted(stated)}; expected one number")
    rows = [each.weight_VD.shape[0] for each in heads] + ([] if logit_columns is None else [logit_columns])
    if stated and min(stated) > min(rows):
        raise ValueError(
            f"vocab_size={min(stated)} on one side, {min(rows)} rows on another; "
            "expected every side to hold the whole vocabulary"
        )
    return min([*stated, *rows])


class Projection:
    """A head made ready for one pass over the tokens: real rows only, weights in the dtype of its GEMMs.

    Logits are float32 at least. Half-precision operands stay as they are on a GPU, whose matrix units sum in
    float32; on a CPU they are upcast once, here.
    """

    def __init__(self, head: OutputHead, vocabulary: int, operand_dtype: torch.dtype):
        weight_VD = head.weight_VD.detach()[:vocabulary]
        self.compute_dtype = torch.promote_types(operand_dtype, torch.float32)
        self.operand_dtype = operand_dtype if weight_VD.is_cuda else self.compute_dtype
        self.weight_VD = weight_VD.to(self.operand_dtype)
        self.bias = None if head.bias is None else head.bias.detach()[:vocabulary].to(self.compute_dtype)
        self.scale, self.softcap = head.scale, head.softcap

    def logits(self, hidden_CD: Tensor) -> Tensor:
        """[C, D] → [C, V] in the compute dtype."""
        logits_CV = self._matmul(hidden_CD.to(self.operand_dtype), self.weight_VD.t())
        if self.bias is not None:
            logits_CV += self.bias
        if self.scale != 1.0:
            logits_CV *= self.scale
        return soft_cap(logits_CV, self.softcap)

    def before_head(self, grad_CV: Tensor, logits_CV: Tensor) -> Tensor:
        """The gradient with respect to hidden Wᵀ + bias from the one with respect to the logits, in place."""
        if self.softcap is not None:
            grad_CV *= 1 - (logits_CV / self.softcap).square()
        if self.scale != 1.0:
            grad_CV *= self.scale
        return grad_CV

    def hidden_grad(self, grad_CV: Tensor) -> Tensor:
        return self._matmul(self._operand(grad_CV), self.weight_VD)

    def add_weight_grad(self, total_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        total_VD += self._matmul(self._operand(grad_CV).t(), hidden_CD.to(self._gradient_dtype))

    @property
    def _gradient_dtype(self) -> torch.dtype:
        # a logit's gradient can be 1e-8: below float16's smallest number, well within bfloat16's range
        return torch.float32 if self.operand_dtype == torch.float16 else self.operand_dtype

    def _operand(self, grad_CV: Tensor) -> Tensor:
        return grad_CV.to(self._gradient_dtype)

    def _matmul(self, left: Tensor, right: Tensor) -> Tensor:
        right = right.to(left.dtype)
        if left.dtype == self.compute_dtype:
            return left @ right
        return torch.mm(left, right, out_dtype=self.compute_dtype)


def operand_dtype(hidden: Tensor, weight_VD: Tensor) -> torch.dtype:
    """The dtype that a plain matrix product of the two would take, autocast included."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return torch.promote_types(hidden.dtype, weight_VD.dtype)


def log_probs(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) over the last dim."""
    # not logits − logsumexp: the maximum has to go first, or large logits take the last digits with them
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)


def entropy(log_probs: Tensor) -> Tensor:
    """−Σ p log p over the last dim, with 0·log 0 = 0."""
    return -(log_probs.exp() * log_probs.masked_fill(log_probs == -math.inf, 0.0)).sum(-1)
