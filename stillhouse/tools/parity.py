"""`stillhouse parity`: compares one step under every possible layout with the same step in one process.

    torchrun --nproc-per-node 4 -m stillhouse parity run.yaml

The run's engine (`parallel.engine`) computes the step of each layout. The step in one process is the reference, and
always uses torch's engine.

The command uses the run's models and data, in float32, so that a difference comes from the layout and not from
rounding. For an on-policy run, every process generates the same completions once. Every process also computes the
reference, so the student, its gradients and the teacher must fit into one process.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from textwrap import fill
from typing import TypeVar

import torch
from torch import Tensor

from stillhouse.config import RunConfig
from stillhouse.config.engine_capabilities import EngineCapabilities, capabilities
from stillhouse.config.read_config import dotted_values
from stillhouse.data import StepMicroBatches
from stillhouse.data.media import media_kind
from stillhouse.engine.engine import Engine
from stillhouse.loops.rollouts import make_generator, sampling_of
from stillhouse.loops.session import Data
from stillhouse.models import eos_ids
from stillhouse.parallel import SCHEMES, Degrees, Layout, Mesh, connect_processes, process_count, temporary_groups
from stillhouse.parallel.apply.tensor_parallel import dispatched_experts
from stillhouse.rollout import PromptPlan, RolloutQueue, Samples, TargetRules, step_documents
from stillhouse.rollout.documents import StepPacker
from stillhouse.rollout.engines import InJobEngine
from stillhouse.rollout.plan import RolloutSchedule
from stillhouse.rollout.user_functions import CompletionCalls
from stillhouse.run.data import load_run_data
from stillhouse.run.preflight import require_adapters, require_attention
from stillhouse.run.run import prompt_sources
from stillhouse.run.setup import RunSetup
from stillhouse.signals import NoTeacher, SignalSource

#: the relative difference up to which two float32 gradients count as equal
SAME = 1e-4
#: keys that change how a run computes a step, and that this command ignores
LEFT_OUT = ("train.compile", "train.residual_dtype", "parallel.gather_dtype", "parallel.offload")
#: the number of micro-batches per process; each has one packed sequence
MICRO_BATCHES = 2
HEADER = f"{'layout':<40}{'loss':>10}{'gradient':>10}  verdict"

Name = TypeVar("Name")


@dataclass(frozen=True)
class Row:
    """The result for one layout.

    loss: the relative difference of the loss from the reference.
    gradient: the largest relative difference of a parameter's gradient. parameter: the name of this parameter.
    refused: the reason if the layout is impossible, otherwise "".
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

    def __str__(self) -> str:
        if self.refused:  # the reason is longer than a line of the table
            reason = fill(self.refused, 116, initial_indent="    ", subsequent_indent="    ")
            return f"{self.layout:<40}{'':>20}  not possible:\n{reason}"
        return f"{self.layout:<40}{self.loss:>10.1e}{self.gradient:>10.1e}  {self.verdict}"


def layouts(engine: EngineCapabilities, processes: int, *, experts: bool = False) -> list[Layout]:
    """Return the layouts with one degree above 1. For an even number of at least 4 processes, also return layouts
    with two degrees above 1.

    experts: whether a model has experts, so that expert parallelism is included.
    """
    axes = engine.axes
    choices = [Degrees(**{axis: processes}) for axis in axes]
    if experts:
        choices.append(Degrees(fsdp=processes, expert=processes))
    if processes >= 4 and processes % 2 == 0:
        rest = processes // 2
        choices += [Degrees(**{one: 2, other: rest}) for at, one in enumerate(axes) for other in axes[at + 1 :]]
    result: list[Layout] = []
    for degrees in choices:
        names = (engine.schedules or SCHEMES) if degrees.pipeline == processes > 1 else ("1f1b",)
        shares_tokens = engine.sequence and degrees.tensor > 1
        sequence = [True] if shares_tokens and experts else [False, True] if shares_tokens else [False]
        result += [Layout(degrees, name, sequence=choice) for name in names for choice in sequence]
    return result


def left_out(config: RunConfig) -> list[str]:
    """Return the keys, with their values, that are set in the configuration and that `parity` ignores."""
    values, name = dotted_values(config), config.parallel.engine
    engine = capabilities(name)
    # in `parity`, torch's engine applies activation checkpointing; an engine that recomputes layers itself does not
    keys = [*LEFT_OUT, f"parallel.{name}", *["train.activation_checkpointing"] * engine.recomputes]
    return [f"{key}={values[key]}" for key in keys if values.get(key)]


