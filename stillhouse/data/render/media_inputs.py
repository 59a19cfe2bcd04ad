"""The inputs of micro-batches and of single documents that come from images.

S tokens of a document, A axes of rotary positions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from stillhouse.data.documents import Documents
from stillhouse.hashing import json_hash
from stillhouse.images.processor import AxisPositions, ImageProcessor, ImageTensors


@dataclass(frozen=True, eq=False)
class DocumentImages:
    """The images of a document, for a model that reads the document by itself.

    identity: a hash of the encoded images and of everything that determines their pixels.
    read: makes the tensors. Raises DataError if a file has changed.
    placeholder_ids: the tokens that stand for features of images.
    """

    identity: bytes
    read: Callable[[], ImageTensors]
    placeholder_ids: Sequence[int] = ()

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors of the images, as arguments of the model."""
        return self.read().tensors


class ImageInputs:
    """Makes the inputs of a micro-batch that come from images.

    axis_positions: see `AxisPositions`.
    teachers: the same for each teacher in this job with another processor, by its name; None for a teacher that reads
        no images. All other teachers read what the student reads.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        axis_positions: AxisPositions | None = None,
        teachers: "Mapping[str, ImageInputs | None] | None" = None,
    ):
        self.processor, self.axis_positions, self.teachers = processor, axis_positions, dict(teachers or {})

    def of_teacher(self, name: str) -> "ImageInputs | None":
        """The inputs of a teacher: these, unless `teachers` has others for it; None if it reads no images."""
        return self.teachers.get(name, self)

    def tensors(
        self, documents: Documents, members: Sequence[int], ids_M: Sequence[np.ndarray], *, may_skip: bool = False
    ) -> list[dict[str, Tensor]]:
        """The tensors of the images of each document. ids_M: the documents as the model reads them.

        may_skip: a document without a placeholder is one that the model, a teacher, does not read. Otherwise, raises
        DataError for images without placeholders.
        """
        return [
            {}
            if may_skip and not self.processor.count_placeholders(ids)
            else self.processor.tensors(documents, member, ids)
            for member, ids in zip(members, ids_M, strict=True)
        ]

    def of(self, documents: Documents, document: int) -> DocumentImages | None:
        """The images of one document; None without images."""
        images = [] if documents.images is None else documents.images.of(document)
        if not images:
            return None
        hashes = [self.processor.pixels_identity, *(image.sha256.hex() for image in images)]
        return DocumentImages(
            bytes.fromhex(json_hash(hashes)),
            partial(self.processor.read, documents, document, documents.tokens(document)),
            self.processor.placeholder_ids,
        )

    def per_token(self, ids: np.ndarray, images: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """The further inputs of one document: token types [S] and axis positions [S, A], if the model has them."""
        name, inputs = self.processor.layout.token_types, {}
        if name is not None:
            inputs[name] = self.processor.token_types(ids)
        if self.axis_positions is not None:
            types = None if name is None else torch.from_numpy(inputs[name])
            positions_SA = self.axis_positions(torch.from_numpy(ids.astype(np.int64)), types, images)
            if positions_SA is not None:
                inputs["axis_position_ids"] = positions_SA.numpy()
        return inputs
