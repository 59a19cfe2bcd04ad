"""The step of an optimizer, its groups of parameters, and its state as plain tensors.

The name of a parameter and the class of its module decide whether the parameter is a matrix (`weight_kinds`). The
biases of stacked experts and the A of a state-space layer also have two dims, so the number of dims is not enough.
"""

import re
import sys
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd

from stillhouse.config import ConfigError, TrainConfig, as_config_error
from stillhouse.config.train_section import SHARDED
from stillhouse.display import first_line
from stillhouse.models import Decoder
from stillhouse.models.dtensors import gathered_tensor, local, shard_slices
from stillhouse.parallel import Layout
from stillhouse.registry import load, load_all

_KEY = "train.optimizer"

WeightKind = Literal["matrix", "table", "vector"]
#: the names of matrices in transformers. `nn.Linear` is not enough: the matrices of routers, experts and latent
#: projections are parameters of other modules
_MATRIX = re.compile(r"weight|(\w+_)?(proj|projection|gate)(_weight)?|(hc_)?fn")
#: the names of classes whose parameters are vectors, and the names of other parameters that are (stacks of) vectors
_NORM = re.compile(r"\w*Norm(Gated|\dd)?")
_VECTOR = re.compile(r"(\w+_)?(bias|ape|A_log|D|scale)")


def require_optimizer(train: TrainConfig, layout: Layout) -> None:
    """Raise ConfigError for an optimizer that this layout does not allow, or whose library is not installed."""
    degrees, kinds = layout.degrees, load_all("stillhouse.optimizers")
    if degrees.processes > degrees.pipeline and SHARDED not in kinds[train.optimizer].capabilities:
        raise ConfigError(
            _KEY,
            f"got {train.optimizer} under {layout}, which distributes weights over processes: expected "
            f"{' or '.join(name for name, kind in kinds.items() if SHARDED in kind.capabilities)}, or only "
            "pipeline parallelism",
        )
    with as_config_error(_KEY):
        kinds[train.optimizer].require()


def weight_kinds(models: Iterable[nn.Module]) -> dict[nn.Parameter, WeightKind]:
    """Return the kind of each parameter, which the class of its module and its name in the module determine.

    matrix: the matrix of a linear map, or a stack of such matrices (experts, heads). The last two dims are rows and
        columns.
    vector: norms, biases, and the A of a state-space layer; also a stack of vectors.
    table: embeddings, output heads, kernels of convolutions, and weights with unknown names, such as DBRX's experts,
        which are concatenated along the rows of one tensor.

    Weight decay applies to matrices and tables, Muon to matrices.
    """
    models = list(models)
    kinds: dict[nn.Parameter, WeightKind] = {}
    for module in (module for model in models for module in model.modules()):
        for name, parameter in module.named_parameters(recurse=False):
            if kinds.get(parameter) != "table":  # a tied head has the embedding's weight, which is a table
                kinds[parameter] = _kind(module, name, parameter)
    heads = [model.output_weight for model in models if isinstance(model, Decoder) and model.has_head]
    return kinds | {weight: "table" for weight in heads if isinstance(weight, nn.Parameter)}


def _kind(module: nn.Module, name: str, parameter: Tensor) -> WeightKind:
    # families define their own norm classes, and some norms have a vector for each head (Cohere)
    if parameter.dim() < 2 or _NORM.fullmatch(type(module).__name__) or _VECTOR.fullmatch(name):
        return "vector"
    if isinstance(module, nn.Embedding | _ConvNd):
        return "table"
    if _MATRIX.fullmatch(name):
        return "matrix"
    return "vector" if parameter.numel() == max(parameter.shape) else "table"


def stacked_vectors(models: Iterable[nn.Module]) -> list[str]:
    """Return the names of the trained vectors with several dims. Earlier versions treated them as matrices."""
    models = list(models)
    kinds = weight_kinds(models)
    named = (entry for model in models for entry in model.named_parameters())
    return [name for name, weight in named if kinds[weight] == "vector" and weight.dim() > 1 and weight.requires_grad]


