"""Packing, padded rows, the order of training and labels; a model gives the same for packed and single documents."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.causal_families import build as build_causal
from kit.config_cases import refused_calls
from kit.documents import documents_of, random_documents
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from stillhouse.data import MicroBatch, PackedSequences, StepMicroBatches, make_micro_batch
from stillhouse.data.packing import best_fit, similar_fit
from stillhouse.document_lengths import DocumentLengths
from stillhouse.models import Decoder
from stillhouse.models.document_packing import UnpackedRows

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
        teacher_ids_T = part.teacher_inputs["input_ids"].flatten()
        assert teacher_ids_T[~is_padding_T].tolist() == (expected_T[~is_padding_T] + 100).tolist()
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


POSITIONS_BS = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 1, 2]])
IS_PADDING_BS = torch.tensor([[0, 0, 0, 0, 0, 1], [0, 0, 1, 0, 0, 0]]).bool()


def ids_of(rows: UnpackedRows) -> Tensor:
    return rows.unpack(torch.arange(12).view(2, 6))


def test_each_document_is_a_row_that_repeats_its_first_token() -> None:
    rows = UnpackedRows.of(POSITIONS_BS)
    ids_NL = ids_of(rows)
    assert ids_NL[:, :4].tolist() == [[0, 1, 2, 0], [3, 4, 3, 3], [5, 5, 5, 5], [6, 7, 6, 6], [8] * 4, [9, 10, 11, 9]]
    assert torch.equal(rows.pack(ids_NL), torch.arange(12).view(2, 6))
    rows = UnpackedRows.of(torch.tensor([[0, 1], [2, 3]]))
    assert rows.unpack(torch.arange(4).view(2, 2))[:, :2].tolist() == [[0, 1], [2, 3]]


def test_padding_has_no_row_except_one_if_there_is_nothing_else() -> None:
    rows = UnpackedRows.of(POSITIONS_BS, IS_PADDING_BS)
    assert ids_of(rows)[:, 0].tolist() == [0, 3, 6, 9]
    packed_BS = rows.pack(ids_of(rows))
    assert torch.equal(packed_BS[~IS_PADDING_BS], torch.arange(12).view(2, 6)[~IS_PADDING_BS])
    rows = UnpackedRows.of(POSITIONS_BS, torch.ones_like(IS_PADDING_BS))
    assert ids_of(rows).shape == (1, 8)
    assert rows.pack(ids_of(rows)).shape == (2, 6)


def faked(mode: FakeTensorMode, lengths: DocumentLengths) -> tuple[Tensor, Tensor, DocumentLengths]:
    borders_M, filled_K = map(mode.from_tensor, (lengths.borders_M, lengths.filled_K))
    fake = lengths._replace(borders_M=borders_M, filled_K=filled_K)
    return mode.from_tensor(POSITIONS_BS), mode.from_tensor(IS_PADDING_BS), fake


def test_known_lengths_are_not_read_from_the_device() -> None:
    """Fake tensors have no values: what would wait for a device to read them raises an error."""
    lengths = DocumentLengths.of(POSITIONS_BS, IS_PADDING_BS)
    expected = UnpackedRows.of(POSITIONS_BS, IS_PADDING_BS)
    rows = UnpackedRows.of(POSITIONS_BS, IS_PADDING_BS, lengths)
    assert torch.equal(rows.index_NL, expected.index_NL)
    assert torch.equal(rows.place_T, expected.place_T)
    with FakeTensorMode() as mode:
        positions_BS, is_padding_BS, fake = faked(mode, lengths)
        rows = UnpackedRows.of(positions_BS, is_padding_BS, fake)
        assert rows.pack(rows.unpack(positions_BS)).shape == POSITIONS_BS.shape
        assert rows.index_NL.shape == expected.index_NL.shape
        with pytest.raises(DynamicOutputShapeException):
            UnpackedRows.of(positions_BS, is_padding_BS)


def test_documents_in_one_row_lie_one_behind_another() -> None:
    """Each is padded to a multiple of 4 with its first token; padding alone has no place."""
    lengths = DocumentLengths.of(POSITIONS_BS, IS_PADDING_BS)
    widths = [-(-length // 4) * 4 for length in lengths.filled]
    with FakeTensorMode() as mode:
        positions_BS, is_padding_BS, fake = faked(mode, lengths)
        assert UnpackedRows.of(positions_BS, is_padding_BS, fake, widths=widths).index_NL.shape == (1, sum(widths))
    rows = UnpackedRows.of(POSITIONS_BS, IS_PADDING_BS, lengths, widths=widths)
    values_1P = rows.unpack(POSITIONS_BS)
    expected = [
        [*range(length), *[0] * (width - length)] for length, width in zip(lengths.filled, widths, strict=True)
    ]
    assert values_1P[0].tolist() == [position for of_document in expected for position in of_document]
    ids_BS = torch.arange(POSITIONS_BS.numel()).view(POSITIONS_BS.shape)
    assert torch.equal(rows.pack(rows.unpack(ids_BS))[~IS_PADDING_BS], ids_BS[~IS_PADDING_BS])


def test_a_moved_micro_batch_has_the_lengths_of_its_rows() -> None:
    batch = make_micro_batch(random_documents([3, 2, 5]), [[0, 1], [2]]).padded(2, 9)
    lengths = batch.to("cpu").lengths
    assert lengths is not None
    assert (lengths.longest, max(lengths.filled)) == (5, 5)
    assert lengths.filled_K.tolist() == [0, 1, 3]
    empty = batch.without_targets().to("cpu").lengths
    assert empty is not None
    assert empty.filled_K.tolist() == [0]


def test_packing_is_the_inverse_of_unpacking_also_for_gradients() -> None:
    rows = UnpackedRows.of(POSITIONS_BS, IS_PADDING_BS)
    values_BSD = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    weights_BS = torch.randn(2, 6, dtype=torch.float64).masked_fill(IS_PADDING_BS, 0.0)
    (rows.pack(rows.unpack(values_BSD) ** 2) * weights_BS[..., None]).sum().backward()
    torch.testing.assert_close(values_BSD.grad, 2 * values_BSD.detach() * weights_BS[..., None])


def chat_lengths(count: int) -> np.ndarray:
    """Lengths as of conversations: log-normal with a long tail, cut at 2,048 tokens."""
    lengths = np.random.default_rng(0).lognormal(mean=5.5, sigma=1.0, size=count)
    return lengths.clip(8, 2048).astype(np.int64)


def test_a_bin_has_similar_lengths_and_room_for_their_padding() -> None:
    lengths_D = chat_lengths(500)
    bins_D = similar_fit(lengths_D, 8192)
    for number in range(bins_D.max() + 1):
        of_bin = lengths_D[bins_D == number]
        assert len(of_bin) * of_bin.max() <= 8192
    order = np.argsort(-lengths_D, kind="stable")
    assert (np.diff(bins_D[order]) >= 0).all()


@pytest.mark.parametrize("count", [2000, 20000])
def test_little_padding_for_lengths_of_conversations(count: int) -> None:
    lengths = chat_lengths(count).tolist()
    documents = documents_of([[3] * length for length in lengths], [[1] * length for length in lengths])
    packed = PackedSequences(documents, max_tokens=8192, seed=0, by_length=True)
    assert packed.padding_share < 0.05
    members = np.concatenate([packed.members(sequence) for sequence in range(len(packed))])
    assert sorted(members.tolist()) == list(range(count))
