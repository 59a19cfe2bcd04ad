"""Broadcasts each batch from rank 0, which handles HTTP, to the other tensor-parallel ranks.

A batch is sent as the bytes of one safetensors file: its documents as tensors, and their options as JSON in the
header. So received bytes cannot run code. The number of bytes is sent before each batch. Two special values of it
mean that there is no batch yet (sent so that the collective does not time out), and that the server ends.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from stillhouse.parallel import Mesh
from stillhouse.serving.image_wire import decode_images, encode_images, header_of, take_images
from stillhouse.serving.wire import KEY, document_tensors, read_images
from stillhouse.signals.extract import Ranked
from stillhouse.signals.scorer import Scorer, ScoreRequest
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

#: seconds without a batch after which rank 0 broadcasts `_NOTHING`
BEAT_SECONDS = 60.0
_NOTHING, _END = 0, -1


class BatchBroadcast:
    """Broadcasts batches over the tensor-parallel ranks. A single process sends nothing."""

    def __init__(self, mesh: Mesh):
        self.ranks, self._device = mesh.ranks, mesh.device
        self._sent = time.monotonic()

    @property
    def is_single(self) -> bool:
        return self.ranks.size == 1

    def send(self, parts: Sequence[ScoreRequest]) -> None:
        if self.is_single:
            return
        content = torch.frombuffer(bytearray(_encoded(parts)), dtype=torch.uint8)
        self._broadcast(torch.tensor([len(content)]))
        self._broadcast(content)

    def beat(self) -> None:
        """Broadcast `_NOTHING` if the last broadcast is older than `BEAT_SECONDS`, so that no rank times out."""
        if not self.is_single and time.monotonic() - self._sent > BEAT_SECONDS:
            self._broadcast(torch.tensor([_NOTHING]))

    def send_end(self) -> None:
        self._broadcast(torch.tensor([_END]))

    def follow(self, scorer: Scorer) -> None:
        """Called on all ranks except 0: compute the batches that rank 0 broadcasts, until `_END`."""
        while (length := int(self._broadcast(torch.zeros(1, dtype=torch.int64)))) != _END:
            if length != _NOTHING:
                content = self._broadcast(torch.zeros(length, dtype=torch.uint8))
                scorer.score(_decoded(content.cpu().numpy().tobytes()))

    def _broadcast(self, values: Tensor) -> Tensor:
        if not self.is_single:
            values = values.to(self._device)
            dist.broadcast(values, 0, group=self.ranks.group)
            self._sent = time.monotonic()
        return values


def _encoded(parts: Sequence[ScoreRequest]) -> bytes:
    tensors = document_tensors([part.document for part in parts])
    for number, part in enumerate(parts):
        if part.document.ids_NK is not None:
            tensors[f"ids.{number}"] = part.document.ids_NK.contiguous()
    wanted = [
        {"ranked": part.wanted.top_k} if isinstance(part.wanted, Ranked) else asdict(part.wanted) for part in parts
    ]
    images = read_images([part.document for part in parts])
    of_images, sent = encode_images(
        [(part.document.tokens, of_part) for part, of_part in zip(parts, images, strict=True)]
    )
    return save(tensors | of_images, {KEY: json.dumps({"wanted": wanted} | sent)})


def _decoded(content: bytes) -> list[ScoreRequest]:
    tensors, header = load(content), header_of(content, KEY)
    token_ids, bounds = tensors["token_ids"].numpy(), tensors["offsets"].tolist()
    tokens = [token_ids[start:stop] for start, stop in pairwise(bounds)]
    images = decode_images(*take_images(header, tensors), tokens)
    parts = []
    for number, (of_document, rows, wanted) in enumerate(
        zip(tokens, tensors["rows"].tolist(), header["wanted"], strict=True)
    ):
        document = DocumentRows(of_document, range(*rows), tensors.get(f"ids.{number}"), media=images[number])
        parts.append(ScoreRequest(document, Ranked(wanted["ranked"]) if "ranked" in wanted else SignalSpec(**wanted)))
    return parts
