"""Frozen models whose linear layers multiply in 8-bit floating point (fp8, e4m3), by torchao.

Weights have one scale per output row. Activations are rounded while the model runs, with one scale per token, so a
token's numbers do not depend on the other tokens of its batch. Products are added up in higher precision and rounded
to bfloat16. The output head, the embedding, the norms and the routers of experts keep bfloat16: the objective reads
the head's weight, and a rounded router would send tokens to other experts.

The model is loaded in bfloat16 and then rounded. It runs on the same tokens before and after that: a kernel that is
wrong on this device would otherwise give plausible signals of a wrong teacher.

N tokens, V vocabulary.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stillhouse.libraries import reading
from stillhouse.models.forward_modes import evaluating

FP8 = "fp8"
#: parts of the names of modules that choose experts, which are plain linear layers in some families
_ROUTERS = {"gate", "gating", "router", "shared_expert_gate"}
#: torchao's products need matrices whose rows and columns are multiples of this
_MULTIPLE = 16
#: the first compute capability of CUDA devices that multiply in fp8
_CAPABILITY = (8, 9)
#: the largest change of the logits by rounding, relative to their deviation from their mean over the vocabulary, as
#: the median over tokens. A trained model changed by 0.05, models with random weights by 0.2
_LARGEST_CHANGE = 0.5
_TOKENS = 64
#: the scale of a row of inputs is at least that of a row with this largest number
_LEAST = 1e-12


def float8_problem(device: torch.device | str | None) -> str | None:
    """Return why a device cannot multiply in fp8; None if it can."""
    place = torch.device(device or "cpu")
    if place.type == "cuda" and torch.cuda.get_device_capability(place) >= _CAPABILITY:
        return None
    actual = str(place)
    if place.type == "cuda":
        actual = "compute capability {}.{}".format(*torch.cuda.get_device_capability(place))
    least = ".".join(map(str, _CAPABILITY))
    return (
        f"fp8 needs a GPU of compute capability {least} or later (such as L40S or H100), got {actual}: expected int8 "
        "or nf4"
    )


def round_to_float8(model: PreTrainedModel) -> None:
    """Quantize the linear layers of a bfloat16 model in place.

    Raises ValueError for another dtype, and if the logits change more than rounding can change them.
    """
    if model.dtype != torch.bfloat16:
        raise ValueError(f"fp8 rounds bfloat16 weights, got {model.dtype}: expected dtype bfloat16")
    model.requires_grad_(False)
    before_NV = _probe_logits(model)
    rounded = {id(module) for name, module in model.named_modules() if _is_rounded(model, module, name)}
    with reading("torchao cannot be used"):
        from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_
        from torchao.quantization.quantize_.common import KernelPreference

        configuration = Float8DynamicActivationFloat8WeightConfig(
            granularity=PerRow(),
            activation_value_lb=_LEAST,  # torchao would divide a row of zeros by 0
            kernel_preference=KernelPreference.TORCH,
            set_inductor_config=False,  # these settings are global, and the objective is compiled with others
        )
        quantize_(model, configuration, filter_fn=lambda module, name: id(module) in rounded)
    deviation_N = (before_NV - before_NV.mean(-1, keepdim=True)).norm(dim=-1)
    change = float(((_probe_logits(model) - before_NV).norm(dim=-1) / deviation_N).median())
    if not change <= _LARGEST_CHANGE:
        raise ValueError(
            f"fp8 changes its logits by {change:.2g} of their deviation, and rounding alone by at most "
            f"{_LARGEST_CHANGE}: expected a device and a torchao whose fp8 products are right, or int8 or nf4"
        )


def _is_rounded(model: PreTrainedModel, module: nn.Module, name: str) -> bool:
    if type(module) is not nn.Linear or module is model.get_output_embeddings() or _ROUTERS & set(name.split(".")):
        return False
    if module.in_features % _MULTIPLE or module.out_features % _MULTIPLE:
        return False
    return bool(module.weight.ne(0).any(1).all())  # torchao would divide a row of zeros by 0


@torch.no_grad()
def _probe_logits(model: PreTrainedModel) -> Tensor:
    rows = model.get_input_embeddings().weight.shape[0]
    ids_N = torch.randint(rows, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    with evaluating(model):
        return model(ids_N.to(model.device), use_cache=False).logits[0].float()
