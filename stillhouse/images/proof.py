"""Proves that packed documents with images have the same hidden states as each document alone in the plain model.

The documents come from the model's own processor. Their images are different, and at least one document has no image.
The plain model gets each document alone, as the processor returns it: without positions, which the model then
computes itself. The decoder gets all documents in two rows with padding. Each document must have the same hidden
states in both cases. Then the images of one document are changed. The hidden states of this document must change,
and those of the others must not. This proves that images are read, and that they belong to the right documents.

B rows, S columns, A axes of positions; D width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from stillhouse.libraries import reading
from stillhouse.models.document_packing import ROWS, PackingError, library_errors
from stillhouse.models.forward_modes import autocast, autocast_dtype, evaluating
from stillhouse.models.load_proof import PLACE_TOLERANCE, compare, relative_errors
from stillhouse.models.model_checks import ProofError, typename
from stillhouse.models.vision_language import AXES, TOKEN_TYPES

#: joins the images of several documents, as a micro-batch has them
JoinImages = Callable[[Sequence[Mapping[str, Tensor]]], Mapping[str, Tensor]]
#: the smallest relative change of a hidden state that proves that images are read; ignored images change nothing
_CHANGED = 1e-4
#: the error for a decoder that cannot run packed documents
CANNOT_RUN = "{} cannot run packed documents with images"
_PADDING = 3  # the number of columns of padding in the longer row


@dataclass(frozen=True)
class ImageDocument:
    """A document as the processor returns it."""

    ids_S: Tensor
    types_S: Mapping[str, Tensor]  # the kinds of tokens, by their names in TOKEN_TYPES
    images: Mapping[str, Tensor]  # all other tensors, except for the attention mask

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "ImageDocument":
        """The document with these tensors of a processor. Tensors per token have the shape [1, S]."""
        per_token = {"input_ids", "attention_mask", *TOKEN_TYPES}
        return cls(
            tensors["input_ids"][0],
            {name: tensors[name][0] for name in TOKEN_TYPES if name in tensors},
            {name: value for name, value in tensors.items() if name not in per_token},
        )

    def axis_positions(self, decoder: Any) -> Tensor | None:
        """The rotary positions [S, A]; None if there is only one axis."""
        types_S = next(iter(self.types_S.values()), None)
        positions_SA: Tensor | None = decoder.axis_positions(self.ids_S, types_S, self.images)
        return positions_SA


class ImageModel(ABC):
    """A model to be proven. `alone` and `packed` are collectives of the processes that have parts of the model.

    decoders: the parts of the model on this process; all parts pack documents in the same way.
    precision: the dtype of the model's matrix products; if it is None, the dtype of the weights.
    """

    decoders: Sequence[Any]
    precision: torch.dtype | None

    @abstractmethod
    def alone(self, document: ImageDocument) -> Tensor:
        """Return the hidden states [S, D] of the plain model for a document alone."""

    @abstractmethod
    def packed(self, documents: "PackedDocuments", images: Mapping[str, Tensor]) -> Tensor | None:
        """Return the hidden states [B, S, D] of packed documents; None on a process that does not have them."""


class WholeModel(ImageModel):
    """A `Decoder` that has all layers."""

    def __init__(self, decoder: Any, precision: torch.dtype | None = None):
        self.decoders, self.precision = [decoder], precision

    def alone(self, document: ImageDocument) -> Tensor:
        return run_alone(self.decoders[0], document)[0]

    def packed(self, documents: "PackedDocuments", images: Mapping[str, Tensor]) -> Tensor:
        (decoder,) = self.decoders
        device = decoder.pretrained.device
        arguments = {name: value.to(device) for name, value in documents.inputs.items()}
        on_device = {name: value.to(device) for name, value in images.items()}
        is_padding_BS = documents.is_padding_BS.to(device)
        with library_errors(CANNOT_RUN.format(typename(decoder.pretrained))):
            hidden_BSD: Tensor = decoder(**arguments, is_padding=is_padding_BS, images=on_device, head=False)
        return hidden_BSD


def prove_images(
    decoder: Any,
    documents: Sequence[Mapping[str, Tensor]],
    join: JoinImages,
    agreed: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Call `prove_image_model` for a `Decoder` that has all layers."""
    prove_image_model(WholeModel(decoder, autocast_dtype(decoder.pretrained)), documents, join, agreed)