def make_optimizer(models: Iterable[nn.Module], train: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer of the models' parameters that require a gradient (see `weight_kinds`)."""
    kinds = {weight: kind for weight, kind in weight_kinds(models).items() if weight.requires_grad}
    optimizer: torch.optim.Optimizer = load("stillhouse.optimizers", train.optimizer).make(kinds, train)
    return optimizer


class KnownState(torch.optim.Optimizer):
    """An optimizer that can create its state before the first step. A checkpoint is read into this state."""

    @abstractmethod
    def empty_state(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter before the first step: zeros."""


class ShardedMuon(KnownState):
    """torch's Muon with Nesterov momentum, also for sharded matrices and for each matrix of a stack.

    The momentum is sharded like the matrix, but a shard of the orthogonalized momentum depends on the full momentum.
    So each process gathers one matrix or stack at a time. This is not necessary for a stack that is sharded only
    along its first dims, because each process then has whole matrices.
    """

    def __init__(self, matrices: Sequence[nn.Parameter], lr: float, weight_decay: float, momentum: float):
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        momentum, rate = group["momentum"], group["lr"]
        for matrix in group["params"]:
            if matrix.grad is None:
                continue
            if not (state := self.state[matrix]):
                state |= self.empty_state(matrix)
            state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
            update = matrix.grad.lerp(state["momentum_buffer"], momentum)
            placements: Sequence[Any] = update.placements if isinstance(update, DTensor) else ()
            if all(placement.is_replicate() or placement.dim < update.dim() - 2 for placement in placements):
                change = _orthogonal_step(local(update), rate)
            else:
                change = _orthogonal_step(gathered_tensor(update), rate)[shard_slices(matrix)]
            local(matrix).mul_(1 - rate * group["weight_decay"]).add_(change)

    def empty_state(self, parameter: Tensor) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(parameter)}


class CombinedOptimizer(KnownState):
    """Combines optimizers of different parameters into one optimizer, with one state and one list of groups."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def empty_state(self, parameter: Tensor) -> dict[str, Any]:
        owners = {id(other): part for part in self.parts for group in part.param_groups for other in group["params"]}
        return empty_state(owners[id(parameter)], parameter)


def skips_by_flag(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's kernel itself skips a step if a flag on the device is 1 (see `make_step`).

    If it does, the host reads the gradient's norm after the step, together with the metrics, and so waits only once.
    If it does not, the host must read the norm before the step, because a step with an infinite or NaN gradient
    could not be undone.
    """
    return type(optimizer) is torch.optim.AdamW and all(group["fused"] for group in optimizer.param_groups)


def make_step(optimizer: torch.optim.Optimizer, rate: float, skipped: Tensor | None = None) -> None:
    """Step the optimizer with this learning rate. Raises ConfigError if torch cannot compile torchao's step.

    skipped: a 0-D float32 tensor, only for optimizers for which `skips_by_flag` is true. If the tensor is 1.0,
    weights and state do not change, but a parameter without state gets the state of `empty_state`.
    """
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's compiled step reads the rate from a tensor
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    if skipped is not None:
        optimizer.found_inf = skipped  # type: ignore[attr-defined]  # torch.amp.GradScaler also sets `found_inf`
    try:
        optimizer.step()
    except torch._dynamo.exc.TorchDynamoException as error:
        needed = f"torch.compile, which torchao's adamw_8bit needs, fails on this machine ({first_line(error)})"
        fix = "expected adamw, or a C++ compiler that torch finds and, on a GPU, Triton"
        raise ConfigError(_KEY, f"{needed}: {fix}") from error


def empty_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return the optimizer's state of a parameter before the first step: all zeros."""
    if isinstance(optimizer, KnownState):
        return optimizer.empty_state(parameter)
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    state = {"step": torch.zeros((), device=parameter.device if is_fused else None)}
    if isinstance(optimizer, torch.optim.Adafactor):
        if parameter.dim() < 2:
            return state | {"variance": torch.zeros_like(parameter)}
        rows = parameter.new_zeros(parameter[..., :1].shape)
        return state | {"row_var": rows, "col_var": parameter.new_zeros(parameter[..., :1, :].shape)}
    if isinstance(optimizer, torch.optim.AdamW):
        return state | {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    # torchao decides by the size of the parameter whether a moment has 8 bits
    signed: dict[str, Any] = {"exp_avg": True, "exp_avg_sq": False}
    return state | {name: optimizer._new_buffer(parameter, value) for name, value in signed.items()}  # type: ignore[attr-defined]


def state_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer's state of one parameter as plain tensors, which share memory with the state. An 8-bit
    moment becomes two tensors: the codes, and one scale for each block of codes.
    """
    eight_bits: Any = ()
    if "torchao" in sys.modules:
        from torchao.optim import subclass_8bit

        eight_bits = subclass_8bit.OptimState8bit
    tensors: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, eight_bits):
            tensors |= {f"{key}.codes": value.codes, f"{key}.scale": value.scale}
        else:
            tensors[key] = value
    return tensors


def parameter_groups(kinds: Mapping[nn.Parameter, WeightKind], train: TrainConfig) -> list[dict[str, Any]]:
    """Return the groups of parameters, with the weight decay of each."""
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter, kind in kinds.items():
        # the foreach implementation of AdamW needs all tensors of a group on one mesh
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups[kind != "vector", mesh].append(parameter)
    decay = {True: train.weight_decay, False: 0.0}
    return [{"params": held, "weight_decay": decay[has_decay]} for (has_decay, _), held in groups.items()]


def _orthogonal_step(momentum: Tensor, rate: float) -> Tensor:
    """Return the change of a matrix, or of each matrix of a stack, in a step of torch's Muon without weight decay."""
    change = torch.zeros_like(momentum, memory_format=torch.contiguous_format)
    matrices = [nn.Parameter(matrix) for matrix in change[None].flatten(0, -3)]
    for matrix, gradient in zip(matrices, momentum[None].flatten(0, -3), strict=True):
        matrix.grad = gradient
    if matrices:  # a process may have no expert
        torch.optim.Muon(
            matrices, lr=rate, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
        ).step()
    return change
