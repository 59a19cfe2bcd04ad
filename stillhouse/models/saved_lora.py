"""The files of a LoRA that another process has trained, for a server that adds the same layers to its own model.

Every option that changes the layers is read or refused, because with other layers the server would be another model.
"""

import importlib.util
import json
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from torch import Tensor, nn

from stillhouse.display import escaped
from stillhouse.models.adapter import target_names
from stillhouse.models.decoder import Decoder

ADAPTER_CONFIG = "adapter_config.json"
#: the options without an effect on a server's layers: peft derives fan_in_fan_out from the class of each layer
_WITHOUT_EFFECT = {
    *("base_model_name_or_path", "fan_in_fan_out", "inference_mode", "lora_dropout", "peft_version", "revision"),
    "task_type",
}


class _AdapterConfig(BaseModel):
    """adapter_config.json, as `save_lora` writes it."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    r: int = Field(ge=1, le=2**16)
    lora_alpha: FiniteFloat = Field(gt=0)
    target_modules: list[str] = Field(min_length=1)


@dataclass(frozen=True)
class LoraOptions:
    """The options of `add_lora` that determine the layers. targets: the last parts of module names, sorted."""

    r: int
    alpha: float
    targets: tuple[str, ...]

    @classmethod
    def of(cls, content: bytes) -> "LoraOptions":
        """Parse the content of adapter_config.json. Raises ValueError for layers that `add_lora` does not make."""
        if importlib.util.find_spec("peft") is None:
            raise ValueError("an adapter needs peft, which is not installed; pip install 'stillhouse[lora]'")
        try:
            config = _AdapterConfig.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            place = escaped(".".join(map(str, first["loc"])))
            raise ValueError(f"{ADAPTER_CONFIG} describes no LoRA: {place}: {first['msg']}") from error
        _require_plain(config.model_extra or {})
        return cls(config.r, config.lora_alpha, tuple(sorted(set(config.target_modules))))

    def __str__(self) -> str:
        return f"r {self.r}, alpha {self.alpha:g} on {escaped(', '.join(self.targets))[:200]}"


def expected_lora(decoder: Decoder, options: LoraOptions) -> dict[str, Tensor]:
    """Return the matrices of the layers that `add_lora` would add, on the meta device, by their names in the decoder.

    The decoder is not changed, and must not have an adapter. Raises ValueError for targets that cannot have one.
    """
    modules, prefix = dict(decoder.pretrained.named_modules()), f"{decoder.backbone_name}."
    matrices: dict[str, Tensor] = {}
    for name in target_names(decoder, list(options.targets)):
        module = modules[name]
        if not name.startswith(prefix):
            raise ValueError(f"'{name}' is not in the model's backbone: expected layers of the backbone")
        dtype = torch.promote_types(module.weight.dtype, torch.float32)
        inputs, outputs = _sizes(module)
        for matrix, shape in (("lora_A", (options.r, inputs)), ("lora_B", (outputs, options.r))):
            in_decoder = f"backbone.{name.removeprefix(prefix)}.{matrix}.default.weight"
            matrices[in_decoder] = torch.empty(shape, dtype=dtype, device="meta")
    return matrices


def _sizes(module: nn.Module) -> tuple[int, int]:
    """The numbers of inputs and outputs of a linear layer."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight = module.get_parameter("weight")  # Conv1D of GPT-2 stores [inputs, outputs]
    return weight.shape[0], weight.shape[1]


def _require_plain(options: dict[str, Any]) -> None:
    """Raise ValueError for an option that makes other layers, such as those of DoRA."""
    from peft import LoraConfig

    defaults = json.loads(json.dumps(LoraConfig().to_dict()))
    for name, value in sorted(options.items()):
        default = defaults.get(name)
        if name in _WITHOUT_EFFECT or value == default or not (value or default):
            continue
        raise ValueError(
            f"{ADAPTER_CONFIG} has {escaped(name)[:100]}={escaped(str(value))[:100]}: expected "
            f"{default}, because the server adds plain LoRA layers"
        )
