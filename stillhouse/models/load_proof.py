"""Proves that a model is causal, separates documents in a row and has the expected logits, on artificial documents.

Each row has two documents. In the two rows of a pair, the documents begin with the same tokens (p and q) and continue
with different tokens (a and a', b and b'). Two forward passes differ only in the order of the two rows of each pair:

    A    row 0   p a | q b        B    row 0   p a'| q b'
         row 1   p a'| q b'            row 1   p a | q b

If the model is causal, the hidden states of `p` do not change, because only later tokens change. If documents do not
see each other, the hidden states of `q` do not change either. Both passes have the same shapes, documents and random
numbers, so a model that separates documents gives the same bits, even in half precision, with dropout and with
experts. In a small model that mixes documents, the hidden states change by 0.04 % or more. The first two pairs
have different document borders, because an attention function could use the borders of one row for all rows. Row 4
has a document of row 2 at another place. In the third pair, only the first documents are exchanged. This finds models
in which all tokens see the first tokens of the row.

B rows, S columns, D width.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental import implicit_replication
from transformers import PreTrainedModel

from stillhouse.display import name_list, named_if_slow
from stillhouse.libraries import reading
from stillhouse.models.document_packing import PackingError, packing_errors
from stillhouse.models.dtensors import local
from stillhouse.models.families import NOISE, LogitRule, ModelFacts, text_config
from stillhouse.models.forward_modes import (
    VARLEN,
    attention_name,
    autocast,
    autocast_dtype,
    evaluating,
    in_mode,
    uses_flash_attention,
)
from stillhouse.models.model_checks import ProofError, check_finite_weights, typename
from stillhouse.models.processors import hidden_states
from stillhouse.models.varlen import VARLEN_LENGTHS, PackedAttention, require_varlen
from stillhouse.objective import OutputHead

#: the largest relative change, in any dtype, of hidden states that must be equal in both passes
_UNCHANGED = 1e-4
# the largest relative error of the logits, which may differ from the model's own logits only by the head's rounding
_LOGIT_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# the largest relative change of hidden states if a document is at another place in its row, where every layer rounds
# differently. The median over tokens is compared, because rounding can change the experts of single tokens
PLACE_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.25}

_COLUMNS = 26
_PARTNERS = [1, 0, 3, 2, 4, 5, 6]  # for each row of `ids_BS`, the row that replaces it in pass B
_THIRD = slice(5, 7)  # the third pair, whose rows exchange only the first documents


@dataclass(frozen=True)
class ProbeDocuments:
    """The documents of the proof. Rows 0 and 1 are the first pair, rows 2 and 3 the second, rows 5 and 6 the third.

    ids_BS, position_ids_BS: the inputs of pass A. starts_B: the column in which each row's second document begins.
    """

    ids_BS: Tensor
    position_ids_BS: Tensor
    starts_B: tuple[int, ...]

    @classmethod
    def of(cls, vocabulary: int, *, depths: int = 0, multiple: int = 1) -> "ProbeDocuments":
        """Return documents with fixed token ids below `vocabulary`. The number of columns is a multiple of
        `multiple`. The documents are longer for a model with MTP depths.
        """
        columns = -(-(_COLUMNS + 4 * depths) // multiple) * multiple
        early, middle, late = columns * 6 // 16, columns // 2, columns * 9 // 16
        starts_B = (late, late, early, early, columns - early, middle, middle)
        column_S = torch.arange(columns)
        start_B1 = torch.tensor(starts_B)[:, None]
        position_ids_BS = torch.where(column_S < start_B1, column_S, column_S - start_B1)
        ids_BS = torch.randint(vocabulary, (len(starts_B), columns), generator=torch.Generator().manual_seed(0))
        probe = cls(ids_BS, position_ids_BS, starts_B)
        for row in (0, 2):
            ids_BS[row + 1] = (ids_BS[row] + 1) % vocabulary
            for part in probe.beginnings(row):
                ids_BS[row + 1, part] = ids_BS[row, part]
        ids_BS[4, : columns - early] = ids_BS[2, early:]
        ids_BS[6] = (ids_BS[5] + 1) % vocabulary
        return probe

    @property
    def exchanged_ids_BS(self) -> Tensor:
        """The token ids of pass B."""
        ids_BS, start = self.ids_BS[_PARTNERS], self.starts_B[_THIRD.start]
        ids_BS[_THIRD, :start] = self.ids_BS[_THIRD, :start].flip(0)
        return ids_BS

    def beginnings(self, row: int, depth: int = 0) -> tuple[slice, slice]:
        """Return, for each document of a row, the columns whose hidden states at this depth are equal in passes A and
        B. At depth k, hidden states also depend on the k tokens after their column, so there are k columns fewer.
        """
        start, columns = self.starts_B[row], self.ids_BS.shape[1]
        return slice(0, start // 2 - depth), slice(start, start + (columns - start) // 2 - depth)


class Subject(ABC):
    """A model, or a student and a teacher that run together, whose hidden states for a probe are compared."""

    probe: ProbeDocuments
    device: torch.device
    attentions: Sequence[PackedAttention]  # the attention functions of each model

    @abstractmethod
    def run(self, ids_BS: Tensor, position_ids_BS: Tensor) -> Sequence[Tensor]:
        """Return the hidden states [B, S, D] of each depth, or an empty list on a process that has none."""

    @torch.no_grad()
    def exchanged(self, *, other_noise: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Return, for each depth, the hidden states of passes A and B, which have the same dropout and noise.

        other_noise: whether to run pass A twice instead, with two different sequences of random numbers.
        """
        second_ids_BS = self.probe.ids_BS if other_noise else self.probe.exchanged_ids_BS
        passes = []
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            for ids_BS, seed in ((self.probe.ids_BS, 0), (second_ids_BS, int(other_noise))):
                torch.manual_seed(seed)
                passes.append(self.run(ids_BS.to(self.device), self.probe.position_ids_BS.to(self.device)))
        return list(zip(*passes, strict=True))

    @torch.no_grad()
    def whole_rows(self) -> list[tuple[Tensor, Tensor]]:
        """Return, for each depth, the hidden states of rows with one document each, computed with variable-length
        attention and with the usual attention. The list is empty if no model uses variable-length attention.
        """
        if not any(attention.reads_lengths for attention in self.attentions):
            return []
        ids_BS = self.probe.ids_BS.to(self.device)
        position_ids_BS = torch.arange(ids_BS.shape[1], device=self.device).expand_as(ids_BS)
        by_lengths = self.run(ids_BS, position_ids_BS)
        with ExitStack() as stack:
            for attention in self.attentions:
                stack.enter_context(attention.without_lengths())
            usual = self.run(ids_BS, position_ids_BS)
        return list(zip(by_lengths, usual, strict=True))


