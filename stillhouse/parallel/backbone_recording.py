"""Records what a backbone passes to its layers, in the runs with which `backbone_cut.py` proves its stages.

B rows, S columns, D width.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stillhouse.display import name_list
from stillhouse.models import Decoder
from stillhouse.models.lm_head import PassThrough

#: the advice in error messages for models that cannot be cut into stages
UNCUT = "expected pipeline=1, and no separate layout for a teacher"
#: the token ids of the runs
IDS_BS = torch.arange(3, 15).view(3, 4)


class DependenceError(ValueError):
    """A layer needs something that another stage has or computes."""


class RecordedRun:
    """What a backbone passes to its layers in a run.

    inputs: by layer, the hidden states. arguments: by layer, all other arguments. outputs: by layer, random values.
    events: the numbers of layers and the names of parts with weights, in the order in which they ran.
    embeddings: the outputs of embeddings.
    """

    def __init__(self, name: str, returns_tuple: bool):
        self.name, self.returns_tuple = name, returns_tuple
        self.inputs: list[Tensor] = []
        self.arguments: list[dict[str, Any]] = []
        self.outputs: list[Tensor] = []
        self.events: list[int | str] = []
        self.embeddings: list[Tensor] = []

    def layer(self, number: int, hidden_BSD: Tensor, arguments: dict[str, Any]) -> Any:
        self.events.append(number)
        self.inputs.append(hidden_BSD)
        self.arguments.append(arguments)
        self.outputs.append(torch.rand_like(hidden_BSD).requires_grad_())
        output = self.outputs[-1].clone()  # some backbones add to it in place
        # the second element stands for anything that a layer could hand to the next one
        return (output, torch.zeros((), requires_grad=True)) if self.returns_tuple else output

    def require_chain(self, output: Tensor, width: int) -> None:
        """Raise ValueError unless the layers ran in order, and each one read only the output of the one before."""
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
                raise ValueError(f"layer {number} of {self.name} does not read the output of the one before: {UNCUT}")
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
            raise DependenceError(f"{self.name} reads more than its last layer's output after the layers: {UNCUT}")

    def parts(self, decoder: Decoder, embedding: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the `first` and the `last` parts (`BackboneCut`).

        embedding: the name of the token embedding, which is left out.
        """
        places = [place for place, event in enumerate(self.events) if isinstance(event, int)]
        before, after = (
            dict.fromkeys(str(event) for event in events if event != embedding)
            for events in (self.events[: places[0]], self.events[places[-1] + 1 :])
        )
        weighted = {path for path, child in children_of_language_model(decoder) if has_weights(child)}
        clear = before.keys() ^ after.keys()
        if unclear := {path for path in weighted if path not in clear and path != embedding}:
            raise DependenceError(
                f"{self.name} runs {name_list(unclear)} between its layers, or before and after them: {UNCUT}"
            )
        return tuple(path for path in before if path in weighted), tuple(path for path in after if path in clear)

    def require_same(self, later: "RecordedRun") -> None:
        """Raise ValueError unless the layers of a later stage get the same arguments."""
        for number, (arguments, later_arguments) in enumerate(zip(self.arguments, later.arguments, strict=True)):
            for key in arguments:
                values, stage_values = _tensors(arguments[key]), _tensors(later_arguments.get(key))
                pairs = zip(values, stage_values, strict=False)
                if len(values) != len(stage_values) or not all(torch.equal(*pair) for pair in pairs):
                    raise DependenceError(
                        f"layer {number} of {self.name} reads '{key}', which only the first stage can compute: "
                        f"{UNCUT}"
                    )


class LayerRecorder(PassThrough):
    """Replaces a layer in the runs of the proof."""

    def __init__(self, layer: nn.Module, number: int, run: RecordedRun):
        super().__init__()
        copy_attributes(layer, self)
        self.names = list(inspect.signature(layer.forward).parameters)
        self.number, self.run = number, run

    def forward(self, *arguments: Any, **options: Any) -> Any:
        named = dict(zip(self.names, arguments, strict=False)) | options
        return self.run.layer(self.number, named.pop(self.names[0]), named)


class RandomEmbedding(nn.Module):
    """Replaces an embedding in the run of the first stage."""

    def __init__(self, embedding: nn.Embedding, run: RecordedRun):
        super().__init__()
        self.run = run
        # some backbones read the row of padding; all rows share one number, which transformers cannot initialise
        weight: Any = torch.zeros((), dtype=embedding.weight.dtype).expand(embedding.weight.shape)
        weight._is_hf_initialized = True
        self.weight = weight

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        ids = embedding_ids(arguments, options)
        random = torch.rand(*ids.shape, self.weight.shape[1], dtype=self.weight.dtype)
        self.run.embeddings.append(random.requires_grad_())
        return self.run.embeddings[-1].clone()  # some backbones scale it in place


def children_of_language_model(decoder: Decoder) -> Iterator[tuple[str, nn.Module]]:
    """Yield the children of the language model, with their names in the backbone."""
    (prefix,) = (path for path, module in decoder.backbone.named_modules() if module is decoder.language_model)
    for path, child in decoder.language_model.named_children():
        yield f"{prefix}.{path}" if prefix else path, child


def has_weights(module: nn.Module) -> bool:
    is_embedding = any(isinstance(part, RandomEmbedding) for part in module.modules())
    return is_embedding or next(module.parameters(), None) is not None


def embedding_ids(arguments: Sequence[Any], options: Mapping[str, Any]) -> Tensor:
    """Return the integers among the arguments of an embedding, which may also get a mask."""
    return next(tensor for tensor in _tensors([*arguments, options]) if tensor.dtype == torch.int64)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


def copy_attributes(layer: nn.Module, into: nn.Module) -> None:
    """Copy the attributes of a layer that are neither private nor modules, such as its kind."""
    vars(into).update({name: value for name, value in vars(layer).items() if not name.startswith("_")})
