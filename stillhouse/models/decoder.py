"""A Hugging Face causal language model as backbone and head.

    tokens ─▶ backbone ─▶ hidden states ─▶ head(processor, context) ─▶ logits, or the processor's result

The model's code is not changed: the backbone is the model's base model, and `Head` contains the model's output layer.
`Decoder.pretrained` is the model itself. It is used for its configuration, for saving and for generation. It shares
all parameters with the decoder, but is not registered as a submodule, so that each parameter is registered once.

B rows, S tokens per row, T = B·S, D width, E width of a teacher, V vocabulary.
"""

import inspect
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from stillhouse.display import escaped
from stillhouse.document_lengths import DocumentLengths, require_separable
from stillhouse.models.document_packing import AUTO, JoinedRow, Packing, UnpackedRows, backbone_inputs
from stillhouse.models.families import LogitRule, backbone_name, layer_list, outermost_lists, text_config
from stillhouse.models.forward_modes import evaluating
from stillhouse.models.layer_hooks import LayerLossModule, checkpoint_contexts
from stillhouse.models.lm_head import Head, OutputProcessor, PassThrough, match_tied_flag
from stillhouse.models.load_proof import prove_decoder, require_runnable
from stillhouse.models.model_checks import require_decoder
from stillhouse.models.pretrained import load_causal_lm
from stillhouse.models.processors import full_vocab
from stillhouse.models.varlen import VARLEN_LENGTHS, Activations
from stillhouse.models.vision_language import AXES, TOKEN_TYPES, image_weights_reached, model_media, read_token_inputs
from stillhouse.objective import FullVocab, OutputHead

if TYPE_CHECKING:  # `mtp` needs a later version of transformers than this file
    from stillhouse.models.adapter import Lora
    from stillhouse.models.mtp import MtpLayers

HEAD_WEIGHT, HEAD_BIAS = "head.linear.weight", "head.linear.bias"
Kind = TypeVar("Kind", bound=LayerLossModule)


