"""Multi-token prediction (MTP): a causal language model has additional layers for tokens after the next one.

    decoder = MultiTokenDecoder.new(Decoder.from_pretrained(…), depths=1)
    next, second = decoder(input_ids, position_ids, processor=…, context=targets.shift_for_mtp(position_ids, 1))

Depth 0 is the main model after its final norm. Row t of depth k is computed from row t of depth k − 1 and from the
embedding of token t + k. Row t of depth k predicts the label of row t + k, which `Targets.shift_for_mtp` moves to row
t (DeepSeek-V3, arXiv:2412.19437, section 2.2). All depths use the main model's embedding and output head.

The layers are in transformers' `MtpModel`. This file calls the layers one by one, because the forward of `MtpModel`
drafts a single token per layer from logits. Every MTP layer has the class of the main model's last layer. The number
of MTP layers is written to the model's configuration, and so are their types if the family declares no MTP layers.
MTP needs a later version of transformers than the rest of the library.

B rows, S tokens per row, D width, V vocabulary.
"""

import copy
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from stillhouse.libraries import reading, require_feature
from stillhouse.models.decoder import Decoder
from stillhouse.models.dtensors import name_seed, set_from_global
from stillhouse.models.families import ModelFacts, declare_mtp, text_config
from stillhouse.models.lm_head import OutputProcessor
from stillhouse.models.load_proof import prove_decoder
from stillhouse.models.model_checks import typename
from stillhouse.objective import OutputHead

require_feature("multi-token prediction")


class MtpLayers(nn.Module):
    """The MTP layers of all depths. They use the main model's embedding, head and rotary frequencies."""

    layers: nn.ModuleList
    model: MtpModel  # the model that contains these layers
    initial: nn.ModuleList | None  # for new layers, a copy on the meta device; None for layers from a checkpoint

    def __init__(self, model: MtpModel, initial: nn.ModuleList | None = None):
        super().__init__()
        # a plain attribute assignment would register the modules shared with the main model a second time
        self.__dict__.update(model=model, initial=initial)
        self.layers = model.layers

    @property
    def depths(self) -> int:
        return len(self.layers)

    @property
    def is_new(self) -> bool:
        return self.initial is not None

    def hidden_states(
        self, hidden_BSD: Tensor, input_ids_BS: Tensor, position_ids_BS: Tensor, lengths: Mapping[str, Any]
    ) -> Iterator[Tensor]:
        """Yield the hidden states of depths 1, 2, …, each [B, S, D].

        hidden_BSD: the hidden states of depth 0.
        input_ids_BS: the token ids; on a context rank, also the next tokens, in additional columns.
        lengths: the documents' lengths for variable-length attention.
        """
        for depth in range(1, self.depths + 1):
            # beyond the end, the last id is repeated; this is harmless, because no row with a label attends to it
            place_S = torch.arange(hidden_BSD.shape[1], device=input_ids_BS.device)
            shifted_BS = input_ids_BS[:, (place_S + depth).clamp(max=input_ids_BS.shape[1] - 1)]
            # position ids are not shifted with the token ids: rotary attention depends only on differences of
            # positions, and after a shift, the mask would count the end of a document as a part of the next document
            hidden_BSD = self.model.forward_layer(
                depth - 1, hidden_BSD, position_ids_BS, None, input_ids=shifted_BS, **lengths
            )
            yield hidden_BSD

    @torch.no_grad()
    def initialize(self, main: PreTrainedModel, seed: int) -> None:
        """Initialise new layers on this process by the family's own rule. Layers from a checkpoint do not change.

        The values do not depend on the layout (`name_seed`). Only one module's tensors are unsharded at any time.
        Raises ValueError if the family has no rule for a tensor.
        """
        for name, module in () if self.initial is None else self.initial.named_modules():
            if not _direct_tensors(module):
                continue
            unsharded = copy.deepcopy(module).to_empty(device="cpu")
            for tensor in _direct_tensors(unsharded).values():
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(name_seed(seed, name))
                # MtpModel's own rule would leave routers at zero and experts uninitialised
                main._init_weights(unsharded)
            targets = _direct_tensors(self.layers.get_submodule(name))
            for key, value in _direct_tensors(unsharded).items():
                if not bool(value.isfinite().all()):
                    raise ValueError(
                        f"{typename(main)} has no rule to initialise '{key}' of a {type(module).__name__}: expected "
                        "a family with a rule for all tensors of MTP layers, or MTP layers from a checkpoint"
                    )
                set_from_global(targets[key], value)

    def checkpoint_tensors(self, main: PreTrainedModel) -> dict[str, Tensor]:
        """Return the tensors of the layers by their names in a checkpoint."""
        return {self.checkpoint_name(main, name): tensor for name, tensor in self.state_dict().items()}

    def checkpoint_name(self, main: PreTrainedModel, name: str) -> str:
        """Return a tensor's name in a checkpoint. name: its name in this module, such as layers.0.eh_proj.weight."""
        _, number, rest = name.split(".", 2)
        if rest.startswith("post_norm."):
            rest = f"shared_head.norm.{rest.removeprefix('post_norm.')}"
        return ModelFacts(main.config).mtp_prefixes[int(number)] + rest.removeprefix("mtp_block.")


