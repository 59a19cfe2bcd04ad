"""Held-out text shaded by the divergence between teacher and student at each token.

A shade stands for a range of KL in nats; each range starts at twice the start of the one before. The ranges are the
same in every report, so that reports can be compared.
"""

import bisect
from dataclasses import dataclass

from stillhouse.output.report.marks import label, pieces
from stillhouse.output.report.reading import Document, HeldOut, Token

# Lower ends of the shades above the first, in nats. The style sheet has a colour for each: --kl-0 … --kl-8.
SHADES = (0.03125, 0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class ShadedToken:
    shade: int | None  # None: the token is no training target, or nothing predicts it
    pieces: list[tuple[str, str]]  # (text, mark): one of the two is empty, or both belong to one character
    target: bool


@dataclass(frozen=True)
class ShadedDocument:
    source: str
    tokens: list[ShadedToken]
    targets: int
    mean_kl: float | None  # nats per token, over the targets


def shade_documents(held_out: HeldOut) -> list[ShadedDocument]:
    return [_shade_document(document) for document in held_out.documents]


def shade(kl: float) -> int:
    return bisect.bisect_right(SHADES, kl)


def term_names(held_out: HeldOut) -> list[str]:
    """Return the terms of the objective whose gradients are known."""
    return list(dict.fromkeys(name for each in held_out.documents for token in each.tokens for name in token.terms))


def readouts(held_out: HeldOut) -> list[list[list[object]]]:
    """Return what the page shows for the token under the pointer.

    [label, KL, teacher's top, student's top, for each of `term_names` (value, gradient, raises, lowers) or null]
    """
    names = term_names(held_out)
    return [[_readout(token, names) for token in document.tokens] for document in held_out.documents]


def _shade_document(document: Document) -> ShadedDocument:
    divergences = [token.kl for token in document.tokens if token.target and token.kl is not None]
    return ShadedDocument(
        source=document.source,
        tokens=[_shade_token(token) for token in document.tokens],
        targets=sum(token.target for token in document.tokens),
        mean_kl=sum(divergences) / len(divergences) if divergences else None,
    )


def _shade_token(token: Token) -> ShadedToken:
    shaded = token.target and token.kl is not None
    return ShadedToken(shade(token.kl) if shaded else None, pieces(token.text), token.target)  # type: ignore[arg-type]


def _readout(token: Token, names: list[str]) -> list[object]:
    kl = None if token.kl is None else float(f"{token.kl:.4g}")
    terms = []
    for name in names:
        term = token.terms.get(name)
        figures = [] if term is None else [float(f"{each:.4g}") for each in (term.value, term.gradient)]
        terms.append(None if term is None else [*figures, _labelled(term.raises), _labelled(term.lowers)])
    return [label(token.text), kl, _labelled(token.teacher), _labelled(token.student), terms]


def _labelled(pairs: list[tuple[str, float]]) -> list[list[object]]:
    return [[label(text), round(value, 5)] for text, value in pairs]
