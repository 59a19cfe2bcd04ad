"""LoRA on a decoder: each selected linear layer is frozen and gets two small trained matrices.

W x becomes W x + (alpha / r) B A x, where A is [r, inputs] and B [outputs, r] (Hu et al. 2021, arXiv:2106.09685).
peft's LoRA layers replace the linear layers, and the adapter's files have peft's format. peft is an optional
dependency, so a function imports it only when it needs it.

An inference server can also add LoRA layers, for weights that another process trains. The server reads the options
from adapter_config.json (`LoraOptions`), and refuses options for layers that `add_lora` does not make (such as DoRA).
"""

import copy
import importlib.util
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stillhouse.display import escaped
from stillhouse.libraries import reading
from stillhouse.models.decoder import Decoder
from stillhouse.models.dtensors import name_seed, set_from_global
from stillhouse.models.quantized import element_count, is_quantized

ALL_LINEAR = "all-linear"
_NAME = "default"  # peft's name for the only adapter of a model
ADAPTER_CONFIG = "adapter_config.json"
#: the options of peft that do not change a server's layers; peft sets fan_in_fan_out by the class of each layer
_WITHOUT_EFFECT = {
    *("base_model_name_or_path", "fan_in_fan_out", "inference_mode", "lora_dropout", "peft_version", "revision"),
    "task_type",
}


@dataclass(frozen=True)
class Lora:
    """The size of a decoder's adapter."""

    r: int
    alpha: float
    layers: int  # the number of layers with a LoRA
    trained: int  # the number of trained parameters
    parameters: int  # the number of parameters of the full model, adapter included

    def __str__(self) -> str:
        def short(count: int) -> str:
            for size, unit in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
                if count >= size:
                    return f"{count / size:.3g}{unit}"
            return str(count)

        counts = f"{short(self.trained)} of {short(self.parameters)} parameters train"
        return f"LoRA r {self.r}, alpha {self.alpha:g} on {self.layers} modules, {counts}"


def add_lora(
    decoder: Decoder,
    *,
    r: int = 16,
    alpha: float = 32.0,
    targets: str | list[str] = ALL_LINEAR,
    dropout: float = 0.0,
    base: str | None = None,
    revision: str | None = None,
) -> Lora:
    """Add an adapter to an unsharded decoder and freeze all other parameters.

    The matrices A and B are uninitialised until `initialize_lora` is called. Their dtype is float32, or the dtype of
    the layer's weight if it is wider than float32.

    targets: `ALL_LINEAR` (all linear layers of the language model except the head), or the last parts of the names of
        linear layers, such as q_proj.
    base, revision: the base model's name and revision, which are written to the adapter's files. The default name is
        the one from which the model was loaded.

    Raises ValueError for targets that cannot have an adapter.
    """
    from peft import LoraConfig

    model = decoder.pretrained
    names = target_names(decoder, targets)
    # as usual in adapter files, write only the last parts of the names, unless these would select further modules
    last_parts = {name.rpartition(".")[2] for name in names}
    selected = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last_parts}
    config = LoraConfig(
        r=r,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        target_modules=sorted(last_parts) if selected == set(names) else names,
        lora_dropout=dropout,
        task_type="CAUSAL_LM",
        revision=revision,
    )
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # peft itself detects GPT-2's [in, out] weights
        model.add_adapter(config)
    config.base_model_name_or_path = base or model.name_or_path
    config.target_modules = sorted(config.target_modules)  # the order of peft's set differs between processes
    layers = _lora_layers(model)
    if different := sorted(layers.keys() ^ set(names)):  # peft treats some names as names of experts
        raise ValueError(
            f"peft puts the LoRA on other layers of model type '{model.config.model_type}' than the requested layers "
            f"(first difference: '{different[0]}'): expected layers that are not experts, such as [q_proj, v_proj]"
        )
    for layer in layers.values():
        weight = layer.get_base_layer().weight
        for matrices in (layer.lora_A, layer.lora_B):
            matrices.to_empty(device=weight.device).to(torch.promote_types(weight.dtype, torch.float32))
    trained = sum(element_count(parameter) for parameter in decoder.parameters() if parameter.requires_grad)
    decoder.lora = Lora(r, alpha, len(layers), trained, sum(map(element_count, decoder.parameters())))
    return decoder.lora


