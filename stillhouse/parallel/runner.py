"""A twin laid over processes: the same two calls under every layout.

runner = lay_out(layout, mesh, make_student, make_teacher)
runner.forward_backward(works)      gradients are in runner.parameters(), each process's part of them
runner.forward(works)
norm = runner.clip(1.0)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from stillhouse.models import Decoder
from stillhouse.parallel.context_parallel import apply_context_parallel
from stillhouse.parallel.expert_parallel import apply_expert_parallel, dispatched_experts
from stillhouse.parallel.fsdp import apply_fsdp, apply_fsdp_to_experts
from stillhouse.parallel.gradients import gradient_norm, scale_gradients, settle
from stillhouse.parallel.mesh import Degrees, Mesh
from stillhouse.parallel.pipeline import SCHEMES, Pipeline, Width
from stillhouse.parallel.separate import SeparateTeacher, only_head, only_layers
from stillhouse.parallel.stages import cost_of, forwards, keep_layers, require_cuttable, require_training, split
from stillhouse.parallel.tensor_parallel import apply_tensor_parallel
from stillhouse.parallel.twin import Twin, Work

ONE = Degrees()


@dataclass(frozen=True)
class Origin:
    """Where a model comes from.

    make: all of it, with weights or on the meta device; called once for each stage that is here.
    fill: gives it weights when it lies where it belongs, if it has none.
    own_base: of a student with an adapter: without it, it is the teacher, too.
    """

    make: Callable[[], Decoder]
    fill: Callable[[Decoder], object] | None = None
    own_base: bool = False


@dataclass(frozen=True)
class Layout:
    """How a run lies over processes.

    schedule: of the pipeline, a name of `SCHEMES`. gather_dtype, of the student, and offload: `apply_fsdp`'s.
    """

    degrees: Degrees = ONE
    schedule: str = "1f1b"
    gather_dtype: torch.dtype | None = None
    offload: bool = False

    def __str__(self) -> str:
        schedule = f", {self.schedule}" if self.degrees.pipeline > 1 else ""
        return f"{self.degrees}{schedule}"

    @property
    def stages(self) -> int:
        """Of the pipeline, over all ranks."""
        pipeline = self.degrees.pipeline
        return pipeline * SCHEMES[self.schedule].per_rank if pipeline > 1 else 1

    @property
    def last_rank(self) -> int:
        """The place of the last stage along the pipeline."""
        pipeline = self.degrees.pipeline
        return SCHEMES[self.schedule].rank_of(self.stages - 1, pipeline) if pipeline > 1 else 0


class Runner:
    """A twin, or this rank's stages of it, and how works go through.

    separate: the layers of a teacher in a layout of its own.
    """

    def __init__(
        self,
        layout: Layout,
        twins: dict[int, Twin],
        pipeline: Pipeline | None,
        mesh: Mesh | None,
        *,
        tied: bool,
        separate: SeparateTeacher | None = None,
    ):
        self.layout, self.twins, self.pipeline, self.mesh, self.tied = layout, twins, pipeline, mesh, tied
        self.separate = separate

    def forward_backward(self, works: Sequence[Work], upcoming: Sequence[Work] = ()) -> list[Any]:
        """Adds the gradients of the works' losses to the student's; what the processor made of each, with its loss
        detached. Under a pipeline the ranks of the last stage have these, the others none.

        upcoming: the next call's works, where the runner looks ahead; the teacher says what it has time for about
        their tokens. Others may come then.
        """
        if self.pipeline is not None:
            made = self.pipeline.forward_backward(works, upcoming)
        else:
            made = self._one_by_one(works)
        for each in made:
            each.loss.detach_()
        return made

    def forward(self, works: Sequence[Work]) -> list[Any]:
        """What the processor makes of each work, without gradients."""
        with torch.no_grad():
            if self.pipeline is not None:
                made = self.pipeline.forward(works)
            else:
                made = [self.twins[0](work) for work in works]
        for module in (module for twin in self.twins.values() for module in twin.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()  # no backward will
        return made

    @property
    def looks_ahead(self) -> bool:
        """Whether `forward_backward` makes use of the next step's works."""
        return self.pipeline is not None and self.pipeline.ahead is not None

    @property
    def teacher(self) -> Decoder | None:
        """The teacher, or its part on this rank's first stage."""
        here = next(iter(self.twins.values())).teacher
        return here if self.separate is None else self.separate.teacher

    @property
    def context_group(self) -> ProcessGroup | None:
        """The ranks that have the other parts of this one's sequences; None where it has them whole."""
        if self.mesh is None or self.layout.degrees.context == 1:
            return None
        return self.mesh.tokens.get_group("context")

    @property
    def is_counted(self) -> bool:
        """Whether what this rank's stages make is to be summed: of the ranks with the same tokens, one."""
        return self.mesh is None or self.mesh.place("tensor") == 0

    @property
    def has_results(self) -> bool:
        """The same for what the last stage makes."""
        return self.is_counted and self.layout.stages - 1 in self.twins

    def students(self) -> list[Decoder]:
        """The student, or this rank's parts of it."""
        return [twin.student for twin in self.twins.values()]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The student's that are here, by their names in the whole model. A weight that the head shares with an
        embedding on another stage comes under the head's name, too.
        """
        for student in self.students():
            yield from student.named_parameters()

    def shared_name(self, name: str) -> str:
        """The name that a parameter has in the whole model: of a head that is a copy of the embedding, that one's."""
        if self.tied and name == "head.linear.weight":
            return self.students()[0].embedding_name
        return name

    def zero_grad(self) -> None:
        for _, parameter in self.named_parameters():
            parameter.grad = None

    def clip(self, limit: float) -> Tensor:
        """The norm of the whole gradient, the same on every rank, before it is cut down to `limit` (0: it is not)."""
        held = settle(parameter for _, parameter in self.named_parameters())
        degrees = self.layout.degrees
        second = self._second_of_tied()
        counted = [parameter for parameter in held if parameter is not second]
        group, device = (None, None) if self.mesh is None else (self.mesh.everyone, self.mesh.device)
        norm = gradient_norm(counted, degrees.processes // degrees.pipeline, group, device)
        if limit:
            scale_gradients(held, (limit / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _second_of_tied(self) -> Tensor | None:
        """The head's weight where the embedding, of which it is a copy, is on another stage."""
        last = self.layout.stages - 1
        if not self.tied or self.pipeline is None or last not in self.twins:
            return None
        return self.twins[last].student.output_weight

    def _one_by_one(self, works: Sequence[Work]) -> list[Any]:
        twin, made = self.twins[0], []
        for number, work in enumerate(works, start=1):
            if isinstance(twin.student, FSDPModule):
                # copies add up their gradients by themselves until the last one
                twin.student.set_requires_all_reduce(number == len(works))
            made.append(twin(work))
            made[-1].loss.backward()
        return made


def alone(student: Decoder, teacher: Decoder | None, *, own_base: bool = False) -> Runner:
    """The runner of a process that has it all."""
    teacher_from = None if teacher is None else Origin(lambda: teacher)
    return lay_out(Layout(), None, Origin(lambda: student, own_base=own_base), teacher_from)


def lay_out(
    layout: Layout,
    mesh: Mesh | None,
    student_from: Origin,
    teacher_from: Origin | None,
    teacher_apart: tuple[Layout, Mesh] | None = None,
) -> Runner:
    """The runner of this process. mesh: None for one process alone. teacher_apart: a layout of the teacher's own,
    over the same processes.

    Raises ValueError for a model that the layout does not fit.
    """
    degrees = layout.degrees
    _require_own_teacher(layout, student_from, teacher_apart)
    separate = None
    if teacher_from is not None and teacher_apart is not None and mesh is not None:
        separate = _apart(teacher_from, teacher_apart, layout, mesh)
        teacher_from = replace(teacher_from, make=only_head(teacher_from.make))
    if layout.stages == 1:
        student, teacher = student_from.make(), None if teacher_from is None else teacher_from.make()
        _require_experts(degrees, student, teacher)
        twin = _placed(layout, mesh, student, teacher, student_from, teacher_from)
        return Runner(layout, {0: twin}, None, mesh, tied=student.tied, separate=separate)
    assert mesh is not None
    scheme = SCHEMES[layout.schedule]
    twins = {}
    tied, width, teacher_cost = False, None, 0.0
    for number in scheme.stages_of(mesh.place("pipeline"), degrees.pipeline):
        student, teacher = student_from.make(), None if teacher_from is None else teacher_from.make()
        _require_experts(degrees, student, teacher)
        for decoder in (student, teacher):
            if decoder is not None:
                require_cuttable(decoder.config)
        costs = cost_of(student, 3), None if teacher is None else cost_of(teacher, 1)
        stages = split(layout.stages, *costs)
        teacher_cost = 0.0 if costs[1] is None else forwards(costs[1], costs[0])
        if student.lora is not None:
            require_training(student, stages)
        # a frozen weight has no gradients to sum
        tied, stage = student.tied and student.output_weight.requires_grad, stages[number]
        beside = student if student_from.own_base else teacher
        width = _width(student, beside if separate is None else None)
        keep_layers(student, stage.student, first=stage.is_first, last=stage.is_last)
        if separate is not None and not stage.is_last:
            teacher = None
        if teacher is not None:
            keep_layers(teacher, stage.teacher, first=stage.is_first, last=stage.is_last)
        twins[number] = _placed(layout, mesh, student, teacher, student_from, teacher_from)
    assert width is not None
    group, sharding = mesh.tokens.get_group("pipeline"), mesh.sharding
    options: dict[str, Any] = {
        "tied": tied,
        "sharding": sharding,
        "teacher_cost": teacher_cost,
        "further": mesh.pipelines,
    }
    pipeline = Pipeline(twins, scheme, width, group, mesh.device, **options)
    return Runner(layout, twins, pipeline, mesh, tied=tied, separate=separate)


def _apart(origin: Origin, teacher_apart: tuple[Layout, Mesh], layout: Layout, mesh: Mesh) -> SeparateTeacher:
    own_layout, own_mesh = teacher_apart
    teaching = lay_out(own_layout, own_mesh, replace(origin, make=only_layers(origin.make)), None)
    ((teacher, *_), last_ranks) = teaching.students(), (own_layout.last_rank, layout.last_rank)
    return SeparateTeacher(teacher, teaching.forward, own_mesh, mesh, last_ranks)


def _require_own_teacher(layout: Layout, student_from: Origin, teacher_apart: Any) -> None:
    """Raise ValueError where the teacher is to run ahead, and is the student's own base, or lies otherwise."""
    if layout.stages == 1 or not SCHEMES[layout.schedule].ahead:
        return
    why = "is the student without its adapter" if student_from.own_base else "has a layout of its own"
    if student_from.own_base or teacher_apart is not None:
        raise ValueError(
            f"schedule {layout.schedule} for a teacher that {why}: it runs a model of the teacher's own, "
            "in the student's stages, a step ahead; expected schedule 1f1b"
        )


def _require_experts(degrees: Degrees, *decoders: Decoder | None) -> None:
    if degrees.expert > 1 and not any(dispatched_experts(each) for each in decoders if each is not None):
        raise ValueError(
            f"parallel.expert={degrees.expert} for models without experts that transformers' plans deal out: "
            "expected 1"
        )


def _placed(
    layout: Layout,
    mesh: Mesh | None,
    student: Decoder,
    teacher: Decoder | None,
    student_from: Origin,
    teacher_from: Origin | None,
) -> Twin:
    """Each in its layout, then with its weights."""
    twin = Twin(student, teacher, own_base=student_from.own_base)  # from here on the teacher is frozen
    for decoder, origin in ((student, student_from), (teacher, teacher_from)):
        if decoder is None or origin is None:
            continue
        if mesh is not None:
            _place(decoder, layout, mesh, layout.gather_dtype if decoder is student else None)
        if origin.fill is not None:
            origin.fill(decoder)
    return twin


def _place(decoder: Decoder, layout: Layout, mesh: Mesh, gather_dtype: torch.dtype | None) -> None:
    """Inner layouts first: attention, then matrices, then experts, then what is shared of them."""
    degrees = layout.degrees
    options: dict[str, Any] = {
        # a pipeline's schedule runs parts of backward by itself: what is gathered stays until then
        "reshard_after_forward": layout.stages == 1,
        "gather_dtype": gather_dtype,
        "offload": layout.offload,
    }
    if degrees.context > 1 and decoder.layers():
        apply_context_parallel(decoder, mesh.tokens.get_group("context"), degrees.tensor)
    if degrees.tensor > 1:
        apply_tensor_parallel(decoder, mesh.weights["tensor"])
    if degrees.experts > 1 and (experts := dispatched_experts(decoder)):
        apply_expert_parallel(decoder, mesh.experts["expert"], mesh.weights["tensor"])
        if mesh.expert_sharding is not None:
            apply_fsdp_to_experts(experts, mesh.expert_sharding, **options)
    if mesh.sharding is not None:
        apply_fsdp(decoder, mesh.sharding, **options)


def _width(student: Decoder, teacher: Decoder | None) -> Width:
    """Hidden states are in the dtype of the embedding, which the layers add to."""
    sides = [
        (each.config.get_text_config().hidden_size, each.pretrained.get_input_embeddings().weight.dtype)
        for each in (student, teacher)
        if each is not None
    ]
    return Width(*(value for side in sides for value in side))
