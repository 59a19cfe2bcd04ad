"""Properties of model families: where a model's parts are, how it computes logits, which parallel plans it has.

They are read from transformers' configurations and modules; no family is recognised by its name. If a new family has
another name for a setting, a plan, a part, a token or a source of noise, add that name to this file. The names that
decide how an optimizer treats a parameter are in `engine/optimizer.py`. Add-ons have tables of their own.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.output_capturing import OutputRecorder

from stillhouse.display import escaped
from stillhouse.libraries import reading

#: the names of heads in transformers' weight files, and of embeddings, which can be tied to the head
HEAD_NAMES = ("lm_head", "embed_out", "embed_tokens", "embed_in", "wte", "word_embeddings", "tok_embeddings")
#: the sizes in a configuration that the context degree must divide
HEADS = ("num_attention_heads", "num_key_value_heads")
#: the sizes in a configuration that the tensor degree must divide
MATRIX_SIZES = (*HEADS, "intermediate_size")
#: layer types whose attention windows begin at fixed columns of a row, not where a document begins
_WINDOWS = {"chunked_attention", "compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse"}
#: layer types that mix tokens by a state or a convolution
_STATES = {"conv", "hybrid", "hybrid_sliding", "linear_attention"}
#: the names of the widths of attention heads
_HEAD_WIDTHS = ("head_dim", "global_head_dim", "qk_head_dim", "v_head_dim")
#: types of rotary positions whose angles depend on the longest document of a forward pass
_ROTARY_BY_LENGTH = ("longrope", "dynamic")
#: the ids of placeholder tokens of images, videos and audio
_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")
#: parts of the names of routers, which choose experts. In some families, a router is a plain linear layer
ROUTERS = {"gate", "gating", "router", "shared_expert_gate"}
#: the names of attributes with a probability of dropout, or with the size of a router's noise
NOISE = re.compile(r"\w*drop\w*|\w*jitter_noise")
#: an attribute of routers that sample experts in train mode. It also changes their results in eval mode, so it must
#: not be set to 0; eval mode removes the noise instead
SAMPLING = "router_jitter_noise"


def text_config(config: PreTrainedConfig) -> Any:
    """Return the configuration of the language model, which may be a part of a composite model's configuration."""
    return config.get_text_config()


