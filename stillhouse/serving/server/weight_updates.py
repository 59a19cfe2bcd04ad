"""New weights for a server that generates completions, read from a folder of published weights.

An HTTP thread reads a version into host memory, and compares it with the folder's hashes and with the model. The
model's thread copies the version into the model between two batches, so that all tokens of a completion have the same
version. A version is a whole model, or an adapter of the model that the server was started with. A server accepts
either models or adapters until it ends, because a model would replace the base of an adapter.
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
from safetensors.torch import load
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from stillhouse.display import escaped
from stillhouse.libraries import reading
from stillhouse.models import Decoder, add_lora, element_count
from stillhouse.models.adapter import ADAPTER_CONFIG, LoraOptions, expected_lora, is_lora, saved_lora_name
from stillhouse.models.checkpoint_names import StoredNames, parts_of_stack, saved_names
from stillhouse.models.model_checks import typename
from stillhouse.parallel import log_rank0
from stillhouse.rollout.published_folder import (
    OTHER_BYTES,
    AdapterBase,
    NoVersionError,
    PublishedFolder,
    published_folder,
)
from stillhouse.serving.server.gate import ENDING, RequestError

#: the label of the weights that the server was started with; vLLM uses the same label
FIRST_VERSION = "default"
#: the maximum number of bytes of the headers of all safetensors files together, and of an adapter's configuration
_HEADER_BYTES, _CONFIG_BYTES = 64 * 2**20, 2**20
_ANEW = "a server accepts only whole models or only adapters: restart the server"


@dataclass(frozen=True, eq=False)
class NewWeights:
    """Weights that have been read and checked, but are not in use yet.

    tensors: the weights by their names in the decoder. lora: the adapter's options, or None for a whole model.
    """

    tensors: Mapping[str, Tensor]
    lora: LoraOptions | None = None


class WeightUpdates:
    """Reads new weights and copies them into the decoder. Only the model's thread may call `apply` and `close`.

    version: the label of the weights that are in use. base: the identity of the decoder without an adapter.
    root: the folder that must contain all published folders. If it is None, they may be anywhere.
    """

    def __init__(self, decoder: Decoder, base: AdapterBase, root: Path | None = None):
        self.version = FIRST_VERSION
        self._decoder, self._base, self._root = decoder, base, root
        #: all tensors that transformers would save for the model, on the meta device. It is None for a quantized
        #: model, whose weights cannot be replaced
        self._expected: dict[str, Tensor] | None = None
        if base.quantize is None:
            state = decoder.state_dict()
            names = saved_names(decoder).items()
            empty = {saved: torch.empty_like(state[name], device="meta") for name, saved in names}
            self._expected = dict(revert_weight_conversion(decoder.pretrained, empty))
        self._most_bytes = 4 * sum(map(element_count, decoder.parameters()))
        self._expected_lora: dict[LoraOptions, dict[str, Tensor]] = {}
        #: the options of the last submitted adapter (None without one), and whether a whole model was submitted
        self._lora: LoraOptions | None = None
        self._has_model = False
        self._waiting: deque[tuple[NewWeights, str, Future[None]]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def read(self, folder: Path, manifest: str | None = None) -> NewWeights:
        """Read the weights of a folder. manifest: the expected sha256 of the manifest; None accepts any manifest.

        Raises ValueError unless the folder is complete and has this manifest, all tensors fit the model, and all
        values are finite. With a root, the error does not reveal which paths exist outside the root. Without a root,
        it does not reveal which paths exist.
        """
        shown = escaped(str(folder))[:200]
        if not folder.is_absolute() or "\0" in str(folder):
            raise ValueError(f"folder '{shown}': expected an absolute path on the server's machine")
        if self._root is not None:
            folder = Path(os.path.realpath(folder))  # `..` and links could lead out of the root
            if not folder.is_relative_to(self._root):
                raise ValueError(f"{shown} is not inside the folder of this server's --weights-root")
        try:
            with published_folder(folder) as published:
                if manifest not in (None, published.sha256):
                    raise ValueError(
                        f"{shown} has another manifest than its run has published: the server sees an older or "
                        "another folder at this path; expected a file system that the run and the server share, and "
                        "that shows new files at once"
                    )
                if published.manifest.kind == "adapter":
                    return self._adapter(shown, published)
                return NewWeights(self._model(shown, published))
        except NoVersionError as error:
            if self._root is not None:
                raise
            log_rank0(f"POST /v1/weights: {escaped(str(error))}")
            raise ValueError(
                f"{shown} is no complete version of the weights that this server can read: expected the folder that "
                "the run writes to, on a file system that the run and the server share; see the server's log"
            ) from error

    def submit(self, weights: NewWeights, version: str) -> "Future[None]":
        """Submit new weights. The future is done when the weights are in use. version: their label."""
        done: Future[None] = Future()
        with self._lock:
            if self._closed:
                done.set_exception(RequestError(HTTPStatus.SERVICE_UNAVAILABLE, ENDING))
            else:
                self._lora, self._has_model = weights.lora, weights.lora is None
                self._waiting.append((weights, version, done))
        return done

    def apply(self) -> None:
        """Copy all submitted weights into the model. Called between two batches."""
        while self._waiting:
            weights, version, done = self._waiting.popleft()
            if weights.lora is not None and self._decoder.lora is None:
                lora = weights.lora
                try:
                    added = add_lora(self._decoder, r=lora.r, alpha=lora.alpha, targets=list(lora.targets))
                except (
                    ValueError,
                    RuntimeError,
                ) as error:  # perhaps only some layers have the adapter: end the server
                    done.set_exception(error)
                    raise
                self._decoder.requires_grad_(False).eval()
                matrices = sum(matrix.nbytes for name, matrix in self._decoder.named_parameters() if is_lora(name))
                log_rank0(f"adapter: {lora}: {added.layers} layers, {matrices / 2**20:,.2f} MiB more than the model")
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
            done.set_exception(RequestError(HTTPStatus.SERVICE_UNAVAILABLE, ENDING))

    def _model(self, shown: str, published: PublishedFolder) -> dict[str, Tensor]:
        """Return the tensors by their names in the decoder. Each of them may consist of several stored tensors.

        Raises ValueError if the server has an adapter or is quantized, or if the tensors do not fit the decoder.
        """
        if self._lora is not None:
            raise ValueError(f"{shown} has a whole model, and the server has an adapter of a run; {_ANEW}")
        if self._expected is None:
            raise ValueError(
                f"{shown} has a whole model, and the server's model is quantized ({self._base.quantize}): expected "
                "an adapter, or a server without --quantize"
            )
        stored = _stored(shown, published, typename(self._decoder.pretrained), self._expected)
        state, names = self._decoder.state_dict(), StoredNames(self._decoder.pretrained, stored)
        tensors = dict[str, Tensor]()
        for name, saved in saved_names(self._decoder).items():
            if (key := names.get(saved)) is not None:
                tensor: Tensor | None = stored[key]
            elif parts := parts_of_stack(self._decoder, saved):
                experts = [[part.replace("*", str(number)) for part in parts] for number in range(len(state[name]))]
                # `pop` frees the experts' tensors, so that the host memory never has all experts twice
                tensor = torch.stack(
                    [torch.cat([stored.pop(names.get(part) or part) for part in expert]) for expert in experts]
                )
            else:
                tensor = names.converted(saved, stored.__getitem__)
            assert tensor is not None, name
            assert tensor.shape == state[name].shape, name
            tensors[name] = tensor
        _require_finite(shown, tensors, {name for name, _ in self._decoder.named_buffers()})
        return tensors

    def _adapter(self, shown: str, published: PublishedFolder) -> NewWeights:
        """Return the adapter's options, and its matrices by their names in the decoder.

        Raises ValueError for an adapter of another base, or with other options than the first adapter.
        """
        if self._has_model:
            raise ValueError(f"{shown} has an adapter, and the server has a whole model of a run; {_ANEW}")
        if (base := published.manifest.base) is None:
            raise ValueError(
                f"{shown} does not name the model on which its adapter was trained: expected a folder that a run has "
                "published for its rollout servers"
            )
        here, is_other = self._base, f"{shown} has an adapter that was trained on another base than the server's"
        if base.fingerprint != here.fingerprint:
            raise ValueError(
                f"{is_other}: the hash of the base is {escaped(base.fingerprint)[:12]} in the run and "
                f"{here.fingerprint[:12]} on the server; serve the run's student.model, with the same revision"
            )
        if base.quantize != here.quantize:
            kind = escaped(str(base.quantize))[:20]
            expected = "no --quantize" if base.quantize is None else f"--quantize {kind}"
            raise ValueError(
                f"{is_other}: the quantization is {kind} in the run and {here.quantize} on the server; expected "
                f"{expected}"
            )
        if base.dtype != here.dtype:
            dtype = escaped(base.dtype)[:20]
            raise ValueError(
                f"{is_other}: the dtype is {dtype} in the run and {here.dtype} on the server; expected --dtype "
                f"{dtype}"
            )
        if ADAPTER_CONFIG not in published.manifest.files:
            raise ValueError(f"{shown} has no {ADAPTER_CONFIG}: expected an adapter; publish it again")
        try:
            options = LoraOptions.of(published.read(ADAPTER_CONFIG, _CONFIG_BYTES))
            if self._lora not in (None, options):
                raise ValueError(
                    f"an adapter with {options}, and the server has one with {self._lora}: restart the server"
                )
            if options not in self._expected_lora:
                self._expected_lora[options] = expected_lora(self._decoder, options)
            in_decoder = self._expected_lora[options]
            if sum(matrix.nbytes for matrix in in_decoder.values()) > self._most_bytes:
                raise ValueError(f"with r {options.r}, the adapter is larger than the model: expected a smaller r")
        except ValueError as error:
            raise ValueError(f"{shown}: {error}") from error
        names = {saved_lora_name(self._decoder, name): name for name in in_decoder}
        layers = f"the LoRA layers of {typename(self._decoder.pretrained)}"
        stored = _stored(shown, published, layers, {saved: in_decoder[name] for saved, name in names.items()})
        _require_finite(shown, stored, set())
        return NewWeights({names[saved]: matrix for saved, matrix in stored.items()}, options)


def _stored(shown: str, published: PublishedFolder, model: str, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the tensors of a folder, and compare every file with its hash.

    model: the name of the model that has these tensors, for messages.
    expected: the tensors that the folder must have. Their size also limits the bytes that are read.
    Raises ValueError unless the folder has exactly these tensors, with the same dtypes and shapes.
    """
    weight_bytes, other_bytes = _HEADER_BYTES + sum(tensor.nbytes for tensor in expected.values()), OTHER_BYTES
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
    for name in sorted(all_tensors.keys() | expected.keys()):
        here, there = (
            "absent"
            if tensor is None
            else f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
            for tensor in (expected.get(name), all_tensors.get(name))
        )
        if here != there:
            raise ValueError(
                f"{shown} does not fit {model}: '{escaped(name)}' is {there} in the folder and {here} in the "
                "server; expected the same model with the same dtype (--dtype)"
            )
    return all_tensors


def _require_finite(shown: str, tensors: Mapping[str, Tensor], buffers: set[str]) -> None:
    for name, tensor in tensors.items():
        if bool((tensor.isnan() if name in buffers else ~tensor.isfinite()).any()):  # a buffer may be infinite
            raise ValueError(f"{shown}: '{name}' has values that are NaN or infinite: expected finite weights")