class Decoder(nn.Module):
    """Wraps a causal language model of transformers.

    Raises ValueError for a model without an output head, with an encoder, or with a head that is not a plain linear
    layer (a head with LoRA, or a quantized head). `verify=True` runs a few artificial tokens, and raises ValueError
    if the head does not give the model's own logits, if tokens attend to later tokens, or if documents influence each
    other in every way of packing that `packing` allows.

    `packing`: "packed" for several documents in a row, "rows" for one document per row, "auto" for the first exact
    way (see `document_packing.py`). `activations`: the device and dtype of the activations. If they are given, packed
    documents use variable-length attention where it is possible; otherwise, the model keeps its own attention.
    """

    pretrained: PreTrainedModel
    backbone: nn.Module
    backbone_name: str  # the backbone's name in `pretrained`
    head: Head | PassThrough
    packing: Packing  # the way in which documents are packed; a proof replaces a way that is not exact
    rows: UnpackedRows | JoinedRow | None  # the rows that the backbone now runs; None for the micro-batch's own rows
    tied: bool  # whether the head and the input embedding share one weight
    embedding_name: str  # the name of the input embedding's weight among this module's parameters
    lora: "Lora | None" = None  # describes the adapter that `add_lora` has added
    mtp: "MtpLayers | None"  # the MTP layers that `add_mtp` has added
    layer_losses: dict[str, LayerLossModule]  # the losses that `add_layer_loss` has added, by their names

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        packing: str = AUTO,
        activations: Activations | None = None,
        verify: bool = True,
    ):
        super().__init__()
        linear = require_decoder(model)
        match_tied_flag(model)
        # a plain attribute assignment would register the model's parameters a second time
        self.__dict__["pretrained"] = model
        self.backbone_name = str(backbone_name(model))
        self.backbone = model.get_submodule(self.backbone_name)
        self.packing, self.rows = Packing(model, self.backbone, packing, activations), None
        self.head = Head(linear, LogitRule.from_config(model.config))
        self.mtp, self.layer_losses = None, {}
        self.training = self.head.training = model.training
        embedding = model.get_input_embeddings().weight
        self.tied = linear.weight is embedding
        self.embedding_name = next(name for name, weight in self.named_parameters() if weight is embedding)
        self.register_state_dict_post_hook(_drop_shared)
        self.register_load_state_dict_pre_hook(_find_shared)
        self.register_load_state_dict_post_hook(_share_again)
        if verify:
            prove_decoder(self)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        revision: str | None = None,
        dtype: str | torch.dtype | None = None,
        *,
        attention: str | None = None,
        trust_remote_code: bool = False,
        device: str | torch.device | None = None,
        quantize: str | None = None,
        trained: bool = False,
        packing: str = AUTO,
        multimodal: bool = False,
        activations: Activations | None = None,
        verify: bool = True,
    ) -> "Decoder":
        """Load a model from a folder or a hub id, and wrap it. transformers gets `name_or_path` unchanged.

        `dtype`: a name such as "bfloat16", or "auto" or None for the dtype of the saved weights. With None, a saved
        dtype narrower than float32 causes a warning, because rounding changes the results. `attention`: transformers'
        `attn_implementation`. `device`: None means the CPU; some attention implementations can be verified only on a
        GPU. `quantize`: "int8", "nf4" or "fp8", for a frozen model (see `quantized.py`). `trained`: whether an
        adapter will be trained on the quantized model. `multimodal`: whether to load the vision tower if the family
        has classes with and without a tower.

        Raises ValueError for a model that cannot be found, read or wrapped, and for a checkpoint that lacks weights.
        """
        model = load_causal_lm(
            name_or_path,
            revision=revision,
            dtype=dtype,
            attention=attention,
            trust_remote_code=trust_remote_code,
            quantize=quantize,
            trained=trained,
            multimodal=multimodal,
            device=device,
        )
        what = f"model '{escaped(os.fspath(name_or_path))}'"
        if dtype is None and model.dtype.itemsize < torch.float32.itemsize:
            saved = f"{what} computes in {str(model.dtype).removeprefix('torch.')}, the dtype of its saved weights: "
            warnings.warn(f'{saved}pass dtype="auto" if this is intended, or dtype="float32"', stacklevel=2)
        if verify:
            require_runnable(model, what)
        return cls(model, packing=packing, activations=activations, verify=verify)

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        processor: OutputProcessor | None = None,
        context: Any = None,
        head: bool = True,
        mtp_input_ids: Tensor | None = None,
        is_padding: Tensor | None = None,
        lengths: DocumentLengths | None = None,
        images: Mapping[str, Tensor] | None = None,
        **backbone_kwargs: Any,
    ) -> Any:
        """Return logits [B, S, V], or the result of `processor` for the hidden states (see `OutputProcessor`).

        `head=False`: return the hidden states [B, S, D] after the final norm, without running the head.
        `position_ids`: [B, S], or [1, S] for all rows. If a row has several documents, the positions restart at each
        document, and attention_mask must be None. `attention_mask`: [B, S], 1 for tokens, 0 for padding.
        `is_padding`: bool [B, S], True for padding. A backbone that gets one document per row does not run documents
        that contain only padding; their hidden states are arbitrary. `lengths`: the documents' lengths; if they are
        None, they are computed from `position_ids`, which waits for the device. `images`: the backbone's arguments
        for images, in the order of the documents in the flattened rows. `backbone_kwargs`: further arguments of the
        backbone. With `position_ids` and without a mask, they must be tensors [B, S, …], such as `axis_position_ids`
        [B, S, A], the rotary positions in A axes. With `inputs_embeds` [B, S, D], `input_ids` must be None.
        `mtp_input_ids`: the token ids [B, S]. If they are given, the MTP layers run, and the head calls the processor
        once with a tuple of the hidden states of depths 0, 1, ….
        """
        rows, attention = None, self.packing.attention
        arguments = {"input_ids": input_ids, **read_token_inputs(self.backbone, backbone_kwargs)}
        images = model_media(self.pretrained, self.backbone, images or {})
        if mtp_input_ids is not None and (images or AXES in arguments):
            raise ValueError(
                "student.mtp: MTP layers read only embeddings of tokens, but the data has images: expected mtp null"
            )
        is_packed = position_ids is not None and attention_mask is None
        if position_ids is not None and attention_mask is None:
            arguments, rows = backbone_inputs(
                self.pretrained, self.packing, position_ids, is_padding, arguments, lengths, images
            )
        else:
            arguments |= {"attention_mask": attention_mask, **images}
            if position_ids is not None and attention_mask is not None:
                require_separable(position_ids, attention_mask)
                arguments["position_ids"] = position_ids
        with nullcontext() if is_packed else attention.without_lengths(), self._in_rows(rows):
            with image_weights_reached(self):
                hidden = self.backbone(**arguments, use_cache=False, return_dict=True).last_hidden_state
            depths: tuple[Tensor, ...] = (hidden,)
            if mtp_input_ids is not None:
                assert self.mtp is not None, "mtp_input_ids for a decoder without MTP layers"
                self.mtp.model.config._attn_implementation = self.config._attn_implementation
                if rows is not None and position_ids is not None:
                    mtp_input_ids, position_ids = rows.unpack(mtp_input_ids), rows.position_ids(position_ids)
                if position_ids is None:
                    position_ids = torch.arange(mtp_input_ids.shape[1], device=mtp_input_ids.device)[None]
                kernel_lengths = {name: arguments[name] for name in VARLEN_LENGTHS if attention.reads_lengths}
                depths += tuple(self.mtp.hidden_states(hidden, mtp_input_ids, position_ids, kernel_lengths))
        if rows is not None:
            depths = tuple(rows.pack(hidden_NLD) for hidden_NLD in depths)
        hidden_states = depths[0] if mtp_input_ids is None else depths
        return self.head(hidden_states, processor, context) if head else hidden_states

    @torch.no_grad()
    def signal(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **backbone_kwargs: Any,
    ) -> FullVocab:
        """Return this model's exact teacher signal: hidden states [T, E] and the head, both without gradients. The
        forward pass runs in eval mode; afterwards the previous mode is restored.
        """
        with evaluating(self):
            return self(input_ids, position_ids, attention_mask, processor=full_vocab, **backbone_kwargs)

    def axis_positions(
        self, input_ids_S: Tensor, token_types_S: Tensor | None, images: Mapping[str, Tensor]
    ) -> Tensor | None:
        """Return a document's rotary positions in several axes, [S, A] int64, or None for a family with one axis.

        The positions are computed by the family's own function, which needs no weights. All tensors are on the CPU.
        images: the document's images, as the family's processor returns them.
        """
        if (function := getattr(self.backbone, "get_rope_index", None)) is None:
            return None
        types_S = torch.zeros_like(input_ids_S) if token_types_S is None else token_types_S
        arguments = {"input_ids": input_ids_S[None], **dict.fromkeys(TOKEN_TYPES, types_S[None]), **images}
        names = inspect.signature(function).parameters
        with torch.device("cpu"):
            positions_A1S, _ = function(**{name: value for name, value in arguments.items() if name in names})
        positions_SA: Tensor = positions_A1S[:, 0].T.contiguous()
        return positions_SA

    @property
    def has_head(self) -> bool:
        """Whether this process has the head. Of all pipeline stages, only the last one has it."""
        return isinstance(self.head, Head)

    def layers(self) -> list[nn.Module]:
        """The language model's layers on this process, in order."""
        numbered = layer_list(self.pretrained)
        lists = outermost_lists(self.backbone) if numbered is None else [numbered]
        # a pipeline stage has placeholders without parameters for layers of other stages
        return [layer for layers in lists for layer in layers if next(layer.parameters(), None) is not None]

    def mtp_layers(self) -> list[nn.Module]:
        """The MTP layers on this process."""
        return [] if self.mtp is None else list(self.mtp.layers)

    @property
    def language_model(self) -> nn.Module:
        """The language model: the backbone or, if there is also a vision tower, a part of the backbone. Names in
        transformers' plans for parallelism are relative to this module.
        """
        decoder = self.pretrained.get_decoder()
        return decoder if any(module is decoder for module in self.backbone.modules()) else self.backbone

    @property
    def config(self) -> PreTrainedConfig:
        return self.pretrained.config

    @property
    def vocabulary_rows(self) -> int:
        """The number of rows of the head: the tokenizer's vocabulary and any padding rows after it."""
        return int(text_config(self.config).vocab_size)

    @property
    def width(self) -> int:
        return int(text_config(self.config).hidden_size)

    @property
    def output_weight(self) -> Tensor:
        """The head's weight [V, D], or this process's shard if the decoder is sharded."""
        assert isinstance(self.head, Head), "the head of this decoder is on another process"
        return self.head.linear.weight

    def output_head(self) -> OutputHead:
        """Return the head's tensors, for use outside a forward pass. Only for an unsharded model."""
        assert isinstance(self.head, Head), "the head of this decoder is on another process"
        return self.head.tensors()

    def shared_names(self) -> dict[str, str]:
        """Return, for each further name of a shared parameter, the name under which the state dict has the parameter.
        A tied head shares the embedding's weight. Some families share weights between layers (Zamba 2).
        """
        first: dict[int, str] = {}
        named = self.named_parameters(remove_duplicate=False)
        names = {name: first.setdefault(id(parameter), name) for name, parameter in named}
        return {name: other for name, other in names.items() if name != other}

    def share(self, names: Mapping[str, str]) -> None:
        """Share parameters again that loading has separated.

        names: the result of `shared_names` before the parameters were separated.
        """
        for name, other in names.items():
            module, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(module), leaf, self.get_parameter(other))

    @contextmanager
    def _in_rows(self, rows: UnpackedRows | JoinedRow | None) -> Iterator[None]:
        """Within the block, tell the hooks of the layers that the backbone runs these rows."""
        self.rows = rows
        for loss in self.layer_losses.values():
            loss.current = loss.current._replace(rows=rows)
        try:
            yield
        finally:
            self.rows = None
            for loss in self.layer_losses.values():
                loss.current = loss.current._replace(rows=None)

    def keep_part(self, *, first: bool, last: bool) -> None:
        """Keep a pipeline stage's part: remove the head and the MTP layers from a stage that is not the last one.

        Embedding and head stay tied only on a stage that has the embedding and the head. A last stage with MTP layers
        has both, because it has a copy of the embedding.
        """
        if not last:
            self.head, self.mtp = PassThrough(), None
            self.pretrained.set_output_embeddings(None)
        self.tied = self.tied and last and (first or self.mtp is not None)

    def add_layer_loss(self, loss: LayerLossModule) -> None:
        """Add a loss that hooks compute inside the layers. Its weights become parameters of this module."""
        self.add_module(loss.name, loss)
        self.layer_losses[loss.name] = loss

    def layer_loss(self, kind: type[Kind]) -> Kind:
        """Return the layer loss of this class. Raises ValueError if `add_layer_loss` has not added one."""
        loss = self.layer_losses.get(kind.name)
        if not isinstance(loss, kind):
            raise ValueError(f"the decoder has no {kind.__name__}: expected a call of Decoder.add_layer_loss before")
        return loss

    def gradient_checkpointing_enable(self) -> None:
        """Recompute each layer in backward instead of keeping its activations. The head is not recomputed."""
        model: Any = self.pretrained
        later = "activation_checkpointing_enable"  # the method's name in later versions of transformers
        enable = getattr(model, later, None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False, "context_fn": partial(checkpoint_contexts, self.layer_losses)})

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the configuration and the weights (safetensors) in transformers' format. Tied weights are written
        once. The numbers of MTP layers follow those of the model's own layers, as in released checkpoints.
        """
        model = self.pretrained
        tensors = None if self.mtp is None else model.state_dict() | self.mtp.checkpoint_tensors(model)
        model.save_pretrained(folder, state_dict=tensors)


# a checkpoint contains a shared weight only once, under the name of the first parameter
def _drop_shared(decoder: Any, state: dict[str, Any], prefix: str, _: dict[str, Any]) -> None:
    for name in decoder.shared_names():
        state.pop(prefix + name, None)


def _find_shared(decoder: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    decoder.__dict__["_shared"] = decoder.shared_names()
    for name, other in decoder.shared_names().items():
        if prefix + other in state:
            state.setdefault(prefix + name, state[prefix + other])


def _share_again(decoder: Any, _: Any) -> None:
    # `load_state_dict(assign=True)` gives each name a separate parameter
    decoder.share(decoder.__dict__.pop("_shared"))
