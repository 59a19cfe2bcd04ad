"""Context parallelism by Ulysses (Jacobs et al. 2023, arXiv:2309.14509): each rank has a part of every sequence.

Ranks exchange data only inside attention. Before attention, a rank has all heads for its part of the sequence. After
an all-to-all, it has a part of the heads for the global sequence. Then transformers' attention function runs with the
masks of the global sequence, for example for packed documents. Another all-to-all restores the distribution.

In a vision-language backbone, everything before the language model gets whole sequences on every rank, with all media
of the micro-batch. Then each rank gives only its columns to the language model. So media need not be divided among
ranks, and the sum over ranks of the tower's gradients is the tower's gradient for the whole sequences.

B rows, S tokens of the global sequence, H heads, D width of a head.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_masks_for_generate
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from stillhouse.models import Decoder
from stillhouse.models.families import HEADS, ModelFacts, text_config
from stillhouse.models.forward_modes import VARLEN
from stillhouse.models.vision_language import TOKEN_TYPES

_ULYSSES = "ulysses_"  # the prefix of the names of the attention functions in transformers' registry
#: the inputs [B, S] of a backbone apart from position ids
_OF_TOKENS = ("input_ids", *TOKEN_TYPES)


def apply_context_parallel(decoder: Decoder, group: ProcessGroup, tensor: int = 1) -> None:
    """Make a decoder accept this rank's part of each sequence, with the position ids of that part.

    tensor: the degree of tensor parallelism, which also divides the heads. Raises ValueError for a model whose
    attention does not support context parallelism, and for degrees that do not divide the heads.
    """
    config, ranks = text_config(decoder.config), group.size()
    inner, attention = config._attn_implementation, decoder.packing.attention
    if inner not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        raise ValueError(
            f"attention '{inner}' under context={ranks}: expected attention sdpa, or another function that "
            "transformers registers, such as flash_attention_2"
        )
    language, is_part = decoder.language_model, config is not decoder.config
    layers = getattr(language, "layers", None) if is_part or language is decoder.backbone else None
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"the backbone of model type '{config.model_type}' has no list `layers`: expected context=1")
    if ModelFacts(config).mixes_tokens_by_score:
        raise ValueError(
            f"the attention of model type '{config.model_type}' selects tokens by scores over a whole sequence "
            "(index_topk), of which a context rank has a part: expected context=1"
        )
    with attention.without_lengths():
        joins_rows = {VARLEN: True, attention.usual: decoder.packing.joins_rows}
    decoder.packing.shard_documents()
    if size := ModelFacts(config).indivisible_size(HEADS, ranks * tensor):
        raise ValueError(
            f"context={ranks} × tensor={tensor} does not divide the {size[0]}={size[1]} of model type "
            f"'{config.model_type}': expected degrees whose product divides it"
        )
    names = {function: f"{_ULYSSES}{function}_{group.group_name}" for function in attention.names}
    for function, name in names.items():
        AttentionInterface.register(name, partial(_ulysses, function, group, joins_rows[function]))
        if function in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[function])
    attention.rename(names)
    dtype = next(decoder.parameters()).dtype

    def masks(inputs_embeds: Tensor, position_ids: Tensor) -> dict[str, Any]:
        mask = create_masks_for_generate(config, inputs_embeds, None, None, position_ids=position_ids)
        return {"attention_mask": mask}

    global_masks = partial(_global_masks, masks, dtype)
    if is_part:
        columns = _Columns(config, global_masks, group)
        decoder.backbone.register_forward_pre_hook(columns.gather, with_kwargs=True)
        language.register_forward_pre_hook(columns.cut, with_kwargs=True)
    else:
        language.register_forward_pre_hook(partial(_with_global_masks, global_masks, group), with_kwargs=True)
    if decoder.mtp is not None:
        model = decoder.mtp.model
        for number, layer in enumerate(decoder.mtp.layers):
            mtp_masks = partial(model.create_masks_for_mtp_layer, number, mtp_cache=None)
            hook = partial(_with_global_masks, partial(_global_masks, mtp_masks, dtype), group)
            layer.register_forward_pre_hook(hook, with_kwargs=True)


@contextmanager
def whole_sequences(decoder: Decoder, group: ProcessGroup | None) -> Iterator[None]:
    """Suspend context parallelism within the block, so that a decoder that reads media accepts whole sequences.

    group: the context ranks, or None without context parallelism.
    """
    attention = decoder.packing.attention
    if group is None:
        yield
        return
    suffix = f"_{group.group_name}"
    sharded = {name: name.removeprefix(_ULYSSES).removesuffix(suffix) for name in attention.names}
    attention.rename(sharded)
    try:
        yield
    finally:
        attention.rename({function: name for name, function in sharded.items()})


@dataclass(frozen=True)
class NextTokens:
    """Appends the next `count` columns of the sequences to a rank's columns, without gradients.

    The last rank appends zeros.

    group: the context ranks; None if this process has the global sequences, so that nothing is appended.
    """

    count: int
    group: ProcessGroup | None = None

    @torch.no_grad()
    def __call__(self, columns_BS: Tensor) -> Tensor:
        """Return the columns [B, S, …] with the next columns, [B, S + count, …]. A collective of the group."""
        if self.group is None:
            return columns_BS
        parts = _gathered(columns_BS[:, : self.count], self.group)
        # a rank with fewer than `count` columns sends all of them; the next rank's columns follow without a gap
        padding_BK = columns_BS.new_zeros(columns_BS.shape[0], self.count, *columns_BS.shape[2:])
        next_BK = torch.cat([*parts[self.group.rank() + 1 :], padding_BK], 1)[:, : self.count]
        return torch.cat([columns_BS, next_BK], 1)


def _with_global_masks(
    masks: Callable[[Tensor], dict[str, Any]],
    group: ProcessGroup,
    _: nn.Module,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[Any, Any]:
    global_BS = gather_sequences(options["position_ids"], group)
    return arguments, options | masks(global_BS) | {"global_position_ids": global_BS}


def _global_masks(masks: Callable[..., dict[str, Any]], dtype: torch.dtype, global_BS: Tensor) -> dict[str, Any]:
    """Return the masks of global sequences. masks: makes the masks from embeddings (of `dtype`) and position ids"""
    # transformers reads only the shape, dtype and device of the embeddings
    embeddings = torch.empty((), dtype=dtype, device=global_BS.device).expand(*global_BS.shape, 1)
    return masks(inputs_embeds=embeddings, position_ids=global_BS)


@dataclass
class _Columns:
    """Forward pre-hooks: `gather` is for a vision-language backbone, `cut` is for its language model.

    config: the language model's configuration. masks: makes the masks of global sequences from their text positions.
    is_whole: whether the backbone got the token ids of whole sequences, and not hidden states of a previous stage.
    """

    config: PreTrainedConfig
    masks: Callable[[Tensor], dict[str, Any]]
    group: ProcessGroup
    is_whole: bool = False

    @property
    def _is_sharded(self) -> bool:  # False within `whole_sequences`
        return (self.config._attn_implementation or "").startswith(_ULYSSES)

    def gather(self, _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        """Give the backbone the global sequences: the ids, positions and types of their tokens."""
        self.is_whole = self._is_sharded and options.get("input_ids") is not None
        if not self.is_whole:
            return arguments, options
        present = [name for name in _OF_TOKENS if options.get(name) is not None]
        whole = {name: gather_sequences(options[name], self.group) for name in present}
        whole["position_ids"] = self._positions(options)
        if options.get("attention_mask") is not None:
            whole |= self.masks(_text(whole["position_ids"]))
        return arguments, options | whole

    def cut(self, _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        """Give the language model this rank's columns, and the masks of the global sequences."""
        if not self._is_sharded:
            return arguments, options
        if not self.is_whole:
            global_BS = _text(self._positions(options))
            return arguments, options | self.masks(global_BS) | {"global_position_ids": global_BS}
        positions, embeds_BSD = options["position_ids"], options["inputs_embeds"]
        rank, shape_BS, part = self.group.rank(), embeds_BSD.shape[:2], dict[str, Any]()
        columns = slice(*(shape_BS[1] // self.group.size() * border for border in (rank, rank + 1)))
        is_image_BS, features = options.get("visual_pos_masks"), options.get("deepstack_visual_embeds")
        if is_image_BS is not None and features is not None:  # the model adds the features after some layers
            part["visual_pos_masks"] = is_image_BS[:, columns]
            index_N = (is_image_BS.flatten().cumsum(0).view_as(is_image_BS) - 1)[:, columns][is_image_BS[:, columns]]
            part["deepstack_visual_embeds"] = [feature_ND[index_N] for feature_ND in features]
        for name, value in options.items():
            if isinstance(value, Tensor) and value.shape[:2] == shape_BS and name not in part:
                part[name] = value[:, columns]
        part["position_ids"] = positions[..., columns]
        masks = {} if options.get("attention_mask") is not None else self.masks(_text(positions))
        return arguments, options | part | masks | {"global_position_ids": _text(positions)}

    def _positions(self, options: Mapping[str, Any]) -> Tensor:
        """Return the position ids of the global sequences: [B, S], or [A, B, S] if a position has A coordinates."""
        return gather_sequences(options["position_ids"].movedim(-1, 1), self.group).movedim(1, -1)


def _text(positions: Tensor) -> Tensor:
    return positions[0] if positions.dim() == 3 else positions


def gather_sequences(columns_BS: Tensor, group: ProcessGroup | None) -> Tensor:
    """Concatenate the columns of all context ranks to the global sequences [B, S, …], without gradients.

    group: the context ranks, which all call this; None if this process has the global sequences already.
    """
    return columns_BS if group is None else torch.cat(_gathered(columns_BS, group), 1)


def _gathered(columns_BS: Tensor, group: ProcessGroup) -> list[Tensor]:
    columns_BS = columns_BS.contiguous()
    parts = [torch.empty_like(columns_BS) for _ in range(group.size())]
    dist.all_gather(parts, columns_BS, group=group)
    return parts


def _ulysses(
    inner: str,
    group: ProcessGroup,
    joins_rows: bool,
    module: nn.Module,
    query_BHSD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Run transformers' attention function `inner` on the global sequence and a part of the heads."""
    inputs = [_all_to_all(heads, group) for heads in (query_BHSD, key_BHSD, value_BHSD)]
    # functions that separate packed documents by position ids need the position ids of the global sequence
    position_ids_BS = options.pop("global_position_ids", None)
    shape_BS = inputs[0].shape[0], inputs[0].shape[2]
    joins_rows = joins_rows and position_ids_BS is not None
    if joins_rows:
        inputs = [heads.transpose(0, 1).flatten(1, 2)[None] for heads in inputs]
        position_ids_BS = position_ids_BS.expand(shape_BS).reshape(1, -1)
    options["position_ids"] = position_ids_BS
    output_BSHD, _ = ALL_ATTENTION_FUNCTIONS[inner](module, *inputs, attention_mask, **options)
    if joins_rows:
        output_BSHD = output_BSHD[0].unflatten(0, shape_BS)
    return _all_to_all(output_BSHD, group), None


def _all_to_all(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Send a chunk of dim 1 to each rank; concatenate the received chunks along dim 2, differentiably."""
    outgoing = torch.stack(tensor.chunk(group.size(), 1))
    return torch.cat(all_to_all_single_autograd(outgoing, None, None, group).unbind(0), 2)
