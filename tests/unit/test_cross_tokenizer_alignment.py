"""Two tokenizers on the same text: spans, their borders, special tokens, and what is refused."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.documents import documents_of
from kit.two_tokenizers import NAMES, are_characters, bytes_of, cut_within_a_text, tokenizer, vocabulary_bytes
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from stillhouse.data import DataError, Documents
from stillhouse.data.render.alignment import AlignedDocument, Aligner
from stillhouse.data.render.token_bytes import BYTE_OF, TokenBytes

PAIRS = [(one, other) for one in NAMES for other in NAMES]
TEXTS = [
    "The student learns.",
    "  two spaces,\n\nand lines\t\tand 1024",
    "Hallå 😀 e\N{COMBINING ACUTE ACCENT} 中文字 ︎",
    "a",
    "it's <s> and <|im_end|> as text </s>",
    "\N{FAMILY}\N{ZERO WIDTH JOINER}\N{WOMAN} <0x41>",
]


def ids_of(made: PreTrainedTokenizerBase, text: str) -> np.ndarray:
    """The document of a text, as the student's templates make it."""
    return np.array([*made(text)["input_ids"], made.eos_token_id], dtype=np.int32)


def test_the_alphabet_is_that_of_the_tokenizers_library() -> None:
    assert set(BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())
    everything = "".join(map(chr, range(0x800))) + "€😀"
    encoded = "".join(part for part, _ in pre_tokenizers.ByteLevel(False, False, False).pre_tokenize_str(everything))
    assert bytes(BYTE_OF[character] for character in encoded) == everything.encode()


@cache
def aligner_of(student: str, teacher: str) -> Aligner:
    return Aligner(tokenizer(student), tokenizer(teacher))


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_texts(student: str, teacher: str) -> None:
    for text in TEXTS:
        check_alignment(student, teacher, text)


@settings(max_examples=60)
@given(text=st.text(min_size=1, max_size=40).filter(lambda text: "▁" not in text), pair=st.sampled_from(PAIRS))
def test_any_text(text: str, pair: tuple[str, str]) -> None:
    check_alignment(*pair, text)


def check_alignment(student: str, teacher: str, text: str) -> None:
    """The spans are those of a brute-force search for common borders, and they cover the text."""
    one, other = tokenizer(student), tokenizer(teacher)
    one.split_special_tokens = True  # names of special tokens are text
    ids = ids_of(one, text)
    (document,) = aligner_of(student, teacher).align([ids])
    start, first = len(one("")["input_ids"]), len(other("")["input_ids"])
    assert document.teacher_tokens[:first].tolist() == other("")["input_ids"]
    assert document.teacher_tokens[-1] == other.eos_token_id
    sides = [bytes_of(one, ids[start:-1]), bytes_of(other, document.teacher_tokens[first:-1])]
    if student == "mistral" and text.startswith(" ") and not text.startswith("  "):
        text = text[1:]  # both have the same ids
    for pieces in sides:
        if b"".join(pieces) == b" " + text.encode():
            pieces[0] = pieces[0][1:]
        assert b"".join(pieces) == text.encode()
    borders = [[sum(map(len, pieces[:count])) for count in range(len(pieces) + 1)] for pieces in sides]
    common = sorted(set(borders[0]) & set(borders[1]))
    *spans, end = document.spans
    last, there = len(ids) - 1, len(document.teacher_tokens) - 1
    assert (end.student, end.teacher) == (range(last, last + 1), range(there, there + 1))
    covered = [
        [b"".join(side[at - skip] for at in of) for side, skip, of in zip(sides, (start, first), span, strict=True)]
        for span in spans
    ]
    assert covered == [[text.encode()[here:there]] * 2 for here, there in pairwise(common)]
    for side in (0, 1):
        numbers = [number for span in document.spans for number in span[side]]
        assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("teacher", NAMES)
