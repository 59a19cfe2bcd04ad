"""The inputs of micro-batches and of single documents that come from media.

S tokens of a document, A axes of rotary positions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from stillhouse.data.documents import Documents
from stillhouse.data.media import AxisPositions, MediaProcessor, MediaTensors
from stillhouse.hashing import json_hash


@dataclass(frozen=True, eq=False)
class DocumentMedia:
    """The media of a document, for a model that reads the document by itself.

    identity: a hash of the encoded files and of everything that determines their tensors.
    read: makes the tensors. Raises DataError if a file has changed.
    placeholder_ids: the tokens that stand for features.
    """

    identity: bytes
    read: Callable[[], MediaTensors]
    placeholder_ids: Sequence[int] = ()

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors of the media, as arguments of the model."""
        return self.read().tensors


class MediaInputs:
    """Makes the inputs of a micro-batch that come from media.

    axis_positions: see `AxisPositions`.
    teachers: the same for each teacher in this job with another processor, by its name; None for a teacher that reads
        no media. All other teachers read what the student reads.
    """

    def __init__(
        self,
        processor: MediaProcessor,
        axis_positions: AxisPositions | None = None,
        teachers: "Mapping[str, MediaInputs | None] | None" = None,
    ):
        self.processor, self.axis_positions, self.teachers = processor, axis_positions, dict(teachers or {})

    def teacher_inputs(self, name: str) -> "MediaInputs | None":
        """The inputs of a teacher: these, unless `teachers` has others for it; None if it reads no media."""
        return self.teachers.get(name, self)

    def tensors(
        self, documents: Documents, members: Sequence[int], ids_M: Sequence[np.ndarray], *, may_skip: bool = False
    ) -> list[dict[str, Tensor]]:
        """The tensors of the media of each document. ids_M: the documents as the model reads them.

        may_skip: a document without a placeholder is one that the model, a teacher, does not read. Otherwise, raises
        DataError for media without placeholders.
        """
        return [
            {}
            if may_skip and not np.isin(ids, self.processor.placeholder_ids).any()
            else dict(self.processor.read(documents, member, ids).tensors)
            for member, ids in zip(members, ids_M, strict=True)
        ]

    def of(self, documents: Documents, document: int) -> DocumentMedia | None:
        """The media of one document; None without media."""
        files = documents.media_of(document)
        if not files:
            return None
        hashes = [self.processor.pixels_identity, *(file.sha256.hex() for file in files)]
        return DocumentMedia(
            bytes.fromhex(json_hash(hashes)),
            partial(self.processor.read, documents, document, documents.tokens(document)),
            self.processor.placeholder_ids,
        )

    def per_token(self, ids: np.ndarray, media: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """The further inputs of one document: token types [S] and axis positions [S, A], if the model has them."""
        inputs = self.processor.token_types(ids)
        if self.axis_positions is not None:
            types_S = next(map(torch.from_numpy, inputs.values()), None)
            positions_SA = self.axis_positions(torch.from_numpy(ids.astype(np.int64)), types_S, media)
            if positions_SA is not None:
                inputs["axis_position_ids"] = positions_SA.numpy()
        return inputs
