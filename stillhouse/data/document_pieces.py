"""The pieces into which a long text is split, each of which is a document."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stillhouse.data.render.templates import Encoded
from stillhouse.data.substitutions import Substitution


def of_piece(
    prefixes: Mapping[str, Substitution],
    images: Mapping[str, Sequence[Substitution]],
    length: int,
    *,
    is_first: bool,
) -> dict[str, list[Substitution]]:
    """A piece's substitutions by teacher. length: its tokens. Only a document's first piece has the BOS."""
    substitutions = {name: [item] if is_first else [Substitution(0, 0, item.ids)] for name, item in prefixes.items()}
    for name, items in images.items():
        within = [replace(item, stop=min(item.stop, length)) for item in items]
        substitutions[name] = [*substitutions.get(name, []), *within]
    return {name: [item for item in items if item.gain or len(item.ids)] for name, items in substitutions.items()}


def split_into_pieces(encoded: Encoded, max_tokens: int) -> list[Encoded]:
    """Split into pieces of at most `max_tokens`. Each piece begins with the last token of the previous piece.

    This token is not a target of the later piece. So every token except the first is predicted once.
    """
    split = []
    for start in range(0, len(encoded.ids) - 1, max_tokens - 1):
        targets = encoded.targets[start : start + max_tokens].copy()
        targets[:1] = False
        split.append(Encoded(encoded.ids[start : start + max_tokens], targets))
    return split