@torch.no_grad()
def initialize_lora(decoder: Decoder, seed: int, *, fresh: bool = True) -> None:
    """Initialise the matrices of the decoder's adapter, if it has one, on this process.

    As in peft, the values of A are random with a uniform distribution, and B is zero. With fresh=False, B is random
    like A, so that no gradient is 0. The values do not depend on the sharding (`name_seed`).
    """
    for name, parameter in decoder.named_parameters():
        if is_lora(name):
            set_from_global(parameter, initial_matrix(name, parameter.shape, seed, parameter.dtype, fresh=fresh))


def initial_matrix(
    name: str, shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32, *, fresh: bool = True
) -> Tensor:
    """Return the initial values of the unsharded matrix that the decoder calls `name` (see `initialize_lora`)."""
    matrix = torch.zeros(tuple(shape), dtype=dtype)
    if not fresh or ".lora_A." in name:
        nn.init.kaiming_uniform_(
            matrix, a=math.sqrt(5), generator=torch.Generator().manual_seed(name_seed(seed, name))
        )
    return matrix


def is_lora(name: str) -> bool:
    """Return whether a parameter with this name is a matrix of an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """Return the name that a weight has in the same model without an adapter."""
    return name.replace(".base_layer.", ".")


def lora_parts(layer: nn.Module) -> dict[str, nn.Module]:
    """Return a layer's submodules base_layer, lora_A and lora_B by name, or {} for a layer without an adapter."""
    children = dict(layer.named_children())
    if "lora_A" not in children:
        return {}
    matrices = {name: children[name].get_submodule(_NAME) for name in ("lora_A", "lora_B")}
    return {"base_layer": children["base_layer"], **matrices}


@contextmanager
def without_lora(decoder: Decoder) -> Iterator[None]:
    """Within the block, switch the adapter off. Only for forward passes without gradients."""
    layers = _lora_layers(decoder).values()
    for layer in layers:
        layer.enable_adapters(False)
        # peft has also frozen the matrices, but they must require grad: FSDP records in its first forward which
        # parameters require grad, and the first forward may be in this block
        layer.set_requires_grad(layer.active_adapters)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def save_lora(decoder: Decoder, matrices: Mapping[str, Tensor], folder: str | os.PathLike[str]) -> None:
    """Write the adapter to a folder in peft's format. matrices: the unsharded matrices, by their decoder names."""
    config: Any = copy.copy(decoder.pretrained.peft_config[_NAME])
    config.inference_mode = True  # peft also sets this when it saves an adapter
    config.save_pretrained(os.fspath(folder))
    named = {saved_lora_name(decoder, name): matrix.contiguous() for name, matrix in matrices.items()}
    save_file(named, os.path.join(folder, "adapter_model.safetensors"), metadata={"format": "pt"})


def saved_lora_name(decoder: Decoder, name: str) -> str:
    """Return the name that a matrix has in peft's files. name: its name in the decoder."""
    inside = f"base_model.model.{decoder.backbone_name}."
    return inside + name.removeprefix("backbone.").replace(f".{_NAME}.", ".")


def merged_lora(model: PreTrainedModel, folder: str | os.PathLike[str]) -> PreTrainedModel:
    """Return the model on the CPU, with the adapter in `folder` merged into its weights."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")  # caused by peft
        return PeftModel.from_pretrained(model, os.fspath(folder), torch_device="cpu").merge_and_unload()


def target_names(decoder: Decoder, targets: str | list[str]) -> list[str]:
    """Return the full names of the linear layers that `targets` select (see `add_lora`).

    Raises ValueError for a target that selects no module, and for one that selects the head, the input embedding or a
    module that is not linear.
    """
    model = decoder.pretrained
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    modules = dict(model.named_modules())
    linear = [name for name, module in modules.items() if _is_linear(module) and module is not head]
    if targets == ALL_LINEAR:
        language_modules = set(decoder.language_model.modules())  # vision towers have no gradient without images
        return [name for name in linear if modules[name] in language_modules]
    names: dict[str, None] = {}
    for target in [targets] if isinstance(targets, str) else targets:
        selected = [name for name in modules if f".{name}".endswith(f".{target}")]
        if not selected:
            raise ValueError(
                f"no module is called '{target}': expected {ALL_LINEAR}, or some of the linear layers "
                f"{', '.join(sorted({name.rpartition('.')[2] for name in linear}))}"
            )
        for name in selected:
            is_tied = head.weight is embedding.weight
            if modules[name] is head or (modules[name] is embedding and is_tied):
                which = "output head" if modules[name] is head else "input embedding"
                shared = ", whose weight is tied" if is_tied else ""
                raise ValueError(
                    f"'{target}' is the {which} ('{name}'{shared}), which cannot have a LoRA: the objective reads "
                    f"only the head's weight, without a LoRA. Expected {ALL_LINEAR}, or layers of the backbone"
                )
            if name not in linear:
                raise ValueError(f"'{target}' is a {type(modules[name]).__name__} ('{name}'): expected linear layers")
        names |= dict.fromkeys(selected)
    return list(names)


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer that returns only its output tensor (unlike Llama 4's router)."""
    if not isinstance(module, nn.Linear | Conv1D):
        return False
    if type(module).forward in (nn.Linear.forward, Conv1D.forward) or is_quantized(module.weight):
        return True
    row_1D = torch.empty(1, module.in_features, dtype=module.weight.dtype, device="meta")
    try:
        with reading("a linear layer"):
            output = copy.deepcopy(module).to("meta")(row_1D)
    except ValueError:
        return False
    return isinstance(output, torch.Tensor) and output.shape == (1, module.out_features)


