"""Tokens of texts that somebody else writes, in which added tokens of the tokenizer are ordinary text.

So a reply of a tool or of an environment can neither end its turn nor begin one of the student.
"""

import re
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from stillhouse.data.record import RecordError
from stillhouse.data.render.assistant_turns import ANCHOR
from stillhouse.data.render.tokenizers import tokenize


class OrdinaryText:
    """Tokenizes texts without their added tokens. key: of the configuration, for errors."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, key: str):
        self.tokenizer, self.key = tokenizer, key
        added = [text for text in tokenizer.get_added_vocab() if text.strip()]
        self._added_ids = {index for text, index in tokenizer.get_added_vocab().items() if text.strip()}
        self._added = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or r"(?!)")

    def template_ids(self, text: str) -> list[int]:
        """The tokens of a text of the chat template, with its added tokens. Raises ValueError as `tokenize` does."""
        try:
            return tokenize(self.tokenizer, [text], special=False)[0] if text else []
        except RecordError as error:
            raise ValueError(f"{self.key}: {error}") from error

    def ids(self, text: str) -> list[int]:
        """The tokens of a text by itself, in which added tokens are ordinary text."""
        ids, end = list[int](), 0
        for match in self._added.finditer(text):
            ids += self.template_ids(text[end : match.start()]) + self._without_token(match[0])
            end = match.end()
        return ids + self.template_ids(text[end:])

    def ids_within(self, write: Callable[[Sequence[str]], str], replies: Sequence[str]) -> list[int]:
        """The tokens of a text of the chat template with replies, in which added tokens are ordinary text.

        write: returns the text with these replies. Raises ValueError for a reply that has such tokens nevertheless.
        """
        salt = f"{ANCHOR}Text"
        while any(salt in reply for reply in replies):
            salt += "x"
        texts: list[str] = []

        def hide(match: re.Match[str]) -> str:
            texts.append(match[0])
            return f"{salt}{len(texts) - 1}z"

        written = write([self._added.sub(hide, reply) for reply in replies])
        ids = list[int]()
        for number, piece in enumerate(re.split(f"{salt}([0-9]+)z", written)):
            ids += self._without_token(texts[int(piece)]) if number % 2 else self.template_ids(piece)
        short_ids = self.template_ids(write(["a"] * len(replies)))
        if self._added_among(ids) != self._added_among(short_ids):
            raise ValueError(
                f"{self.key}: the reply {replies[0][:80]!r} would have special tokens of the tokenizer, which cannot "
                "be tokenized as ordinary text"
            )
        return ids

    def _without_token(self, added: str) -> list[int]:
        """The tokens of the text of an added token, without this token."""
        for pieces in ([added[:1], added[1:]], list(added)):
            ids = [index for piece in pieces for index in self.template_ids(piece)]
            if not self._added_among(ids):
                return ids
        raise ValueError(f"{self.key}: a reply has the token {added!r}, which cannot be written as ordinary text")

    def _added_among(self, ids: Sequence[int]) -> list[int]:
        return [index for index in ids if index in self._added_ids]
