"""Finds out whether the layers of a backbone can run in different pipeline stages.

A stage runs the code of the whole backbone, including masks and position embeddings, but only the layers of this
stage. On a later stage, the received hidden states replace the input of the model's first layer. This is correct
only if no layer reads any other value that another stage computes.

Two runs of the backbone prove this. Recorders replace the layers. The first run gets token ids, as on the first
stage. The second run gets hidden states and lacks the parts of other stages, as on later stages. The backbone must
pass each layer's output to the next layer. All other arguments of the layers must be equal in both runs, and must not
depend on embeddings or on other layers. In the two runs, the backbone lacks the parts outside the language model,
such as a vision tower, which only the first stage has. The proof of their media reader covers these parts.

B rows, S columns, D width.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
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
from stillhouse.models.pretrained import auto_class, initialize_buffers
from stillhouse.models.vision_language import beside_language_model

#: the advice in error messages for models that cannot be cut into stages
UNCUT = "expected pipeline=1, and no key parallel for a teacher"
#: the token ids of the two runs
IDS_BS = torch.arange(3, 15).view(3, 4)


@dataclass(frozen=True)
class BackboneCut:
    """The names of a backbone's parts.

    first: the parts with weights that run before the first layer, except the embedding.
    last: the parts with weights that run after the last layer.
    beside: the parts outside the language model, which only the first stage has: vision towers and projectors.
    returns_tuple: whether the backbone reads a layer's output as a tuple that begins with the hidden states.
    states: maps the number of each layer that reads an earlier layer's keys and values to the earlier layer's number.
    """

    embedding: str
    layers: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    beside: tuple[str, ...]
    returns_tuple: bool
    states: Mapping[int, int]


class AbsentLayer(PassThrough):
    """Replaces a layer of another stage. It keeps the layer's public attributes, which the backbone may read."""

    def __init__(self, layer: nn.Module, returns_tuple: bool):
        super().__init__()
        vars(self).update({name: value for name, value in vars(layer).items() if not name.startswith("_")})
        self.returns_tuple = returns_tuple

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states, None) if self.returns_tuple else hidden_states


def require_cuttable(config: PreTrainedConfig) -> BackboneCut:
    """Return the parts of a model's backbone. Raises ValueError if the backbone cannot be cut into stages."""
    name, errors = f"model type '{config.model_type}'", list[ValueError]()
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
    try:
        require_cuttable(config)
    except ValueError:
        return False
    return True