def _lora_layers(model: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


class _AdapterConfig(BaseModel):
    """The content of adapter_config.json, as `save_lora` writes it."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    r: int = Field(ge=1, le=2**16)
    lora_alpha: FiniteFloat = Field(gt=0)
    target_modules: list[str] = Field(min_length=1)


@dataclass(frozen=True)
class LoraOptions:
    """The options that determine the layers of an adapter. targets: the last parts of module names, sorted."""

    r: int
    alpha: float
    targets: tuple[str, ...]

    @classmethod
    def of(cls, content: bytes) -> "LoraOptions":
        """Return the options in the content of adapter_config.json. Raises ValueError if the content describes no
        LoRA, or a LoRA with other layers than `add_lora` makes, or if peft is not installed.
        """
        if importlib.util.find_spec("peft") is None:
            raise ValueError("an adapter needs peft, which is not installed; pip install 'stillhouse[lora]'")
        try:
            config = _AdapterConfig.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            place = escaped(".".join(map(str, first["loc"])))
            raise ValueError(f"{ADAPTER_CONFIG} describes no LoRA: {place}: {first['msg']}") from error
        from peft import LoraConfig

        defaults = json.loads(json.dumps(LoraConfig().to_dict()))
        for name, value in sorted((config.model_extra or {}).items()):
            default = defaults.get(name)
            # refuse options that make other layers, such as those of DoRA; null has no effect
            if name not in _WITHOUT_EFFECT and value not in (default, None) and (value or default):
                raise ValueError(
                    f"{ADAPTER_CONFIG} has {escaped(name)[:100]}={escaped(str(value))[:100]}: expected "
                    f"{default}, because the server adds plain LoRA layers"
                )
        return cls(config.r, config.lora_alpha, tuple(sorted(set(config.target_modules))))

    def __str__(self) -> str:
        return f"r {self.r}, alpha {self.alpha:g} on {escaped(', '.join(self.targets))[:200]}"


def expected_lora(decoder: Decoder, options: LoraOptions) -> dict[str, Tensor]:
    """Return the matrices, on the meta device and by name, that `add_lora` would add to a decoder without an adapter.

    Raises ValueError for targets that cannot have an adapter.
    """
    modules, prefix = dict(decoder.pretrained.named_modules()), f"{decoder.backbone_name}."
    matrices: dict[str, Tensor] = {}
    for name in target_names(decoder, list(options.targets)):
        module = modules[name]
        if not name.startswith(prefix):
            raise ValueError(f"'{name}' is not in the model's backbone: expected layers of the backbone")
        weight = module.get_parameter("weight")  # Conv1D of GPT-2 stores [inputs, outputs]
        dtype, is_linear = torch.promote_types(weight.dtype, torch.float32), isinstance(module, nn.Linear)
        inputs, outputs = (module.in_features, module.out_features) if is_linear else weight.shape
        for matrix, shape in (("lora_A", (options.r, inputs)), ("lora_B", (outputs, options.r))):
            in_decoder = f"backbone.{name.removeprefix(prefix)}.{matrix}.default.weight"
            matrices[in_decoder] = torch.empty(shape, dtype=dtype, device="meta")
    return matrices
