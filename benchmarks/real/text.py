"""The text of the experiments: the documentation of Python's standard library, which every installation has.

The split of a document depends on its name alone (`stillhouse/tools/demo/corpus.py`), and no paragraph is in both
splits. The result files have the number and the hash of the pieces, because the text depends on Python's version.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

from stillhouse.tools.demo.corpus import Split, collect_split

#: characters of a piece: about 300 tokens
PIECE = 1200
#: pieces for training (about 120,000 tokens) and for the held-out figures (about 3,000 tokens)
TRAINED, HELD_OUT = 400, 10


def training_pieces() -> list[str]:
    return _first("teacher", TRAINED)


def held_out_pieces() -> list[str]:
    return _first("held_out", HELD_OUT)


def described(pieces: list[str]) -> dict[str, Any]:
    """The size and the hash of pieces, for a result file."""
    digest = hashlib.sha256("\0".join(pieces).encode()).hexdigest()
    return {"pieces": len(pieces), "characters": sum(map(len, pieces)), "sha256": digest}


def _first(split: Split, count: int) -> list[str]:
    pieces = [piece for document in collect_split(split) for piece in _cut(document.text)]
    if len(pieces) < count:
        raise ValueError(f"Python's library has {len(pieces)} pieces for {split}: expected {count}")
    # from all over the library, so that long modules do not make up the whole
    return pieces[:: len(pieces) // count][:count]


def _cut(text: str) -> Iterator[str]:
    """Cut a text between paragraphs into pieces of about `PIECE` characters; a shorter rest is left out."""
    piece = ""
    for paragraph in text.split("\n\n"):
        piece += paragraph + "\n\n"
        if len(piece) >= PIECE:
            yield piece[: 2 * PIECE]
            piece = ""
