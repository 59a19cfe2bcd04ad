"""Documents as padded rows: where their tokens lie, and how documents of similar lengths come together."""

import numpy as np
import pytest
import torch
from kit.documents import documents_of, random_documents
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from stillhouse.data import PackedSequences, make_micro_batch
from stillhouse.data.packing import similar_fit
from stillhouse.document_lengths import DocumentLengths
from stillhouse.models.document_packing import UnpackedRows

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