class _WholeDecoder(Subject):
    """An unsharded `Decoder`."""

    def __init__(self, decoder: Any):
        self._decoder, self.device, self.attentions = decoder, decoder.pretrained.device, [decoder.packing.attention]
        depths = 0 if decoder.mtp is None else decoder.mtp.depths
        self.probe = ProbeDocuments.of(decoder.vocabulary_rows, depths=depths)

    def run(self, ids_BS: Tensor, position_ids_BS: Tensor) -> Sequence[Tensor]:
        run = partial(self._decoder, ids_BS, position_ids_BS, processor=hidden_states)
        if self._decoder.mtp is None:
            return (run(),)
        failure = f"{typename(self._decoder.pretrained)} cannot run layers for multi-token prediction"
        with reading(failure, passes=ProofError):
            depths: Sequence[Tensor] = run(mtp_input_ids=ids_BS)
        return depths


def prove_decoder(decoder: Any) -> None:
    """Prove that an unsharded `Decoder` is causal and separates documents at all depths, and check its logits.

    A way of packing that is not exact is replaced by the next way. Raises ProofError, naming the cause. Weights,
    modes and random states do not change.
    """
    model, subject = decoder.pretrained, _WholeDecoder(decoder)
    _require_placed(model)

    def is_exact(training: bool) -> bool:
        dtype = autocast_dtype(model)  # read it again, because the attention may have changed
        try:
            with in_mode(decoder, model, training=training), autocast(model.device, dtype):
                with packing_errors(model, decoder.packing):
                    exchanged = subject.exchanged()
                rows = [] if training else subject.whole_rows()
            prove_hidden(decoder, subject.probe, exchanged, rows, dtype, training=training)
        except PackingError as error:
            decoder.packing.refuse(error)
            return False
        return True

    with named_if_slow(f"proving the packing and the logits of {typename(model)}"):
        while not all(map(is_exact, (False, True))):
            pass  # try the next way of packing
        with evaluating(decoder, model), autocast(model.device, autocast_dtype(model)):
            document_ids_S = subject.probe.ids_BS[0, : subject.probe.starts_B[0]]
            prove_logits(decoder, {"input_ids": document_ids_S[None].to(model.device)})


