"""Which parts of a vision-language model are trained: its language model, its projector, its vision tower.

The parts are found by the structure of the modules. transformers says which module of the backbone is the language
model and which one is the tower. The projector is what else the backbone has; if there is nothing else, it is the
last part of the tower: the modules that end in a matrix with the width of the language model (Qwen-VL's mergers).
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stillhouse.display import name_list
from stillhouse.models.families import outermost_lists, text_config
from stillhouse.models.layer_hooks import hooked
from stillhouse.models.lm_head import input_embedding
from stillhouse.models.model_checks import describe

LANGUAGE, PROJECTOR, VISION = "language", "projector", "vision"


def train_parts(decoder: Any, parts: Collection[str]) -> None:
    """Freeze the parameters of all parts of a `Decoder` that are not among `parts`.

    Raises ValueError, naming the model, if it has no such part.
    """
    by_part = _image_parts(decoder)
    if missing := [part for part in parts if part != LANGUAGE and not by_part.get(part)]:
        present = [LANGUAGE, *(part for part in (PROJECTOR, VISION) if by_part.get(part))]
        raise ValueError(
            f"{describe(decoder.pretrained)} has no part that is its {name_list(missing)}: expected some of "
            f"{name_list(present)}"
        )
    trained = {id(parameter) for part in parts for parameter in by_part.get(part, ())}
    outside = {id(parameter) for parameter in image_parameters(decoder)}
    for parameter in decoder.parameters():
        if not (id(parameter) in trained if id(parameter) in outside else LANGUAGE in parts):
            parameter.requires_grad_(False)


def image_parameters(decoder: Any) -> Iterator[nn.Parameter]:
    """Yield the parameters of a `Decoder` that are outside of its language model: those of towers and projectors."""
    for part in beside_language_model(decoder).values():
        yield from [part] if isinstance(part, nn.Parameter) else part.parameters()


def beside_language_model(decoder: Any) -> dict[str, Any]:
    """Return the modules and parameters of a `Decoder`'s backbone beside its language model, by their names."""
    language, module, prefix = decoder.language_model, decoder.backbone, ""
    if text_config(decoder.config) is decoder.config:
        return {}
    beside: dict[str, Any] = {}
    while module is not language:
        children = dict(module.named_children())
        inner = next(name for name, child in children.items() if any(part is language for part in child.modules()))
        others = {**dict(module.named_parameters(recurse=False)), **children}
        del others[inner]
        beside |= {prefix + name: part for name, part in others.items()}
        module, prefix = children[inner], f"{prefix}{inner}."
    return beside


def require_language_alone(parts: Collection[str]) -> None:
    """Raise ValueError if tower or projector are to be trained, and no document for training has an image: then only
    the optimizer's weight decay would change them.
    """
    if any(part != LANGUAGE for part in parts):
        raise ValueError(
            f"got {name_list(parts)}, and no document of data.train has an image: expected [{LANGUAGE}], or "
            "documents with images"
        )


@contextmanager
def image_weights_reached(decoder: Any) -> Iterator[None]:
    """Within the block, embeddings of tokens give gradients of 0 to the trained weights of towers and projectors.

    A micro-batch without images does not run the vision tower. But under FSDP, all processes must run the backward of
    the same layers, and sum the gradients of the same weights.
    """
    embedding = input_embedding(decoder.pretrained)
    if embedding is None or not torch.is_grad_enabled():
        yield
        return

    def reach(module: nn.Module, arguments: Any, embedded: Tensor) -> Tensor:
        weights = [weight for weight in image_parameters(decoder) if weight.requires_grad]
        return _Reached.apply(embedded, *weights) if weights else embedded

    with hooked(embedding.register_forward_hook(reach)):
        yield


def _image_parts(decoder: Any) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of the vision tower and of the projector."""
    beside = list(beside_language_model(decoder).values())
    tower = next((part for part in beside if part is decoder.pretrained.get_encoder(modality="image")), None)
    if tower is None:
        return {}
    names = {id(module): name for name, module in decoder.backbone.named_modules()}
    projectors = [part for part in beside if part is not tower and "audio" not in names.get(id(part), "")]
    projectors = projectors or _last_parts(tower, text_config(decoder.config).hidden_size)
    projector = [
        parameter
        for part in projectors
        for parameter in ([part] if isinstance(part, nn.Parameter) else part.parameters())
    ]
    in_projector = {id(parameter) for parameter in projector}
    return {PROJECTOR: projector, VISION: [weight for weight in tower.parameters() if id(weight) not in in_projector]}


def _last_parts(tower: nn.Module, width: int) -> list[nn.Module]:
    """Return the parts of a tower that end in a matrix with this number of rows, and no convolution or embedding."""
    lists = list(outermost_lists(tower))
    single = [child for child in tower.children() if not isinstance(child, nn.ModuleList) and _ends_in(child, width)]
    kinds = tuple({type(module) for module in single})
    return [*single, *(members for members in lists if all(isinstance(member, kinds) for member in members))]


def _ends_in(module: nn.Module, width: int) -> bool:
    parts = list(module.modules())
    matrices = [part for part in parts if isinstance(part, nn.Linear)]
    first = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
    return (
        bool(matrices) and matrices[-1].out_features == width and not any(isinstance(part, first) for part in parts)
    )


class _Reached(torch.autograd.Function):
    """Returns a tensor unchanged and gives all weights gradients of 0 in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros_like(weight) for weight in ctx.saved_tensors)