def continue_with_received(backbone: nn.Module, first_layer: nn.Module) -> None:
    """Let the first layer of a backbone, or its `AbsentLayer`, read the `inputs_embeds` of the backbone unchanged.

    A forward with token ids does not change. Only a last stage that has the embedding can get token ids (in a proof).
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
        # the layers do not run here, and variable-length attention accepts only a CUDA device
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
    states: dict[int, int] = {}
    named = [named for arguments in run.arguments for named in arguments.items()]
    # layers can keep states for later layers in a dict that the backbone passes to all layers
    if keys := {key for key, value in named if isinstance(value, MutableMapping) and not value}:
        if (shared := ModelFacts(config).shared_states) is None:
            raise DependenceError(f"the layers of {name} share states in {name_list(keys)}: {UNCUT}")
        states = shared
    first, last = run.parts(decoder, embedding)
    backbone.set_submodule(embedding, PassThrough())
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
            f"{name} changes its hidden states after its last layer, and every stage would repeat this: {UNCUT}"
        )
    return BackboneCut(embedding, layers, first, last, beside, returns_tuple, states)


def remove_part(backbone: nn.Module, path: str) -> None:
    """Remove a module or a parameter of another stage from a backbone."""
    path, _, leaf = path.rpartition(".")
    parent = backbone.get_submodule(path)
    part = getattr(parent, leaf)
    if isinstance(part, nn.Parameter):
        delattr(parent, leaf)
        setattr(parent, leaf, torch.empty(0))  # the family's code may initialise this attribute
    else:
        is_embedding = isinstance(part, nn.Embedding | _RandomEmbedding)
        setattr(parent, leaf, _AbsentEmbedding(part) if is_embedding else PassThrough())


class _AbsentEmbedding(nn.Module):
    """Replaces an embedding of positions. Returns zeros, which have no effect when the model adds them."""

    def __init__(self, embedding: Any):
        super().__init__()
        self.width, self.dtype = embedding.weight.shape[1], embedding.weight.dtype

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        ids = _embedding_ids(arguments, options)
        return torch.zeros(*ids.shape, self.width, dtype=self.dtype, device=ids.device)


def _children(decoder: Decoder, name: str) -> tuple[str, str]:
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
        for path, child in _children_of_language_model(decoder)
        if child is module
    }
    if missing := wanted.keys() - names.keys():
        raise DependenceError(
            f"the language model of {name} does not contain {name_list(missing)} as direct children: {UNCUT}"
        )
    return names["an embedding"], names["one list of layers"]


@torch.no_grad()
def _replace_weights(decoder: Decoder, layers: str, run: "RecordedRun") -> None:
    """Replace layers and embeddings by recorders, and give random values to all other weights of the backbone."""
    backbone = decoder.backbone
    modules: Any = backbone.get_submodule(layers)
    for number, layer in enumerate(modules):
        modules[number] = _LayerRecorder(layer, number, run)
    for path, module in list(backbone.named_modules()):
        if isinstance(module, nn.Embedding):
            backbone.set_submodule(path, _RandomEmbedding(module, run))
    decoder.keep_part(first=False, last=False)
    decoder.to_empty(device="cpu")
    for parameter in backbone.parameters():
        parameter.uniform_(0.5, 1.0)
    initialize_buffers(decoder, decoder.pretrained, decoder.mtp_layers())
    for path, child in _children_of_language_model(decoder):
        child.register_forward_pre_hook(lambda *_, path=path: run.events.append(path))


class DependenceError(ValueError):
    """A layer needs a part or a value that another stage has or computes."""


@dataclass
class RecordedRun:
    """The values that a backbone passes to its layers in a run.

    inputs: the hidden states that each layer gets.
    arguments: the arguments of each layer, without the hidden states.
    outputs: the random values that each recorder returns.
    events: the numbers of layers and the names of the language model's other parts, in the order in which they ran.
    embeddings: the outputs of embeddings.
    """

    name: str
    returns_tuple: bool
    inputs: list[Tensor] = field(default_factory=list)
    arguments: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    events: list[int | str] = field(default_factory=list)
    embeddings: list[Tensor] = field(default_factory=list)

    def require_chain(self, output: Tensor, width: int) -> None:
        """Raise ValueError unless the layers ran in order, and each layer read only the previous layer's output."""
        numbers = [event for event in self.events if isinstance(event, int)]
        if numbers != list(range(len(numbers))) or not numbers:
            raise ValueError(f"{self.name} runs its layers in the order {numbers}: {UNCUT}")
        if (shape := tuple(self.inputs[0].shape)) != (*IDS_BS.shape, width):
            raise DependenceError(
                f"the layers of {self.name} pass several hidden states per token (shape {list(shape)} for a batch of "
                f"{list(IDS_BS.shape)} tokens and hidden states of width {width}): {UNCUT}"
            )
        for number, (before, after) in enumerate(zip(self.outputs, self.inputs[1:], strict=False), start=1):
            if before.shape != after.shape or not torch.equal(before, after):
                raise ValueError(f"layer {number} of {self.name} does not read the previous layer's output: {UNCUT}")
        for number, arguments in enumerate(self.arguments):
            for key, value in arguments.items():
                if any(tensor.requires_grad for tensor in _tensors(value)):
                    raise DependenceError(
                        f"layer {number} of {self.name} reads '{key}', which is computed from embeddings or by "
                        f"another layer: {UNCUT}"
                    )
        others = [*self.embeddings, *self.outputs[:-1]]
        gradients = torch.autograd.grad(output.float().sum(), others, allow_unused=True)
        if any(gradient is not None for gradient in gradients):
            raise DependenceError(
                f"after its layers, {self.name} reads other values than the last layer's output: {UNCUT}"
            )

    def parts(self, decoder: Decoder, embedding: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the parts `first` and `last` of a `BackboneCut`. embedding: the token embedding's name"""
        places = [place for place, event in enumerate(self.events) if isinstance(event, int)]
        before, after = (
            dict.fromkeys(str(event) for event in events if event != embedding)
            for events in (self.events[: places[0]], self.events[places[-1] + 1 :])
        )
        weighted = {
            path
            for path, child in _children_of_language_model(decoder)
            if any(isinstance(part, _RandomEmbedding) for part in child.modules())
            or any(True for _ in child.parameters())
        }
        clear = before.keys() ^ after.keys()
        if unclear := {path for path in weighted if path not in clear and path != embedding}:
            raise DependenceError(
                f"{self.name} runs {name_list(unclear)} between its layers, or before and after them: {UNCUT}"
            )
        return tuple(path for path in before if path in weighted), tuple(path for path in after if path in clear)

    def require_same(self, later: "RecordedRun") -> None:
        """Raise ValueError unless the layers get the same arguments in this run and in the run of a later stage."""
        for number, (arguments, later_arguments) in enumerate(zip(self.arguments, later.arguments, strict=True)):
            for key in arguments:
                values, stage_values = _tensors(arguments[key]), _tensors(later_arguments.get(key))
                pairs = zip(values, stage_values, strict=False)
                if len(values) != len(stage_values) or not all(torch.equal(*pair) for pair in pairs):
                    raise DependenceError(
                        f"layer {number} of {self.name} reads '{key}', which only the first stage can compute: "
                        f"{UNCUT}"
                    )


class _LayerRecorder(AbsentLayer):
    def __init__(self, layer: nn.Module, number: int, run: RecordedRun):
        super().__init__(layer, run.returns_tuple)
        self.names = list(inspect.signature(layer.forward).parameters)
        self.number, self.run = number, run

    def forward(self, *arguments: Any, **options: Any) -> Any:
        named = dict(zip(self.names, arguments, strict=False)) | options
        hidden_BSD: Tensor = named.pop(self.names[0])
        output = torch.rand_like(hidden_BSD).requires_grad_()
        run = self.run
        run.events.append(self.number)
        run.inputs.append(hidden_BSD)
        run.arguments.append(named)
        run.outputs.append(output)
        # a clone, because some backbones add to the output in place. The tuple's second element represents any value
        # that a layer could pass to the next layer
        return (output.clone(), torch.zeros((), requires_grad=True)) if self.returns_tuple else output.clone()


class _RandomEmbedding(nn.Module):
    def __init__(self, embedding: nn.Embedding, run: RecordedRun):
        super().__init__()
        self.run = run
        # some backbones read the padding token's row. All rows share one stored number, so transformers must not
        # initialise the weight
        weight: Any = torch.zeros((), dtype=embedding.weight.dtype).expand(embedding.weight.shape)
        weight._is_hf_initialized = True
        self.weight = weight

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        ids = _embedding_ids(arguments, options)
        random = torch.rand(*ids.shape, self.weight.shape[1], dtype=self.weight.dtype)
        self.run.embeddings.append(random.requires_grad_())
        return self.run.embeddings[-1].clone()  # some backbones scale this output in place


def _children_of_language_model(decoder: Decoder) -> Iterator[tuple[str, nn.Module]]:
    (prefix,) = (path for path, module in decoder.backbone.named_modules() if module is decoder.language_model)
    for path, child in decoder.language_model.named_children():
        yield f"{prefix}.{path}" if prefix else path, child


def _embedding_ids(arguments: Sequence[Any], options: Mapping[str, Any]) -> Tensor:
    """Return the token ids among the arguments of an embedding, which may also get a mask."""
    return next(tensor for tensor in _tensors([*arguments, options]) if tensor.dtype == torch.int64)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []
