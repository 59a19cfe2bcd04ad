"""Proves that a model computes what training assumes, by running artificial documents through it.

Each row has two documents. In the two rows of a pair, the documents begin with the same tokens (p and q) and continue
with different tokens (a and a', b and b'). Two forward passes differ only in the order of the two rows of each pair:

    A    row 0   p a | q b        B    row 0   p a'| q b'
         row 1   p a'| q b'            row 1   p a | q b

The hidden states of `p` must not change, because only later tokens change: the model is causal. The hidden states of
`q` must not change either, although the document before `q` changes: documents do not see each other. Both passes
have the same shapes, documents and random numbers. So a model that separates documents gives the same bits, even in
half precision, with dropout and with experts. In a small model that does not separate them, the hidden states change
by 0.04 % or more. The first two pairs have different document borders, because an attention function could use the
borders of one row for all rows. Row 4 has a document of row 2 at another place. In the third pair, only the first
documents are exchanged:

    A    row 5   s | t            B    row 5   s'| t
         row 6   s'| t'                row 6   s | t'

`t` and `t'` must not change. This finds models in which all tokens see the first tokens of the row.

B rows, S columns, D width.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental import implicit_replication
from transformers import PreTrainedModel

from stillhouse.display import name_list
from stillhouse.libraries import reading
from stillhouse.models.document_packing import PackingError, packing_errors
from stillhouse.models.dtensors import local
from stillhouse.models.forward_modes import (
    VARLEN,
    attention_name,
    autocast,
    autocast_dtype,
    evaluating,
    in_mode,
    noise_keys,
    uses_flash_attention,
)
from stillhouse.models.model_checks import ProofError, check_finite_weights, describe
from stillhouse.models.model_parts import LogitRule, layers_with_state
from stillhouse.models.packed_attention import PackedAttention
from stillhouse.models.varlen import require_varlen, single_document
from stillhouse.objective import OutputHead

#: largest relative change of hidden states that must be equal in both passes, in every dtype
_UNCHANGED = 1e-4
# largest relative error of the logits: they differ from the model's own logits only by the rounding of the head
_LOGIT_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# largest relative change of a document at another place in a row, where every layer rounds differently. It is the
# median over tokens, because rounding can change the experts of single tokens
PLACE_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.25}

_COLUMNS = 26
_PARTNERS = [1, 0, 3, 2, 4, 5, 6]  # for each row of `ids_BS`, the row with which it is exchanged
_THIRD = slice(5, 7)  # the rows of which only the first documents are exchanged


@dataclass(frozen=True)
class ProbeDocuments:
    """The documents of the proof. Rows 0 and 1 are the first pair, rows 2 and 3 the second, rows 5 and 6 the third.

    ids_BS, position_ids_BS: the inputs of pass A. starts_B: the column at which each row's second document begins.
    """

    ids_BS: Tensor
    position_ids_BS: Tensor
    starts_B: tuple[int, ...]

    @classmethod
    def of(cls, vocabulary: int, *, depths: int = 0, multiple: int = 1) -> "ProbeDocuments":
        """Return documents of fixed token ids below `vocabulary`. The number of columns is a multiple of `multiple`.

        depths: the number of MTP depths; more depths need longer documents.
        """
        columns = -(-(_COLUMNS + 4 * depths) // multiple) * multiple
        early, late = columns * 6 // 16, columns * 9 // 16
        middle = columns // 2
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
    def document_ids_S(self) -> Tensor:
        """The token ids of one document."""
        return self.ids_BS[0, : self.starts_B[0]]

    @property
    def exchanged_ids_BS(self) -> Tensor:
        """The token ids of pass B."""
        ids_BS = self.ids_BS[_PARTNERS]
        start = self.starts_B[_THIRD.start]
        ids_BS[_THIRD, :start] = self.ids_BS[_THIRD, :start].flip(0)
        return ids_BS

    def beginnings(self, row: int, depth: int = 0) -> tuple[slice, slice]:
        """Return, for each document of a row, the columns whose hidden states at this depth are equal in both passes.

        At depth k, the hidden states of a column also depend on the k tokens after it.
        """
        start, columns = self.starts_B[row], self.ids_BS.shape[1]
        return slice(0, start // 2 - depth), slice(start, start + (columns - start) // 2 - depth)


Forward = Callable[[Tensor, Tensor], Sequence[Tensor]]


def prove_decoder(decoder: Any) -> None:
    """Prove that an unsharded `Decoder` separates documents, at depth 0 and all MTP depths, and check its logits.

    Raises ProofError, naming the cause. Weights, modes and random states do not change.
    """
    model = decoder.pretrained
    _require_placed(model)
    depths = 0 if decoder.mtp is None else decoder.mtp.depths
    probe = ProbeDocuments.of(decoder.vocabulary_rows, depths=depths)

    def forward(ids_BS: Tensor, position_ids_BS: Tensor) -> Sequence[Tensor]:
        if decoder.mtp is None:
            return (decoder(ids_BS, position_ids_BS, processor=_returned),)
        with reading(f"{describe(model)} cannot run layers for multi-token prediction", passes=ProofError):
            return decoder(ids_BS, position_ids_BS, processor=_returned, mtp_input_ids=ids_BS)

    def prove_passes() -> None:
        dtype = autocast_dtype(model)
        for training in (False, True):
            of_packing = packing_errors(model, decoder.packing)
            with in_mode(decoder, model, training=training), autocast(model.device, dtype), of_packing:
                depths_hidden = run_probe(forward, probe, model.device)
            prove_documents(decoder, depths_hidden, probe)
            if not training:
                prove_places(decoder, depths_hidden, probe, dtype)
        if decoder.packing.attention.reads_lengths:
            with evaluating(decoder, model), autocast(model.device, dtype):
                by_attention = run_whole_rows(forward, probe, model.device, [decoder.packing.attention])
            prove_attention(decoder, by_attention, dtype)

    while True:
        try:
            prove_passes()
            break
        except PackingError as error:
            decoder.packing.refuse(error)
    with evaluating(decoder, model), autocast(model.device, autocast_dtype(model)):
        prove_logits(decoder, {"input_ids": probe.document_ids_S[None].to(model.device)})


@torch.no_grad()
def require_runnable(model: PreTrainedModel, name: str) -> None:
    """Raise ValueError if transformers cannot run the model, for example because its configuration is damaged."""
    _require_placed(model)
    ids_BS = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    lengths = single_document(ids_BS) if attention_name(model) == VARLEN else {}
    with evaluating(model), autocast(model.device, autocast_dtype(model)), reading(f"{name} cannot be run"):
        model(ids_BS, use_cache=False, return_dict=True, **lengths)


def run_probe(forward: Forward, probe: ProbeDocuments, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return, for each depth, the hidden states [B, S, D] of passes A and B; an empty list if `forward` returns none.

    forward: returns the hidden states of each depth for ids and positions [B, S].
    """
    # the same dropout and noise in both passes
    return _run_passes(forward, probe, device, [(probe.ids_BS, 0), (probe.exchanged_ids_BS, 0)])


