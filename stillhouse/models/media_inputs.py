"""The inputs of a multimodal backbone beside its token ids: images, kinds of tokens, and positions of several axes.

The processor of a family repeats a placeholder token in the text for each feature of an image. The backbone runs the
vision tower, and replaces the embeddings of the placeholders by the features, in the order of the flattened rows.
Some families (Qwen-VL, GLM-V, …) rotate by positions of several axes, such as time, height and width.

B rows, S columns per row, A axes of positions.
"""

import inspect
from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stillhouse.display import name_list
from stillhouse.models.model_checks import describe

#: the name of the positions of several axes, [B, S, A], among the inputs of a micro-batch
AXES = "axis_position_ids"
#: the names of the kinds of tokens, [B, S], as processors return them: 0 for text
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
#: the name of the decoder's argument with the tensors of images and other media
MEDIA_ARGUMENT = "images"
#: the names of placeholder tokens in transformers' configurations
_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")


def model_media(model: PreTrainedModel, backbone: nn.Module, images: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the images as arguments of the backbone: floating-point values in the dtype of its weights.

    Raises ValueError if the backbone reads no images.
    """
    if images and not images.keys() & _parameters(backbone):
        raise ValueError(
            f"{describe(model)} got {name_list(images)}, and its backbone reads none of them: expected a "
            "vision-language model, or documents without images"
        )
    return {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in images.items()}


def read_token_inputs(backbone: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs without the kinds of tokens that the backbone's forward does not name.

    A processor returns them also for families in which only the positions depend on them.
    """
    named = _parameters(backbone)
    return {name: value for name, value in inputs.items() if name not in TOKEN_TYPES or name in named}


def axis_positions(
    backbone: nn.Module, input_ids_S: Tensor, token_types_S: Tensor | None, images: Mapping[str, Tensor]
) -> Tensor | None:
    """Return the positions of one document in each axis, [S, A] int64; None for a family with one axis.

    All tensors are on the CPU. images: those of the document, as its processor returns them. The family's own
    function computes the positions, and reads no weights.
    """
    function = getattr(backbone, "get_rope_index", None)
    if function is None:
        return None
    types_S = torch.zeros_like(input_ids_S) if token_types_S is None else token_types_S
    arguments = {"input_ids": input_ids_S[None], **dict.fromkeys(TOKEN_TYPES, types_S[None]), **images}
    names = inspect.signature(function).parameters
    with torch.device("cpu"):
        positions_A1S, _ = function(**{name: value for name, value in arguments.items() if name in names})
    return positions_A1S[:, 0].T.contiguous()


def model_positions(position_ids_BS: Tensor, axes_BSA: Tensor | None, *, separates: bool) -> Tensor:
    """Return the positions that the backbone gets: [B, S], or [1 + A, B, S] or [A, B, S] with several axes.

    separates: whether the backbone separates documents by the text positions, which are then the first axis.
    """
    if axes_BSA is None:
        return position_ids_BS
    axes_ABS = axes_BSA.permute(2, 0, 1)
    if not separates:
        return axes_ABS
    return torch.cat([position_ids_BS.expand(axes_BSA.shape[:2])[None], axes_ABS])


def is_placeholder(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Tensor | None:
    """Return which tokens stand for features of images, bool [B, S]; None if neither ids nor kinds say it."""
    ids_BS = inputs.get("input_ids")
    marks = [inputs[name] != 0 for name in TOKEN_TYPES if inputs.get(name) is not None]
    if ids_BS is not None:
        marks += [ids_BS == number for number in placeholder_ids(model)]
    return reduce(or_, marks) if marks else None


def placeholder_ids(model: PreTrainedModel) -> list[int]:
    """Return the ids of the tokens that stand for features of images, videos and audio in the model's config."""
    numbers = (getattr(model.config, name, None) for name in _PLACEHOLDERS)
    return [number for number in numbers if number is not None]


def padded_with_text(ids_BS: Tensor, is_placeholder_BS: Tensor, is_padding_BS: Tensor) -> Tensor:
    """Return the token ids with another padding where it is a placeholder, for which there is no feature.

    The padding is then the first token that is no placeholder.
    """
    ids_T, is_text_T = ids_BS.flatten(), ~is_placeholder_BS.flatten()
    first = is_text_T.int().argmax()
    return torch.where(is_padding_BS & is_placeholder_BS, ids_T[first], ids_BS)


def _parameters(backbone: nn.Module) -> set[str]:
    return set(inspect.signature(backbone.forward).parameters)
