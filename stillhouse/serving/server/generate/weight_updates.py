"""New weights for a server that generates completions, read from a folder of published weights.

An HTTP thread reads a version into host memory, and checks it against the folder's hashes and the model. The model's
thread copies it into the model between two batches. So all tokens of a completion have one version, and a folder that
is refused or changes later has no effect. Until the copy, host memory holds the new weights in addition.

A version is a whole model, or an adapter of the model that the server was started with. The first adapter adds LoRA
layers to the model; later ones replace their matrices. A server takes models or adapters until it ends, because
a model would replace the base of an adapter.
"""

import os
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import torch
from torch import Tensor

from stillhouse.display import escaped
from stillhouse.models import Decoder, add_lora
from stillhouse.models.adapter import LoraOptions, is_lora
from stillhouse.parallel import log_rank0
from stillhouse.rollout.published_folder import AdapterBase, NoVersionError, published_folder
from stillhouse.serving.server.bodies import ENDING, RequestError
from stillhouse.serving.server.generate.published_tensors import AdapterReader, ModelReader

#: the version of the weights that the server was started with; vLLM has the same name for it
FIRST_VERSION = "default"
_ANEW = "a server takes whole models or adapters until it ends: start the server anew"


@dataclass(frozen=True, eq=False)
class NewWeights:
    """tensors: by their names in the decoder. lora: the options of the adapter that they are; None: a whole model."""

    tensors: Mapping[str, Tensor]
    lora: LoraOptions | None = None


class WeightUpdates:
    """version: the label of the current weights. Only the model's thread may call `apply` and `close`.

    base: the model that the decoder is, without an adapter.
    root: the folder below which published folders are read; None: anywhere.
    """

    def __init__(self, decoder: Decoder, base: AdapterBase, root: Path | None = None):
        self.version = FIRST_VERSION
        self._decoder, self._base, self._root = decoder, base, root
        # the weights of a quantized model cannot be replaced
        self._models = ModelReader(decoder) if base.quantize is None else None
        self._adapters = AdapterReader(decoder, base)
        #: what was submitted first
        self._lora: LoraOptions | None = None
        self._has_model = False
        self._waiting: deque[tuple[NewWeights, str, Future[None]]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def read(self, folder: Path, manifest: str | None = None) -> NewWeights:
        """Read the weights of a folder. manifest: the manifest's expected sha256.

        Raises ValueError unless the folder is complete and has this manifest, each tensor fits the model, and all
        values are finite. A client is not told which paths exist outside of the root, or anywhere without a root.
        """
        shown = escaped(str(folder))[:200]
        if not folder.is_absolute() or "\0" in str(folder):
            raise ValueError(f"folder '{shown}': expected an absolute path on the server's machine")
        if self._root is not None:
            folder = Path(os.path.realpath(folder))  # without `..` and links, by which it could leave the root
            if not folder.is_relative_to(self._root):
                raise ValueError(f"{shown} is not in the folder of this server's --weights-root")
        try:
            return self._read(folder, shown, manifest)
        except NoVersionError as error:
            if self._root is not None:
                raise
            log_rank0(f"POST /v1/weights: {escaped(str(error))}")
            raise ValueError(
                f"{shown} is no complete version of the weights that this server can read: expected the folder that "
                "the run writes to, on a file system of both; the server's log says more"
            ) from error

    def _read(self, folder: Path, shown: str, manifest: str | None) -> NewWeights:
        with published_folder(folder) as published:
            if manifest not in (None, published.sha256):
                raise ValueError(
                    f"{shown} has another manifest than its run has published: the server sees an older or another "
                    "folder there; expected the folder that the run writes to, on a file system that shows new files"
                )
            if published.manifest.kind == "adapter":
                if self._has_model:
                    raise ValueError(f"{shown} has an adapter, and the server has a whole model of a run; {_ANEW}")
                return NewWeights(*self._adapters.read(shown, published, self._lora))
            if self._lora is not None:
                raise ValueError(f"{shown} has a whole model, and the server has an adapter of a run; {_ANEW}")
            if self._models is None:
                raise ValueError(
                    f"{shown} has a whole model, and the server's is quantized ({self._base.quantize}): expected an "
                    "adapter, or a server without --quantize"
                )
            return NewWeights(self._models.read(shown, published))

    def submit(self, weights: NewWeights, version: str) -> "Future[None]":
        """Request new weights. The future is done when they are in use. version: the label of the new weights."""
        done: Future[None] = Future()
        with self._lock:
            if self._closed:
                done.set_exception(_ending())
            else:
                self._lora, self._has_model = weights.lora, weights.lora is None
                self._waiting.append((weights, version, done))
        return done

    def apply(self) -> None:
        """Copy all submitted weights into the model. Called between two batches."""
        while self._waiting:
            weights, version, done = self._waiting.popleft()
            if weights.lora is not None and self._decoder.lora is None:
                self._add_layers(weights.lora, done)
            state = self._decoder.state_dict()
            with torch.no_grad():
                for name, tensor in weights.tensors.items():
                    state[name].copy_(tensor)
            self.version = version
            done.set_result(None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for _, _, done in self._waiting:
            done.set_exception(_ending())

    def _add_layers(self, lora: LoraOptions, done: "Future[None]") -> None:
        """Add the layers of the first adapter. An error ends the server, whose model may have some of the layers."""
        try:
            added = add_lora(self._decoder, r=lora.r, alpha=lora.alpha, targets=list(lora.targets))
        except (ValueError, RuntimeError) as error:
            done.set_exception(error)
            raise
        self._decoder.requires_grad_(False).eval()
        matrices = sum(matrix.nbytes for name, matrix in self._decoder.named_parameters() if is_lora(name))
        log_rank0(f"adapter: {lora}: {added.layers} layers, {matrices / 2**20:,.2f} MiB beside the model")


def _ending() -> RequestError:
    return RequestError(HTTPStatus.SERVICE_UNAVAILABLE, ENDING)
