"""A tiny model of every family of causal language models that the installed transformers has.

`build` makes a model from the family's own configuration class. The sizes come from one rule for all families, and
causal_options.yaml has what a family needs beyond it. Every kind of layer of a family occurs at least once. The
values are chosen so that a mistake changes the result: windows and chunks are shorter than the test sequences, norms
and biases are not ones and zeros, and no weight is zero.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from stillhouse.models.pretrained import auto_class

#: the names of the standard deviations of the initialisation
_SPREAD = {"initializer_range", "init_std", "embedding_initializer_range"}
#: the names of lists with the type of each layer
_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types")

_OPTIONS = YAML(typ="safe").load(Path(__file__).with_name("causal_options.yaml").read_text(encoding="utf-8"))
SIZES, MORE, WITH_IMAGES = _OPTIONS["sizes"], _OPTIONS["more"], tuple(_OPTIONS["with_images"])
#: model type: why it is left out
LEFT_OUT = {model_type: reason for reason, types in _OPTIONS["left_out"].items() for model_type in types}
VOCABULARY, EXPERTS = 251, 4
#: the token ids from here on can stand for an image or another input
SPECIAL = 230
#: the model types that `build` accepts
CAUSAL: tuple[str, ...] = tuple(sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *WITH_IMAGES} - {*LEFT_OUT}))


def build(
    model_type: str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    usual: bool = False,
    whole: bool = False,
    **overrides: Any,
) -> PreTrainedModel:
    """Return a tiny model in eval mode. The same seed gives the same weights in every dtype.

    usual: the family's usual initialisation, at which documents that see each other change the least. whole: with the
    vision tower, where the causal class is the language model alone (Qwen3.5, Llama 4). overrides: options of the
    configuration, or of its text configuration. The global random state does not change.
    """
    return of_config(tiny_config(model_type, usual=usual, **overrides), dtype, seed, usual=usual, whole=whole)


def of_config(
    config: PreTrainedConfig,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    usual: bool = False,
    whole: bool = False,
) -> PreTrainedModel:
    """Return the model of a configuration; see `build`."""
    with torch.random.fork_rng(devices=[]), poisoned_memory():
        torch.manual_seed(seed)
        model = (AutoModelForImageTextToText if whole else auto_class(config)).from_config(config)
        _fill(model, usual)
    if dtype == torch.float64:  # the grouped product of experts does not support float64
        model.set_experts_implementation("eager")
    if dtype != torch.float32:  # a conversion would also make the complex angles of a vision tower real
        model.to(dtype)
    return model.eval()


def tiny_config(model_type: str, *, usual: bool = False, **overrides: Any) -> PreTrainedConfig:
    """Return the configuration of a tiny model; the options are those of `build`."""
    kind = CONFIG_MAPPING[model_type]
    names = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)
    # transformers writes defaults into the dictionaries that it gets
    more = deepcopy({**MORE.get(model_type, {}), **overrides})
    has_text = "text_config" in kind.sub_configs
    if outside := {name: more.pop(name) for name in overrides if has_text and name not in names}:
        more["text_config"] = _options(more.get("text_config")) | outside
    return _configured(kind, more, usual)


def _configured(kind: type[PreTrainedConfig], more: Mapping[str, Any], usual: bool) -> PreTrainedConfig:
    """Return a configuration of this class. more: options beyond the rule, or instead of it."""
    names = [field.name for field in dataclasses.fields(kind)]
    aliases = {name: alias for alias, name in kind.attribute_map.items()}
    values: dict[str, Any] = {}
    for place, name in enumerate(names):
        size = name if name in SIZES else aliases.get(name)
        if size in SIZES:
            values[name] = SIZES[size]
        elif name.endswith(("_token_id", "_token_index")):
            values[name] = SPECIAL + place % (VOCABULARY - SPECIAL)
    if usual:
        values = {name: value for name, value in values.items() if name not in _SPREAD}
    parts = _parts(kind, {name: more[name]["model_type"] for name in more if "model_type" in _options(more[name])})
    values |= {name: _configured(part, _options(more.get(name)), usual) for name, part in parts.items()}
    values |= {kind.attribute_map.get(name, name): more[name] for name in more if name not in parts}
    return _quietly(kind, values | _kinds_of_layers(kind, values))


def _options(value: Any) -> dict[str, Any]:
    return {**value} if isinstance(value, Mapping) else {}


def _parts(kind: type[PreTrainedConfig], chosen: Mapping[str, str]) -> dict[str, type[PreTrainedConfig]]:
    """Return the classes of a composite configuration's parts: those that are chosen, and otherwise the defaults."""
    if not kind.sub_configs:
        return {}
    parts: dict[str, type[PreTrainedConfig]] = {}
    for name, part in kind.sub_configs.items():
        if name in chosen:
            parts[name] = CONFIG_MAPPING[chosen[name]]
        elif part is not AutoConfig:
            parts[name] = part
        elif isinstance(default := getattr(_default(kind), name), PreTrainedConfig):
            parts[name] = type(default)
    return parts


def _kinds_of_layers(kind: type[PreTrainedConfig], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return lists of layer types in which each type of the family occurs, and the number of layers."""
    names = {field.name for field in dataclasses.fields(kind)}
    depth = kind.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    types: dict[str, list[str]] = {}
    for name in _KINDS:
        if name in names:
            given = values.get(name) or list(dict.fromkeys(getattr(_default(kind), name) or ()))
            types |= {name: given} if given else {}
    if not types:
        return {}
    layers = max(values.get(depth, 0), *(len(given) for given in types.values()))
    count = {depth: layers} if depth in values else {}
    return count | {name: (given * layers)[:layers] for name, given in types.items()}


@cache
def _default(kind: type[PreTrainedConfig]) -> PreTrainedConfig:
    return _quietly(kind, {})


def _quietly(kind: type[PreTrainedConfig], values: Mapping[str, Any]) -> PreTrainedConfig:
    """Make a configuration without transformers' warnings of token ids that the vocabulary does not have."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return kind(**values)
    finally:
        logging.set_verbosity(level)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within the block, memory that torch does not initialise is NaN, or True, so that tests can find it."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@torch.no_grad()
def _fill(model: nn.Module, usual: bool) -> None:
    """Give random values to what transformers left uninitialised, zero or constant, unless it is `usual`."""
    for parameter in model.parameters():
        unset = parameter.isnan()
        parameter[unset] = 0.1 * torch.randn(int(unset.sum()))
        if not usual and (parameter.ndim == 1 or bool((parameter == parameter.flatten()[0]).all())):
            parameter += 0.1 * torch.randn_like(parameter)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and not usual:  # the row of the padding token is zero
            zero = ~module.weight.any(-1)
            module.weight[zero] = 0.1 * torch.randn(int(zero.sum()), module.weight.shape[1])
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set or bool(buffer.any()):
                continue
            if buffer.is_floating_point():  # corrections of router scores
                buffer += 0.1 * torch.randn_like(buffer)
            elif buffer.ndim == 2:  # experts by token id
                buffer += torch.rand(len(buffer), EXPERTS).argsort(-1)[:, : buffer.shape[1]]
