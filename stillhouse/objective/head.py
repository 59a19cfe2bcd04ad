"""The output head as plain tensors: computes logits from hidden states, and gradients of hidden states and weight.

    logits = softcap(scale · (hidden Wᵀ + bias)),   softcap(x) = c·tanh(x / c)

C rows of a chunk of T tokens, D width, V vocabulary (if the head is sharded, this rank's part of the vocabulary). The
rows of a weight are vocabulary entries.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from stillhouse.objective.vocab import VocabShard, check_shard, rows_of


@dataclass(frozen=True, eq=False)
class OutputHead:
    """The tensors and settings that turn hidden states into logits. A head module creates this object in its forward.

    `shard`: the rows of the global head that are in `weight_VD` and `bias`, or None for all rows.
    `vocab_size`: the number of real rows of the global head; the rows after them are padding and get no probability.
    If it is None, all rows are real, as in the loss of Hugging Face's models.
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
            shape = tuple(self.bias.shape)
            raise ValueError(f"head bias of shape {shape}: expected ({rows},), one per row of the weight")
        if self.shard is not None:
            check_shard(self.shard, rows)
        elif self.vocab_size is not None and self.vocab_size > rows:
            raise ValueError(f"vocab_size={self.vocab_size}: expected 1 to {rows}, the number of rows of the head")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(f"vocab_size={self.vocab_size}: expected 1 or more, the size of the whole vocabulary")
        if isinstance(self.scale, bool) or not math.isfinite(self.scale):
            raise ValueError(f"scale={self.scale}: expected a finite number")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap={self.softcap}: expected a positive number, or None for no softcap")

    @property
    def rows(self) -> int:
        """The number of rows of the global head."""
        return self.weight_VD.shape[0] if self.shard is None else self.shard.rows

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of this rank's rows, [..., V], by plain operations in the hidden states' dtype."""
        logits = torch.nn.functional.linear(hidden, self.weight_VD, self.bias)
        logits = logits * self.scale if self.scale != 1.0 else logits
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def detached(head: OutputHead) -> OutputHead:
    """Return the head with detached tensors, or the head itself if none of its tensors requires a gradient."""
    if not head.weight_VD.requires_grad and (head.bias is None or not head.bias.requires_grad):
        return head
    return replace(head, weight_VD=head.weight_VD.detach(), bias=None if head.bias is None else head.bias.detach())


def common_vocabulary(heads: Sequence[OutputHead], logit_columns: int | None = None) -> int:
    """Return the number of rows that get probability: the smallest `vocab_size` or row count of these heads.

    The heads share a tokenizer, so their row counts differ only in padding (151,936 and 152,064 rows for 151,665
    tokens). `logit_columns`: the number of columns of logits that have no head, which also limits the result.

    Raises ValueError if the heads have different `vocab_size`, or if a `vocab_size` exceeds a row count.
    """
    stated = {head.vocab_size for head in heads if head.vocab_size is not None}
    if len(stated) > 1:
        raise ValueError(
            f"the heads have different vocabularies: vocab_size {sorted(stated)}; expected the same vocab_size in all"
        )
    rows = [head.rows for head in heads] + ([] if logit_columns is None else [logit_columns])
    if stated and min(stated) > min(rows):
        raise ValueError(
            f"vocab_size={min(stated)} in one head, {min(rows)} rows in another head or in the logits; "
            "expected at least vocab_size rows in all of them"
        )
    return min([*stated, *rows])


#: vocabulary rows per CPU thread in one matrix product for logits; larger products are 15 % slower with MKL
PANEL_ROWS = 512
#: matrix products on a GPU are fast only if sizes are multiples of 16 bytes: 8 numbers in half precision
ALIGNED = 8


class Projection:
    """A head for one pass over the tokens, with only the real rows, and the weight in the dtype of matrix products.

    Logits are at least float32. On a GPU, half-precision operands keep their dtype, since matrix products accumulate
    in float32. On a CPU, the weight is converted to float32 once, when this object is made.

    shard: the student's shard, whose rows this rank needs. A teacher's head can be sharded differently (`rows_of`).
    gradient_dtype: the dtype of the gradient of logits in matrix products.
    """

    def __init__(
        self, head: OutputHead, vocabulary: int, operand_dtype: torch.dtype, shard: VocabShard | None = None
    ):
        weight_VD = rows_of(head.weight_VD, head.shard, shard, vocabulary).detach()
        self.scale, self.softcap, self.bias = head.scale, head.softcap, None
        self.compute_dtype = torch.promote_types(operand_dtype, torch.float32)
        self.operand_dtype = operand_dtype if weight_VD.is_cuda else self.compute_dtype
        # the gradient of a logit can be 1e-8, which underflows in float16 but not in bfloat16
        self.gradient_dtype = torch.float32 if self.operand_dtype == torch.float16 else self.operand_dtype
        self.weight_VD = weight_VD.to(self.operand_dtype)
        if head.bias is not None:
            self.bias = rows_of(head.bias, head.shard, shard, vocabulary).detach().to(self.compute_dtype)

    def logits(self, hidden_CD: Tensor, out_CV: Tensor | None = None) -> Tensor:
        """Return the logits [C, V] of hidden states [C, D] in the compute dtype, in `out_CV` if it is not None."""
        shape = _, vocabulary = len(hidden_CD), len(self.weight_VD)
        logits_CV = hidden_CD.new_empty(shape, dtype=self.compute_dtype) if out_CV is None else out_CV
        hidden_CD = hidden_CD.to(self.operand_dtype)
        panels = self._aligned_panels()
        if not self.weight_VD.is_cuda:
            size = PANEL_ROWS * torch.get_num_threads()
            panels = [slice(start, min(start + size, vocabulary)) for start in range(0, vocabulary, size)]
        for panel in panels:
            self._matmul(hidden_CD, self.weight_VD[panel].t(), logits_CV[:, panel])
        if self.bias is not None:
            logits_CV += self.bias
        if self.scale != 1.0:
            logits_CV *= self.scale
        if self.softcap is not None:
            logits_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_CV

    def hidden_grad(self, operand_CV: Tensor, out_CD: Tensor | None = None) -> Tensor:
        """Return the gradient of the hidden states in the compute dtype, in `out_CD` if it is not None."""
        first, *rest = self._aligned_panels()
        grad_CD = self._matmul(operand_CV[:, first], self.weight_VD[first], out_CD)
        for panel in rest:
            self._add_product(grad_CD, operand_CV[:, panel], self.weight_VD[panel])
        return grad_CD

    def add_weight_grad(self, total_VD: Tensor, operand_CV: Tensor, hidden_CD: Tensor) -> None:
        """Add operand_CVᵀ hidden_CD to total_VD, the gradient of the weight in the compute dtype."""
        for panel in self._aligned_panels():
            self._add_product(total_VD[panel], operand_CV[:, panel].t(), hidden_CD)

    def _aligned_panels(self) -> list[slice]:
        """Return slices of the rows: on a GPU, a multiple of `ALIGNED` rows and the rows after it; on a CPU, all.

        On an H100, the product for logits took seven times as long with 151,665 rows as with 151,936 (docs/gpu.md).
        """
        rows = len(self.weight_VD)
        border = rows // ALIGNED * ALIGNED
        if not self.weight_VD.is_cuda or border in (0, rows):
            return [slice(0, rows)]
        return [slice(0, border), slice(border, rows)]

    def _add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add left · right in place to a total that has the compute dtype."""
        right = right.to(left.dtype)
        if left.dtype == self.compute_dtype:
            total.addmm_(left, right)
        else:
            torch.addmm(total, left, right, out_dtype=self.compute_dtype, out=total)

    def _matmul(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        right = right.to(left.dtype)
        if left.dtype == self.compute_dtype:
            return torch.mm(left, right, out=out)
        return torch.mm(left, right, out_dtype=self.compute_dtype, out=out)


def operand_dtype(hidden: Tensor, weight_VD: Tensor) -> torch.dtype:
    """Return the dtype in which torch would multiply the two tensors, with autocast if it is on."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return torch.promote_types(hidden.dtype, weight_VD.dtype)
