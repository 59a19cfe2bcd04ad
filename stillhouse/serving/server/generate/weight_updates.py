"""New weights for a server that generates completions, read from a folder of published weights.

An HTTP thread reads a version into host memory, and checks it against the folder's hashes and the model. The model's
thread copies it into the model between two batches. So all tokens of a completion have one version, and a folder that
is refused or changes later has no effect. Until the copy, host memory holds the new weights in addition.
"""

import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from http import HTTPStatus
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from stillhouse.display import escaped
from stillhouse.generation.published_folder import OTHER_BYTES, PublishedFolder, published_folder
from stillhouse.libraries import reading
from stillhouse.models import Decoder
from stillhouse.models.checkpoint_names import StoredNames, parts_of_stack, saved_names
from stillhouse.models.model_checks import describe
from stillhouse.serving.server.request_errors import ENDING, RequestError

#: the version of the weights that the server was started with; vLLM has the same name for it
FIRST_VERSION = "default"
#: the most bytes of the headers of all safetensors files together
_HEADER_BYTES = 64 * 2**20


class WeightUpdates:
    """version: the label of the current weights. Only the model's thread may call `apply` and `close`."""

    def __init__(self, decoder: Decoder):
        self.version = FIRST_VERSION
        self._decoder, self._model = decoder, describe(decoder.pretrained)
        self._expected = _expected(decoder)
        self._bytes = _HEADER_BYTES + sum(tensor.nbytes for tensor in self._expected.values())
        self._waiting: deque[tuple[Mapping[str, Tensor], str, Future[None]]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def read(self, folder: Path, manifest: str | None = None) -> dict[str, Tensor]:
        """Read the weights of a folder, by their names in the model. manifest: the manifest's expected sha256.

        Raises ValueError unless the folder is complete and has this manifest, each tensor fits the model, and all
        values are finite.
        """
        shown = escaped(str(folder))[:200]
        if not folder.is_absolute() or "\0" in str(folder):
            raise ValueError(f"folder '{shown}': expected an absolute path on the server's machine")
        with published_folder(folder) as published:
            if manifest not in (None, published.sha256):
                raise ValueError(
                    f"{shown} has another manifest than its run has published: the server sees an older or another "
                    "folder there; expected the folder that the run writes to, on a file system that shows new files"
                )
            if published.manifest.kind != "model":
                raise ValueError(
                    f"{shown} has an adapter: expected a whole model; write completions of a student with an "
                    "adapter in its own process (rollout.engine=transformers) or with vLLM"
                )
            stored = self._tensors(published)
        self._compare(shown, stored)
        tensors, buffers = self._by_model_names(stored), {name for name, _ in self._decoder.named_buffers()}
        for name, tensor in tensors.items():
            if bool((tensor.isnan() if name in buffers else ~tensor.isfinite()).any()):  # buffers can be limits
                raise ValueError(f"{shown}: '{name}' has values that are NaN or infinite: expected a model")
        return tensors

    def submit(self, tensors: Mapping[str, Tensor], version: str) -> "Future[None]":
        """Request new weights. The future is done when they are in use. version: the label of the new weights."""
        done: Future[None] = Future()
        with self._lock:
            if self._closed:
                done.set_exception(_ending())
            else:
                self._waiting.append((tensors, version, done))
        return done

    def apply(self) -> None:
        """Copy all submitted weights into the model. Called between two batches."""
        while self._waiting:
            tensors, version, done = self._waiting.popleft()
            state = self._decoder.state_dict()
            with torch.no_grad():
                for name, tensor in tensors.items():
                    state[name].copy_(tensor)
            self.version = version
            done.set_result(None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for _, _, done in self._waiting:
            done.set_exception(_ending())

    def _tensors(self, published: PublishedFolder) -> dict[str, Tensor]:
        """Read the tensors of a folder, and compare every file with its hash."""
        weight_bytes, other_bytes = self._bytes, OTHER_BYTES
        all_tensors, files = dict[str, Tensor](), dict[str, str]()
        for name in sorted(published.manifest.files):
            if not name.endswith(".safetensors"):
                other_bytes -= published.compare(name, other_bytes)
                continue
            content = published.read(name, weight_bytes)
            weight_bytes -= len(content)
            with reading(f"{published.path / escaped(name)[:200]}"):
                tensors = load(content)
            all_tensors |= tensors
            files |= dict.fromkeys(tensors, name)
        if files != published.manifest.tensors:
            raise ValueError(
                f"{published.path} does not hold the tensors that its manifest names: publish the weights again"
            )
        return all_tensors

    def _compare(self, shown: str, stored: Mapping[str, Tensor]) -> None:
        for name in sorted(stored.keys() | self._expected.keys()):
            here, there = (_shown(tensors.get(name)) for tensors in (self._expected, stored))
            if here != there:
                raise ValueError(
                    f"{shown} does not fit {self._model}: '{escaped(name)}' is {there} there and {here} in the "
                    "server; expected the same model with the same dtype (--dtype)"
                )

    def _by_model_names(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors by their names in the decoder, which may stack or join several of the stored ones."""
        state, names = self._decoder.state_dict(), StoredNames(self._decoder, stored)
        tensors = {}
        for name, in_model in saved_names(self._decoder).items():
            tensors[name] = self._tensor(in_model, len(state[name]) if state[name].dim() else 1, names, stored)
            assert tensors[name].shape == state[name].shape, name
        return tensors

    def _tensor(self, name: str, experts: int, names: StoredNames, stored: dict[str, Tensor]) -> Tensor:
        if (key := names.get(name)) is not None:
            return stored[key]
        if parts := parts_of_stack(self._decoder, name):
            of_experts = ([part.replace("*", str(number)) for part in parts] for number in range(experts))
            # `pop` frees the experts' tensors, so that the host memory never has all experts twice
            return torch.stack(
                [torch.cat([stored.pop(names.get(part) or part) for part in expert]) for expert in of_experts]
            )
        converted = names.converted(name, stored.__getitem__)
        assert converted is not None, name
        return converted


def _ending() -> RequestError:
    return RequestError(HTTPStatus.SERVICE_UNAVAILABLE, ENDING)


def _expected(decoder: Decoder) -> dict[str, Tensor]:
    """Each tensor that transformers would save for the model, on the meta device."""
    state = decoder.state_dict()
    empty = {saved: torch.empty_like(state[name], device="meta") for name, saved in saved_names(decoder).items()}
    return dict(revert_weight_conversion(decoder.pretrained, empty))


def _shown(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
