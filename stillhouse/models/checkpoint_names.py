"""The names of a decoder's tensors in transformers' files."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from stillhouse.models.adapter import base_name
from stillhouse.models.decoder import Decoder

#: the prefix of the names of a decoder's MTP tensors
MTP = "mtp."


def checkpoint_names(decoder: Decoder, name: str) -> list[str]:
    """Return the names that a decoder's tensor can have in transformers' files. A tied tensor has several names."""
    model, name = decoder.pretrained, base_name(name)
    prefix = f"{decoder.backbone_name}."
    if decoder.mtp is not None and name.startswith(MTP):
        return [decoder.mtp.checkpoint_name(model, name.removeprefix(MTP))]
    if name.startswith("backbone."):
        name = prefix + name.removeprefix("backbone.")
        return [name, *(target for target, source in model.all_tied_weights_keys.items() if source == name)]
    head = next(path for path, module in model.named_modules() if module is model.get_output_embeddings())
    candidates = [f"{head}.{name.removeprefix('head.linear.')}"]
    if getattr(model.config, "tie_word_embeddings", False):  # transformers ignores the text configuration's value
        candidates.append(prefix + decoder.embedding_name.removeprefix("backbone."))
    return candidates


def saved_names(decoder: Decoder) -> dict[str, str]:
    """Return a dict that maps a full decoder's tensor names to the names in the transformers model, not in files."""
    names = (name for name in decoder.state_dict() if name.partition(".")[0] not in decoder.layer_losses)
    return {name: checkpoint_names(decoder, name)[0] for name in names}


class StoredNames:
    """Maps a model's tensors to the tensors in a folder's files.

    Names in files may differ from names in the model, for example if an earlier version of transformers, or a model
    with images, wrote them. transformers' conversions rename tensors, and make some tensors from several stored ones.
    """

    def __init__(self, model: PreTrainedModel, stored: Iterable[str]):
        self._model, self._conversions = model, get_model_conversion_mapping(model)
        renamings = [conversion for conversion in self._conversions if isinstance(conversion, WeightRenaming)]
        self._converters = [conversion for conversion in self._conversions if isinstance(conversion, WeightConverter)]
        # transformers adds or removes the prefix of the backbone only for names that have a value in this dict
        names: dict[str, Any] = dict.fromkeys(map(base_name, model.state_dict()), True)
        self._stored: dict[str, str] = {}
        # maps the name of a conversion's first result to (stored name, pattern) of each tensor that it converts
        self._groups: dict[str, list[tuple[str, str]]] = {}
        for key in sorted(stored, key=dot_natural_key):
            prefix = model.base_model_prefix
            renamed = key if key in names else rename_source_key(key, renamings, [], prefix, names)[0]
            self._stored.setdefault(renamed, key)  # if a tensor has several names, transformers reads the first one
            target, pattern = rename_source_key(key, renamings, self._converters, prefix, names)
            if pattern is not None:
                self._groups.setdefault(target, []).append((key, pattern))

    def remember(self) -> None:
        """Let transformers save the model under the stored names, as if transformers had loaded it."""
        self._model._weight_conversions = [part for part in self._conversions if part.was_used()]

    def get(self, name: str) -> str | None:
        """Return the stored name of a model's tensor, or None if no file has it as one tensor (see `converted`)."""
        return self._stored.get(name)

    def converted(self, name: str, read: Callable[[str], Tensor]) -> Tensor | None:
        """Return a tensor that transformers makes from several stored tensors, or None if it cannot make the tensor.

        read: reads a tensor by its stored name.
        """
        for converter in self._converters:
            for target in converter.target_patterns:
                first = name.replace(target, converter.target_patterns[0])
                group = self._groups.get(first)
                if target not in name or group is None:
                    continue
                conversion = copy.deepcopy(converter)
                for key, pattern in group:
                    conversion.add_tensor(first, key, pattern, read(key))
                tensors = conversion.convert(first, model=self._model, config=self._model.config)
                if name in tensors:
                    tensor: Any = tensors[name]
                    return tensor[0] if isinstance(tensor, list) else tensor
        return None


def save_as(model: PreTrainedModel, loaded: PreTrainedModel) -> None:
    """Let transformers save `model`, an empty copy of `loaded`, under the tensor names in the files of `loaded`."""
    if hasattr(loaded, "_weight_conversions"):  # absent if the weights have been initialised, not loaded
        model._weight_conversions = loaded._weight_conversions


def parts_of_stack(decoder: Decoder, name: str) -> list[str]:
    """Return the names, in files, of the tensors that form the stack `name`, with a * for the expert's number.

    A file has one tensor per expert; a model has one tensor of all experts, the stack. If `name` is no stack, the
    list is empty. Of two names (gate and up projection), the first one's rows come first in an expert's matrix.
    """
    for conversion in get_model_conversion_mapping(decoder.pretrained):
        target = conversion.target_patterns[0]
        if isinstance(conversion, WeightConverter) and name.endswith(target):
            merge, *rest = conversion.operations
            joins_rows = [isinstance(operation, Concatenate) and operation.dim == 1 for operation in rest]
            if isinstance(merge, MergeModulelist) and merge.dim == 0 and joins_rows in ([], [True]):
                sources = [source.replace(r"\.", ".") for source in conversion.source_patterns]
                return [name.removesuffix(target) + source for source in sources]
    return []
