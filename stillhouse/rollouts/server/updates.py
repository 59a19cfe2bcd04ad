"""New weights for a server that writes completions, read from a folder of published weights.

The HTTP threads check a folder; the model's thread copies its tensors between two batches. So every completion is
written by one version. A folder that is refused changes nothing.
"""

import threading
from collections import deque
from concurrent.futures import Future
from pathlib import Path

import torch
from safetensors import safe_open
from transformers.core_model_loading import revert_weight_conversion

from stillhouse.display import escaped
from stillhouse.libraries import reading
from stillhouse.models import Decoder
from stillhouse.models.structure import describe
from stillhouse.parallel.loading import checkpoint_names, read_weights
from stillhouse.rollouts.weights import read_manifest

#: the version of the weights that the server was started with, as vLLM names it
FIRST_VERSION = "default"
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class WeightUpdates:
    """version: of the present weights. All methods but `apply` and `close` may be called from any thread."""

    def __init__(self, decoder: Decoder):
        self.version = FIRST_VERSION
        self._decoder, self._what = decoder, describe(decoder.pretrained)
        self._expected = _expected(decoder)
        self._waiting: deque[tuple[Path, str, Future[None]]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def check(self, folder: Path) -> None:
        """Raise ValueError unless the folder is complete and fits the model in every tensor."""
        shown = f"folder '{escaped(str(folder))[:200]}'"
        if not folder.is_absolute():
            raise ValueError(f"{shown}: expected an absolute path on the server's machine")
        with reading(shown, passes=ValueError):
            manifest = read_manifest(folder)
            if manifest.kind != "model":
                raise ValueError(
                    f"{folder} has an adapter: expected a whole model; write completions of a student with an "
                    "adapter in its own process (rollout.engine=transformers) or with vLLM"
                )
            self._compare(folder, {name: folder / file for name, file in manifest.tensors.items()})

    def submit(self, folder: Path, version: str) -> "Future[None]":
        """Ask for the weights of a folder that was checked. The future is done when they are in use."""
        done: Future[None] = Future()
        with self._lock:
            if self._closed:
                done.set_exception(ValueError("the server is about to end"))
            else:
                self._waiting.append((folder, version, done))
        return done

    def apply(self) -> None:
        """Copy the weights that were asked for, between two batches.

        Raises ValueError if a folder changes while it is read. Then the weights are of no version, and the caller
        must not write anything with them.
        """
        while True:
            with self._lock:
                if not self._waiting:
                    return
                folder, version, done = self._waiting.popleft()
            try:
                with torch.no_grad():
                    read_weights(self._decoder, folder)
            except (ValueError, OSError, RuntimeError) as error:
                done.set_exception(ValueError(f"{folder} has changed while it was read: {error}"))
                self.close()
                raise
            self.version = version
            done.set_result(None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for _, _, done in self._waiting:
                done.set_exception(ValueError("the server is about to end"))
            self._waiting.clear()

    def _compare(self, folder: Path, files: dict[str, Path]) -> None:
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        for path in sorted(set(files.values())):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 it is no dict
                    piece = file.get_slice(name)
                    found[name] = tuple(piece.get_shape()), piece.get_dtype()
        if found.keys() != files.keys():
            raise ValueError(f"{folder} does not hold the tensors that its manifest names: publish the weights again")
        for name in sorted(found.keys() | self._expected.keys()):
            here, there = (_shown(each.get(name)) for each in (self._expected, found))
            if here != there:
                raise ValueError(
                    f"{folder} does not fit {self._what}: '{escaped(name)}' is {there} there and {here} in the "
                    "server; expected the same model with the same dtype (--dtype)"
                )


def _expected(decoder: Decoder) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor that transformers writes for the model."""
    held = {
        checkpoint_names(decoder, name)[0]: torch.empty_like(value, device="meta")
        for name, value in decoder.state_dict().items()
    }
    written = revert_weight_conversion(decoder.pretrained, held)
    return {name: (tuple(each.shape), _DTYPES.get(each.dtype, str(each.dtype))) for name, each in written.items()}


def _shown(tensor: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if tensor is None else f"{tensor[1]} of shape {list(tensor[0])}"
