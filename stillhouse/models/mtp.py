"""Multi-token prediction: a causal language model followed by extra layers, each of which predicts one token further.

    decoder = MultiTokenDecoder.new(Decoder.from_pretrained(…), depths=1)
    next, second = decoder(input_ids, position_ids, processor=…, context=targets.shift_for_mtp(position_ids, 1))

Row t of depth k is computed from row t of depth k − 1 (depth 0: the main model after its final norm) and from the
embedding of token t + k. It predicts the label of row t + k, which `Targets.shift_for_mtp` moves to row t
(DeepSeek-V3, arXiv:2412.19437, section 2.2). The depths share the main model's embedding and output head, so a
processor treats every depth in the same way.

The layers are those of transformers' `MtpModel`, which `generate(use_mtp=True)` drafts with. They are called one by
one, because MtpModel's own forward drafts a single token per layer from logits and raises a TypeError with labels.

B rows, S tokens per row, D width, V vocabulary.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from stillhouse.models.decoder import Decoder, evaluating
from stillhouse.models.head import OutputProcessor
from stillhouse.models.structure import describe
from stillhouse.models.verify import verify_depths
from stillhouse.objective import OutputHead

if not hasattr(MtpModel, "forward_layer"):
    raise ImportError(
        "multi-token prediction needs transformers 5.20 or later, whose MtpModel runs a layer by itself"
    )

_SHARED = ("embed_tokens", "shared_head", "rotary_emb")  # modules of an MtpModel that it shares with the main model


class MultiTokenDecoder(nn.Module):
    """A decoder, `main`, and the layers of its further depths, which `mtp` runs.

    `train_main=False`: the main model is frozen, head and embedding included; only the layers train. `verify=True`
    raises ValueError for layers that let documents in one row attend to each other.
    """

    main: Decoder
    mtp: MtpModel
    layers: nn.ModuleList

    def __init__(self, main: Decoder, mtp: MtpModel, *, train_main: bool = True, verify: bool = True):
        super().__init__()
        if mtp.embed_tokens is not main.pretrained.get_input_embeddings():
            raise ValueError(
                f"{describe(main.pretrained)} has a separate embedding for its further depths: expected a shared one"
            )
        self.main = main
        # a plain attribute assignment would register the modules shared with the main model a second time
        self.__dict__["mtp"] = mtp
        for name, child in mtp.named_children():
            if name not in _SHARED:
                self.add_module(name, child.train(main.training))
        if not train_main:
            main.requires_grad_(False)
        self.training = main.training
        if verify:
            with evaluating(self):
                verify_depths(self)

    @classmethod
    def new(cls, main: Decoder, depths: int, *, train_main: bool = True, verify: bool = True) -> "MultiTokenDecoder":
        """Add newly initialised layers and write their number into the model's configuration.

        Raises ValueError, naming the model type, for a family for which transformers has no such layers.
        """
        model = main.pretrained
        config = _require_family(model)
        kinds = getattr(config, "mtp_layer_types", None)
        if depths < 1 or (kinds is not None and len(kinds) != depths):
            expected = "1 or more" if kinds is None else f"{len(kinds)}, as its configuration lists their types"
            raise ValueError(f"{depths} further depths of a {describe(model)}: expected {expected}")
        config.num_mtp_layers = depths
        try:
            mtp = MtpModel(model, depths)
        except ValueError as error:
            raise ValueError(f"{describe(model)}: {error}") from error
        # initialise by the family's own rule: MtpModel's rule leaves routers at zero and experts uninitialised
        for module in mtp.layers.modules():
            model._init_weights(module)
        mtp.layers.to(model.device, model.dtype)
        return cls(main, mtp, train_main=train_main, verify=verify)

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | os.PathLike[str], *, train_main: bool = True, verify: bool = True, **options: Any
    ) -> "MultiTokenDecoder":
        """Load the main model and the layers of one checkpoint; `options` are those of `Decoder.from_pretrained`.

        Also raises ValueError for a checkpoint without the layers.
        """
        main = Decoder.from_pretrained(name_or_path, **options, verify=verify)
        model = main.pretrained
        depths = _require_family(model).num_mtp_layers
        what, fresh = f"model '{os.fspath(name_or_path)}'", "MultiTokenDecoder.new draws fresh layers"
        if not depths:
            raise ValueError(f"{what} has no further depths according to its configuration (num_mtp_layers); {fresh}")
        find_layers(model)
        try:
            mtp = MtpModel.from_pretrained(model, device_map={"": model.device})
        except RuntimeError as error:
            names = ", ".join(f"{each}*" for each in _places(model))
            raise ValueError(
                f"{what} lacks weights of its {depths} further depths: expected {names}; {fresh}"
            ) from error
        return cls(main, mtp, train_main=train_main, verify=verify)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        processor: OutputProcessor | None = None,
        context: Any = None,
    ) -> tuple[Any, ...]:
        """Return the processor's results for depths 0, 1, …; without a processor, logits [B, S, V] for each depth.

        `input_ids`: [B, S]. `position_ids`: [B, S] (or [1, S]); they restart at each document of a row, and padding
        is a document of its own. The last k rows of a document have nothing to predict at depth k.
        """

        def keeping(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> tuple[Tensor, Any]:
            if processor is None:
                return hidden_states, head.logits(hidden_states)
            return hidden_states, processor(hidden_states=hidden_states, head=head, context=context, depth=depth)

        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        hidden_BSD, made = self.main(input_ids, position_ids, processor=keeping, context=context)
        results = [made]
        for depth in range(1, self.depths + 1):
            # positions are not shifted with the ids: after a shift, the mask would count the end of a document as
            # part of the next one; and rotary attention depends on differences of positions only
            hidden_BSD = self.mtp.forward_layer(
                depth - 1, hidden_BSD, position_ids, None, input_ids=_shifted(input_ids, depth)
            )
            results.append(self.main.head(hidden_BSD, processor, context, depth))
        return tuple(results)

    @property
    def depths(self) -> int:
        """The number of further depths, not counting depth 0."""
        return len(self.layers)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write one checkpoint; the layers' numbers follow the main model's, as in released ones (`find_layers`)."""
        model = self.main.pretrained
        tensors = dict(model.state_dict())
        for layer, prefix in zip(self.layers, _places(model), strict=True):
            for name, tensor in layer.state_dict().items():
                tensors[prefix + _saved_name(name)] = tensor
        model.save_pretrained(folder, state_dict=tensors)


