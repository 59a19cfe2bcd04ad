"""Gaps for prefixes: layouts by hand, rows that line up, and hidden states equal to those of each document alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.documents import BOS, documents_of, random_documents
from kit.families import FAMILIES, build
from torch import Tensor

from stillhouse.data import Documents, MicroBatch, PackedSequences, StepMicroBatches

EXAMPLES = settings(max_examples=50, deadline=None, derandomize=True)


def by_hand() -> Documents:
    """Return three documents, the first with a BOS, and two teachers with prefixes of different lengths."""
    return documents_of(
        [[BOS, 5, 6, 2], [7, 8, 2], [9, 2]],
        [[0, 0, 1, 1], [0, 1, 1], [0, 1]],
        {"a": [[20, 21], [30], [50, 51]], "b": [[40, 41, 42], [], []]},
        [True, False, False],
    )


def packed_by_hand(gaps: tuple[str, ...]) -> tuple[PackedSequences, StepMicroBatches]:
    packed = PackedSequences(by_hand(), max_tokens=11, seed=0, shuffle=False, gaps=gaps)
    return packed, packed.micro_batches([np.arange(len(packed))])


def test_micro_batches_of_a_teacher_are_built_when_they_are_accessed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, step = packed_by_hand(("a", "unknown"))
    assert step.for_teacher("unknown") is step
    assert step.for_teacher("b") is step  # it has prefixes, but reads them outside of the job
    assert step.for_teacher("a") is not step
    plain = StepMicroBatches([step[0]])
    assert plain.for_teacher("a") is plain
    ids, rows = plain.teacher_tokens(1, "a")
    assert (ids.tolist(), rows.tolist()) == ([7, 8, 2], [0, 1, 2])
    _, step = packed_by_hand(("a", "b"))

    def refuse(*_: Any) -> MicroBatch:
        raise AssertionError("a micro-batch was built")

    monkeypatch.setattr(PackedSequences, "micro_batch", refuse)
    its = step.for_teacher("a")
    assert (len(its), its.shapes_BS, its.tokens) == (1, [(2, 11)], 9)
    with pytest.raises(AssertionError, match="was built"):
        its[0]


@pytest.mark.parametrize("gaps", [(), ("a",), ("a", "b")])
def test_what_a_teacher_outside_of_the_job_reads(gaps: tuple[str, ...]) -> None:
    _, step = packed_by_hand(gaps)
    expected = {
        "a": [([1, 20, 21, 5, 6, 2], 2), ([30, 7, 8, 2], 1), ([50, 51, 9, 2], 2)],
        "b": [([1, 40, 41, 42, 5, 6, 2], 3), ([7, 8, 2], 0), ([9, 2], 0)],
        "unknown": [([1, 5, 6, 2], 0), ([7, 8, 2], 0), ([9, 2], 0)],
    }
    for name, documents in expected.items():
        for number, (ids, shift) in enumerate(documents):
            teacher_ids, rows = step.teacher_tokens(number, name)
            length = packed_by_hand(())[0].documents.lengths_D[number]
            assert (teacher_ids.tolist(), rows.tolist()) == (ids, list(range(shift, shift + length)))


def test_the_fingerprint_covers_where_a_bos_stays() -> None:
    documents = by_hand()
    given = documents.substitutions
    changed = {name: replace(texts, spans_P2=1 - texts.spans_P2) for name, texts in given.items()}
    assert replace(documents, substitutions=changed).fingerprint() != documents.fingerprint()


def test_documents_that_do_not_fit_with_their_gaps_are_refused() -> None:
    needed = "documents of at most 6 tokens for every teacher to pack, got 3 documents of at most 7"
    with pytest.raises(ValueError, match=needed):
        PackedSequences(by_hand(), max_tokens=6, seed=0, gaps=["a", "b"])
    assert len(PackedSequences(by_hand(), max_tokens=6, seed=0, gaps=["a"])) == 3


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], dict[str, list[int]]]:
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=20))
    one = st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths))
    return lengths, {"a": draw(one), "b": draw(one)}


@EXAMPLES
@given(case=cases(), gaps=st.sampled_from([("a",), ("a", "b"), ("b", "unknown")]), seed=st.integers(0, 3))
def test_rows_line_up(case: tuple[list[int], dict[str, list[int]]], gaps: tuple[str, ...], seed: int) -> None:
    documents = random_documents(*case, seed)
    packed = PackedSequences(documents, max_tokens=24, seed=seed, gaps=gaps)
    plain = PackedSequences(documents, max_tokens=24, seed=seed)
    step = packed.micro_batches([np.arange(start, min(start + 3, len(packed))) for start in range(0, len(packed), 3)])
    assert [batch.shape_BS for batch in step] == step.shapes_BS
    assert max(columns for _, columns in step.shapes_BS) <= 24
    assert step.tokens == len(documents.tokens_N)
    assert step.normalizer == plain.micro_batches([np.arange(len(plain))]).normalizer
    rows = torch.cat([batch.document_T for batch in step])
    assert torch.bincount(rows[rows >= 0]).tolist() == documents.lengths_D.tolist()
    for name in set(gaps) - {"unknown"}:
        for batch in step.for_teacher(name):
            assert batch.teacher_inputs is not None
            ids_T, positions_T = (batch.teacher_inputs[key].flatten() for key in ("input_ids", "position_ids"))
            for row in batch.valid_index.tolist():
                assert ids_T[row + 1] == batch.labels_T[row]
                assert positions_T[row + 1] == positions_T[row] + 1
            for document in batch.document_T[batch.document_T >= 0].unique().tolist():
                read, rows = step.teacher_tokens(document, name)
                stop = int((batch.document_T == document).nonzero().max()) + 1
                assert ids_T[stop - len(read) : stop].tolist() == read.tolist()
                assert positions_T[stop - len(read) : stop].tolist() == list(range(len(read)))
                assert rows[0] == len(read) - documents.lengths_D[document]


def hidden(model: Any, ids_BS: Tensor, positions_BS: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        outputs = model.base_model(ids_BS, position_ids=positions_BS, use_cache=False)
    return outputs.last_hidden_state.flatten(0, 1)


def distance(actual_TD: Tensor, expected_TD: Tensor) -> float:
    return float((actual_TD - expected_TD).abs().max() / expected_TD.abs().max())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_hidden_states_equal_those_of_each_document_alone(family: str) -> None:
    prefixes = {"a": [3, 4, 0, 1, 8, 2, 0, 6], "b": [1, 0, 0, 5, 9, 6, 0, 2]}
    documents = random_documents([9, 1, 7, 12, 3, 16, 5, 2], prefixes)
    packed = PackedSequences(documents, max_tokens=29, seed=0, gaps=("a", "b"))
    step = packed.micro_batches([np.arange(len(packed))])
    model = build(family, dtype=torch.float64)
    # Gemma 2 computes the softmax of its capped attention in float32, whatever the dtype of the model is.
    tolerance = 1e-6 if family == "gemma2" else 1e-12
    for name in ("a", "b"):
        (batch,) = step.for_teacher(name)
        batch = batch.padded(batch.shape_BS[0] + 1, batch.shape_BS[1] + 3)
        assert batch.teacher_inputs is not None
        student_TD = hidden(model, batch.input_ids_BS, batch.position_ids_BS)
        teacher_TD = hidden(model, batch.teacher_inputs["input_ids"], batch.teacher_inputs["position_ids"])
        for document in range(len(documents)):
            rows_T = batch.document_T == document
            alone_SD = hidden(model, torch.from_numpy(documents.tokens(document).astype(np.int64))[None])
            assert distance(student_TD[rows_T], alone_SD) <= tolerance
            ids, rows = step.teacher_tokens(document, name)
            shift = int(rows[0])
            full_SD = hidden(model, torch.from_numpy(ids.astype(np.int64))[None])
            assert distance(teacher_TD[rows_T], full_SD[shift:]) <= tolerance
            if shift and len(alone_SD) > 1:
                assert distance(full_SD[shift:], alone_SD) > 1e-3  # the prefix is read