class ModelFacts:
    """Facts about a model's layers, positions, experts, MTP layers and parallel plans, read from its configuration.

    text: the language model's part of the configuration.
    max_positions: max_position_embeddings, or None if the configuration does not have this key.
    row_windows: the layer types and settings by which attention depends on a token's column in its row.
    layers_with_state: the layer types that mix tokens without attention, by a state or a convolution.
    experts_per_token: the number of experts that each token chooses in a layer; 1 for a model without experts.
    declares_mtp: whether the family's configuration class has a key for MTP layers.
    declared_depths: the number of MTP layers in this configuration.
    caps_scores: whether attention scores have a softcap; False if layers differ (`is_heterogeneous`).
    drops_scores: whether attention has dropout; False if layers differ.
    mixes_tokens_by_score: whether attention selects tokens by scores over a whole sequence.
    mixes_columns: whether an MLP selects activations by their mean and deviation over its width (Gemma 3n).
    """

    def __init__(self, config: PreTrainedConfig):
        text = self.text = text_config(config)
        types = set(getattr(text, "layer_types", None) or ())
        scaled = ["attn_temperature_tuning"] if getattr(text, "attn_temperature_tuning", None) else []
        self.row_windows = sorted(_WINDOWS & types) + scaled
        self.layers_with_state = sorted(_STATES & types)
        self.max_positions: int | None = getattr(text, "max_position_embeddings", None)
        experts = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None)
        self.experts_per_token: int = experts or 1
        self.declares_mtp = hasattr(type(text), "num_mtp_layers")
        self.declared_depths: int = getattr(text, "num_mtp_layers", None) or 0
        self.mixes_tokens_by_score = getattr(text, "index_topk", None) is not None
        self.mixes_columns = any(getattr(text, "activation_sparsity_pattern", None) or ())
        self.has_alibi = bool(getattr(config, "alibi", None))
        # the top level of the configuration has no sizes if layers differ
        self.is_heterogeneous = bool(getattr(text, "is_heterogeneous", False))
        self.caps_scores = not self.is_heterogeneous and bool(getattr(text, "attn_logit_softcapping", None))
        self.drops_scores = not self.is_heterogeneous and bool(getattr(text, "attention_dropout", 0.0))

    @property
    def widest_head(self) -> int:
        """The largest width of an attention head, or 0 if the configuration does not have it."""
        widths = [getattr(self.text, name, None) for name in _HEAD_WIDTHS]
        if widths[0] is None and getattr(self.text, "num_attention_heads", None):
            widths[0] = self.text.hidden_size // self.text.num_attention_heads
        return max((width for width in widths if isinstance(width, int)), default=0)

    @property
    def length_limits(self) -> list[tuple[str, int]]:
        """(rotary type, limit) for each type whose angles change if a document in a forward exceeds the limit."""
        rotary = getattr(self.text, "rope_parameters", None) or {}
        # one dict for all layers, or one dict per kind of layer
        parts = [values for values in rotary.values() if isinstance(values, dict)] or [rotary]
        lengths = ((rope, rope.get("original_max_position_embeddings") or self.max_positions) for rope in parts)
        by_length = ((rope.get("rope_type"), length) for rope, length in lengths if length)
        return [(kind, length) for kind, length in by_length if kind in _ROTARY_BY_LENGTH]

    @property
    def mtp_prefixes(self) -> list[str]:
        """The prefixes of the names of MTP layers in a checkpoint with this configuration, one for each depth."""
        layers = self.text.num_hidden_layers
        return [f"model.layers.{layers + depth}." for depth in range(self.declared_depths)]

    @property
    def shared_states(self) -> dict[int, int] | None:
        """A dict that maps the number of each layer that reads an earlier layer's keys and values to the earlier
        layer's number. None if the configuration does not show which layers read them.
        """
        modes = getattr(self.text, "kv_sharing_modes", None)
        if modes is None or any(mode not in (None, "store", "reuse") for mode in modes):
            return None
        stored: dict[str, int] = {}
        states: dict[int, int] = {}
        for number, (mode, kind) in enumerate(zip(modes, self.text.layer_types, strict=True)):
            if mode == "store":
                stored[kind] = number
            elif mode == "reuse":
                states[number] = stored[kind]
        return states

    def parallel_plan(self, kind: str) -> dict[str, Any]:
        """Return transformers' plan "tp", "ep" or "pp": a dict by module names (`plan_name`), {} without a plan."""
        return getattr(self.text, f"base_model_{kind}_plan", None) or {}

    def sizes(self, name: str) -> Any:
        """Return the value of a size's key in the configuration, or None. It is a list by layer if layers differ."""
        if not self.is_heterogeneous:
            return getattr(self.text, name, None)
        return [getattr(layer, name, None) for layer in self.text.per_layer_config]

    def indivisible_size(self, names: Sequence[str], ranks: int) -> tuple[str, Any] | None:
        """Return (key, value) of the first size that is no multiple of `ranks`, or None. For values, see `sizes`."""
        for name in names:
            size = self.sizes(name)
            if any(count is not None and count % ranks for count in (size if isinstance(size, list) else [size])):
                return name, size
        return None


def backbone_name(model: PreTrainedModel) -> str | None:
    """Return the name of the module that computes the head's input, or None if there is no such module. Usually, this
    name is `base_model_prefix`. In Llama 4, the module is the one that has the embedding and the same parent as the
    head.
    """
    if model.base_model is not model:
        return model.base_model_prefix
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    path = next((name for name, module in model.named_modules() if module is head), "")
    parent, _, _ = path.rpartition(".")
    children = model.get_submodule(parent).named_children()
    beside = [name for name, child in children if embedding in set(child.modules()) - {child}]
    return ".".join(filter(None, [parent, *beside])) if len(beside) == 1 else None


def layer_list(model: PreTrainedModel) -> nn.ModuleList | None:
    """Return the list of the language model's layers. None if no list, or several lists, have the configured length.
    A pipeline stage has modules without parameters in place of the layers of other stages.
    """
    count = text_config(model.config).num_hidden_layers
    numbered = [layers for layers in outermost_lists(model.get_decoder()) if len(layers) == count]
    return numbered[0] if len(numbered) == 1 else None


def outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """Yield a module's outermost lists of modules, such as the layers of a language model and of a vision tower."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from outermost_lists(child)


def eos_ids(tokenizer: PreTrainedTokenizerBase, decoder: Any) -> tuple[int, ...]:
    """Return the end-of-sequence ids of the tokenizer and of the model's generation_config, in ascending order. A
    model that was trained on conversations may end a turn with an id that only its generation_config has.
    """
    ids = {*_end_ids(decoder.pretrained.generation_config), tokenizer.eos_token_id} - {None}
    return tuple(sorted(map(int, ids)))


def read_end_ids(name_or_path: str, revision: str | None = None, *, trust_remote_code: bool = False) -> list[int]:
    """Return the end-of-sequence ids in a model's generation_config.json or, without this file, in config.json."""
    with reading(f"model '{escaped(name_or_path)}': its configuration cannot be read"):
        try:
            config = GenerationConfig.from_pretrained(name_or_path, revision=revision or "main")
        except OSError:  # the file is optional; without it, transformers also reads the configuration
            config = GenerationConfig.from_model_config(
                AutoConfig.from_pretrained(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
            )
    return sorted(_end_ids(config))


def add_end_ids(decoder: Any, ids: Collection[int]) -> None:
    """Add end-of-sequence ids to the model's generation_config, which is saved with the model.

    The ids are written into a temporary file, from which the generation_config is read again. transformers saves an
    inconsistent generation_config (a temperature without sampling) only if it has not changed since it was read.
    """
    model = decoder.pretrained
    before = _end_ids(model.generation_config)
    if before >= set(ids):
        return
    united = sorted({*before, *ids})
    with TemporaryDirectory() as folder, reading("the generation_config of the student cannot be saved"):
        config = model.generation_config or GenerationConfig()
        config.save_pretrained(folder)
        path = Path(folder) / GENERATION_CONFIG_NAME
        content = json.loads(path.read_bytes()) | {"eos_token_id": united if len(united) > 1 else united[0]}
        path.write_text(json.dumps(content), encoding="utf-8")
        model.generation_config = type(config).from_pretrained(folder)


def _end_ids(config: GenerationConfig | None) -> set[int]:
    named = None if config is None else config.eos_token_id
    return {int(number) for number in (named if isinstance(named, list | tuple) else [named]) if number is not None}


@dataclass(frozen=True)
class LogitRule:
    """How a model family changes its logits after the projection: softcap(scale · logits)."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "LogitRule":
        """Read the rule from a configuration, with the usual meaning of each key. Some families use a key differently
        (`logits_scaling` divides in Granite and multiplies in HyperCLOVA X), so `prove_logits` checks the rule.
        """
        text = text_config(config)
        scale = 1.0
        for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
            scale *= float(getattr(text, name, None) or 1.0)
        for name in ("logits_scaling", "logits_mup_width_multiplier"):
            scale /= float(getattr(text, name, None) or 1.0)
        names = "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"
        softcaps = (getattr(text, name, None) for name in names)
        return cls(scale, next((float(cap) for cap in softcaps if cap), None))


def router_classes(model: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    """Return the model's router classes with an auxiliary loss in transformers, whose first output is the logits."""
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    if not isinstance(recorded, OutputRecorder) or recorded.index:
        return ()
    return (recorded.target_class,) if hasattr(text_config(model.config), "router_aux_loss_coef") else ()


def placeholder_ids(model: PreTrainedModel) -> list[int]:
    """Return the ids of the placeholder tokens for features of images, videos and audio."""
    numbers = (getattr(model.config, name, None) for name in _PLACEHOLDERS)
    return [number for number in numbers if number is not None]


def is_of_experts(name: str) -> bool:
    """Return whether the module or tensor with this name is a stack of experts, or a part of a stack."""
    return "experts" in name.split(".")


def declare_mtp(config: PreTrainedConfig, depths: int) -> None:
    """Write the number of MTP layers into a configuration; for families that declare none, also their layer types."""
    text = text_config(config)
    text.num_mtp_layers = depths
    if not ModelFacts(config).declares_mtp:
        for kinds, preferred in (("layer_types", "full_attention"), ("mlp_layer_types", None)):
            if (types := getattr(text, kinds, None)) is not None:
                setattr(text, f"mtp_{kinds}", [preferred if preferred in types else types[-1]] * depths)


def without_mtp(config: PreTrainedConfig) -> list[str]:
    """Remove the MTP layers from a configuration, and return the prefixes of their names in the checkpoint."""
    prefixes, text = ModelFacts(config).mtp_prefixes, text_config(config)
    if prefixes:
        text.num_mtp_layers = 0
    for kinds in ("mtp_layer_types", "mtp_mlp_layer_types"):
        text.__dict__.pop(kinds, None)
    return prefixes


def plan_name(name: str) -> str:
    """Return a module's name as plans write it: with * in place of a layer's number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
