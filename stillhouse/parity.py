"""`stillhouse parity`: one step under every layout that the processes allow, against the same step in one process.

    torchrun --nproc-per-node 4 -m stillhouse parity run.yaml

The run's own models and data, in float32: what differs is then the layout's and not rounding's. Every process
computes the reference by itself, so both models and the student's gradients have to fit into one.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stillhouse.config import RunConfig
from stillhouse.data import PackedSequences
from stillhouse.models import draw_lora
from stillhouse.parallel import SCHEMES, Degrees, Layout, Mesh, Runner, alone, gathered, process_count, start
from stillhouse.parallel.expert_parallel import dispatched_experts
from stillhouse.train.build import lay_out_models, load_models, own_base, require_adapters
from stillhouse.train.dealing import dealt_works
from stillhouse.train.session import choose_device, load_data, load_tokenizers, parse_objective
from stillhouse.train.step import add_up, summed_metrics

#: relative difference up to which two gradients are the same in float32
SAME = 1e-4
#: micro-batches of a step for each process, one packed sequence each
MICRO_BATCHES = 2

Name = TypeVar("Name")


@dataclass(frozen=True)
class Row:
    """loss, gradient: relative differences from one process; of the gradients, the parameter's that differs most.
    refused: why the layout is not possible.
    """

    layout: str
    loss: float = 0.0
    gradient: float = 0.0
    parameter: str = ""
    refused: str = ""

    @property
    def verdict(self) -> str:
        if self.refused:
            return f"not possible: {self.refused}"
        return "same" if self.gradient <= SAME and self.loss <= SAME else f"DIFFERENT in {self.parameter}"


def layouts(processes: int, *, experts: bool = False) -> list[Layout]:
    """Each degree alone, and two at a time where there are processes for that. experts: whether there are any."""
    axes = ("fsdp", "replicate", "tensor", "context", "pipeline")
    found = [Degrees(**{axis: processes}) for axis in axes]
    if experts:
        found.append(Degrees(fsdp=processes, expert=processes))
    if processes >= 4 and processes % 2 == 0:
        rest = processes // 2
        found += [Degrees(**{one: 2, other: rest}) for at, one in enumerate(axes) for other in axes[at + 1 :]]
    result: list[Layout] = []
    for degrees in found:
        names = SCHEMES if degrees.pipeline == processes else ("1f1b",)
        result += [Layout(degrees, name) for name in names] if degrees.pipeline > 1 else [Layout(degrees)]
    return result


def parity(config: RunConfig) -> Iterator[Row]:
    """A row for each layout, the same on every process. Raises ConfigError and ValueError as a run does."""
    config = config.model_copy(
        update={
            "train": config.train.model_copy(update={"precision": "fp32"}),
            "student": config.student.model_copy(update={"dtype": "float32"}),
            "teacher": config.teacher and config.teacher.model_copy(update={"dtype": "float32"}),
        }
    )
    recipe = parse_objective(config)
    require_adapters(config.student)
    device, processes = choose_device(config.device), process_count()
    tokenizer, _ = load_tokenizers(config)
    documents, _ = load_data(config.data, config.objective, tokenizer)
    sequences = PackedSequences(documents, max_tokens=config.data.max_tokens, seed=config.seed)
    numbers = sequences.order(0)[: MICRO_BATCHES * processes]
    rows = [numbers[at : at + 1] for at in range(len(numbers))]
    start(device, config.train.timeout)
    float32 = partial(torch.autocast, device.type, enabled=False)

    def step(runner: Runner) -> dict[str, float]:
        mesh = runner.mesh
        for student in runner.students():
            student.eval()  # dropout draws otherwise on every layout
            draw_lora(student, config.seed, fresh=False)  # a fresh adapter's A has no gradient
        works = dealt_works(
            runner,
            sequences,
            rows,
            recipe,
            sequences.targets(rows),
            device,
            training=True,
            router_aux_loss=config.objective.router_aux_loss,
            precision=float32,
        )
        outputs = runner.forward_backward(works)
        runner.clip(0.0)
        own = summed_metrics(outputs if runner.has_results else ())
        return add_up(gathered(own, None if mesh is None else mesh.everyone, device))

    reference = alone(*load_models(config, device), own_base=own_base(config))
    expected = step(reference)
    gradients = {name: each.grad.cpu() for name, each in reference.named_parameters() if each.grad is not None}
    total = float(torch.stack([each.norm() for each in gradients.values()]).norm())
    has_experts = any(dispatched_experts(each) for each in (*reference.students(), reference.teacher) if each)
    del reference
    for layout in layouts(processes, experts=has_experts):
        try:
            mesh = Mesh(layout.degrees, device)
            runner = lay_out_models(config, layout, mesh, device)
            found = step(runner)
        except ValueError as error:
            yield Row(str(layout), refused=str(error))
            continue
        own = worst(differences(runner, gradients, 1e-3 * total))
        parameter, gradient = worst(gathered(own, mesh.everyone, device))
        yield Row(str(layout), abs(found["loss"] / expected["loss"] - 1), gradient, parameter)


def differences(runner: Runner, gradients: dict[str, Tensor], least: float) -> Iterator[tuple[str, float]]:
    """Of each parameter that is here: how far its gradient is from the reference's, relative to the larger of that
    one's norm and `least`. A collective of the processes that share it.
    """
    for name, parameter in runner.named_parameters():
        reference = gradients.get(runner.shared_name(name))
        if reference is None or parameter.grad is None:
            yield name, 0.0 if (reference is None) == (parameter.grad is None) else float("inf")
            continue
        yield name, apart(whole(parameter.grad).cpu(), reference, least)


def worst(errors: Iterable[tuple[Name, float]]) -> tuple[Name, float]:
    """The largest of some errors with its name. A NaN is larger than any number, wherever it stands."""
    return max(errors, key=lambda each: (math.isnan(each[1]), each[1]))


def apart(value: Tensor, reference: Tensor, least: float = 0.0) -> float:
    return float((value - reference).norm()) / max(float(reference.norm()), least)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that lies over processes: a collective of them."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


HEADER = f"{'layout':<28}{'loss':>10}{'gradient':>10}  verdict"


def line(row: Row) -> str:
    figures = f"{'':>20}" if row.refused else f"{row.loss:>10.1e}{row.gradient:>10.1e}"
    return f"{row.layout:<28}{figures}  {row.verdict}"
