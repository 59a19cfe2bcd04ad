"""The bytes that each token of a tokenizer represents. Two different tokenizers can be compared by these bytes.

Two kinds of tokenizers have exact bytes for every token. Byte-level tokenizers (GPT-2, Llama 3, Qwen) represent the
256 byte values by 256 characters. SentencePiece tokenizers (Llama 2, Gemma) represent a space as "▁", and some put a
space before a text. Other tokenizers, such as WordPiece, lose white space, so that their tokens have no exact bytes.
For these tokenizers, `TokenBytes` raises ValueError.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from stillhouse.libraries import reading

_SPACE = "▁"
_DECODERS_OF_SPACES = {"Replace", "Metaspace", "ByteFallback", "Fuse", "Strip"}
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: the settings with which these pre-tokenizers put no space before a text
_NO_ADDED_SPACE: dict[str, dict[str, Any]] = {
    "Metaspace": {"prepend_scheme": "never"},
    "ByteLevel": {"add_prefix_space": False},
}


_VISIBLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = sorted({*range(256)} - {*_VISIBLE})
#: GPT-2's characters for the 256 bytes: a visible byte is its own character; other bytes have characters from 256 on
BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}


class TokenBytes:
    """A tokenizer as a translation between ids and bytes.

    special: the content of each special token, by id.
    bytes_of: the bytes of each token that is not special, by id.
    id_of: the id of a token, by its bytes. If several tokens have equal bytes, it is the lowest id, if possible of a
        token that is not a byte-fallback token such as <0x41>.
    bos, eos, unknown: the ids of these special tokens, or None.
    prefix: the ids that the tokenizer puts before every text.

    Raises ValueError for a tokenizer whose tokens have no exact bytes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.name = name = tokenizer.name_or_path
        if not tokenizer.is_fast:
            raise ValueError(f"the bytes of the tokens of {name!r} are not known: expected a fast tokenizer")
        decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]
        parts = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        self._is_byte_level = any(part["type"] == "ByteLevel" for part in parts)
        # whether the decoder only converts "▁" to a space and byte-fallback tokens to bytes, and strips a space
        writes_spaces = {part["type"] for part in parts} <= _DECODERS_OF_SPACES and any(
            (part["type"] == "Replace" and part["pattern"] == {"String": _SPACE} and part["content"] == " ")
            or (part["type"] == "Metaspace" and part["replacement"] == _SPACE)
            for part in parts
        )
        if not self._is_byte_level and not writes_spaces:
            kind = "no decoder" if decoder is None else f"the decoder {decoder['type']}"
            raise ValueError(
                f"the tokens of {name!r} ({kind}) have no exact bytes: expected a byte-level tokenizer, or one that "
                f"writes spaces as {_SPACE!r}"
            )
        vocabulary, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
        self.bos, self.eos, self.unknown = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id
        in_roles = (self.bos, self.eos, self.unknown, tokenizer.pad_token_id)
        self.special = {
            index: token
            for token, index in vocabulary.items()
            if index in in_roles or (index in added and added[index].special)
        }
        self.bytes_of = {
            index: token.encode() if index in added else self._content(token)
            for token, index in vocabulary.items()
            if index not in self.special
        }
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_padding()
        self._backend.no_truncation()
        # by special token: the ids of a text after it; None if the tokenizer does not recognise the token in a text
        behind_special: dict[int, list[int] | None] = {}
        for index, token in self.special.items():
            ids = self._backend.encode(f"{token}a", add_special_tokens=False).ids
            behind_special[index] = ids[1:] if ids[:1] == [index] else None
        # from now on, the name of a special token in a text is tokenized as text
        self._backend.encode_special_tokens = True
        state = json.loads(self._backend.to_str())
        state |= {part: _without_added_space(state[part]) for part in ("normalizer", "pre_tokenizer")}
        self._inner = Tokenizer.from_str(json.dumps(state))
        self._inner.encode_special_tokens = True
        # Gemma's "▁▁" is an added token, and also the token of two spaces
        written = {index: self._content(token) for token, index in vocabulary.items() if index in added}
        ordinary = [index for index in written.keys() - self.special if written[index] != self.bytes_of[index]]
        encoded = self.encode([written[index].decode() for index in ordinary], inner=True)
        self.bytes_of |= {
            index: written[index] for index, ids in zip(ordinary, encoded, strict=True) if ids == [index]
        }
        numbers = {index for token, index in vocabulary.items() if _BYTE.fullmatch(token)}
        order = sorted(self.bytes_of, key=lambda index: (index in numbers, index), reverse=True)
        self.id_of: Mapping[bytes, int] = {self.bytes_of[index]: index for index in order}
        plain, spaced = (b"".join(self.pieces(ids)) for ids in self.encode(["a", " a"]))
        self._adds_space, self._adds_second_space = plain == b" a", spaced == b"  a"
        self._adds_space_after = {
            index: self._adds_space if ids is None else b"".join(self.pieces(ids)) == b" a"
            for index, ids in behind_special.items()
        }
        if (content := b"".join(self.pieces(self.encode(["a"], inner=True)[0]))) != b"a":
            raise ValueError(
                f"the tokenizer {name!r} reads 'a' within a text as {content!r}: expected one that puts at "
                "most a space before a text, by Prepend, Metaspace or ByteLevel"
            )
        with_prefix = self._backend.encode("a").ids
        starts = [at for at, index in enumerate(with_prefix) if index not in self.special]
        self.prefix = with_prefix[: starts[0]] if starts else []

    def encode(self, texts: Sequence[str], *, inner: bool = False) -> list[list[int]]:
        """The ids of texts, without special tokens. The name of a special token in a text is tokenized as text.

        inner: the texts are from the middle of longer texts, so that no space is put before them.
        """
        backend = self._inner if inner else self._backend
        with reading(f"the tokenizer {self.name!r} cannot tokenize a text"):
            return [encoding.ids for encoding in backend.encode_batch(list(texts), add_special_tokens=False)]

    def adds_space(self, special: int | None) -> bool:
        """Whether the tokenizer puts a space before a text after this special token (None: after no token)."""
        return self._adds_space if special is None else self._adds_space_after[special]

    def has_added_space(self, content: bytes) -> bool:
        """Whether the first byte of a text is a space that the tokenizer has added.

        Some tokenizers add no space if the text begins with a space. So " a" and "a" have the same ids, for which the
        text is assumed to be "a".
        """
        return content.startswith(b" ") and (self._adds_second_space or not content.startswith(b"  "))

    def pieces(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token. Raises ValueError for an id without bytes."""
        missing = next((index for index in ids if index not in self.bytes_of), None)
        if missing is not None:
            raise ValueError(f"token id {missing} ({self.special.get(missing, 'unknown')!r}) represents no text")
        return [self.bytes_of[index] for index in ids]

    def _content(self, token: str) -> bytes:
        if not self._is_byte_level:
            byte = _BYTE.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()
        # a vocabulary may contain a token with another character, which no text produces
        return bytes(map(BYTE_OF.__getitem__, token)) if BYTE_OF.keys() >= set(token) else token.encode()


def _without_added_space(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer without the parts that put a space before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    for steps in ("normalizers", "pretokenizers"):
        if steps in part:
            part = part | {steps: [step for step in map(_without_added_space, part[steps]) if step is not None]}
    return part | _NO_ADDED_SPACE.get(part["type"], {})