def prove_image_model(
    model: ImageModel,
    documents: Sequence[Mapping[str, Tensor]],
    join: JoinImages,
    agreed: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Prove that a model reads packed documents with images as the plain model does. If a way of packing fails, the
    model uses its next way of packing, which is then proven.

    documents: documents with and without images, as the processor returns them for single documents. agreed: a
    context that raises a PackingError or ProofError of its block on all processes that share the model. Raises
    ProofError with the model's name if also the last way, documents in separate rows, fails. Does not change weights,
    modes or the state of random generators.
    """
    parsed = [ImageDocument.of(tensors) for tensors in documents]
    with_images = [document for document in parsed if document.images]
    if not with_images or len(with_images) == len(parsed):
        raise ValueError(
            f"got {len(with_images)} documents with images of {len(parsed)}: expected some with and some without"
        )
    pretrained = [decoder.pretrained for decoder in model.decoders]
    device, packings = pretrained[0].device, [decoder.packing for decoder in model.decoders]
    modules = [*model.decoders, *pretrained]
    with torch.no_grad(), evaluating(*modules), autocast(device, model.precision), _kept_deltas(modules):
        expected = None
        while True:
            try:
                with agreed():
                    expected = expected or [model.alone(document) for document in parsed]
                    for packing in packings:
                        packing.reads_media = True
                    _prove_packed(model, parsed, expected, join)
                return
            except PackingError as error:
                is_last = packings[0].name == ROWS
                for packing in packings:
                    packing.reads_media = False
                    if not is_last:
                        packing.refuse(error)
                if is_last:
                    raise ProofError(
                        f"{error}: expected documents without images, or another vision-language model"
                    ) from error


@dataclass(frozen=True)
class PackedDocuments:
    """Documents in two rows. places: the row and the columns of each document."""

    inputs: dict[str, Tensor]
    is_padding_BS: Tensor
    places: Sequence[tuple[int, slice]]

    @classmethod
    def of(cls, decoder: Any, documents: Sequence[ImageDocument]) -> "PackedDocuments":
        half = (len(documents) + 1) // 2
        rows = [documents[:half], documents[half:]]
        lengths = [sum(len(document.ids_S) for document in row) for row in rows]
        columns = _PADDING + max(lengths)
        parts: list[dict[str, Tensor]] = []
        places: list[tuple[int, slice]] = []
        for number, row in enumerate(rows):
            tensors, start = list[dict[str, Tensor]](), 0
            for document in row:
                places.append((number, slice(start, start + len(document.ids_S))))
                start += len(document.ids_S)
                positions_S, axes_SA = torch.arange(len(document.ids_S)), document.axis_positions(decoder)
                per_token = {"input_ids": document.ids_S, "position_ids": positions_S, **document.types_S}
                tensors.append(per_token if axes_SA is None else {**per_token, AXES: axes_SA})
            missing = columns - lengths[number]
            parts.append({name: _padded(name, [part[name] for part in tensors], missing) for name in tensors[0]})
        inputs = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        is_padding_BS = torch.arange(columns) >= torch.tensor(lengths)[:, None]
        return cls(inputs, is_padding_BS, places)

    def parts(self, hidden_BSD: Tensor) -> list[Tensor]:
        """Return the hidden states [S, D] of each document."""
        return [hidden_BSD[row, columns] for row, columns in self.places]


def _prove_packed(
    model: ImageModel, documents: Sequence[ImageDocument], expected: Sequence[Tensor], join: JoinImages
) -> None:
    """Raise PackingError unless the packed documents have the expected hidden states [S, D] and images are read."""
    decoder = model.decoders[0]
    packed, name = PackedDocuments.of(decoder, documents), typename(decoder.pretrained)

    def run(members: Sequence[ImageDocument]) -> Tensor | None:
        return model.packed(packed, join([document.images for document in members if document.images]))

    hidden_BSD, changed = run(documents), dict[int, Tensor]()
    # `run` is a collective, so it comes before the checks, which can raise an error on some processes only
    for number, document in enumerate(documents):
        if images := document.images.items():
            inverted = {name: -value.flip(-1) if value.is_floating_point() else value for name, value in images}
            others = [*documents[:number], replace(document, images=inverted), *documents[number + 1 :]]
            if (changed_BSD := run(others)) is not None:
                changed[number] = changed_BSD
    if hidden_BSD is None:
        return
    hidden, precision = packed.parts(hidden_BSD), model.precision or expected[0].dtype
    for number, (hidden_SD, expected_SD) in enumerate(zip(hidden, expected, strict=True), start=1):
        which = f"{name}: packed with others, document {number} of {len(documents)} has hidden states that differ by "
        rest = "{error:.2%} from those of the plain model on that document alone"
        _compare(hidden_SD, expected_SD, precision, which + rest)
    # other images in a document must change the hidden states of this document only
    message = f"{name}: the hidden states of a document change by {{error:.2%}} with the images of another document"
    for number, changed_BSD in changed.items():
        after = packed.parts(changed_BSD)
        change = float(relative_errors(after[number], hidden[number]).max())
        if not change > _CHANGED:
            raise PackingError(f"{name} ignores images: with other images, its hidden states change by {change:.2%}")
        for other, (before_SD, after_SD) in enumerate(zip(hidden, after, strict=True)):
            if other != number:
                _compare(after_SD, before_SD, precision, message)


def document_positions(decoder: Any, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Return the rotary positions [S, A] of a document from its processor; None if there is only one axis."""
    return ImageDocument.of(tensors).axis_positions(decoder)


def run_alone(decoder: Any, document: ImageDocument) -> Tensor:
    """Return the hidden states [1, S, D] of the plain model for a document alone."""
    device = decoder.pretrained.device
    types = {name: value[None].to(device) for name, value in document.types_S.items()}
    images = {name: value.to(device) for name, value in document.images.items()}
    with reading(f"{typename(decoder.pretrained)} cannot run a document with images", passes=ProofError):
        hidden_1SD: Tensor = decoder(document.ids_S[None].to(device), **types, images=images, head=False)
    return hidden_1SD


def _padded(name: str, parts: Sequence[Tensor], columns: int) -> Tensor:
    """Join values [S, …] of documents and of padding. Padding counts as a document: its positions begin at 0."""
    joined_S = torch.cat([*parts])
    if name not in ("position_ids", AXES):
        return pad(joined_S, (0, columns), value=int(joined_S[0]) if name == "input_ids" else 0)
    positions = torch.arange(columns).view(-1, *[1] * (joined_S.dim() - 1)).expand(columns, *joined_S.shape[1:])
    return torch.cat([joined_S, positions])


def _compare(hidden_SD: Tensor, expected_SD: Tensor, precision: torch.dtype, message: str) -> None:
    """Raise PackingError for large errors. In half precision, only the median counts: rounding can change experts."""
    errors_S, is_half = relative_errors(hidden_SD, expected_SD), precision.itemsize < torch.float32.itemsize
    compare(errors_S, PLACE_TOLERANCE[precision], message, PackingError, median=is_half)


@contextmanager
def _kept_deltas(models: Sequence[Any]) -> Iterator[None]:
    """Restore, after the block, the state that a backbone keeps from its last images and adds to later positions."""
    modules = {part for model in models for part in model.modules() if hasattr(part, "rope_deltas")}
    kept = [(module, module.rope_deltas) for module in modules]
    try:
        yield
    finally:
        for module, deltas in kept:
            module.rope_deltas = deltas