def test_a_document_that_is_cut_within_characters(teacher: str) -> None:
    """The first document ends within the emoji, the second one begins there: its bytes have no counterpart."""
    student = tokenizer("small")
    ids = np.array(student("one 😀 two", add_special_tokens=False)["input_ids"], dtype=np.int32)
    pieces = TokenBytes(student).pieces(ids.tolist())
    inside = next(at for at, piece in enumerate(pieces) if piece == b"\x9f")
    first, second = Aligner(student, tokenizer(teacher)).align([ids[:inside], ids[inside:]])
    assert covered_bytes(pieces[:inside], first) == b"one "
    assert covered_bytes(pieces[inside:], second) == b" two"
    texts = [tokenizer(teacher).decode(part.teacher_tokens, skip_special_tokens=True) for part in (first, second)]
    assert [text.strip() for text in texts] == ["one", "two"]


def covered_bytes(pieces: list[bytes], document: AlignedDocument) -> bytes:
    return b"".join(pieces[at] for span in document.spans for at in span.student)


def test_special_tokens() -> None:
    """The end by its role, <|im_end|> by its name, and <|im_start|>, which the teacher does not have, as text."""
    student, teacher = tokenizer("small"), tokenizer("large")
    text = "<|im_start|>user\nHi<|im_end|></s>"
    ids = np.array(student(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    aligner = Aligner(student, teacher)
    (document,) = aligner.align([ids])
    ours, others = student.convert_ids_to_tokens(ids), teacher.convert_ids_to_tokens(document.teacher_tokens)
    spans = [([ours[at] for at in span.student], [others[at] for at in span.teacher]) for span in document.spans]
    as_text = teacher.convert_ids_to_tokens(aligner.teacher.encode(["<|im_start|>"])[0])
    assert len(as_text) > 1
    assert spans[0] == (["<|im_start|>"], as_text)
    assert spans[-2:] == [(["<|im_end|>"], ["<|im_end|>"]), (["</s>"], ["<|end|>"])]
    matched = {name: aligner.teacher_of[student.convert_tokens_to_ids(name)] for name in ("</s>", "<|im_end|>")}
    assert matched == {"</s>": teacher.eos_token_id, "<|im_end|>": teacher.convert_tokens_to_ids("<|im_end|>")}
    assert aligner.teacher_of[student.convert_tokens_to_ids("<|im_start|>")] == -1


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_ids_match_if_they_stand_for_the_same_bytes(student: str, teacher: str) -> None:
    one, other = tokenizer(student), tokenizer(teacher)
    aligner = aligner_of(student, teacher)
    twins = {index: twin for index, twin in enumerate(aligner.student_of.tolist()) if twin >= 0}
    ours = {index: twin for index, twin in enumerate(aligner.teacher_of.tolist()) if twin >= 0}
    assert {twin: index for index, twin in twins.items()} == ours
    ours, others = vocabulary_bytes(one), vocabulary_bytes(other)
    pieces = {ours[twin]: others[index] for index, twin in twins.items() if twin in ours}
    assert all(piece == same for piece, same in pieces.items())
    assert pieces.keys() == set(ours.values()) & set(others.values())
    if student == teacher:  # of two ids for a byte, that of the character is meant
        assert all(index == twin for index, twin in twins.items())
        assert twins.keys() >= {index for index in ours if len(ours[index]) > 1}


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_the_first_token_of_the_teachers_tokens(student: str, teacher: str) -> None:
    one, other = tokenizer(student), tokenizer(teacher)
    aligner, ours = aligner_of(student, teacher), vocabulary_bytes(one)
    first_ids = {index: int(aligner.first_of[index]) for index in vocabulary_bytes(other)}
    for index, piece in vocabulary_bytes(other).items():
        if piece in ours.values():
            assert ours[first_ids[index]] == piece
        elif first_ids[index] >= 0:
            assert piece.startswith(ours[first_ids[index]])
            assert ours[first_ids[index]]
        elif are_characters(piece):
            assert first_ids[index] >= 0


@pytest.mark.parametrize("student", ["pieces", "mistral"])
@pytest.mark.parametrize("teacher", NAMES)
def test_the_first_token_of_a_student_that_writes_spaces(student: str, teacher: str) -> None:
    """Within a text, the first token has no added space; at its beginning it has."""
    one, other = tokenizer(student), tokenizer(teacher)
    aligner, ours = aligner_of(student, teacher), vocabulary_bytes(one)
    by_bytes = {piece: index for index, piece in ours.items()}
    known = {
        index: piece
        for index, piece in vocabulary_bytes(other).items()
        if are_characters(piece) and b"\xe2\x96\x81" not in piece
    }
    assert len(known) > 150
    for index, piece in known.items():
        text = piece.decode()
        if piece in by_bytes:
            assert ours[aligner.first_of[index]] == piece
        else:
            assert aligner.first_of[index] == cut_within_a_text(one, text)[0], text
        assert aligner.first_of_text[index] == one(text, add_special_tokens=False)["input_ids"][0], text
    without = {index for index in vocabulary_bytes(other) if aligner.first_of[index] < 0}
    assert not without & known.keys()


@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_spaces_are_added_only_where_the_tokenizers_add_them(student: str, teacher: str) -> None:
    """Behind a special token, and in a piece of a text that was cut, a space may be a part of the text.

    The teacher's tokens are those of its own tokenizer for the whole text.
    """
    one, other = tokenizer(student), tokenizer(teacher)
    aligner, ends = aligner_of(student, teacher), (one.eos_token, other.eos_token)
    for text in ("one two", "  one two", f"one{ends[0]} two", f"one{ends[0]}  two", f"one{ends[0]}two"):
        (document,) = aligner.align([np.array(one(text)["input_ids"], dtype=np.int32)])
        assert document.teacher_tokens.tolist() == other(text.replace(*ends))["input_ids"], text
    if one.bos_token_id not in one("")["input_ids"]:
        return  # every document is taken for a whole text
    ids = one("one,  9 three", add_special_tokens=False)["input_ids"]
    cut = next(at for at in range(1, len(ids)) if bytes_of(one, ids[at:])[0].startswith(b" "))
    text = b"".join(bytes_of(one, ids[cut:])).decode()
    (document,) = aligner.align([np.array(ids[cut:], dtype=np.int32)])
    plain_ids = other(text, add_special_tokens=False)["input_ids"]
    expected = cut_within_a_text(other, text) if teacher in ("pieces", "mistral") else plain_ids
    assert document.teacher_tokens.tolist() == expected
    assert not document.begins


def documents(made: PreTrainedTokenizerBase, texts: Sequence[str]) -> Documents:
    ids = [ids_of(made, text).tolist() for text in texts]
    return documents_of(ids, [[1] * len(document) for document in ids])


def test_tokens_without_text_are_refused() -> None:
    student, teacher = tokenizer("small"), tokenizer("pieces")
    backend = teacher.backend_tokenizer
    backend.model = models.BPE(unk_token="<unk>", vocab={"<unk>": 0, "▁": 353, "a": 304}, merges=[])
    with pytest.raises(DataError, match=r"^train.jsonl:2: token id 0 \('<unk>'\) represents no text"):
        Aligner(student, teacher).translate(documents(student, ["aa a", "b"]))
    (unknown,) = student("<unk>", add_special_tokens=False)["input_ids"]
    with pytest.raises(ValueError, match=r"token 1 is '<unk>', whose text is not known"):
        Aligner(student, tokenizer("large")).align([np.array([60, unknown, 60], dtype=np.int32)])
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])))
    with pytest.raises(ValueError, match=r"no decoder\) have no exact bytes"):
        TokenBytes(bare)
    ids = student.convert_tokens_to_ids(["a", "Ł", "b"])
    with pytest.raises(ValueError, match="the student's tokens are not UTF-8 text"):
        Aligner(student, tokenizer("large")).align([np.array(ids, dtype=np.int32)])
