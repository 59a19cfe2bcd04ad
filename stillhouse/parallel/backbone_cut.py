"""Finds out whether the layers of a backbone can run in different pipeline stages.

A stage runs the code of the whole backbone, but only its own layers. So every stage builds masks and position
embeddings again. A later stage continues with the hidden states that it has received where the model's first layer
would run. So the code before the first layer may change embeddings.

This is right only if no layer reads anything else that another stage computes. Two runs of the backbone, whose layers
are replaced by recorders, prove it: one with token ids, as on the first stage, and one with hidden states and without
the parts of other stages, as on the later stages. The backbone must call all layers in order, and pass the output of
each layer to the next one. All other arguments of the layers must be the same in both runs, and must not depend on
embeddings or on other layers.

The embedding and the layers of a vision-language model are in a part of its backbone, the language model. Both runs
are without the parts beside it, such as the vision tower, which only the first stage has; these
parts have a proof of their own.

B rows, S columns, D width.
"""

import copy
import inspect
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from stillhouse.display import name_list
from stillhouse.dry_run import replaceable
from stillhouse.libraries import reading
from stillhouse.models import Decoder
from stillhouse.models.families import ModelFacts, layer_list, text_config
from stillhouse.models.forward_modes import VARLEN
from stillhouse.models.lm_head import PassThrough, input_embedding
from stillhouse.models.pretrained import auto_class
from stillhouse.models.vision_language import beside_language_model
from stillhouse.parallel.backbone_recording import (
    IDS_BS,
    UNCUT,
    DependenceError,
    LayerRecorder,
    RandomEmbedding,
    RecordedRun,
    children_of_language_model,
    copy_attributes,
    embedding_ids,
)
from stillhouse.parallel.sharded_loading import make_buffers


@dataclass(frozen=True)
class BackboneCut:
    """The parts of a backbone, by their names in it.

    first: parts with weights, beside the embedding, that run before the first layer.
    last: parts that run after the last layer, such as the final norm.
    beside: parts beside the language model that only the first stage has: vision towers and projectors.
    returns_tuple: whether the backbone reads a layer's output as a tuple that begins with the hidden states.
    states: by the number of a layer: the earlier layer whose keys and values it reads.
    """

    embedding: str
    layers: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    beside: tuple[str, ...]
    returns_tuple: bool
    states: Mapping[int, int]


class AbsentLayer(PassThrough):
    """Replaces a layer of another stage. It has the layer's plain attributes, which the backbone may read."""

    def __init__(self, layer: nn.Module, returns_tuple: bool):
        super().__init__()
        copy_attributes(layer, self)
        self.returns_tuple = returns_tuple

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states, None) if self.returns_tuple else hidden_states


def require_cuttable(config: PreTrainedConfig) -> BackboneCut:
    """Return the parts of the backbone of a model with this configuration.

    Raises ValueError, naming the cause, for a model that cannot be cut into stages.
    """
    name = f"model type '{config.model_type}'"
    errors: list[ValueError] = []
    for returns_tuple in (False, True):
        try:
            with torch.random.fork_rng(devices=[]):
                return cut_backbone(config, name, returns_tuple)
        except DependenceError:
            raise
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def is_cuttable(config: PreTrainedConfig) -> bool:
    """Whether `require_cuttable` accepts a model with this configuration."""
    try:
        require_cuttable(config)
    except ValueError:
        return False
    return True


