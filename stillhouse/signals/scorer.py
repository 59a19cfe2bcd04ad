"""Runs a teacher on a batch of documents and gives each of them what its request asks for.

The documents of a batch may belong to different requests and ask for different signals: the layers run once for all
of them, packed into rows as in training, and each signal is then computed from the hidden states of its own rows.

T tokens of a batch with padding, N rows of a document, C rows of all documents that ask for one signal, K ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stillhouse.data import DataReport, Documents, PackedSequences
from stillhouse.models.modes import packs_one_row
from stillhouse.objective import OutputHead
from stillhouse.parallel import Runner, StageInputs
from stillhouse.signals.cache.files import document_id
from stillhouse.signals.extract import ChosenRows, Extract, ranked_log_probs
from stillhouse.signals.labelled import ExtractLabelled, LabelledRows
from stillhouse.signals.sampled_ids import Draw, DrawRows, uniform_numbers
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec


class Ranked(NamedTuple):
    """Asks for the tensors of `ranked_log_probs`, each row's id being the next token; the last row has none."""

    top_k: int


Wanted: TypeAlias = SignalSpec | Ranked


class Part(NamedTuple):
    """A document of a request."""

    document: DocumentRows
    wanted: Wanted

    @property
    def tokens(self) -> int:
        return len(self.document.tokens)


class NotFiniteError(ValueError):
    """What the model computes for a part of a request has a NaN or an infinity."""


#: what a part gets: its tensors, or why it has none
Outcome: TypeAlias = dict[str, Tensor] | NotFiniteError


@dataclass(frozen=True)
class _Group:
    """The parts of a batch that ask for the same.

    members: their numbers. index_C: their rows in the batch. ids_CK: the ids of "chosen", or the next tokens, [C, 1].
    uniform_CM: the random numbers of "sampled".
    """

    wanted: Wanted
    members: list[int]
    lengths: list[int]
    index_C: Tensor
    ids_CK: Tensor | None
    uniform_CM: Tensor | None = None


class Scorer:
    """A teacher, whole or this rank's part of it. Under tensor parallelism all ranks score the same batches."""

    def __init__(self, runner: Runner, device: torch.device):
        self._runner, self._device = runner, device
        self._decoder = runner.students()[0].eval()

    def score(self, parts: Sequence[Part]) -> list[Outcome]:
        """The outcome of each part, with tensors on the CPU. A part without finite signals gets an error of its own.

        Raises RuntimeError where the forward pass fails, as with too little memory.
        """
        documents = _documents([part.document.tokens for part in parts])
        one_row = packs_one_row(self._runner.students()[0].pretrained)
        tokens = len(documents.tokens_N) if one_row else int(documents.lengths_D.max())
        sequences = PackedSequences(documents, max_tokens=tokens, seed=0, shuffle=False)
        micro_batch = sequences.micro_batch(range(len(sequences)))
        is_first_T = (micro_batch.position_ids_BS.flatten() == 0) & (micro_batch.document_T >= 0)
        starts_D = torch.empty(len(parts), dtype=torch.int64)
        starts_D[micro_batch.document_T[is_first_T]] = is_first_T.nonzero()[:, 0]
        groups = _groups(parts, starts_D.tolist())
        (tensors_by_group,) = self._runner.forward(
            [StageInputs(micro_batch.to(self._device), {}, _Processor(groups))]
        )
        outcomes: dict[int, Outcome] = {}
        for group, tensors in zip(groups, tensors_by_group, strict=True):
            by_document = {name: tensor.split(group.lengths) for name, tensor in tensors.items()}
            for at, member in enumerate(group.members):
                outcomes[member] = _checked({name: part_of_group[at] for name, part_of_group in by_document.items()})
        return [outcomes[number] for number in range(len(parts))]


@dataclass(frozen=True)
class _Processor:
    """The output processor: the tensors of each group."""

    groups: list[_Group]

    def __call__(
        self, *, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0
    ) -> list[dict[str, Tensor]]:
        return [self._tensors(group, hidden_states, head) for group in self.groups]

    def _tensors(self, group: _Group, hidden_states: Tensor, head: OutputHead) -> dict[str, Tensor]:
        index_C = group.index_C.to(hidden_states.device)
        if isinstance(group.wanted, Ranked):
            assert group.ids_CK is not None
            hidden_CE = hidden_states.flatten(0, -2)[index_C]
            return ranked_log_probs(hidden_CE, head, group.ids_CK[:, 0], group.wanted.top_k)
        if group.uniform_CM is not None:
            draws = DrawRows(index_C, group.uniform_CM)
            return Draw(group.wanted)(hidden_states=hidden_states, head=head, context=draws)
        if group.wanted.with_label:
            assert group.ids_CK is not None
            labelled = LabelledRows(index_C, group.ids_CK[:, 0])
            return ExtractLabelled(group.wanted)(hidden_states=hidden_states, head=head, context=labelled)
        context: Any = index_C if group.ids_CK is None else ChosenRows(index_C, group.ids_CK)
        return Extract(group.wanted)(hidden_states=hidden_states, head=head, context=context)


def _documents(tokens: Sequence[np.ndarray]) -> Documents:
    tokens_N = np.concatenate(tokens).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(token) for token in tokens])]).astype(np.int64)
    keys_D = np.zeros(len(tokens), dtype=np.uint64)
    targets_N = np.zeros(len(tokens_N), dtype=bool)
    return Documents(tokens_N, targets_N, offsets, keys_D, [""] * len(tokens), DataReport("requests"))


def _groups(parts: Sequence[Part], starts: Sequence[int]) -> list[_Group]:
    """starts: the row of the batch at which each part's document begins."""
    members: dict[Wanted, list[int]] = {}
    for number, part in enumerate(parts):
        members.setdefault(part.wanted, []).append(number)
    groups = []
    for wanted, numbers in members.items():
        rows = [parts[number].document.rows for number in numbers]
        index_C = [
            torch.arange(row.start, row.stop) + starts[number] for row, number in zip(rows, numbers, strict=True)
        ]
        ids = [_ids(parts[number]) for number in numbers]
        ids_CK = (
            None if ids[0] is None else torch.cat([ids_of_part for ids_of_part in ids if ids_of_part is not None])
        )
        uniform_CM = None
        if isinstance(wanted, SignalSpec) and wanted.kind == "sampled":
            uniform_CM = torch.cat([_uniform(parts[number].document, wanted) for number in numbers])
        lengths = [len(row) for row in rows]
        groups.append(_Group(wanted, numbers, lengths, torch.cat(index_C), ids_CK, uniform_CM))
    return groups


def _ids(part: Part) -> Tensor | None:
    document = part.document
    if isinstance(part.wanted, Ranked) or part.wanted.with_label:
        following = np.append(document.tokens[1:], -1)[document.rows.start : document.rows.stop]
        return torch.from_numpy(following.astype(np.int64))[:, None]
    return document.ids_NK


def _uniform(document: DocumentRows, spec: SignalSpec) -> Tensor:
    """The same numbers for the same document, so that a repeated request gets the same draws."""
    assert spec.top_k is not None
    return torch.from_numpy(uniform_numbers(document_id(document.tokens), document.rows, spec.top_k))


def _checked(tensors: dict[str, Tensor]) -> Outcome:
    for name, tensor in tensors.items():
        if tensor.isnan().any() or (name == "hidden" and tensor.isinf().any()):
            return NotFiniteError(f"the teacher's {name} are not finite")
    if "counts" in tensors and not (tensors["ids"][:, :1] >= 0).all():
        return NotFiniteError("the teacher's logits are not finite, so that nothing can be drawn")
    return tensors
