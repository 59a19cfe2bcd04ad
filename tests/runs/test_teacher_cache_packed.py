"""The packed form of a cache gives exactly the tensors that were written, in as few bytes as it says."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.cache_damage import resealed
from kit.runs import run, session_of, write_run
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from stillhouse.signals import SignalCache, SignalSpec
from stillhouse.signals.cache.bits import pack_rows, unpack_rows
from stillhouse.signals.cache.files import shard_name
from stillhouse.signals.cache.shard_layout import StoredRows, layout_of
from stillhouse.signals.sampled_ids import distinct
from stillhouse.signals.signal_spec import DocumentRows
from stillhouse.tools.write_cache import write_cache

FORWARD_KL = {"objective.loss": "forward_kl"}
SHARD_BYTES = 5000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache of each packed kind, and of the same that is not packed."""
    folder = tmp_path_factory.mktemp("packed")
    config = write_run(folder, **FORWARD_KL)
    for kind, options in KINDS.items():
        for packed in (False, True):
            out = folder / f"{kind} {packed}"
            write_cache(config, out, **options, packed=packed, shard_bytes=SHARD_BYTES)
    return folder


KINDS: dict[str, dict[str, Any]] = {
    "sampled": {"kind": "sampled", "top_k": 50},
    "top_k": {"kind": "top_k", "top_k": 7},
    "top_k float16": {"kind": "top_k", "top_k": 7, "dtype": "float16"},
    "label": {"kind": "top_k", "top_k": 3, "with_label": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_reading_gives_exactly_the_tensors_that_were_written(folder: Path, kind: str) -> None:
    plain, packed = (SignalCache(folder / f"{kind} {is_packed}") for is_packed in (False, True))
    assert plain.documents() == packed.documents()
    for document, rows in plain.documents().items():
        for part in (rows, rows[len(rows) // 2 :], rows[:1]):
            expected, unpacked = plain.read_document(document, part), packed.read_document(document, part)
            assert expected.keys() == unpacked.keys()
            assert all(torch.equal(value, unpacked[name]) for name, value in expected.items())
            assert all(value.dtype == unpacked[name].dtype for name, value in expected.items())
    packed.verify()


def test_the_bytes_of_a_packed_shard(folder: Path) -> None:
    """The 400 ids of the toy vocabulary need 9 bits: 7 ids need 8 bytes; an id and one of 50 counts need 15 bits."""
    vocabulary = SignalCache(folder / "top_k True").manifest.vocabulary
    assert vocabulary == 400
    with safe_open(folder / "top_k True" / shard_name(0), framework="pt") as file:
        assert file.get_slice("ids").get_shape()[1:] == [8]
    with safe_open(folder / "label True" / shard_name(0), framework="pt") as file:
        assert file.get_slice("ids").get_shape()[1:] == [5]
    with safe_open(folder / "sampled True" / shard_name(0), framework="pt") as file:
        numbers, pairs = file.get_tensor("distinct").long(), file.get_tensor("pairs")
        offsets, rows = file.get_tensor("pair_offsets"), file.get_tensor("offsets")
        first = unpack_bits(pairs.numpy())
    sizes = -(-numbers * 15 // 8)
    assert len(pairs) == sizes.sum() == offsets[-1]
    assert offsets.tolist() == [int(sizes[:stop].sum()) for stop in rows.tolist()]
    cache = SignalCache(folder / "sampled False")
    document, rows_of_first = next(iter(cache.documents().items()))
    expected = cache.read_document(document, rows_of_first[:1])
    assert first[:9] == f"{int(expected['ids'][0, 0]):09b}"
    assert first[9:15] == f"{int(expected['counts'][0, 0]) - 1:06b}"


def unpack_bits(string: np.ndarray) -> str:
    return "".join(map(str, np.unpackbits(string)))


def test_the_size_that_is_printed_is_that_on_disk(folder: Path) -> None:
    for kind in KINDS:
        for packed in (False, True):
            cache = folder / f"{kind} {packed}"
            manifest = SignalCache(cache).manifest
            size = sum(path.stat().st_size for path in (cache / "shards").glob("*.safetensors"))
            assert f"{size / manifest.rows:,.1f} bytes each" in manifest.summary(cache)
            assert (", packed of" in manifest.summary(cache)) is packed


@st.composite
def draw_cases(strategy: st.DrawFn) -> tuple[int, int, Tensor, list[int]]:
    """vocabulary, M, draws [N, M] and the lengths of the documents."""
    vocabulary = strategy(st.sampled_from([1, 2, 3, 251, 256, 257, 151_936, 2**31 - 1]))
    draws = strategy(st.integers(1, 255))
    lengths = strategy(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(strategy(st.integers(0, 2**31)))
    different = strategy(st.sampled_from([1, 3, 255]))
    pool = torch.randint(0, vocabulary, (sum(lengths), different), generator=generator)
    columns = torch.randint(0, different, (sum(lengths), draws), generator=generator)
    return vocabulary, draws, pool.gather(1, columns), lengths


@settings(max_examples=150, deadline=None, derandomize=True)
@given(draw_cases())
def test_any_draws_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[int, int, Tensor, list[int]]
) -> None:
    vocabulary, draws, ids_NM, lengths = case
    ids, counts = distinct(ids_NM)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    layout = layout_of(SignalSpec("sampled", "float32", draws, 1.0), 5, vocabulary, packed=True)
    path = tmp_path_factory.getbasetemp() / "draws.safetensors"
    save_file(layout.pack({"ids": ids, "counts": counts}, offsets), path)
    with safe_open(path, framework="pt") as file:
        for document, length in enumerate(lengths):
            for rows in (range(length), range(length - 1, length)):
                part = StoredRows(document, int(offsets[document]), rows)
                unpacked = layout.read(file, part)
                assert torch.equal(unpacked["ids"], ids[part.slice])
                assert torch.equal(unpacked["counts"], counts[part.slice])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(1, 41), st.integers(0, 9), st.integers(1, 70), st.integers(0, 2**31))
def test_any_integers_are_read_as_they_were_packed(width: int, rows: int, numbers: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 1 << width, (rows, numbers))
    strings = pack_rows(values, width)
    assert strings.shape == (rows, -(-numbers * width // 8))
    np.testing.assert_array_equal(unpack_rows(strings, numbers, width), values)
    text = "".join(f"{value:0{width}b}" for value in values[0]) if rows else ""
    assert not rows or unpack_bits(strings[0])[: len(text)] == text


def emptied(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensors[name][:-3].clone()})


def changed(name: str, value: int, at: int = 0) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors[name].view(-1).__setitem__(at, value)


DAMAGE: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], str]] = {
    "truncated pairs": ("sampled True", emptied("pairs"), "'pairs' ends before the last row"),
    "lost numbers": ("sampled True", emptied("distinct"), "'distinct' ends before the last row"),
    "lost offsets": ("sampled True", emptied("pair_offsets"), "is damaged"),
    "a larger number": ("sampled True", changed("distinct", 51), "'distinct' has 51 ids in a row of 50 draws"),
    "another number": (
        "sampled True",
        changed("distinct", 1),
        "is damaged|do not add up|twice|do not fit|not in the vocabulary",
    ),
    "foreign pairs": ("sampled True", lambda tensors: tensors["pairs"].zero_(), "an id twice in a row|do not add up"),
    "pairs of ones": ("sampled True", lambda tensors: tensors["pairs"].fill_(255), "not in the vocabulary"),
    "offsets back": ("sampled True", changed("pair_offsets", 0, 1), "'pair_offsets' of document 0 does not fit"),
    "counts of fewer draws": ("sampled False", changed("counts", 0), "do not fit|do not add up"),
    "one count more": ("sampled False", lambda tensors: tensors["counts"][0, :1].add_(1), "add up to 50 draws"),
    "an id beyond": ("sampled False", changed("ids", 999), "not in the vocabulary of"),
    "an id beyond of top-k": ("top_k False", changed("ids", 999), "not in the vocabulary of"),
    "an id beyond of packed top-k": ("top_k True", changed("ids", 255), "not in the vocabulary|an id twice"),
    "truncated ids": ("top_k True", emptied("ids"), "'ids' ends before the last row"),
    "narrower ids": (
        "top_k True",
        lambda tensors: tensors.update(ids=tensors["ids"][:, :-1].contiguous()),
        "expected .rows, ",
    ),
    "an id twice": ("top_k False", lambda tensors: tensors["ids"][0].fill_(3), "an id twice in a row"),
    "a positive number": ("top_k False", lambda tensors: tensors["log_probs"][0, 0].fill_(0.5), "a positive number"),
    "another temperature": ("top_k False", lambda tensors: tensors["log_probs"].mul_(0.5), "do not add up to 1"),
    "a known label": ("label True", lambda tensors: tensors["log_probs"][:, -1].fill_(-0.1), "do not add up to 1"),
    "NaN": ("top_k True", lambda tensors: tensors["tail_log_prob"].fill_(torch.nan), "has NaN"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_rows_that_no_teacher_gives_are_refused_by_name(folder: Path, tmp_path: Path, damage: str) -> None:
    kind, change, message = DAMAGE[damage]
    copied = Path(shutil.copytree(folder / kind, tmp_path / "copied"))
    resealed(copied, change)
    with pytest.raises(ValueError, match=rf"00000\.safetensors.*({message})"):
        SignalCache(copied).verify()


def test_a_packed_cache_is_not_continued_without_packing(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"has another cache: .*packed True there and False here"):
        write_cache(write_run(folder, **FORWARD_KL), folder / "sampled True", "sampled", top_k=50)


def test_hidden_states_have_no_packed_form(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hidden states have no packed form"):
        write_cache(write_run(folder), tmp_path / "x", "hidden", packed=True)
    with pytest.raises(ValueError, match="the actual token with sampled: expected it only with top_k"):
        write_cache(write_run(folder), tmp_path / "x", "sampled", with_label=True)


def test_the_label_of_a_row_is_the_next_token_of_its_document(folder: Path) -> None:
    cache, session = SignalCache(folder / "label False"), session_of(folder, **FORWARD_KL)
    documents, present = session.train.documents, 0
    for number in range(len(documents)):
        tokens = torch.from_numpy(documents.tokens(number))
        signal = cache.read([DocumentRows(tokens.numpy(), range(len(tokens) - 1))])[0]
        known = (signal["ids"][:, :-1] == tokens[1:, None]).any(1)
        assert torch.equal(signal["ids"][:, -1], tokens[1:].int().masked_fill(known, -1))
        assert torch.equal(signal["log_probs"][:, -1] == -torch.inf, known)
        present += int((~known).sum())
    assert present > 50


def test_the_command_writes_draws_and_says_what_they_are(folder: Path, tmp_path: Path) -> None:
    write_run(folder, **FORWARD_KL)
    shown = run("cache", folder / "run.yaml", "--out", tmp_path / "a", "--signal", "sampled", "--packed").out
    assert "50 draws at temperature 1, packed of" in shown
    assert run("cache", "info", tmp_path / "a").out == shown
    with_label = ("--signal", "top_k", "--top-k", "5", "--with-label", "--dtype", "float16")
    shown = run("cache", folder / "run.yaml", "--out", tmp_path / "b", *with_label).out
    assert "top 5 and the actual token's log-probabilities in float16" in shown
