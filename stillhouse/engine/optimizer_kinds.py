"""The optimizers that `train.optimizer` names, without torch. `optimizer.py` has their steps, groups and states.

Muon (https://kellerjordan.github.io/posts/muon/) changes a matrix by its orthogonalized momentum. With `muon`, AdamW
still trains the embedding, the head and all parameters that are not matrices. Muon's steps are scaled so that Muon
can use the learning rates of AdamW (arXiv:2502.16982, section 2.2).
"""

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from stillhouse.config import TrainConfig
from stillhouse.config.train_section import OFFLOADED, SHARDED

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stillhouse.engine.optimizer import WeightKind

    Kinds = Mapping[nn.Parameter, WeightKind]


class OptimizerKind(Protocol):
    """An entry of the group `stillhouse.optimizers`. An optimizer class derives from `KnownState` if its state before
    the first step differs from the state of torch's AdamW or Adafactor.

    capabilities: `SHARDED` if the result is the same for a sharded and for an unsharded matrix, so that all layouts
        are possible. `OFFLOADED` if weights and state can be in host memory.
    """

    capabilities: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def require(cls) -> None:
        """Raise ValueError if the installed libraries cannot run this optimizer."""

    @classmethod
    def make(cls, kinds: "Kinds", train: TrainConfig) -> "torch.optim.Optimizer":
        """Return the optimizer of these parameters (see `weight_kinds`)."""
        ...


class AdamW(OptimizerKind):
    capabilities = (SHARDED, OFFLOADED)

    @classmethod
    def make(cls, kinds: "Kinds", train: TrainConfig) -> "torch.optim.Optimizer":
        import torch

        # on a CPU, the fused kernel rounds differently
        fused = all(weight.is_cuda for weight in kinds) or None
        return torch.optim.AdamW(fused=fused, **adamw_options(kinds, train))


class AdamW8bit(OptimizerKind):
    @classmethod
    def require(cls) -> None:
        if importlib.util.find_spec("torchao") is None:
            raise ValueError("torchao is not installed: run pip install 'stillhouse[low-bit]'")
        import torch

        if torch._dynamo.config.disable:
            raise ValueError(
                "got adamw_8bit with compiling turned off (TORCH_COMPILE_DISABLE=1), and torchao must compile this "
                "optimizer's step: expected adamw, or compiling turned on"
            )

    @classmethod
    def make(cls, kinds: "Kinds", train: TrainConfig) -> "torch.optim.Optimizer":
        from torchao.optim import AdamW8bit

        optimizer: torch.optim.Optimizer = AdamW8bit(**adamw_options(kinds, train))
        return optimizer


class Adafactor(OptimizerKind):
    @classmethod
    def make(cls, kinds: "Kinds", train: TrainConfig) -> "torch.optim.Optimizer":
        import torch

        from stillhouse.engine.optimizer import parameter_groups

        return torch.optim.Adafactor(parameter_groups(kinds, train), lr=train.learning_rate)


class Muon(OptimizerKind):
    capabilities = (SHARDED,)

    @classmethod
    def make(cls, kinds: "Kinds", train: TrainConfig) -> "torch.optim.Optimizer":
        from stillhouse.engine.optimizer import CombinedOptimizer, ShardedMuon

        by_muon = [weight for weight, kind in kinds.items() if kind == "matrix"]
        by_adamw: Kinds = {weight: kind for weight, kind in kinds.items() if kind != "matrix"}
        parts: list[torch.optim.Optimizer] = []
        if by_muon:
            parts.append(ShardedMuon(by_muon, train.learning_rate, train.weight_decay, train.momentum))
        return CombinedOptimizer(parts + [AdamW.make(by_adamw, train)] if by_adamw else parts)


def adamw_options(kinds: "Kinds", train: TrainConfig) -> dict[str, Any]:
    """Return the arguments that all variants of AdamW take."""
    from stillhouse.engine.optimizer import parameter_groups

    groups = parameter_groups(kinds, train)
    return {"params": groups, "lr": train.learning_rate, "betas": train.betas, "eps": train.eps}
