"""Properties of model families: where a model's parts are, how it computes logits, and its plans for parallelism.

They are read from transformers' configurations and modules; no family is recognised by its name. A family with
another name for a setting, a plan or a head needs a change in this file only.
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
#: the sizes that the tensor degree must divide
MATRIX_SIZES = (*HEADS, "intermediate_size")
#: layer types whose attention windows begin at fixed columns of a row, not where a document begins
_WINDOWS = {"chunked_attention", "compressed_sparse_attention", "heavily_compressed_attention", "minimax_m3_sparse"}
#: layer types that mix tokens by a state or a convolution
_STATES = {"conv", "hybrid", "hybrid_sliding", "linear_attention"}


def text_config(config: PreTrainedConfig) -> Any:
    """Return the configuration of the language model, which may be a part of a composite model's configuration."""
    return config.get_text_config()


class ModelFacts:
    """What a configuration says of its model's layers, positions, experts, MTP layers and plans.

    text: the part of the configuration that is the language model's.
    """

    def __init__(self, config: PreTrainedConfig):
        self.text = text_config(config)

    @property
    def row_windows(self) -> list[str]:
        """The layer types whose attention depends on a token's column in its row."""
        scaled = ["attn_temperature_tuning"] if getattr(self.text, "attn_temperature_tuning", None) else []
        return sorted(_WINDOWS & set(getattr(self.text, "layer_types", None) or ())) + scaled

    @property
    def layers_with_state(self) -> list[str]:
        """The layer types that mix tokens without attention, by a state or a convolution."""
        return sorted(_STATES & set(getattr(self.text, "layer_types", None) or ()))

    @property
    def max_positions(self) -> int | None:
        return getattr(self.text, "max_position_embeddings", None)

    @property
    def rope_parameters(self) -> list[dict[str, Any]]:
        """The rotary settings: one dict for all layers, or one dict per kind of layer."""
        parameters = getattr(self.text, "rope_parameters", None) or {}
        nested = [values for values in parameters.values() if isinstance(values, dict)]
        return nested or [parameters]

    @property
    def experts_per_token(self) -> int:
        """The number of experts that each token chooses in a layer; 1 for a model without experts."""
        return getattr(self.text, "num_experts_per_tok", None) or getattr(self.text, "top_k_experts", None) or 1

    @property
    def declares_mtp(self) -> bool:
        """Whether transformers itself implements MTP layers for the family."""
        return hasattr(type(self.text), "num_mtp_layers")

    @property
    def declared_depths(self) -> int:
        """The number of MTP layers according to a configuration; 0 if the configuration has no such number."""
        return getattr(self.text, "num_mtp_layers", None) or 0

    @property
    def mtp_prefixes(self) -> list[str]:
        """For each depth, the prefix of its layer's names in a checkpoint with this configuration."""
        layers = self.text.num_hidden_layers
        return [f"model.layers.{layers + depth}." for depth in range(self.declared_depths)]

    @property
    def shared_states(self) -> dict[int, int] | None:
        """The earlier layer of its kind whose keys and values a layer reads, by layer; None if that is not known."""
        if (modes := getattr(self.text, "kv_sharing_modes", None)) is None:
            return None
        if any(mode not in (None, "store", "reuse") for mode in modes):
            return None
        stored: dict[str, int] = {}
        states: dict[int, int] = {}
        for number, (mode, kind) in enumerate(zip(modes, self.text.layer_types, strict=True)):
            if mode == "store":
                stored[kind] = number
            elif mode == "reuse":
                states[number] = stored[kind]
        return states

    @property
    def mixes_tokens_by_score(self) -> bool:
        """Whether attention selects tokens by scores over a whole sequence (`index_topk`)."""
        return getattr(self.text, "index_topk", None) is not None

    @property
    def mixes_columns(self) -> bool:
        """Whether activations are chosen by the mean over a matrix's columns (`activation_sparsity_pattern`)."""
        return any(getattr(self.text, "activation_sparsity_pattern", None) or ())

    def parallel_plan(self, kind: str) -> dict[str, Any]:
        """Return transformers' plan "tp", "ep" or "pp" by generic names (`plan_name`); empty without such a plan."""
        return getattr(self.text, f"base_model_{kind}_plan", None) or {}

    def sizes(self, name: str) -> Any:
        """Return a size of the model, or a list of its layers' sizes if they can differ; None without this size."""
        if not getattr(self.text, "is_heterogeneous", False):
            return getattr(self.text, name, None)
        return [getattr(layer, name, None) for layer in self.text.per_layer_config]

    def indivisible_size(self, names: Sequence[str], ranks: int) -> tuple[str, Any] | None:
        """Return (name, value) of the first size that `ranks` does not divide, or None. A value may be a list."""
        for name in names:
            size = self.sizes(name)
            if any(count is not None and count % ranks for count in (size if isinstance(size, list) else [size])):
                return name, size
        return None


