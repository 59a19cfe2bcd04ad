"""The parts and inputs of a vision-language model that a language model does not have.

A family's processor writes one placeholder token into the text for each feature of an image. The backbone runs the
vision tower, and replaces the embeddings of the placeholders by the features, in the order of the flattened rows.
Some families (Qwen-VL, GLM-V, …) have rotary positions in several axes, such as time, height and width.

transformers knows which module of the backbone is the language model and which module is the tower. All other parts
of the backbone are the projector. If there are no other parts, the projector is the last part of the tower: the
modules that end in a matrix with the width of the language model (Qwen-VL's mergers).

B rows, S columns per row, A axes of positions.
"""

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stillhouse.display import name_list
from stillhouse.models.families import outermost_lists, placeholder_ids, text_config
from stillhouse.models.layer_hooks import hooked
from stillhouse.models.lm_head import input_embedding
from stillhouse.models.model_checks import typename

#: the name, in a micro-batch's inputs, of the positions in several axes [B, S, A]
AXES = "axis_position_ids"
#: the names under which processors return the kind of each token, [B, S]; text has kind 0
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
#: the name of the decoder's argument with the tensors of images and other media
MEDIA_ARGUMENT = "images"
LANGUAGE, PROJECTOR, VISION = "language", "projector", "vision"


def train_parts(decoder: Any, parts: Collection[str]) -> None:
    """Freeze the parameters of a `Decoder` except those of the parts `parts` (LANGUAGE, PROJECTOR, VISION).

    Raises ValueError for a part that the decoder does not have.
    """
    beside = beside_language_model(decoder)
    tower = next((part for part in beside.values() if part is decoder.pretrained.get_encoder(modality="image")), None)
    by_part: dict[str, list[nn.Parameter]] = {}
    if tower is not None:
        names = {id(module): name for name, module in decoder.backbone.named_modules()}
        others = [part for part in beside.values() if part is not tower and "audio" not in names.get(id(part), "")]
        projector = _parameters(others) or _parameters(_last_parts(tower, text_config(decoder.config).hidden_size))
        in_projector = {id(parameter) for parameter in projector}
        by_part[PROJECTOR] = projector
        by_part[VISION] = [weight for weight in tower.parameters() if id(weight) not in in_projector]
    if missing := [part for part in parts if part != LANGUAGE and not by_part.get(part)]:
        present = [LANGUAGE, *(part for part in (PROJECTOR, VISION) if by_part.get(part))]
        raise ValueError(
            f"{typename(decoder.pretrained)} has no part called {name_list(missing)}: expected some of "
            f"{name_list(present)}"
        )
    trained = {id(parameter) for part in parts for parameter in by_part.get(part, ())}
    outside = {id(parameter) for parameter in _parameters(beside.values())}
    for parameter in decoder.parameters():
        if not (id(parameter) in trained if id(parameter) in outside else LANGUAGE in parts):
            parameter.requires_grad_(False)


def beside_language_model(decoder: Any) -> dict[str, Any]:
    """Return the modules and parameters of a `Decoder`'s backbone outside its language model, by their names."""
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
    """Raise ValueError if the parts to train include the tower or the projector. This is called if no document for
    training has an image: only the optimizer's weight decay would change these parts then.
    """
    if any(part != LANGUAGE for part in parts):
        raise ValueError(
            f"got {name_list(parts)}, and no document of data.train has an image: expected [{LANGUAGE}], or "
            "documents with images"
        )


@contextmanager
def image_weights_reached(decoder: Any) -> Iterator[None]:
    """Within the block, backward through the token embeddings gives gradients of 0 to the trained weights of towers
    and projectors. A micro-batch without images does not run the vision tower. But under FSDP, all processes must run
    the backward of the same layers, and sum the gradients of the same weights.
    """
    if (embedding := input_embedding(decoder.pretrained)) is None or not torch.is_grad_enabled():
        yield
        return

    def reach(module: nn.Module, arguments: Any, embedded: Tensor) -> Tensor:
        beside = _parameters(beside_language_model(decoder).values())
        weights = [weight for weight in beside if weight.requires_grad]
        return _Reached.apply(embedded, *weights) if weights else embedded

    with hooked(embedding.register_forward_hook(reach)):
        yield


def _parameters(parts: Iterable[nn.Module | nn.Parameter]) -> list[nn.Parameter]:
    return [weight for part in parts for weight in ([part] if isinstance(part, nn.Parameter) else part.parameters())]


def _last_parts(tower: nn.Module, width: int) -> list[nn.Module]:
    """Return the children of a tower that have no convolution or embedding and whose last matrix has `width` rows,
    and the lists in the tower whose members have the classes of these children.
    """
    single: list[nn.Module] = []
    for child in tower.children():
        parts = list(child.modules())
        widths = [part.out_features for part in parts if isinstance(part, nn.Linear)]
        has_inputs = any(isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Embedding) for part in parts)
        if widths[-1:] == [width] and not has_inputs and not isinstance(child, nn.ModuleList):
            single.append(child)
    kinds = tuple({type(module) for module in single})
    lists = outermost_lists(tower)
    return [*single, *(members for members in lists if all(isinstance(member, kinds) for member in members))]


class _Reached(torch.autograd.Function):
    """Returns a tensor unchanged and gives all weights gradients of 0 in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros_like(weight) for weight in ctx.saved_tensors)


def model_media(model: PreTrainedModel, backbone: nn.Module, images: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the images as arguments of the backbone, with floating-point values in the dtype of the model. Raises
    ValueError if the backbone reads no images.
    """
    if images and not images.keys() & inspect.signature(backbone.forward).parameters.keys():
        raise ValueError(
            f"{typename(model)} got {name_list(images)}, and its backbone reads none of them: expected a "
            "vision-language model, or documents without images"
        )
    return {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in images.items()}


def read_token_inputs(backbone: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs. Kinds of tokens (`TOKEN_TYPES`) are omitted if the backbone's forward does not accept them:
    processors return kinds even if only the positions depend on them.
    """
    named = inspect.signature(backbone.forward).parameters
    return {name: value for name, value in inputs.items() if name not in TOKEN_TYPES or name in named}


def model_positions(position_ids_BS: Tensor, axes_BSA: Tensor | None, *, separates: bool) -> Tensor:
    """Return the positions that the backbone gets: [B, S], or [A, B, S] for several axes.

    separates: whether the backbone separates documents by the text positions. If so, the text positions precede the
        A axes in the result, which is [1 + A, B, S].
    """
    if axes_BSA is None:
        return position_ids_BS
    axes_ABS = axes_BSA.permute(2, 0, 1)
    if not separates:
        return axes_ABS
    return torch.cat([position_ids_BS.expand(axes_BSA.shape[:2])[None], axes_ABS])


def placeholder_mask(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Tensor | None:
    """Return which tokens are placeholders of image features, bool [B, S], or None if the inputs do not show it."""
    ids_BS = inputs.get("input_ids")
    marks = [inputs[name] != 0 for name in TOKEN_TYPES if inputs.get(name) is not None]
    marks += [] if ids_BS is None else [ids_BS == number for number in placeholder_ids(model)]
    return reduce(or_, marks) if marks else None


def padded_with_text(ids_BS: Tensor, is_placeholder_BS: Tensor, is_padding_BS: Tensor) -> Tensor:
    """Return token ids in which the first token that is no placeholder replaces all placeholders in padding."""
    ids_T, is_text_T = ids_BS.flatten(), ~is_placeholder_BS.flatten()
    first = is_text_T.int().argmax()
    return torch.where(is_padding_BS & is_placeholder_BS, ids_T[first], ids_BS)
