"""Reads the tensors of a folder of published weights, by their names in the decoder of a server that generates.

A folder has a whole model or an adapter. Every tensor must fit the decoder. So nothing has to be checked when the
tensors are copied into the decoder.
"""

from collections.abc import Mapping

import torch
from safetensors.torch import load
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from stillhouse.display import escaped
from stillhouse.libraries import reading
from stillhouse.models import Decoder, element_count
from stillhouse.models.adapter import ADAPTER_CONFIG, LoraOptions, expected_lora, saved_lora_name
from stillhouse.models.checkpoint_names import StoredNames, parts_of_stack, saved_names
from stillhouse.models.model_checks import typename
from stillhouse.rollout.published_folder import OTHER_BYTES, AdapterBase, PublishedFolder

#: the most bytes of the headers of all safetensors files together, and of an adapter's configuration
_HEADER_BYTES, _CONFIG_BYTES = 64 * 2**20, 2**20


class ModelReader:
    """Reads whole models. decoder: without an adapter, and not quantized."""

    def __init__(self, decoder: Decoder):
        self._decoder = decoder
        self._expected = _expected(decoder)

    def read(self, shown: str, published: PublishedFolder) -> dict[str, Tensor]:
        """Raises ValueError unless all tensors fit the model and are finite. shown: the folder, for messages."""
        stored = _stored(published, self._expected)
        _require_fit(shown, typename(self._decoder.pretrained), self._expected, stored)
        tensors, buffers = self._by_model_names(stored), {name for name, _ in self._decoder.named_buffers()}
        _require_finite(shown, tensors, buffers)
        return tensors

    def _by_model_names(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors by their names in the decoder, which may stack or join several of the stored ones."""
        state, names = self._decoder.state_dict(), StoredNames(self._decoder.pretrained, stored)
        tensors = {}
        for name, in_model in saved_names(self._decoder).items():
            tensors[name] = self._tensor(in_model, len(state[name]) if state[name].dim() else 1, names, stored)
            assert tensors[name].shape == state[name].shape, name
        return tensors

    def _tensor(self, name: str, experts: int, names: StoredNames, stored: dict[str, Tensor]) -> Tensor:
        if (key := names.get(name)) is not None:
            return stored[key]
        if parts := parts_of_stack(self._decoder, name):
            expert_parts = ([part.replace("*", str(number)) for part in parts] for number in range(experts))
            # `pop` frees the experts' tensors, so that the host memory never has all experts twice
            return torch.stack(
                [torch.cat([stored.pop(names.get(part) or part) for part in expert]) for expert in expert_parts]
            )
        converted = names.converted(name, stored.__getitem__)
        assert converted is not None, name
        return converted


class AdapterReader:
    """Reads adapters. base: the server's own model, on which an adapter must have been trained.

    decoder: without an adapter until `read` has accepted one. After that, only adapters with the same options are
    read.
    """

    def __init__(self, decoder: Decoder, base: AdapterBase):
        self._decoder, self._base = decoder, base
        self._most_bytes = 4 * sum(map(element_count, decoder.parameters()))
        self._expected: dict[LoraOptions, dict[str, Tensor]] = {}

    def read(
        self, shown: str, published: PublishedFolder, present: LoraOptions | None
    ) -> tuple[dict[str, Tensor], LoraOptions]:
        """Return the adapter's matrices by their names in the decoder, and its options.

        shown: the folder, for messages. present: the options of the layers that the server has; None: it has none.

        Raises ValueError for an adapter of another base or with other options, and unless all matrices fit and are
        finite.
        """
        self._require_base(shown, published.manifest.base)
        if ADAPTER_CONFIG not in published.manifest.files:
            raise ValueError(f"{shown} has no {ADAPTER_CONFIG}: expected an adapter; publish it again")
        try:
            options = LoraOptions.of(published.read(ADAPTER_CONFIG, _CONFIG_BYTES))
            if present not in (None, options):
                raise ValueError(f"an adapter with {options}, and the server has {present}: start the server anew")
            if options not in self._expected:
                self._expected[options] = expected_lora(self._decoder, options)
            in_decoder = self._expected[options]
            if sum(matrix.nbytes for matrix in in_decoder.values()) > self._most_bytes:
                raise ValueError(f"with r {options.r}, the adapter is larger than the model: expected a smaller r")
        except ValueError as error:
            raise ValueError(f"{shown}: {error}") from error
        names = {saved_lora_name(self._decoder, name): name for name in in_decoder}
        expected = {saved: in_decoder[name] for saved, name in names.items()}
        stored = _stored(published, expected)
        _require_fit(shown, f"the LoRA layers of {typename(self._decoder.pretrained)}", expected, stored)
        _require_finite(shown, stored, set())
        return {names[saved]: matrix for saved, matrix in stored.items()}, options

    def _require_base(self, shown: str, base: AdapterBase | None) -> None:
        if base is None:
            raise ValueError(
                f"{shown} does not name the model on which its adapter was trained: expected a folder that a run has "
                "published for its rollout servers"
            )
        here, is_other = self._base, f"{shown} has an adapter that was trained on another base than the server's"
        if base.fingerprint != here.fingerprint:
            raise ValueError(
                f"{is_other}: the hash of its files is {escaped(base.fingerprint)[:12]}, and {here.fingerprint[:12]} "
                "here; serve the run's student.model, with the same revision"
            )
        if base.quantize != here.quantize:
            kind = escaped(str(base.quantize))[:20]
            expected = "no --quantize" if base.quantize is None else f"--quantize {kind}"
            raise ValueError(
                f"{is_other}: its quantization is {kind} there and {here.quantize} here; expected {expected}"
            )
        if base.dtype != here.dtype:
            dtype = escaped(base.dtype)[:20]
            raise ValueError(f"{is_other}: it is {dtype} there and {here.dtype} here; expected --dtype {dtype}")


def _expected(decoder: Decoder) -> dict[str, Tensor]:
    """Each tensor that transformers would save for the model, on the meta device."""
    state = decoder.state_dict()
    empty = {saved: torch.empty_like(state[name], device="meta") for name, saved in saved_names(decoder).items()}
    return dict(revert_weight_conversion(decoder.pretrained, empty))


def _stored(published: PublishedFolder, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the tensors of a folder, and compare every file with its hash. expected: limits the bytes to read."""
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
    return all_tensors


def _require_fit(shown: str, model: str, expected: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    for name in sorted(stored.keys() | expected.keys()):
        here, there = (_form(tensors.get(name)) for tensors in (expected, stored))
        if here != there:
            raise ValueError(
                f"{shown} does not fit {model}: '{escaped(name)}' is {there} there and {here} in the "
                "server; expected the same model with the same dtype (--dtype)"
            )


def _require_finite(shown: str, tensors: Mapping[str, Tensor], buffers: set[str]) -> None:
    for name, tensor in tensors.items():
        if bool((tensor.isnan() if name in buffers else ~tensor.isfinite()).any()):  # buffers can be limits
            raise ValueError(f"{shown}: '{name}' has values that are NaN or infinite: expected a model")


def _form(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"
