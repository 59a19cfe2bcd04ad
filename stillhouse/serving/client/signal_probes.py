"""The documents with which `signal_proof.py` proves a server, and changes of them: another token, or other images."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stillhouse.data import Documents
from stillhouse.data.media import DocumentMedia, MediaInputs, MediaTensors
from stillhouse.signals.signal_spec import DocumentRows

#: the number of documents that are scored, how many more with images, and the most tokens of a text
PROBES, IMAGE_PROBES, PROBE_TOKENS = 4, 2, 128
#: the least tokens of a document: `prove_alignment` needs a row before the changed token and a row after it
LEAST_TOKENS = 4
#: the probes are chosen among this number of documents
_CHOICE = 100


def make_probes(documents: Documents, media_inputs: MediaInputs | None = None) -> list[DocumentRows]:
    """The beginnings of long documents without images, and short documents with images.

    media_inputs: makes the tensors of the images; None if no document has any. Raises ValueError if the documents are
    too short.
    """
    images = documents.media
    has_images_D = np.zeros(len(documents), dtype=bool) if images is None else np.diff(images.offsets) > 0
    texts = sorted(np.flatnonzero(~has_images_D)[:_CHOICE].tolist(), key=lambda number: -documents.lengths_D[number])
    beginnings = [documents.tokens(number)[:PROBE_TOKENS] for number in texts[:PROBES]]
    probes = [DocumentRows(tokens, range(len(tokens) - 1)) for tokens in beginnings if len(tokens) >= LEAST_TOKENS]
    with_images: list[DocumentRows] = []
    if has_images_D.any():
        assert media_inputs is not None
        numbers = sorted(
            np.flatnonzero(has_images_D)[:_CHOICE].tolist(), key=lambda number: documents.lengths_D[number]
        )
        made = (_with_images(documents, number, media_inputs) for number in numbers)
        with_images = [probe for probe in made if _changeable(probe).any()][:IMAGE_PROBES]
        if not with_images:
            raise ValueError(
                f"none of the first {len(numbers)} documents with images has {LEAST_TOKENS} tokens behind them, so "
                "that the teacher cannot be proven on images; expected longer documents"
            )
    if not probes and not with_images:
        raise ValueError(
            f"none of the first hundred documents has {LEAST_TOKENS} tokens, so the teacher cannot be proven; "
            "expected longer documents"
        )
    return [*probes, *with_images]


def changed_place(probe: DocumentRows) -> int:
    """The token that `prove_alignment` changes: none of an image, with rows before it and after it."""
    places = np.flatnonzero(_changeable(probe))
    return int(places[(len(places) - 1) // 2])


def with_changed_token(document: DocumentRows, place: int, probes: Sequence[DocumentRows]) -> DocumentRows:
    """Replace the token at `place` by another token of the probes' texts."""
    tokens = document.tokens.copy()
    text_tokens = np.unique(np.concatenate([probe.tokens[~is_placeholder(probe)] for probe in probes]))
    others = text_tokens[text_tokens != tokens[place]]
    tokens[place] = others[place % len(others)] if len(others) else int(tokens[place] == 0)
    return replace(document, tokens=tokens)


def with_other_images(document: DocumentRows) -> DocumentRows:
    """Invert the colours of a document's images, and mirror them."""
    images = document.media
    assert images is not None
    tensors, sizes = images.read()
    changed = {name: -value.flip(-1) if value.is_floating_point() else value for name, value in tensors.items()}
    made = MediaTensors(changed, sizes)
    return replace(document, media=DocumentMedia(b"", lambda: made, images.placeholder_ids))


def is_placeholder(document: DocumentRows) -> np.ndarray:
    """Which tokens stand for features of images."""
    return np.isin(document.tokens, [] if document.media is None else list(document.media.placeholder_ids))


def image_places(document: DocumentRows) -> np.ndarray:
    """The places of the tokens that stand for features of images."""
    return np.flatnonzero(is_placeholder(document))


def _with_images(documents: Documents, number: int, media_inputs: MediaInputs) -> DocumentRows:
    """A document up to the tokens behind its last image, and at least its first `PROBE_TOKENS`."""
    whole = DocumentRows(documents.tokens(number), range(1), media=media_inputs.of(documents, number))
    tokens = whole.tokens[: max(PROBE_TOKENS, image_places(whole)[-1] + 1 + LEAST_TOKENS)]
    return replace(whole, tokens=tokens, rows=range(len(tokens) - 1))


def _changeable(probe: DocumentRows) -> np.ndarray:
    """Which tokens may be changed: not the first one and the last two, and behind the images, if there are any."""
    places = np.arange(len(probe.tokens))
    first = 1 if probe.media is None else image_places(probe)[-1] + 1
    return (places >= first) & (places <= len(places) - 3)