def run_with_other_noise(
    forward: Forward, probe: ProbeDocuments, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """As `run_probe`, but pass A twice, with other random numbers."""
    return _run_passes(forward, probe, device, [(probe.ids_BS, 0), (probe.ids_BS, 1)])


def _run_passes(
    forward: Forward, probe: ProbeDocuments, device: torch.device, ids_and_seeds: Sequence[tuple[Tensor, int]]
) -> list[tuple[Tensor, Tensor]]:
    passes = []
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        for ids_BS, seed in ids_and_seeds:
            torch.manual_seed(seed)
            passes.append(forward(ids_BS.to(device), probe.position_ids_BS.to(device)))
    return list(zip(*passes, strict=True))


@torch.no_grad()
def run_whole_rows(
    forward: Forward, probe: ProbeDocuments, device: torch.device, attentions: Sequence[PackedAttention]
) -> list[tuple[Tensor, Tensor]]:
    """Return, for each depth, the hidden states [B, S, D] of rows of one document, with the attention that reads
    lengths and with the usual one; an empty list if `forward` returns none.
    """
    ids_BS, position_ids_BS = probe.ids_BS.to(device), torch.arange(probe.ids_BS.shape[1], device=device)
    position_ids_BS = position_ids_BS.expand_as(ids_BS)
    by_lengths = forward(ids_BS, position_ids_BS)
    with ExitStack() as stack:
        for attention in attentions:
            stack.enter_context(attention.without_lengths())
        usual = forward(ids_BS, position_ids_BS)
    return list(zip(by_lengths, usual, strict=True))


def prove_attention(
    decoder: Any, depths: Sequence[tuple[Tensor, Tensor]], precision: torch.dtype | None = None
) -> None:
    """Check the hidden states that `run_whole_rows` has returned. precision: see `prove_places`.

    Raises ProofError if variable-length attention does not compute what the usual attention does.
    """
    columns = depths[0][0].shape[1] if depths else 0
    for depth, (hidden_BSD, expected_BSD) in enumerate(depths):
        # rows that are joined to one shift other tokens to their last columns at depths > 0
        within = slice(columns - depth)
        error = float(relative_errors(hidden_BSD[:, within], expected_BSD[:, within]).median())
        if not error <= PLACE_TOLERANCE[precision or hidden_BSD.dtype]:
            raise PackingError(
                f"{describe(decoder.pretrained)}: the hidden states with variable-length attention differ by "
                f"{error:.2%} from those with attention '{decoder.packing.attention.usual}'"
            )


def prove_documents(decoder: Any, depths: Sequence[tuple[Tensor, Tensor]], probe: ProbeDocuments) -> None:
    """Check the hidden states that `run_probe` has returned, in train or in eval mode.

    Raises ProofError for a model that is not causal, or that lets documents in a row see each other.
    """
    model = decoder.pretrained
    for depth, (first_BSD, second_BSD) in enumerate(depths):
        _require_finite(decoder, "hidden states", first_BSD, second_BSD)
        _prove_separation(model, first_BSD, second_BSD, probe, depth)


def require_no_noise(decoder: Any, depths: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Check the hidden states that `run_with_other_noise` has returned in train mode.

    Raises ProofError if they depend on random numbers.
    """
    model = decoder.pretrained
    change = max((float(relative_errors(*hidden).max()) for hidden in depths), default=0.0)
    if not change <= _UNCHANGED:
        keys = name_list(noise_keys(model.config)) or "the sizes of its noise"
        raise ProofError(
            f"{describe(model)} has noise in train mode that is not removed for this loss, whose ratios compare with "
            f"probabilities of completions without noise (its hidden states change by {change:.2%} with the random "
            f"numbers): expected 0.0 for {keys} in its config.json"
        )


def prove_places(
    decoder: Any, depths: Sequence[tuple[Tensor, Tensor]], probe: ProbeDocuments, precision: torch.dtype | None = None
) -> None:
    """Check the hidden states that `run_probe` has returned in eval mode.

    precision: the dtype of the matrix products, which determines the rounding; None: the hidden states' dtype.
    Raises ProofError if the hidden states of a document depend on the document's place in its row.
    """
    start, model = probe.starts_B[2], decoder.pretrained
    for depth, (hidden_BSD, _) in enumerate(depths):
        second, first = hidden_BSD[2, start:], hidden_BSD[4, : probe.starts_B[4]]
        error = float(relative_errors(second, first)[: len(first) - depth].median())
        if not error <= PLACE_TOLERANCE[precision or hidden_BSD.dtype]:
            raise PackingError(
                f"{describe(model)}: the hidden states of a document change by {error:.2%} when it lies behind "
                "another one in its row: the model does not number tokens by position_ids, and cannot be packed"
            )


def _prove_separation(
    model: PreTrainedModel, first_BSD: Tensor, second_BSD: Tensor, probe: ProbeDocuments, depth: int
) -> None:
    beginnings = [(row, probe.beginnings(row, depth)) for row in range(4)]
    # if rows are joined to one, the last columns of a row depend on the first tokens of the next row at depths > 0
    end = probe.ids_BS.shape[1] - depth
    thirds = [(row, slice(probe.starts_B[row], end)) for row in range(_THIRD.start, _THIRD.stop)]

    def change(parts: Sequence[tuple[int, slice]]) -> float:
        return float(torch.stack([relative_errors(second_BSD[part], first_BSD[part]).max() for part in parts]).max())

    # only row 0 has no other document before it, if the rows are joined to one row
    before = change([(0, beginnings[0][1][0])])
    behind = change([*((row, part) for row, parts in beginnings for part in parts), *thirds])
    if not before <= _UNCHANGED:
        raise ProofError(
            f"{describe(model)} is not causal: its tokens attend to later tokens (their hidden states change by "
            f"{before:.2%} with them)"
        )
    if not behind <= _UNCHANGED:
        states = layers_with_state(model.config)
        layers = f" and layers that mix tokens without attention ({name_list(states)})" if states else ""
        raise PackingError(
            f"{describe(model)} with attention '{model.config._attn_implementation}'{layers} lets documents that "
            f"share a row see each other (hidden states change by {behind:.2%} with the document before)"
        )


@torch.no_grad()
def prove_logits(decoder: Any, inputs: Mapping[str, Tensor | None]) -> None:
    """Prove that a decoder's head gives the same logits as the transformers model itself.

    Some models do not apply the rule that their configuration has (Aya Vision). If the plain projection gives their
    logits, the decoder uses no rule from now on.

    inputs: arguments of a forward, on the decoder's device. Under a layout, a collective of the processes that have
    this decoder; all of them get the same rule. Raises ProofError.
    """
    model, head = decoder.pretrained, decoder.head

    def logits(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> tuple[Tensor, ...]:
        # run inside the head's forward, because sharded weights are gathered there
        with implicit_replication():
            expected = model(**inputs, use_cache=False, return_dict=True).logits
        plain = replace(head, scale=1.0, softcap=None)
        return local(expected), head.logits(hidden_states), plain.logits(hidden_states)

    # this compares heads; the layers of both run with the usual attention, which needs no lengths of documents
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
        return  # values of another rank that are not finite are an error there
    if not plain_error <= tolerance:
        rule = head.rule
        raise ProofError(
            f"{describe(model)}: its logits differ by up to {error:.2g} (the largest is {scale:.2g}) from "
            f"softcap(scale · (hidden Wᵀ + bias)) with scale {rule.scale:g} and softcap {rule.softcap}, as its "
            "configuration says. The model computes something else after its last hidden states"
        )
    head.rule = LogitRule()


def _returned(*, hidden_states: Any, head: OutputHead, context: Any, depth: int = 0) -> Any:
    """An output processor that returns the hidden states; for several depths, a tuple."""
    return hidden_states


def _require_finite(decoder: Any, what: str, *values: Tensor) -> None:
    if not all(bool(value.isfinite().all()) for value in values):
        model = decoder.pretrained
        check_finite_weights(decoder, describe(model))
        raise ProofError(f"{describe(model)}: its {what} are not finite in {values[0].dtype}: try a wider dtype")


def _require_placed(model: PreTrainedModel) -> None:
    if model.device.type == "meta":
        raise ValueError(f"{describe(model)} has no weights yet (meta device): pass verify=False")
    if model.device.type == "cpu" and uses_flash_attention(model):
        attention = model.config._attn_implementation
        raise ValueError(f"attention '{attention}' runs on GPUs only: pass device='cuda', or verify=False")
    if attention_name(model) == VARLEN:
        require_varlen(model)


def relative_errors(value_ND: Tensor, expected_ND: Tensor) -> Tensor:
    """Return the norm of the difference [N], relative to the norm of the expected values."""
    difference = (value_ND - expected_ND).float().norm(dim=-1)
    return difference / expected_ND.float().norm(dim=-1).clamp_min(1e-30)
