"""`stillhouse parity`: compares one step under every possible layout with the same step in one process.

    torchrun --nproc-per-node 4 -m stillhouse parity run.yaml

It uses the run's own models and data, in float32, so that a difference comes from the layout and not from rounding.
The completions of an on-policy run are written once, in one process.
Every process computes the reference by itself, so both models and the student's gradients must fit into one process.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from stillhouse.config import RolloutConfig, RunConfig
from stillhouse.data import StepMicroBatches
from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.generation import RolloutPlan
from stillhouse.generation.in_process import InProcessEngine
from stillhouse.loops.step_samples import make_queue, pack_step
from stillhouse.models import draw_lora, eos_ids
from stillhouse.parallel import (
    SCHEMES,
    Degrees,
    Layout,
    Mesh,
    process_count,
    start,
)
from stillhouse.parallel.apply.expert_parallel import dispatched_experts
from stillhouse.run.build import build_engine
from stillhouse.run.inputs import RunData, load_run_data
from stillhouse.run.models import ModelSources, require_adapters
from stillhouse.run.rollout_engine import make_generator, sampling_of
from stillhouse.run.session import device_of, objective_spec
from stillhouse.run.stores import open_stores
from stillhouse.signals import NoTeacher, SignalSource

#: two float32 gradients count as the same up to this relative difference
SAME = 1e-4
#: micro-batches of the step per process, with one packed sequence each
MICRO_BATCHES = 2

Name = TypeVar("Name")


@dataclass(frozen=True)
class Row:
    """The result for one layout.

    loss, gradient: relative differences from the step in one process. The gradient is that of `parameter`, which
    differs most. refused: why the layout is not possible.
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
    """Layouts with each degree alone and, with enough processes, with two degrees at a time.

    experts: whether a model has experts, so that expert parallelism is included.
    """
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
    """One row for each layout, the same on every process. Raises ConfigError and ValueError as a run does."""
    config = config.model_copy(
        update={
            "train": config.train.model_copy(update={"precision": "fp32"}),
            "student": config.student.model_copy(update={"dtype": "float32"}),
            "teacher": config.teacher and config.teacher.model_copy(update={"dtype": "float32"}),
        }
    )
    if config.teachers is not None:
        exact = {name: each.model_copy(update={"dtype": "float32"}) for name, each in config.several.items()}
        config = config.model_copy(update={"teachers": config.teachers.model_copy(update=exact)})
    spec, stores = objective_spec(config), open_stores(config)
    require_adapters(config.student)
    device, processes = device_of(config), process_count()
    data = load_run_data(config, stores)
    start(device, config.train.timeout)
    one_process = Mesh(Degrees(), device, of_one_process=True)
    reference, source = build_engine(ModelSources(config, one_process), spec, Layout(), stores)
    if config.rollout is None:
        numbers = data.train.order(0)[: MICRO_BATCHES * processes]
        step: StepMicroBatches = data.train.micro_batches([numbers[at : at + 1] for at in range(len(numbers))])
    else:
        step = _written(config, config.rollout, data, reference, MICRO_BATCHES * processes)
    expected = _gradient(config, reference, source, step)
    gradients = {name: gradient.cpu() for name, gradient in reference.gradients() if gradient is not None}
    total = float(torch.stack([each.norm() for each in gradients.values()]).norm())
    models = (*reference.students, reference.teacher)
    has_experts = any(dispatched_experts(each) for each in models if each)
    del reference, source, models
    for layout in layouts(processes, experts=has_experts):
        try:
            mesh = Mesh(layout.degrees, device)
            engine, source = build_engine(ModelSources(config, mesh), spec, layout, stores)
            found = _gradient(config, engine, source, step)
        except ValueError as error:
            yield Row(str(layout), refused=str(error))
            continue
        own = worst(differences(engine, gradients, 1e-3 * total))
        parameter, gradient = worst(mesh.ranks.gather(own))
        yield Row(str(layout), abs(found / expected - 1), gradient, parameter)


def _written(
    config: RunConfig, rollout: RolloutConfig, data: RunData, engine: TorchEngine, sequences: int
) -> StepMicroBatches:
    """A step on completions that the student writes in this process, the same ones on every process."""
    (student,), prompts = engine.students, data.train.documents
    sampling = sampling_of(rollout, eos_ids(data.tokenizer, student))
    generator = make_generator(config, sampling, student, data.tokenizer, engine.device, engine.autocast)
    plan = RolloutPlan(len(prompts), 0, sequences, rollout.samples_per_prompt, config.seed)
    queue = make_queue(rollout, InProcessEngine(generator), prompts, plan, data.tokenizer, steps=1)
    queue.ask(0)
    return pack_step(config, data.train, queue.take(0), parts=sequences)


def _gradient(config: RunConfig, engine: TorchEngine, source: SignalSource, step: StepMicroBatches) -> float:
    """Run one step and return its loss. Afterwards the student has the step's gradient."""
    for student in engine.students:
        student.eval()  # dropout would draw different numbers under each layout
        draw_lora(student, config.seed, fresh=False)  # B is not zero then: a fresh adapter's A has a zero gradient
    micro_batches = engine.shard(step)
    source = source if engine.needs_teacher else NoTeacher()
    output = engine.forward_backward(micro_batches, source.request(micro_batches).result(), step.normalizer)
    engine.gradient_norm()
    return output.sums["loss"]


def differences(engine: TorchEngine, gradients: dict[str, Tensor], least: float) -> Iterator[tuple[str, float]]:
    """For each parameter on this process, the relative difference between its gradient and the reference gradient.

    The difference is relative to the larger of the reference's norm and `least`. Gathering a sharded gradient is a
    collective of the processes that share it.
    """
    for name, gradient in engine.gradients():
        reference = gradients.get(name)
        if reference is None or gradient is None:
            yield name, 0.0 if (reference is None) == (gradient is None) else float("inf")
        else:
            yield name, relative_difference(gradient.cpu(), reference, least)


def worst(errors: Iterable[tuple[Name, float]]) -> tuple[Name, float]:
    """The largest of some errors with its name. A NaN counts as larger than any number, at every position."""
    return max(errors, key=lambda each: (math.isnan(each[1]), each[1]))


def relative_difference(value: Tensor, reference: Tensor, least: float = 0.0) -> float:
    return float((value - reference).norm()) / max(float(reference.norm()), least)


HEADER = f"{'layout':<28}{'loss':>10}{'gradient':>10}  verdict"


def line(row: Row) -> str:
    figures = f"{'':>20}" if row.refused else f"{row.loss:>10.1e}{row.gradient:>10.1e}"
    return f"{row.layout:<28}{figures}  {row.verdict}"
