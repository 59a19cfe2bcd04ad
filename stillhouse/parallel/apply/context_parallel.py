"""Context parallelism by Ulysses (Jacobs et al. 2023, arXiv:2309.14509): each rank has a part of every sequence.

Ranks exchange data only inside attention. Before attention, each rank has all heads for a part of the sequence.
All-to-alls give it a part of the heads for the global sequence. Then transformers' attention function runs with the
masks of the global sequence, including those for packed documents and sliding windows. Another all-to-all restores
restores the first distribution.

The part of a vision-language backbone before its language model gets whole sequences on every rank: it runs the
vision tower on all media of the micro-batch, and puts the features among the embeddings of all columns. Then each
rank continues with its columns. So features need not be cut with their placeholders, and the ranks' gradients of the
tower add up to that of the whole sequences.

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

_ULYSSES = "ulysses_"  # how the names of the attention functions begin
#: the inputs [B, S] of a backbone beside positions
_OF_TOKENS = ("input_ids", *TOKEN_TYPES)


def apply_context_parallel(decoder: Decoder, group: ProcessGroup, tensor: int = 1) -> None:
    """Make a decoder accept this rank's part of each sequence, with the position ids of that part.

    tensor: the degree of tensor parallelism, which shards the same heads.
    Raises ValueError for a model whose attention does not support this, and for degrees that do not divide the heads.
    """
    config, ranks = text_config(decoder.config), group.size()
    inner, attention = config._attn_implementation, decoder.packing.attention
    if inner not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        raise ValueError(
            f"attention '{inner}' under context={ranks}: expected one of transformers' own functions, "
            "such as sdpa or flash_attention_2"
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
    require_heads(config, ranks, tensor)
    names = {function: _ulysses_name(function, group) for function in attention.names}
    for function, name in names.items():
        AttentionInterface.register(name, partial(_ulysses, function, group, joins_rows[function]))
        if function in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[function])
    attention.rename(names)
    dtype = next(decoder.parameters()).dtype

    def masks(inputs_embeds: Tensor, position_ids: Tensor) -> dict[str, Any]:
        mask = create_masks_for_generate(config, inputs_embeds, None, None, position_ids=position_ids)
        return {"attention_mask": mask}

    if is_part:
        columns = _Columns(config, masks, dtype, group)
        decoder.backbone.register_forward_pre_hook(columns.gather, with_kwargs=True)
        language.register_forward_pre_hook(columns.cut, with_kwargs=True)
    else:
        language.register_forward_pre_hook(partial(_with_global_masks, masks, dtype, group), with_kwargs=True)
    if decoder.mtp is not None:
        model = decoder.mtp.model
        for number, layer in enumerate(decoder.mtp.layers):
            mtp_masks = partial(model.create_masks_for_mtp_layer, number, mtp_cache=None)
            layer.register_forward_pre_hook(partial(_with_global_masks, mtp_masks, dtype, group), with_kwargs=True)


@contextmanager
def whole_sequences(decoder: Decoder, group: ProcessGroup | None) -> Iterator[None]:
    """Within the block, a decoder gets whole sequences, as without context parallelism.

    group: the context ranks; None: the decoder always gets whole sequences.
    """
    attention = decoder.packing.attention
    if group is None:
        yield
        return
    prefix, suffix = _ulysses_name("\n", group).split("\n")
    sharded = {name: name.removeprefix(prefix).removesuffix(suffix) for name in attention.names}
    attention.rename(sharded)
    try:
        yield
    finally:
        attention.rename({function: name for name, function in sharded.items()})


def require_heads(config: PreTrainedConfig, context: int, tensor: int) -> None:
    """Raise ValueError if context × tensor does not divide a model's numbers of heads."""
    if size := ModelFacts(config).indivisible_size(HEADS, context * tensor):
        raise ValueError(
            f"context={context} × tensor={tensor} does not divide the {size[0]}={size[1]} of model type "
            f"'{config.model_type}': expected a divisor, since both degrees divide the heads"
        )


@dataclass(frozen=True)
class NextTokens:
    """Appends the next `count` columns of the sequences to a rank's columns. The following ranks have these columns.

    group: the context ranks; None: this process has the global sequences, and nothing is appended. On the last rank,
    zeros are appended. There is no gradient.
    """

    count: int
    group: ProcessGroup | None = None

    @torch.no_grad()
    def __call__(self, columns_BS: Tensor) -> Tensor:
        """Convert [B, S, …] to [B, S + count, …]. A collective of the group."""
        if self.group is None:
            return columns_BS
        parts = _gathered(columns_BS[:, : self.count], self.group)
        # a rank with fewer than `count` columns sends all its columns; those of the next rank follow without a gap
        padding_BK = columns_BS.new_zeros(columns_BS.shape[0], self.count, *columns_BS.shape[2:])
        next_BK = torch.cat([*parts[self.group.rank() + 1 :], padding_BK], 1)[:, : self.count]
        return torch.cat([columns_BS, next_BK], 1)