def continue_with_received(backbone: nn.Module, first_layer: nn.Module) -> None:
    """Let the first layer of a backbone read the `inputs_embeds` of the backbone's forward unchanged.

    first_layer: the model's first layer, or its `AbsentLayer`. A forward with token ids (on a last stage that has the
    embedding) does not change.
    """
    received: list[Tensor | None] = []

    def keep(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        received[:] = [options.get("inputs_embeds")]

    def insert(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        if (hidden_BSD := received.pop()) is None:
            return arguments, options
        if "hidden_states" in options:
            return arguments, options | {"hidden_states": hidden_BSD}
        return (hidden_BSD, *arguments[1:]), options

    backbone.register_forward_pre_hook(keep, with_kwargs=True)
    first_layer.register_forward_pre_hook(insert, with_kwargs=True)


@replaceable
def cut_backbone(config: PreTrainedConfig, name: str, returns_tuple: bool) -> BackboneCut:
    config = copy.deepcopy(config)
    if text_config(config)._attn_implementation == VARLEN:
        # the layers do not run here, and variable-length attention does not accept the device
        config._attn_implementation = "eager"
    with torch.device("meta"):
        decoder = Decoder(
            auto_class(config, multimodal=True).from_config(config, trust_remote_code=False), verify=False
        )
    backbone: Any = decoder.backbone
    embedding, layers = _children(decoder, name)
    beside = tuple(beside_language_model(decoder))
    owners: dict[int, int] = {}
    for number, layer in enumerate(decoder.layers()):
        for parameter in layer.parameters():
            if (owner := owners.setdefault(id(parameter), number)) != number:
                raise DependenceError(f"layers {owner} and {number} of {name} share weights: {UNCUT}")
    dtype, run = backbone.get_submodule(embedding).weight.dtype, RecordedRun(name, returns_tuple)
    for path in beside:
        remove_part(backbone, path)
    _replace_weights(decoder, layers, run)
    options: dict[str, Any] = {"use_cache": False, "return_dict": True}
    if "position_ids" in inspect.signature(backbone.forward).parameters:
        options["position_ids"] = torch.arange(IDS_BS.shape[1])[None]
    with torch.enable_grad(), reading(f"{name} cannot run without its layers: {UNCUT}", passes=DependenceError):
        output = backbone(input_ids=IDS_BS, **options).last_hidden_state
    run.require_chain(output, decoder.width)
    states = _kept_states(config, run)
    first, last = run.parts(decoder, embedding)
    set_part(backbone, embedding, PassThrough())
    for path in (*first, *last):
        remove_part(backbone, path)
    later = RecordedRun(name, returns_tuple)
    recorders: Any = backbone.get_submodule(layers)
    for recorder in recorders:
        recorder.run = later
    hidden_BSD = torch.rand(*IDS_BS.shape, decoder.width, dtype=dtype)
    with torch.enable_grad(), reading(f"{name} cannot run without its embeddings: {UNCUT}", passes=DependenceError):
        if input_embedding(decoder.pretrained) is not None:
            raise DependenceError(f"{name} finds its embedding in another place than '{embedding}': {UNCUT}")
        output = backbone(input_ids=None, inputs_embeds=hidden_BSD.requires_grad_(), **options).last_hidden_state
    run.require_same(later)
    if not torch.equal(output, later.outputs[-1]):
        raise DependenceError(
            f"{name} changes its hidden states after its last layer, and every stage would repeat that: {UNCUT}"
        )
    return BackboneCut(embedding, layers, first, last, beside, returns_tuple, states)


def remove_part(backbone: nn.Module, path: str) -> None:
    """Remove a part of another stage, a module or a parameter, from a backbone."""
    parent, _, leaf = path.rpartition(".")
    part = getattr(backbone.get_submodule(parent), leaf)
    if isinstance(part, nn.Parameter):
        delattr(backbone.get_submodule(parent), leaf)
        # a plain attribute, which a family may initialise
        setattr(backbone.get_submodule(parent), leaf, torch.empty(0))
    else:
        is_embedding = isinstance(part, nn.Embedding | RandomEmbedding)
        set_part(backbone, path, _AbsentEmbedding(part) if is_embedding else PassThrough())


def set_part(backbone: nn.Module, path: str, part: nn.Module) -> None:
    """Replace a part of a backbone."""
    parent, _, leaf = path.rpartition(".")
    setattr(backbone.get_submodule(parent), leaf, part)


class _AbsentEmbedding(nn.Module):
    """Replaces an embedding of positions, whose output is added to that of the token embedding."""

    def __init__(self, embedding: Any):
        super().__init__()
        self.width, self.dtype = embedding.weight.shape[1], embedding.weight.dtype

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        ids = embedding_ids(arguments, options)
        return torch.zeros(*ids.shape, self.width, dtype=self.dtype, device=ids.device)


def _children(decoder: Decoder, name: str) -> tuple[str, str]:
    """Return the names of the embedding and of the layers in the backbone.

    Raises ValueError unless both are children of the language model, which may be the backbone.
    """
    layers: list[nn.Module | None] = [layer_list(decoder.pretrained)]
    if layers[0] is None:
        layers = [child for child in decoder.language_model.children() if isinstance(child, nn.ModuleList)]
    wanted = {
        "an embedding": decoder.pretrained.get_input_embeddings(),
        "one list of layers": layers[0] if len(layers) == 1 else None,
    }
    names = {
        part: path
        for part, module in wanted.items()
        for path, child in children_of_language_model(decoder)
        if child is module
    }
    if missing := wanted.keys() - names.keys():
        raise DependenceError(
            f"the language model of {name} does not itself have {name_list(missing)}, but perhaps in another part: "
            f"{UNCUT}"
        )
    return names["an embedding"], names["one list of layers"]


@torch.no_grad()
def _replace_weights(decoder: Decoder, layers: str, run: RecordedRun) -> None:
    """Replace layers and embeddings by recorders, and give random values to all other weights of the backbone."""
    backbone = decoder.backbone
    modules: Any = backbone.get_submodule(layers)
    for number, layer in enumerate(modules):
        modules[number] = LayerRecorder(layer, number, run)
    for path, module in list(backbone.named_modules()):
        if isinstance(module, nn.Embedding):
            backbone.set_submodule(path, RandomEmbedding(module, run))
    decoder.keep_part(first=False, last=False)
    decoder.to_empty(device="cpu")
    for parameter in backbone.parameters():
        parameter.uniform_(0.5, 1.0)
    make_buffers(decoder)
    for path, child in children_of_language_model(decoder):
        child.register_forward_pre_hook(lambda *_, path=path: run.events.append(path))


def _kept_states(config: PreTrainedConfig, run: RecordedRun) -> dict[int, int]:
    """Return, by layer, the earlier layer whose keys and values it reads.

    Raises ValueError if layers get a dict in which they can keep such states, but their numbers are not known.
    """
    keys = {
        key
        for arguments in run.arguments
        for key, value in arguments.items()
        if isinstance(value, MutableMapping) and not value
    }
    if not keys:
        return {}
    states = ModelFacts(config).shared_states
    if states is None:
        raise DependenceError(f"the layers of {run.name} share states in {name_list(keys)}: {UNCUT}")
    return states