def find_layers(model: PreTrainedModel) -> None:
    """Let `model.generate(…, use_mtp=True)` find the MTP layers in the checkpoint from which the model was loaded.

    Without this call, transformers finds only MTP layers with the layer numbers of the released models (46 and 92 for
    GLM-4.5). It finds neither those of models with other numbers of layers nor the layer of a second depth.
    """
    ignored = model._keys_to_ignore_on_load_unexpected
    places = {prefix.replace(".", r"\.") for prefix in ModelFacts(model.config).mtp_prefixes}
    model._keys_to_ignore_on_load_unexpected = {*(ignored or ()), *places}


def _direct_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own parameters and persistent buffers, without the tensors of its children."""
    unsaved = module._non_persistent_buffers_set
    buffers = {name: value for name, value in module.named_buffers(recurse=False) if name not in unsaved}
    return dict(module.named_parameters(recurse=False)) | buffers


class MultiTokenDecoder(nn.Module):
    """Runs a decoder, `main`, together with its MTP layers, which are in `main.mtp`.

    `train_main=False`: only the MTP layers train; the main model is frozen, including its head and embedding.
    `verify=True`: raises ValueError if documents in one row attend to each other, also in MTP layers.
    """

    main: Decoder

    def __init__(self, main: Decoder, mtp: MtpModel, *, train_main: bool = True, verify: bool = True):
        super().__init__()
        if main.mtp is None or main.mtp.model is not mtp:
            main.mtp = MtpLayers(mtp).train(main.training)
        self.main = main
        if not train_main:
            freeze_main(main)
        self.training = main.training
        if verify:
            prove_decoder(main)

    @classmethod
    def new(cls, main: Decoder, depths: int, *, train_main: bool = True, verify: bool = True) -> "MultiTokenDecoder":
        """Add newly initialised MTP layers and write their number into the model's configuration. Raises ValueError
        for a family that cannot have MTP layers.
        """
        add_mtp(main, depths, is_new=True)
        assert main.mtp is not None
        main.mtp.initialize(main.pretrained, int(torch.randint(2**62, ())))
        return cls(main, main.mtp.model, train_main=train_main, verify=verify)

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | os.PathLike[str], *, train_main: bool = True, verify: bool = True, **options: Any
    ) -> "MultiTokenDecoder":
        """Load the main model and its MTP layers from one checkpoint. options: see `Decoder.from_pretrained`.

        Raises ValueError as `Decoder.from_pretrained` does, for a checkpoint without MTP layers, and if the main
        model is not in the files from which transformers reads MTP layers.
        """
        main = Decoder.from_pretrained(name_or_path, **options, verify=verify)
        model, depths = main.pretrained, ModelFacts(main.config).declared_depths
        what, fresh = f"model '{os.fspath(name_or_path)}'", "MultiTokenDecoder.new adds new MTP layers"
        revision = "main" if os.path.isdir(name_or_path) else options.get("revision") or "main"
        other = getattr(main.config, "transformers_weights", None) or revision
        if other != "main":
            raise ValueError(
                f"{what}: its main model was read from {other!r}, but transformers reads MTP layers only from "
                f"{SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}, and only of the default revision: expected a "
                "folder with one of these files"
            )
        if not depths:
            raise ValueError(f"{what} has no MTP layers according to its configuration (num_mtp_layers); {fresh}")
        find_layers(model)
        try:
            mtp = MtpModel.from_pretrained(model, device_map={"": model.device})
        except RuntimeError as error:
            names = ", ".join(f"{prefix}*" for prefix in ModelFacts(model.config).mtp_prefixes)
            raise ValueError(
                f"{what} lacks weights of its {depths} MTP layers: expected tensors {names}; {fresh}"
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

        `input_ids`: [B, S]. `position_ids`: [B, S] or [1, S]; they restart at each document of a row, and padding is
        a separate document. The last k rows of a document have no label at depth k.
        """

        def all_depths(
            *, hidden_states: tuple[Tensor, ...], head: OutputHead, context: Any, depth: int = 0
        ) -> tuple[Any, ...]:
            if processor is None:
                return tuple(head.logits(hidden_BSD) for hidden_BSD in hidden_states)
            return tuple(
                processor(hidden_states=hidden_BSD, head=head, context=context, depth=number)
                for number, hidden_BSD in enumerate(hidden_states)
            )

        return self.main(input_ids, position_ids, mtp_input_ids=input_ids, processor=all_depths, context=context)

    @property
    def mtp(self) -> MtpModel:
        assert self.main.mtp is not None
        return self.main.mtp.model

    @property
    def layers(self) -> nn.ModuleList:
        return self.mtp.layers

    @property
    def depths(self) -> int:
        """The number of MTP depths; depth 0 is not counted."""
        return len(self.layers)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write a single checkpoint. MTP layers are numbered after the main model's layers, as in released models."""
        self.main.save_pretrained(folder)


