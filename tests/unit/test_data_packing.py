"""Packing, the order of training and labels; a model gives the same results for packed and separate documents."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.causal_families import build as build_causal
from kit.config_cases import refused_calls
from kit.documents import random_documents

from stillhouse.data import MicroBatch, PackedSequences, StepMicroBatches, make_micro_batch
from stillhouse.data.packing import best_fit
from stillhouse.models import Decoder

EXAMPLES = settings(max_examples=50, deadline=None, derandomize=True)

lengths_lists = st.lists(st.integers(1, 20), min_size=1, max_size=60)


@EXAMPLES
@given(lengths=lengths_lists, capacity=st.integers(20, 50))
def test_best_fit_leaves_no_two_bins_that_fit_in_one(lengths: list[int], capacity: int) -> None:
    bins_D = best_fit(np.array(lengths), capacity)
    fills = sorted(np.bincount(bins_D, weights=lengths))
    assert 0 < fills[0] <= fills[-1] <= capacity
    assert len(fills) == 1 or fills[0] + fills[1] > capacity


def test_best_fit_is_tight() -> None:
    lengths_D = np.random.default_rng(0).integers(1, 2000, 100_000)
    bins_D = best_fit(lengths_D, 4096)
    assert lengths_D.sum() / ((bins_D.max() + 1) * 4096) > 0.995


@EXAMPLES
@given(lengths=lengths_lists, seed=st.integers(0, 3), shuffle=st.booleans())
def test_every_document_lies_whole_in_exactly_one_sequence(lengths: list[int], seed: int, shuffle: bool) -> None:
    packed = PackedSequences(random_documents(lengths), max_tokens=24, seed=seed, shuffle=shuffle)
    members = [packed.members(sequence).tolist() for sequence in range(len(packed))]
    assert sorted(document for sequence in members for document in sequence) == list(range(len(lengths)))
    assert max(sum(lengths[document] for document in sequence) for sequence in members) <= 24
    assert packed.filled_share == pytest.approx(sum(lengths) / (24 * len(packed)))


@EXAMPLES
@given(lengths=lengths_lists, seed=st.integers(0, 3))
def test_batches_hold_labels_weights_and_positions_row_by_row(lengths: list[int], seed: int) -> None:
    documents = random_documents(lengths, seed=seed)
    packed = PackedSequences(documents, max_tokens=24, seed=seed)
    batch = packed.micro_batch(range(len(packed)))
    B, S = batch.input_ids_BS.shape
    assert max(int(documents.lengths_D[packed.members(number)].sum()) for number in range(len(packed))) == S
    assert batch.labels_T.shape == batch.weights_T.shape == batch.document_T.shape == (B * S,)
    ids_T, positions_T = batch.input_ids_BS.reshape(-1), batch.position_ids_BS.reshape(-1)
    seen = []
    for document in range(len(lengths)):
        (rows,) = torch.where(batch.document_T == document)
        start, stop = int(rows[0]), int(rows[-1]) + 1
        assert rows.tolist() == list(range(start, stop))
        assert start // S == (stop - 1) // S  # within one row
        assert ids_T[start:stop].tolist() == documents.tokens(document).tolist()
        assert positions_T[start:stop].tolist() == list(range(stop - start))
        shifted = np.where(documents.targets(document)[1:], documents.tokens(document)[1:], -1)
        assert batch.labels_T[start:stop].tolist() == [*shifted.tolist(), -1]
        seen.extend(rows.tolist())
    padding = sorted(set(range(B * S)) - set(seen))
    assert (batch.document_T[padding] == -1).all()
    assert (batch.labels_T[padding] == -1).all()
    assert torch.equal(batch.weights_T, (batch.labels_T >= 0).float())
    assert batch.valid_index.tolist() == torch.where(batch.weights_T > 0)[0].tolist()
    assert batch.valid_tokens == len(batch.valid_index) == documents.targets_N.sum()


def test_a_micro_batch_moves_with_its_images() -> None:
    batch = make_micro_batch(random_documents([4, 6]), [[0], [1]])
    images = {"media": {"pixel_values": torch.rand(2, 3)}, "teacher_media": {"pixel_values": torch.rand(2, 4)}}
    moved = replace(batch, teacher_inputs=batch.inputs, **images).to("meta")
    values = (moved.labels_T, moved.input_ids_BS, *moved.media.values(), *moved.teacher_media.values())
    assert all(value.is_meta for value in values)
    assert moved.valid_tokens == batch.valid_tokens


def odd_micro_batch() -> MicroBatch:
    """Return two rows of 6 tokens with every field that a micro-batch can have."""
    batch = make_micro_batch(random_documents([4, 6, 2]), [[0, 2], [1]])
    rows_T = torch.arange(12)
    return replace(
        batch,
        inputs={**batch.inputs, "kinds": rows_T.view(2, 6, 1) * torch.ones(3), "image": torch.rand(5, 3, 2, 2)},
        per_token={"advantages_T": rows_T.float() + 0.5, "experts_TK": rows_T[:, None] + torch.arange(2)},
        teacher_inputs={"input_ids": rows_T.view(2, 6) + 100, "position_ids": batch.position_ids_BS},
    )


def test_everything_per_token_is_cut_and_padded_by_one_rule() -> None:
    """Each value contains the number of its row, so that the test can put the parts together by hand."""
    batch = odd_micro_batch()
    padded = batch.padded(3, 8)
    rows_T = torch.tensor([[0, 1, 2, 3, 4, 5, -1, -1], [6, 7, 8, 9, 10, 11, -1, -1], [-1] * 8])
    for number in range(2):
        part = padded.part(number, 2)
        expected_T = rows_T[:, 4 * number : 4 * number + 4].flatten()
        is_padding_T = expected_T < 0
        advantages_T = torch.where(is_padding_T, 0.0, expected_T + 0.5)
        assert part.per_token["advantages_T"].tolist() == advantages_T.tolist()
        assert part.per_token["experts_TK"][~is_padding_T, 1].tolist() == (expected_T[~is_padding_T] + 1).tolist()
        assert part.inputs["kinds"][..., 2].flatten()[~is_padding_T].tolist() == expected_T[~is_padding_T].tolist()
        assert part.inputs["kinds"].shape == (3, 4, 3)
        assert part.inputs["image"] is batch.inputs["image"]
        assert part.teacher_inputs is not None
        assert (
            part.teacher_inputs["input_ids"].flatten()[~is_padding_T].tolist()
            == (expected_T[~is_padding_T] + 100).tolist()
        )
        for name, padding in (("labels_T", -1), ("weights_T", 0), ("document_T", -1)):
            padded_T = torch.where(is_padding_T, padding, getattr(batch, name)[expected_T])
            assert getattr(part, name).tolist() == padded_T.tolist(), name
        assert part.valid_index.tolist() == part.weights_T.nonzero()[:, 0].tolist()
        assert part.valid_tokens == int(part.weights_T.sum())
    assert padded.position_ids_BS[:, 4:].tolist() == [[0, 1, 0, 1], [4, 5, 0, 1], [4, 5, 6, 7]]


@pytest.mark.parametrize(("call", "message"), refused_calls("micro-batches"))
def test_tensors_of_other_rows_are_refused(call: str, message: str) -> None:
    change = eval(call)
    with pytest.raises(ValueError, match=message):
        replace(odd_micro_batch(), **change)


@EXAMPLES
@given(lengths=lengths_lists, rows=st.integers(1, 4), by_length=st.booleans())
def test_counts_of_a_step_are_those_of_its_micro_batches(lengths: list[int], rows: int, by_length: bool) -> None:
    packed = PackedSequences(random_documents(lengths), max_tokens=24, seed=0, by_length=by_length)
    order = packed.order(0)
    step = packed.micro_batches([order[start : start + rows] for start in range(0, len(packed), rows)])
    as_built = StepMicroBatches(list(step))
    for count in ("shapes_BS", "tokens", "normalizer"):
        assert getattr(step, count) == getattr(as_built, count)


def test_targets_of_many_documents_are_counted_in_parts() -> None:
    documents = random_documents([1 + number % 3 for number in range(9000)])
    counts = [int(documents.targets(document)[1:].sum()) for document in range(9000)]
    assert documents.target_counts_D.tolist() == counts


@EXAMPLES
@given(count=st.integers(1, 40), per_step=st.integers(1, 9), epochs=st.integers(1, 3), seed=st.integers(0, 2))
def test_each_epoch_takes_every_sequence_once(count: int, per_step: int, epochs: int, seed: int) -> None:
    packed = PackedSequences(random_documents([20] * count), max_tokens=24, seed=seed)
    assert len(packed) == count
    total = epochs * count
    steps = -(-total // per_step)
    stream = [packed.step_sequences(step, per_step, total) for step in range(steps)]
    assert all(len(sequences) == per_step for sequences in stream[:-1])
    flat = np.concatenate(stream)
    assert len(flat) == total
    for epoch in range(epochs):
        assert sorted(flat[epoch * count : (epoch + 1) * count].tolist()) == list(range(count))
    for outside in (-1, steps):
        with pytest.raises(ValueError, match="lies outside a training"):
            packed.step_sequences(outside, per_step, total)


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    """A step needs no history, and every machine has the same order."""
    documents = random_documents([15] * 50)
    packed, resumed = (PackedSequences(documents, max_tokens=24, seed=5) for _ in range(2))
    history = [packed.step_sequences(step, 8, 150).tolist() for step in range(19)]
    for step in (18, 3, 11, 6):
        assert resumed.step_sequences(step, 8, 150).tolist() == history[step]
    orders = [packed.order(0), packed.order(1), PackedSequences(documents, max_tokens=24, seed=6).order(0)]
    assert len({tuple(order.tolist()) for order in orders}) == 3
    still = PackedSequences(documents, max_tokens=24, seed=5, shuffle=False)
    assert still.order(0).tolist() == still.order(1).tolist() == list(range(50))
    assert [still.members(sequence).tolist() for sequence in range(3)] == [[0], [1], [2]]
    eight = PackedSequences(random_documents([15] * 8), max_tokens=24, seed=5)
    assert eight.order(0).tolist() == [7, 6, 1, 5, 4, 2, 0, 3]
    assert eight.order(1).tolist() == [4, 7, 6, 0, 1, 5, 2, 3]


def test_too_long_a_document_is_refused() -> None:
    with pytest.raises(ValueError, match="documents of at most 24 tokens to pack, got 2 documents of at most 25"):
        PackedSequences(random_documents([3, 25]), max_tokens=24, seed=0)


def test_padding_has_finite_gradients() -> None:
    """Gemma 3n's embedding of id 0 is zero, and the root of its size has an infinite derivative there."""
    documents = random_documents([9, 4], seed=1)
    batch = make_micro_batch(documents, [[0], [1]]).padded(3, 12)
    assert (batch.input_ids_BS[batch.document_T.view(3, 12) < 0] == documents.tokens(0)[0]).all()
    decoder = Decoder(build_causal("gemma3n_text", usual=True)).train()
    decoder(**batch.inputs).flatten(0, 1)[batch.document_T >= 0].logsumexp(-1).sum().backward()
    gradients = [parameter.grad for parameter in decoder.parameters() if parameter.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)
