"""Proves that a model has exactly the settings and weights of a GGUF file, as the package `gguf` reads them.

transformers reads many families, leaves out tensors and settings that it does not know, and warns of nothing. Here,
everything that a file states about its model must have an equal counterpart in the model, and the reverse.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from stillhouse.display import escaped, name_list
from stillhouse.gguf.families import FAMILIES, OPTIONAL, Family, setting
from stillhouse.libraries import imported, reading

_ARCHITECTURE = "general.architecture"
#: long lists that nothing here needs
_UNUSED = ("tokenizer.ggml.scores",)


class GgufFile:
    """The metadata and tensors of a file. Raises ValueError if they cannot be read.

    metadata: Python values by key. tensors: the tensors of `gguf.GGUFReader`; their data stay on the disk.
    """

    def __init__(self, path: Path):
        self.path, self._gguf = path, imported("gguf", str(path))
        with reading(f"{path} is not a readable GGUF file"):
            reader = self._gguf.GGUFReader(path)
            self.metadata = {name: _contents(field) for name, field in reader.fields.items() if name not in _UNUSED}
            self.tensors = list(reader.tensors)

    @property
    def family(self) -> Family:
        """The family of the architecture. Raises ValueError for one that cannot be proven."""
        architecture = self.metadata.get(_ARCHITECTURE)
        if not isinstance(architecture, str) or architecture not in FAMILIES:
            raise ValueError(
                f"{self.path} has the architecture {architecture!r:.60}: expected {name_list(FAMILIES)}, for which "
                "the conversion can be proven"
            )
        return FAMILIES[architecture]

    def require_equal(self, model: PreTrainedModel) -> None:
        """Raise ValueError unless settings and tensors of a float32 model are those of this file."""
        self._require_settings(model)
        weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        for tensor in self.tensors:
            name = self.family.target(tensor.name)
            if name is None or name not in weights:
                raise ValueError(
                    f"{self.path}: the tensor {escaped(tensor.name)!r} has no counterpart in a "
                    f"{type(model).__name__}, so this model cannot be converted"
                )
            self._require_tensor(tensor, name, weights.pop(name), model)
        if weights:
            raise ValueError(
                f"{self.path} lacks tensors of a {type(model).__name__}: {name_list(weights)}; the file is incomplete"
            )

    def _require_tensor(self, tensor: Any, name: str, weight: torch.Tensor, model: PreTrainedModel) -> None:
        with reading(f"{self.path}: the tensor {escaped(tensor.name)!r} cannot be read"):
            values = self._gguf.dequantize(tensor.data, tensor.tensor_type)
            values = self.family.value(name, values, model.config).astype(np.float32)
        read = weight.cpu().numpy()
        if read.shape != values.shape:
            raise ValueError(f"{self.path}: {name} has the shape {read.shape}, and the file has {values.shape}")
        if not np.array_equal(read, values):
            raise ValueError(
                f"{self.path}: transformers reads other values of {name} than the file has (they differ by up to "
                f"{np.abs(read - values).max():.3g}); another version of transformers may read them correctly"
            )

    def _require_settings(self, model: PreTrainedModel) -> None:
        """Compare settings. A setting that is unknown here could change what the model computes, so it is refused."""
        family, config, prefix = self.family, model.config, f"{self.metadata[_ARCHITECTURE]}."
        if config.model_type != family.model_type:
            raise ValueError(f"{self.path}: transformers reads a {config.model_type}, expected {family.model_type}")
        settings = {key.removeprefix(prefix): key for key in self.metadata if key.startswith(prefix)}
        if unknown := sorted(settings.keys() - family.settings.keys()):
            raise ValueError(
                f"{self.path} has the settings {name_list(settings[key] for key in unknown)}, whose effect cannot be "
                "proven: expected a model without them"
            )
        if missing := sorted(family.settings.keys() - settings.keys() - OPTIONAL):
            raise ValueError(f"{self.path} lacks the settings {name_list(prefix + key for key in missing)}")
        expected = {family.settings[key]: (name, self.metadata[name]) for key, name in settings.items()}
        for key, value in (family.fixed or {}).items():
            expected[key] = f"{key} of llama.cpp", setting(config, value) if isinstance(value, str) else value
        for key, (name, value) in expected.items():
            actual = setting(config, key)
            if not isinstance(value, int | float) or np.float32(actual) != np.float32(value):
                raise ValueError(
                    f"{self.path}: the setting {name} is {value!r:.60}, and transformers reads {actual!r:.60}"
                )


def _contents(field: Any) -> Any:
    """The value of a metadata field: a number, a text, or a list of them."""
    value = field.contents()
    return value.item() if isinstance(value, np.generic) else value