@torch.no_grad()
def require_runnable(model: PreTrainedModel, name: str) -> None:
    """Raise ValueError if transformers cannot run the model, for example because its configuration is damaged."""
    _require_placed(model)
    ids_BS = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    borders_M = torch.tensor([0, 2], dtype=torch.int32, device=model.device)  # one document
    needs_lengths = attention_name(model) == VARLEN
    lengths = dict(zip(VARLEN_LENGTHS, (borders_M, borders_M, 2, 2), strict=True)) if needs_lengths else {}
    with evaluating(model), autocast(model.device, autocast_dtype(model)), reading(f"{name} cannot be run"):
        model(ids_BS, use_cache=False, return_dict=True, **lengths)


def relative_errors(value_ND: Tensor, expected_ND: Tensor) -> Tensor:
    """Return each row's norm of the difference, relative to the norm of the expected values, [N]."""
    difference = (value_ND - expected_ND).float().norm(dim=-1)
    return difference / expected_ND.float().norm(dim=-1).clamp_min(1e-30)


def compare(
    errors_N: Tensor, tolerance: float, message: str, kind: type[ValueError] = ProofError, *, median: bool = False
) -> float:
    """Return the largest error, or the median error with median=True, or NaN if an error is not finite.

    message: the message of the exception, with a placeholder for the returned value, such as {error:.2%}.

    Raises an exception of this kind if the result is NaN or exceeds the tolerance.
    """
    error = float(errors_N.median() if median else errors_N.max())
    error = error if bool(errors_N.isfinite().all()) else math.nan
    if not error <= tolerance:
        raise kind(re.sub(r"\{error:([^}]*)\}", lambda match: format(error, match[1]), message))
    return error


def prove_hidden(
    decoder: Any,
    probe: ProbeDocuments,
    exchanged: Sequence[tuple[Tensor, Tensor]],
    whole_rows: Sequence[tuple[Tensor, Tensor]],
    precision: torch.dtype | None = None,
    *,
    training: bool,
) -> None:
    """Check a decoder's hidden states, as `Subject.exchanged` and `Subject.whole_rows` return them.

    precision: the dtype of the matrix products, which determines the rounding; by default the hidden states' dtype.
    training: whether the decoder was in train mode. If so, hidden states at different places are not compared,
        because their noise differs.

    Raises ProofError for a model that is not causal. Raises PackingError if documents in a row see each other, if a
    document's place in its row changes its hidden states, or if variable-length attention gives other hidden states
    than the usual attention.
    """
    model, columns, start = decoder.pretrained, probe.ids_BS.shape[1], probe.starts_B[2]

    def require_near(value_ND: Tensor, expected_ND: Tensor, message: str) -> None:
        tolerance, errors_N = PLACE_TOLERANCE[precision or value_ND.dtype], relative_errors(value_ND, expected_ND)
        compare(errors_N, tolerance, f"{typename(model)}: the hidden states {message}", PackingError, median=True)

    for depth, (first_BSD, second_BSD) in enumerate(exchanged):
        _require_finite(decoder, "hidden states", first_BSD, second_BSD)
        _prove_separation(model, first_BSD, second_BSD, probe, depth)
        if not training:
            within = slice(probe.starts_B[4] - depth)
            require_near(
                first_BSD[2, start:][within],
                first_BSD[4, within],
                "of a document change by {error:.2%} if another document precedes it in its row: the model does not "
                "number tokens by position_ids, so documents cannot share a row",
            )
    for depth, (hidden_BSD, expected_BSD) in enumerate(whole_rows):
        # at depths > 0, the last columns of a row depend on the next row if the rows are joined to one row
        within = slice(columns - depth)
        usual = f"with attention '{decoder.packing.attention.usual}'"
        message = f"with variable-length attention differ by {{error:.2%}} from those {usual}"
        require_near(hidden_BSD[:, within], expected_BSD[:, within], message)


def require_no_noise(decoder: Any, depths: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Raise ProofError if noise changes hidden states. depths: `exchanged(other_noise=True)` in train mode."""
    model = decoder.pretrained
    values = sorted(text_config(model.config).to_dict().items())
    keys = [key for key, value in values if NOISE.fullmatch(key) and isinstance(value, float) and value > 0]
    noise = name_list(keys) or "the sizes of its noise"
    for hidden in depths:
        compare(
            relative_errors(*hidden),
            _UNCHANGED,
            f"{typename(model)} has noise in train mode that could not be removed (its hidden states change by "
            "{error:.2%} with other random numbers), but this loss compares its probabilities with those of sampled "
            f"completions, which have no noise: expected 0.0 for {noise} in its config.json",
        )


def _prove_separation(
    model: PreTrainedModel, first_BSD: Tensor, second_BSD: Tensor, probe: ProbeDocuments, depth: int
) -> None:
    beginnings = [(row, probe.beginnings(row, depth)) for row in range(4)]
    # at depths > 0, the last columns of a row depend on the next row if the rows are joined to one row
    end = probe.ids_BS.shape[1] - depth
    thirds = [(row, slice(probe.starts_B[row], end)) for row in range(_THIRD.start, _THIRD.stop)]
    states = ModelFacts(model.config).layers_with_state
    layers = f" and layers that mix tokens without attention ({name_list(states)})" if states else ""
    # causality is checked only in the first document of row 0: in joined rows, documents precede all others
    before = [(0, beginnings[0][1][0])]
    behind = [*((row, part) for row, parts in beginnings for part in parts), *thirds]
    not_causal = (
        f"{typename(model)} is not causal: its tokens attend to later tokens (hidden states change by {{error:.2%}} "
        "if only later tokens change)"
    )
    not_separate = (
        f"{typename(model)} with attention '{model.config._attn_implementation}'{layers} lets documents that share a "
        "row see each other (hidden states change by {error:.2%} if only another document changes)"
    )
    for places, message, kind in ((before, not_causal, ProofError), (behind, not_separate, PackingError)):
        errors = [relative_errors(second_BSD[place], first_BSD[place]) for place in places]
        compare(torch.cat(errors), _UNCHANGED, message, kind)


@torch.no_grad()
def prove_logits(decoder: Any, inputs: Mapping[str, Tensor | None]) -> None:
    """Prove that a decoder's head gives the same logits as the transformers model itself. Raises ProofError.

    Some models do not apply the logit rule in their configuration (Aya Vision). If the plain projection gives their
    logits, the decoder applies no rule from now on. Under a layout, this is a collective of the processes that have
    this decoder, and all of them get the same rule.

    inputs: arguments of a forward, on the decoder's device.
    """
    model, head = decoder.pretrained, decoder.head

    def logits(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> tuple[Tensor, ...]:
        # the model runs inside the head's forward, because sharded weights are gathered there
        with implicit_replication():
            expected = model(**inputs, use_cache=False, return_dict=True).logits
        plain = replace(head, scale=1.0, softcap=None)
        return local(expected), head.logits(hidden_states), plain.logits(hidden_states)

    # only heads are compared, so both forwards may use the usual attention, which needs no lengths of documents
    with decoder.packing.attention.without_lengths():
        expected, by_rule, plain = decoder(**inputs, processor=logits)
    differences = [by_rule.float() - expected.float(), plain.float() - expected.float()]
    # a tensor rank may have no rows of a small vocabulary
    largest = [values.abs().amax() if values.numel() else values.new_zeros(()) for values in (expected, *differences)]
    maxima = torch.stack([value.float() for value in largest]).nan_to_num(nan=math.inf)
    if head.shard is not None and not head.shard.is_alone:
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=head.shard.group)
    _require_finite(decoder, "logits", by_rule, expected)
    scale, error, plain_error = maxima.tolist()
    tolerance = _LOGIT_TOLERANCE[by_rule.dtype] * scale
    if not math.isfinite(scale + error) or error <= tolerance:
        return  # if values of another rank are not finite, that rank raises an error
    if not plain_error <= tolerance:
        raise ProofError(
            f"{typename(model)}: its logits differ by up to {error:.2g} (the largest logit is {scale:.2g}) from "
            f"softcap(scale · (hidden Wᵀ + bias)) with scale {head.rule.scale:g} and softcap {head.rule.softcap} of "
            "its configuration: expected a model whose logits are computed by this formula"
        )
    head.rule = LogitRule()


def _require_finite(decoder: Any, what: str, *values: Tensor) -> None:
    if not all(bool(value.isfinite().all()) for value in values):
        model = decoder.pretrained
        check_finite_weights(decoder, typename(model))
        raise ProofError(f"{typename(model)}: its {what} are not finite in {values[0].dtype}: try a wider dtype")


def _require_placed(model: PreTrainedModel) -> None:
    if model.device.type == "meta":
        raise ValueError(f"{typename(model)} has no weights yet (meta device): pass verify=False")
    if model.device.type == "cpu" and uses_flash_attention(model):
        attention = model.config._attn_implementation
        raise ValueError(f"attention '{attention}' runs on GPUs only: pass device='cuda', or verify=False")
    if attention_name(model) == VARLEN:
        require_varlen(model)
