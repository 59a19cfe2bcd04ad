"""One optimizer step: forward and backward over its micro-batches, then the update.

Every micro-batch's loss is a sum over its tokens divided by the number of valid tokens of the whole step, so that
neither the loss nor the gradient depends on how the step was cut. T tokens of a micro-batch, flattened.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from stillhouse.data import Batch
from stillhouse.models import Balance
from stillhouse.models.processors import Taught, distillation
from stillhouse.objective import ObjectiveOutput, Signal
from stillhouse.objective.keys import CHUNK_TOKENS
from stillhouse.objective.recipe import Recipe
from stillhouse.parallel import Runner, Work

#: the key of the routers' load balancing among a step's sums
ROUTER_LOSS = "router_aux"


def works(
    batches: Sequence[Batch],
    recipe: Recipe,
    normalizer: float,
    *,
    precision: Callable[[], torch.autocast],
    chunk_tokens: int | None = None,
    balances: Sequence[Balance] = (),
    heard: Sequence[Tensor | None] = (),
) -> list[Work]:
    """Micro-batches with what is to be made of them, as a runner takes them.

    balances, heard: of each micro-batch, or none at all; see `Work`.
    """

    processor = distillation(recipe, chunk_tokens=chunk_tokens)

    def context(batch: Batch, signal: Signal | None) -> Taught:
        return Taught(batch.labels_T, batch.weights_T, normalizer, batch.valid_index, signal=signal)

    made = [Work(batch, processor, partial(context, batch), recipe.needs_teacher, precision) for batch in batches]
    if balances:
        made = [replace(work, balance=balance) for work, balance in zip(made, balances, strict=True)]
    if heard:
        made = [replace(work, heard_BSE=hidden_BSE) for work, hidden_BSE in zip(made, heard, strict=True)]
    return made


def router_balances(
    batches: Sequence[Batch], coefficient: float, normalizer: float, group: ProcessGroup | None = None
) -> list[Balance]:
    """The load balancing of each micro-batch's routers; none where the coefficient is 0.

    group: of the context ranks, which have a part of each sequence.
    """
    if not coefficient:
        return []
    made = []
    for batch in batches:
        shape_BS = batch.input_ids_BS.shape
        targets_B = (batch.labels_T >= 0).view(shape_BS).sum(1)
        made.append(Balance((batch.document_T >= 0).view(shape_BS), targets_B, coefficient / normalizer, group))
    return made


def forward_backward(
    runner: Runner,
    batches: Sequence[Batch],
    recipe: Recipe,
    *,
    normalizer: int | None = None,
    **given: Any,
) -> list[ObjectiveOutput]:
    """Add the step's gradient to the student's parameters. Returns each micro-batch's output, its loss detached (of
    a pipeline, on the last stage's ranks).

    normalizer: the valid tokens of the whole step, of all processes; None: those of `batches`. given: as for `works`.
    """
    tokens = valid_tokens(batches) if normalizer is None else normalizer
    return runner.forward_backward(works(batches, recipe, tokens, **given))


def optimizer_step(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """The update, and gradients back to none."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def valid_tokens(batches: Sequence[Batch]) -> int:
    """Targets of the step: what its losses are divided by. At least 1, so that a step without any is an exact 0."""
    return max(1, sum(batch.valid_tokens for batch in batches))


def summed_metrics(outputs: Sequence[ObjectiveOutput]) -> dict[str, float]:
    """The micro-batches' metric sums added up, their losses under `loss`, and the most rows that a tile had.

    Waits for the device once.
    """
    sums: dict[str, Any] = defaultdict(float)
    for output in outputs:
        sums["loss"] += output.loss.double()
        for name, value in output.metrics.items():
            sums[name] += value.double()
    if not outputs:
        return {}
    sums[CHUNK_TOKENS] = torch.stack([output.metrics[CHUNK_TOKENS] for output in outputs]).max().double()
    values = torch.stack(list(sums.values())).tolist()
    return dict(zip(sums, values, strict=True))


def router_loss(works: Sequence[Work]) -> dict[str, float]:
    """What the routers that are here have made of the micro-batches, summed over target tokens, as a metric sum."""
    losses = [loss for work in works if work.balance is not None for loss in work.balance.losses.values()]
    return {ROUTER_LOSS: float(torch.stack(losses).double().sum())} if losses else {}


def add_up(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`summed_metrics` of several processes, as one."""
    total: dict[str, float] = {}
    for each in sums:
        for name, value in each.items():
            both = (total.get(name, 0.0), value)
            total[name] = max(both) if name == CHUNK_TOKENS else sum(both)
    return total


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> torch.optim.AdamW:
    """AdamW. Matrices decay; vectors (norms and biases) do not."""
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.requires_grad:
            # updated together: only what lies alike can be
            lies = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups[parameter.dim() >= 2, lies].append(parameter)
    decay = {True: weight_decay, False: 0.0}
    return torch.optim.AdamW(
        [{"params": held, "weight_decay": decay[is_matrix]} for (is_matrix, _), held in groups.items()],
        lr=learning_rate,
        betas=betas,
        eps=eps,
    )