def add_mtp(decoder: Decoder, depths: int, *, is_new: bool) -> None:
    """Add uninitialised MTP layers to an unsharded decoder, and write their number into the model's configuration.

    is_new: True if `decoder.mtp.initialize` will initialise the layers, False if a checkpoint will be loaded.
    Raises ValueError for a model that cannot have MTP layers, or cannot have this number of depths.
    """
    model = decoder.pretrained
    config, layers = text_config(model.config), getattr(model.base_model, "layers", None)
    structure = {
        "rms_norm_eps in its configuration": hasattr(config, "rms_norm_eps"),
        "list `layers` in its backbone": isinstance(layers, nn.ModuleList),
        "backbone called `model`": model.base_model_prefix == "model",
        "head called `lm_head`": getattr(model, "lm_head", None) is not None,
    }
    missing = [what for what, is_there in structure.items() if not is_there]
    unable = f"{typename(model)} cannot have layers for multi-token prediction"
    if missing or hasattr(config, "chain_hidden_post_norm"):
        why = f"it has no {', no '.join(missing)}" if missing else "its depths share one norm"
        raise ValueError(
            f"{unable}: {why}; expected a decoder with RMSNorm, such as qwen3, llama, glm4_moe or deepseek_v3"
        )
    listed = getattr(config, "mtp_layer_types", None) if ModelFacts(config).declares_mtp else None
    if depths < 1 or (listed is not None and len(listed) != depths):
        expected = "1 or more" if listed is None else f"{len(listed)}, as in mtp_layer_types of its configuration"
        raise ValueError(f"{depths} MTP layers for a {typename(model)}: expected {expected}")
    with torch.device("meta"), torch.random.fork_rng(devices=[]), reading(unable):
        declare_mtp(config, depths)
        mtp = MtpModel(model, depths)
    if mtp.embed_tokens is not model.get_input_embeddings():
        raise ValueError(f"{typename(model)} has a separate embedding for its MTP layers: expected a shared one")
    mtp.layers.to(model.dtype)
    initial = copy.deepcopy(mtp.layers) if is_new else None
    if model.device.type != "meta":
        mtp.layers.to_empty(device=model.device)
    decoder.mtp = MtpLayers(mtp, initial).train(decoder.training)


def freeze_main(decoder: Decoder) -> None:
    """Freeze all parameters of a decoder except those of its MTP layers. Embedding and head are frozen, too."""
    assert decoder.mtp is not None
    decoder.requires_grad_(False)
    decoder.mtp.requires_grad_(True)