def _with_global_masks(
    masks: Callable[..., dict[str, Any]],
    dtype: torch.dtype,
    group: ProcessGroup,
    _: nn.Module,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[Any, Any]:
    """A forward pre-hook that passes to a module the masks and the position ids of the global sequences.

    masks: makes the masks from embeddings and position ids. dtype: the dtype of the embeddings.
    """
    global_BS = gather_sequences(options["position_ids"], group)
    return arguments, options | _masks_of(masks, dtype, global_BS) | {"global_position_ids": global_BS}


def _masks_of(masks: Callable[..., dict[str, Any]], dtype: torch.dtype, global_BS: Tensor) -> dict[str, Any]:
    """Return the masks of global sequences with these position ids."""
    # transformers reads only the shape, dtype and device of the embeddings
    embeddings = torch.empty((), dtype=dtype, device=global_BS.device).expand(*global_BS.shape, 1)
    return masks(inputs_embeds=embeddings, position_ids=global_BS)


def _ulysses_name(function: str, group: ProcessGroup) -> str:
    return f"{_ULYSSES}{function}_{group.group_name}"


@dataclass
class _Columns:
    """Hooks of a vision-language backbone and of its language model.

    config: of the language model. masks, dtype: see `_with_global_masks`.
    is_whole: whether the backbone has got token ids, of whole sequences, and no hidden states of a previous stage.
    """

    config: PreTrainedConfig
    masks: Callable[..., dict[str, Any]]
    dtype: torch.dtype
    group: ProcessGroup
    is_whole: bool = False

    @property
    def _is_sharded(self) -> bool:
        """Whether the decoder gets its columns (see `whole_sequences`)."""
        return (self.config._attn_implementation or "").startswith(_ULYSSES)

    def gather(self, _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        """Give the backbone the ids, positions and kinds of tokens of the global sequences."""
        self.is_whole = self._is_sharded and options.get("input_ids") is not None
        if not self.is_whole:
            return arguments, options
        whole = {
            name: gather_sequences(options[name], self.group) for name in _OF_TOKENS if options.get(name) is not None
        }
        whole["position_ids"] = _gather_positions(options["position_ids"], self.group)
        if options.get("attention_mask") is not None:
            whole |= self._masks(whole["position_ids"])
        return arguments, options | whole

    def cut(self, _: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        """Give the language model this rank's columns, and the masks of the global sequences."""
        if not self._is_sharded:
            return arguments, options
        if not self.is_whole:
            positions = _gather_positions(options["position_ids"], self.group)
            return arguments, options | self._masks(positions) | {"global_position_ids": _text(positions)}
        positions, embeds_BSD = options["position_ids"], options["inputs_embeds"]
        rank, shape_BS = self.group.rank(), embeds_BSD.shape[:2]
        columns = slice(*(shape_BS[1] // self.group.size() * border for border in (rank, rank + 1)))
        part = _cut_features(options, columns)
        for name, value in options.items():
            if isinstance(value, Tensor) and value.shape[:2] == shape_BS and name not in part:
                part[name] = value[:, columns]
        part["position_ids"] = positions[..., columns]
        masks = {} if options.get("attention_mask") is not None else self._masks(positions)
        return arguments, options | part | masks | {"global_position_ids": _text(positions)}

    def _masks(self, positions: Tensor) -> dict[str, Any]:
        return _masks_of(self.masks, self.dtype, _text(positions))


def _cut_features(options: Mapping[str, Any], columns: slice) -> dict[str, Any]:
    """Return the part of the features that a language model adds behind its layers (deepstack) for these columns."""
    is_image_BS, features = options.get("visual_pos_masks"), options.get("deepstack_visual_embeds")
    if is_image_BS is None or features is None:
        return {}
    number_BS = is_image_BS.flatten().cumsum(0).view_as(is_image_BS) - 1
    part_BS = is_image_BS[:, columns]
    index_N = number_BS[:, columns][part_BS]
    return {"visual_pos_masks": part_BS, "deepstack_visual_embeds": [feature_ND[index_N] for feature_ND in features]}


def _gather_positions(positions: Tensor, group: ProcessGroup) -> Tensor:
    """Return positions of the global sequences, [B, S] or [A, B, S] for A axes, from those of this rank's columns."""
    return gather_sequences(positions.movedim(-1, 1), group).movedim(1, -1)


def _text(positions: Tensor) -> Tensor:
    """Return the text positions [B, S], which are the first axis of several."""
    return positions[0] if positions.dim() == 3 else positions


def gather_sequences(columns_BS: Tensor, group: ProcessGroup | None) -> Tensor:
    """Concatenate the columns of all context ranks to the global sequences [B, S, …], without gradients.

    group: the context ranks; None: this process has the global sequences already. A collective of the group.
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
    """Run transformers' attention function `inner` on the global sequence and a part of the heads.

    joins_rows: see `Packing.joins_rows`.
    """
    inputs = [_all_to_all(heads, 1, 2, group) for heads in (query_BHSD, key_BHSD, value_BHSD)]
    # functions that separate packed documents by their position ids need the ids of the global sequence
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
    return _all_to_all(output_BSHD, 1, 2, group), None


def _all_to_all(tensor: Tensor, split_dim: int, concat_dim: int, group: ProcessGroup) -> Tensor:
    """Send a chunk of `split_dim` to each rank; concatenate received chunks along `concat_dim`. Differentiable."""
    outgoing = torch.stack(tensor.chunk(group.size(), split_dim))
    incoming = all_to_all_single_autograd(outgoing, None, None, group)
    return torch.cat(incoming.unbind(0), concat_dim)
