"""Multi-token prediction: a causal language model with additional layers that predict tokens after the next one.

    decoder = MultiTokenDecoder.new(Decoder.from_pretrained(…), depths=1)
    next, second = decoder(input_ids, position_ids, processor=…, context=targets.shift_for_mtp(position_ids, 1))

Row t of depth k (see `mtp_layers.py`) predicts the label of row t + k, which `Targets.shift_for_mtp` moves to row t
(DeepSeek-V3, arXiv:2412.19437, section 2.2). All depths use the main model's embedding and output head.

B rows, S tokens per row, D width, V vocabulary.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import MtpModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from stillhouse.models.decoder import Decoder
from stillhouse.models.families import ModelFacts
from stillhouse.models.lm_head import OutputProcessor
from stillhouse.models.load_proof import prove_decoder
from stillhouse.models.mtp.mtp_layers import MtpLayers, find_layers, new_layers
from stillhouse.objective import OutputHead


class MultiTokenDecoder(nn.Module):
    """Runs a decoder, `main`, together with its MTP layers, which are in `main.mtp`.

    `train_main=False`: only the MTP layers train; the main model is frozen, head and embedding included.
    `verify=True` raises ValueError for layers that let documents in one row attend to each other.
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
        """Add newly initialised MTP layers and write their number into the model's configuration.

        Raises ValueError, naming the model type, for a family that cannot have MTP layers.
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

        Also raises ValueError for a checkpoint without MTP layers, and for a main model from other files than those
        from which transformers reads MTP layers.
        """
        main = Decoder.from_pretrained(name_or_path, **options, verify=verify)
        model, depths = main.pretrained, ModelFacts(main.config).declared_depths
        what, fresh = f"model '{os.fspath(name_or_path)}'", "MultiTokenDecoder.new draws fresh layers"
        revision = "main" if os.path.isdir(name_or_path) else options.get("revision") or "main"
        other = getattr(main.config, "transformers_weights", None) or revision
        if other != "main":
            raise ValueError(
                f"{what}: its main model is that of {other!r}, but transformers reads MTP layers only from "
                f"{SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}, and only of the default revision: expected a "
                "folder with one of these files"
            )
        if not depths:
            raise ValueError(f"{what} has no further depths according to its configuration (num_mtp_layers); {fresh}")
        find_layers(model)
        try:
            mtp = MtpModel.from_pretrained(model, device_map={"": model.device})
        except RuntimeError as error:
            names = ", ".join(f"{prefix}*" for prefix in ModelFacts(model.config).mtp_prefixes)
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
        is a document of its own. The last k rows of a document have no label at depth k.
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
        """The `MtpModel` of transformers that has the layers."""
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
    """Add uninitialised MTP layers to an unsharded decoder.

    is_new: `decoder.mtp.initialize` will initialise them; otherwise the caller reads them from a checkpoint.
    Raises ValueError for a model that cannot have MTP layers.
    """
    decoder.mtp = new_layers(decoder.pretrained, depths, is_new=is_new).train(decoder.training)


def freeze_main(decoder: Decoder) -> None:
    """Freeze all parameters of a decoder, embedding and head included, except its MTP layers."""
    assert decoder.mtp is not None
    decoder.requires_grad_(False)
    decoder.mtp.requires_grad_(True)