def compare_layouts(config: RunConfig) -> Iterator[Row]:
    """Yield one row per layout, the same on all processes. Raises ConfigError and ValueError as a run does."""
    exact = {"dtype": "float32"}
    several = {
        name: teacher.model_copy(update=exact) if "dtype" in teacher.source_kind.beside else teacher
        for name, teacher in config.several.items()
    }
    kind = capabilities(config.parallel.engine)
    without_settings = {config.parallel.engine: None} if kind.settings else {}
    in_float32 = {
        "train": config.train.model_copy(update={"precision": "fp32", "compile": False, "residual_dtype": None}),
        "parallel": config.parallel.model_copy(update={"gather_dtype": None, "offload": False} | without_settings),
        "student": config.student.model_copy(update=exact),
        "teacher": config.teacher and config.teacher.model_copy(update=exact),
        "teachers": config.teachers and config.teachers.model_copy(update=several),
    }
    config = config.model_copy(update=in_float32)
    setup = RunSetup(config)
    config = setup.config
    torch_engine = config.parallel.model_copy(update={"engine": "torch", "sequence": False})
    in_one_process = RunSetup(config.model_copy(update={"parallel": torch_engine}))
    _ = setup.objective.spec, setup.stores  # raises errors of the objective and the stores before models are loaded
    require_adapters(config.student)
    device, processes = setup.device, process_count()
    require_attention(config.student, setup.teachers, device)
    data = load_run_data(config, setup.stores)
    connect_processes(device, config.train.timeout)
    one_process = Mesh(Degrees(), device, single_process=True)
    multimodal = data.has_media
    reference, source = in_one_process.engine(in_one_process.models(one_process, multimodal=multimodal), Layout())
    if (media_inputs := data.train.media_inputs) is not None:
        data = media_kind(media_inputs.processor).with_models_proven(data, reference, source)
    count = MICRO_BATCHES * processes
    if config.rollout is None:
        numbers = data.train.order(0)[:count]
        step: StepMicroBatches = data.train.micro_batches([numbers[at : at + 1] for at in range(len(numbers))])
    else:
        step = _generated(config, data, reference, count)
    expected = _gradient(reference, source, step, config.seed)
    gradients = {name: gradient.cpu() for name, gradient in reference.gradients() if gradient is not None}
    total = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    models = (*reference.student.decoders, reference.student.teacher)
    has_experts = any(dispatched_experts(model) for model in models if model)
    del reference, source, models
    for layout in layouts(kind, processes, experts=has_experts):
        with temporary_groups(device):
            try:
                mesh = Mesh(layout.degrees, device)
                engine, source = setup.engine(setup.models(mesh, multimodal=multimodal), layout)
                if media_inputs is not None:
                    media_kind(media_inputs.processor).with_models_proven(data, engine, source)
                loss = _gradient(engine, source, step, config.seed)
            except ValueError as error:
                row = Row(str(layout), refused=str(error))
            else:
                here = worst(differences(engine, gradients, 1e-3 * total))
                parameter, gradient = worst(mesh.ranks.gather(here))
                row = Row(str(layout), abs(loss / expected - 1), gradient, parameter)
                del engine, source
        yield row


def _generated(config: RunConfig, data: Data, engine: Engine, sequences: int) -> StepMicroBatches:
    """Return a step on completions that the student generates in this process, the same on all processes."""
    (student,), prompts, rollouts = engine.student.decoders, data.train.documents, config.rollouts
    eos, tokens = eos_ids(data.tokenizer, student), config.train.micro_batch_tokens
    samplings = [sampling_of(rollout, eos) for rollout in rollouts]
    device, autocast = engine.student.device, engine.autocast
    generator = make_generator(samplings[0], student, data, device, autocast, tokens, key="rollout.engine")
    sources = prompt_sources(rollouts, config.data.weighted_sources, prompts, data.dataset)
    sources = [replace(source, share=1.0) for source in sources]
    plan, schedule = PromptPlan(sources, sequences, config.seed), RolloutSchedule.of(rollouts[0], steps=1)
    with ExitStack() as stack:
        calls = CompletionCalls(rollouts, data.tokenizer, data.processor, samplings)
        stack.callback(calls.close)
        samples = Samples(prompts, plan, data.tokenizer, calls.sources, together=True)
        stack.callback(samples.close)
        queue = RolloutQueue(samples, plan, schedule, config=rollouts[0])
        queue.start(0)
        InJobEngine(generator).complete(samples)
        queue.collect()
        documents = step_documents(prompts, queue.take(0), TargetRules.of(rollouts))
    return StepPacker(data.train, tokens).micro_batches(documents, parts=sequences)


def _gradient(engine: Engine, source: SignalSource, step: StepMicroBatches, seed: int) -> float:
    """Run one step and return the loss; the gradient stays in the student. seed: the seed for adapter weights."""
    for student in engine.student.decoders:
        student.eval()  # dropout would use other random numbers under another layout
    engine.student.initialize_adapter(seed, fresh=False)  # with fresh=True, B and so A's gradient would be 0
    micro_batches = engine.student.shard(step)
    source = source if engine.needs_teacher else NoTeacher()
    signals = source.request(micro_batches).result()
    output = engine.forward_backward(micro_batches, signals, step.normalizer)
    engine.gradient_norm()
    return output.sums["loss"]


def differences(engine: Engine, gradients: dict[str, Tensor], least: float) -> Iterator[tuple[str, float]]:
    """Yield the name of each parameter on this process, and its gradient's relative difference from the reference.

    The norm of the difference is divided by the larger of the reference's norm and `least`. A sharded gradient is
    all-gathered, so all processes that have a shard must call this function.
    """
    for name, gradient in engine.gradients():
        reference = gradients.get(name)
        if reference is None or gradient is None:
            yield name, 0.0 if (reference is None) == (gradient is None) else float("inf")
        else:
            yield name, relative_difference(gradient.cpu(), reference, least)


def worst(errors: Iterable[tuple[Name, float]]) -> tuple[Name, float]:
    """Return the largest error with its name. NaN is treated as larger than any number."""
    return max(errors, key=lambda error: (math.isnan(error[1]), error[1]))


def relative_difference(value: Tensor, reference: Tensor, least: float = 0.0) -> float:
    return float((value - reference).norm()) / max(float(reference.norm()), least)