def backbone_name(model: PreTrainedModel) -> str | None:
    """Return the name of the module that computes the hidden states that the head gets; None if there is none.

    Usually `base_model_prefix` names it. In Llama 4, it is the module beside the head that has the embedding.
    """
    if model.base_model is not model:
        return model.base_model_prefix
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    path = next((name for name, module in model.named_modules() if module is head), "")
    parent, _, _ = path.rpartition(".")
    beside = [
        name
        for name, child in model.get_submodule(parent).named_children()
        if embedding in set(child.modules()) - {child}
    ]
    return ".".join(filter(None, [parent, *beside])) if len(beside) == 1 else None


def planned_part(model: PreTrainedModel, backbone: nn.Module) -> nn.Module:
    """Return the module whose submodules transformers' plans name: the language model inside of the backbone."""
    decoder = model.get_decoder()
    return decoder if any(module is decoder for module in backbone.modules()) else backbone


def layer_list(model: PreTrainedModel) -> nn.ModuleList | None:
    """Return the layers of the language model, which may be a part of a larger model; None if they are not found.

    On a pipeline stage, the list has empty modules in place of the layers of other stages.
    """
    count = text_config(model.config).num_hidden_layers
    numbered = [layers for layers in outermost_lists(model.get_decoder()) if len(layers) == count]
    return numbered[0] if len(numbered) == 1 else None


def outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """Yield the outermost lists of modules, such as the layers of the language model and those of a vision tower."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from outermost_lists(child)


def eos_ids(tokenizer: PreTrainedTokenizerBase, decoder: Any) -> tuple[int, ...]:
    """Return the end-of-sequence ids of the tokenizer and of the model's generation_config, in ascending order.

    Training ends a text with the tokenizer's id. But a model that was trained on conversations may end a turn with an
    id that only its generation_config has.
    """
    ids = {*_end_ids(decoder.pretrained.generation_config), tokenizer.eos_token_id} - {None}
    return tuple(sorted(map(int, ids)))


def read_end_ids(name_or_path: str, revision: str | None = None, *, trust_remote_code: bool = False) -> list[int]:
    """Return the end-of-sequence ids of a model's generation_config.json, or else of its configuration."""
    with reading(f"model '{escaped(name_or_path)}': its configuration cannot be read"):
        try:
            config = GenerationConfig.from_pretrained(name_or_path, revision=revision or "main")
        except OSError:  # the file is optional; transformers, too, reads the configuration then
            model_config = AutoConfig.from_pretrained(
                name_or_path, revision=revision, trust_remote_code=trust_remote_code
            )
            config = GenerationConfig.from_model_config(model_config)
    return sorted(_end_ids(config))


def add_end_ids(decoder: Any, ids: Collection[int]) -> None:
    """Add end-of-sequence ids to the model's generation_config, with which it is saved.

    The changed configuration goes through its file: transformers refuses to save an inconsistent one (a temperature
    without sampling) that has changed since it was read.
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


def has_position_table(model: PreTrainedModel, positions: int) -> bool:
    """Whether an embedding other than the token embedding has `positions` rows, or two more at most (OPT)."""
    tokens = model.get_input_embeddings()
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module is not tokens]
    return any(positions <= table.num_embeddings <= positions + 2 for table in tables)


@dataclass(frozen=True)
class LogitRule:
    """How a model family changes its logits after the projection: softcap(scale · logits)."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "LogitRule":
        """Read the rule from the names that transformers' configurations use.

        A name can have different meanings in two families: `logits_scaling` divides in Granite and multiplies in
        HyperCLOVA X. This function uses the usual meaning, and `verify` checks the resulting logits.
        """
        text = text_config(config)
        scale = 1.0
        for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
            scale *= _number(text, name, 1.0)
        for name in ("logits_scaling", "logits_mup_width_multiplier"):
            scale /= _number(text, name, 1.0)
        names = "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"
        softcap = next((cap for name in names if (cap := _number(text, name, 0.0))), None)
        return cls(scale, softcap)


def router_classes(model: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    """Return the router classes whose logits transformers records, if the logits are a router's first output."""
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    if isinstance(recorded, OutputRecorder) and recorded.index == 0:
        return (recorded.target_class,)
    return ()


def is_of_experts(name: str) -> bool:
    """Whether the module or tensor with this name is a stack of experts, or a part of such a stack."""
    return "experts" in name.split(".")


def without_mtp(config: PreTrainedConfig) -> list[str]:
    """Remove the MTP layers from a configuration, and return the prefixes of their names in the checkpoint."""
    family = ModelFacts(config)
    prefixes = family.mtp_prefixes
    if prefixes:
        family.text.num_mtp_layers = 0
    for kinds in ("mtp_layer_types", "mtp_mlp_layer_types"):
        family.text.__dict__.pop(kinds, None)
    return prefixes


def plan_name(name: str) -> str:
    """Return a module's name as plans write it: with * in place of a layer's number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _number(config: PreTrainedConfig, name: str, absent: float) -> float:
    value = getattr(config, name, None)
    return absent if value is None else float(value)
