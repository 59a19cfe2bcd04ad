"""The tokens of the page: their text, shaded by divergence, with the predictions of the models.

The text is unchanged; invisible characters (newlines, tabs, control characters) get a mark. A shade represents a
range of nats, and each range begins at twice the beginning of the previous one. All reports have the same ranges, so
that they can be compared.
"""

import bisect

from stillhouse.output.records import Document, HeldOutTokens, Token

# The lower bounds in nats of all shades but the first. The style sheet has a colour per shade: --kl-0 … --kl-8.
SHADES = (0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)

_MARKS = {"\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡"}


def shade(nats: float) -> int:
    return bisect.bisect_right(SHADES, nats)


def shade_class(nats: float | None, target: bool) -> str:
    """Return the style class of a token; "" if it has no divergence or is not a target."""
    return f"k{shade(nats)}" if target and nats is not None else ""


def label(text: str) -> str:
    """Return a token's text on one line, with visible spaces."""
    marked = "".join("␣" if character == " " else _mark(character) or character for character in text)
    return marked or "∅"


def pieces(text: str) -> list[tuple[str, str]]:
    """Split the text at characters that need a mark; return pairs (text, mark). Either part of a pair may be empty.

    Newlines and tabs also stay in the text beside their mark.
    """
    if not text:
        return [("", "∅")]
    parts = [("", "")]
    for character in text:
        mark = _mark(character)
        if mark:
            parts.append((character if character in "\n\t" else "", mark))
        elif parts[-1][1]:
            parts.append((character, ""))
        else:
            parts[-1] = (parts[-1][0] + character, "")
    return [part for part in parts if part != ("", "")]


def mean_kl(document: Document) -> float | None:
    """Return the mean KL of the targets in nats per token; None if no target has a KL."""
    divergences = [token.kl for token in document.tokens if token.target and token.kl is not None]
    return sum(divergences) / len(divergences) if divergences else None


def term_names(held_out: HeldOutTokens) -> list[str]:
    """Return the terms of the objective whose gradients are known."""
    tokens = (token for document in held_out.documents for token in document.tokens)
    return list(dict.fromkeys(name for token in tokens for name in token.terms))


def readouts(held_out: HeldOutTokens, terms: list[str]) -> list[list[list[object]]]:
    """Return the values that the page shows for the token under the pointer, for each token of each document:

    [label, KL, teacher's top, student's top, for each of `terms` (value, gradient, raises, lowers) or null]
    """
    return [[_readout(token, terms) for token in document.tokens] for document in held_out.documents]


def _readout(token: Token, names: list[str]) -> list[object]:
    kl = None if token.kl is None else float(f"{token.kl:.4g}")
    terms = []
    for name in names:
        term = token.terms.get(name)
        figures = [] if term is None else [float(f"{value:.4g}") for value in (term.value, term.gradient)]
        terms.append(None if term is None else [*figures, _labelled(term.raises), _labelled(term.lowers)])
    return [label(token.text), kl, _labelled(token.teacher), _labelled(token.student), terms]


def _labelled(pairs: list[tuple[str, float]]) -> list[list[object]]:
    return [[label(text), round(value, 5)] for text, value in pairs]


def _mark(character: str) -> str:
    if character in _MARKS:
        return _MARKS[character]
    return chr(0x2400 + ord(character)) if ord(character) < 0x20 else ""  # the control pictures, in the same order