def find_layers(model: PreTrainedModel) -> None:
    """Let `model.generate(…, use_mtp=True)` find the layers in the checkpoint that the model was loaded from.

    transformers looks only for the layer numbers of the released models (GLM-4.5: 46 and 92). So without this it
    finds neither the layers of a model of another size nor a second depth.
    """
    known = model._keys_to_ignore_on_load_unexpected
    places = {prefix.replace(".", r"\.") for prefix in _places(model)}
    model._keys_to_ignore_on_load_unexpected = {*(known or ()), *places}


def _require_family(model: PreTrainedModel) -> Any:
    """Return the configuration that holds the number of depths; ValueError for a family without such layers."""
    config = model.config.get_text_config(decoder=True)
    if not hasattr(config, "num_mtp_layers"):
        raise ValueError(
            f"{describe(model)} has no layers for multi-token prediction in transformers: expected a family whose "
            "configuration has num_mtp_layers, such as glm4_moe or deepseek_v3"
        )
    return config


def _places(model: PreTrainedModel) -> list[str]:
    """Return, for each depth, the prefix of its layer's names in a checkpoint."""
    config = model.config.get_text_config(decoder=True)
    return [f"model.layers.{config.num_hidden_layers + depth}." for depth in range(config.num_mtp_layers)]


def _saved_name(name: str) -> str:
    if name.startswith("post_norm."):
        return f"shared_head.norm.{name.removeprefix('post_norm.')}"
    return name.removeprefix("mtp_block.")


def _shifted(input_ids_BS: Tensor, depth: int) -> Tensor:
    """Shift the token ids by `depth`. The last rows get any token: no row with a label attends to them."""
    place_S = torch.arange(input_ids_BS.shape[1], device=input_ids_BS.device)
    return input_ids_BS[:, (place_S + depth).clamp(max=len(place_S) - 1)]
