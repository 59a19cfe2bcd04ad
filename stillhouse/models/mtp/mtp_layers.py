"""The layers of multi-token prediction (MTP) after a decoder's last layer: creation, initialisation, forward, names.

Row t of depth k is computed from row t of depth k − 1 (depth 0: the main model after its final norm) and from the
embedding of token t + k. The layers are those of transformers' `MtpModel`, which `generate(use_mtp=True)` uses as
draft model. They are called one by one, because MtpModel's own forward drafts a single token per layer from logits.

If a family has no MTP layers of its own, its MTP layers have the class of its last layer. The number and the types of
the MTP layers are written to the model's configuration, where transformers reads them (`num_mtp_layers`,
`mtp_layer_types`).

B rows, S tokens per row, D width.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from stillhouse.libraries import reading
from stillhouse.models.dtensors import name_seed, set_from_global
from stillhouse.models.families import ModelFacts, text_config
from stillhouse.models.model_checks import describe


class MtpLayers(nn.Module):
    """The layers of all depths. Embedding, head and rotary frequencies are those of the main model.

    model: the `MtpModel` of the layers. initial: for new layers, a copy on the meta device, which `initialize` needs;
    None for layers with weights.
    """

    layers: nn.ModuleList
    model: MtpModel
    initial: nn.ModuleList | None

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
        """True for new layers, false for layers from a checkpoint."""
        return self.initial is not None

    def hidden_states(
        self, hidden_BSD: Tensor, input_ids_BS: Tensor, position_ids_BS: Tensor, lengths: Mapping[str, Any]
    ) -> Iterator[Tensor]:
        """Yield the hidden states of depths 1, 2, …, each [B, S, D]. hidden_BSD: the hidden states of depth 0.

        input_ids_BS: on a context rank, it has additional columns with the next tokens of the sequences.
        lengths: those of the documents, for variable-length attention.
        """
        for depth in range(1, self.depths + 1):
            # position ids are not shifted with the token ids: after a shift, the mask would count the end of a
            # document as part of the next one; and rotary attention depends only on differences of positions
            shifted_BS = _shifted(input_ids_BS, depth, hidden_BSD.shape[1])
            hidden_BSD = self.model.forward_layer(
                depth - 1, hidden_BSD, position_ids_BS, None, input_ids=shifted_BS, **lengths
            )
            yield hidden_BSD

    @torch.no_grad()
    def initialize(self, main: PreTrainedModel, seed: int) -> None:
        """Initialise new layers on this process by the family's own rule; does nothing for layers with weights.

        The values depend on the seed and the module's name, but not on the layout (`name_seed`). At any time, only
        one module's tensors are unsharded in memory.
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
                        f"{describe(main)} has no rule to initialise '{key}' of a {type(module).__name__}: expected "
                        "an MTP layer that its family initialises, or one from a checkpoint"
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


def new_layers(model: PreTrainedModel, depths: int, *, is_new: bool) -> MtpLayers:
    """Return uninitialised layers on the model's device, and write their number into the model's configuration.

    is_new: `initialize` will initialise them; otherwise the caller reads them from a checkpoint.
    Raises ValueError for a model that cannot have MTP layers, or cannot have this number of depths.
    """
    config = _require_structure(model)
    kinds = getattr(config, "mtp_layer_types", None) if ModelFacts(config).declares_mtp else None
    if depths < 1 or (kinds is not None and len(kinds) != depths):
        expected = "1 or more" if kinds is None else f"{len(kinds)}, as its configuration lists their types"
        raise ValueError(f"{depths} further depths of a {describe(model)}: expected {expected}")
    unable = f"{describe(model)} cannot have layers for multi-token prediction"
    with torch.device("meta"), torch.random.fork_rng(devices=[]), reading(unable):
        _declare(config, depths)
        mtp = MtpModel(model, depths)
    if mtp.embed_tokens is not model.get_input_embeddings():
        raise ValueError(f"{describe(model)} has a separate embedding for its further depths: expected a shared one")
    mtp.layers.to(model.dtype)
    initial = copy.deepcopy(mtp.layers) if is_new else None
    if model.device.type != "meta":
        mtp.layers.to_empty(device=model.device)
    return MtpLayers(mtp, initial)


def find_layers(model: PreTrainedModel) -> None:
    """Let `model.generate(…, use_mtp=True)` find the layers in the checkpoint that the model was loaded from.

    Without this call, transformers finds only layers with the numbers of the released models (GLM-4.5: 46 and 92).
    It does not find the layers of a model of another size, or of a second depth.
    """
    ignored = model._keys_to_ignore_on_load_unexpected
    places = {prefix.replace(".", r"\.") for prefix in ModelFacts(model.config).mtp_prefixes}
    model._keys_to_ignore_on_load_unexpected = {*(ignored or ()), *places}


def _require_structure(model: PreTrainedModel) -> Any:
    """Return the configuration for the number of depths. Raises ValueError if the model cannot have MTP layers."""
    config, backbone = text_config(model.config), model.base_model
    missing = [
        what
        for what, is_there in (
            ("rms_norm_eps in its configuration", hasattr(config, "rms_norm_eps")),
            ("list `layers` in its backbone", isinstance(getattr(backbone, "layers", None), nn.ModuleList)),
            ("backbone called `model`", model.base_model_prefix == "model"),
            ("head called `lm_head`", getattr(model, "lm_head", None) is not None),
        )
        if not is_there
    ]
    if missing or hasattr(config, "chain_hidden_post_norm"):
        why = f"it has no {', no '.join(missing)}" if missing else "its depths share one norm"
        raise ValueError(
            f"{describe(model)} cannot have layers for multi-token prediction: {why}; expected a decoder with "
            "RMSNorm, such as qwen3, llama, glm4_moe or deepseek_v3"
        )
    return config


def _declare(config: Any, depths: int) -> None:
    """Write the number of depths into a configuration; for a family without its own MTP layers, also their types."""
    config.num_mtp_layers = depths
    if ModelFacts(config).declares_mtp:
        return
    for kinds, preferred in (("layer_types", "full_attention"), ("mlp_layer_types", None)):
        types = getattr(config, kinds, None)
        if types is not None:
            setattr(config, f"mtp_{kinds}", [preferred if preferred in types else types[-1]] * depths)


def _direct_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and persistent buffers, without those of its children."""
    buffers = {
        name: buffer
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
    return dict(module.named_parameters(recurse=False)) | buffers


def _shifted(input_ids_BS: Tensor, depth: int, tokens: int) -> Tensor:
    """Return `tokens` columns of the ids, from column `depth` on. Beyond the end they repeat the last id, which is
    harmless: no row with a label attends to them.
    """
    place_S = torch.arange(tokens, device=input_ids_BS.device)
    return input_ids_BS[:, (place_S + depth).clamp(max=input_ids_BS.shape[1] - 1)]
