"""Builds a runner: plans the pipeline stages, then builds, cuts, distributes and loads each model."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from stillhouse.libraries import require_feature
from stillhouse.models import Decoder, ProofError
from stillhouse.parallel.apply import apply_parallelism
from stillhouse.parallel.apply.tensor_parallel import dispatched_experts
from stillhouse.parallel.backbone_cut import is_cuttable, require_cuttable
from stillhouse.parallel.mesh import Degrees, Mesh
from stillhouse.parallel.pipeline import Pipeline
from stillhouse.parallel.run_layout import SCHEMES, Layout
from stillhouse.parallel.runner import Runner
from stillhouse.parallel.sharded_loading import ModelSource
from stillhouse.parallel.stages import (
    HiddenSize,
    StagePlan,
    cost_of,
    keep_layers,
    require_pairs,
    require_shared_states,
    require_training,
    split,
)
from stillhouse.parallel.teacher_student_pair import TeacherStudentPair


def single_process_runner(student: Decoder, teacher: Decoder | None) -> Runner:
    """Return the runner of a single process with full models."""
    source = None if teacher is None else ModelSource(lambda: teacher, is_proven=True)
    mesh = Mesh(Degrees(), next(student.parameters()).device, single_process=True)
    return build_runner(Layout(), mesh, ModelSource(lambda: student, is_proven=True), source)


def build_runner(
    layout: Layout,
    mesh: Mesh,
    student_source: ModelSource,
    teacher_source: ModelSource | None,
    *,
    teacher_head_only: bool = False,
) -> Runner:
    """Build the runner of this process.

    teacher_head_only: whether to build only the teacher's head, because its layers have a separate layout.

    Raises ValueError for a model that does not fit the layout, ProofError for damaged weights.
    """
    is_base, scheme = student_source.teacher_is_base, SCHEMES[layout.schedule]
    if teacher_source is not None and teacher_head_only:
        teacher_source = replace(teacher_source, build=partial(only_head, teacher_source.build))
    sources = student_source, teacher_source
    student, teacher = _build(layout, *sources)
    if layout.stages == 1:
        pair = _distributed(layout, mesh, student, teacher, *sources)
        return Runner(layout, {0: pair}, None, mesh, tied=student.tied)
    plan = _plan_stages(layout, student, teacher, None if teacher_head_only else student if is_base else teacher)
    cut, teacher_cut = plan.cuts
    pairs: dict[int, TeacherStudentPair] = {}
    for number in scheme.stages_of(mesh.coordinate("pipeline"), layout.degrees.pipeline):
        if pairs:  # each stage is cut from a separate copy of the model
            student, teacher = _build(layout, *sources)
        stage = plan.stages[number]
        keep_layers(student, cut, stage.student, first=stage.is_first, last=stage.is_last)
        if teacher_head_only and not stage.is_last:
            teacher = None
        if teacher is not None:
            assert teacher_cut is not None
            keep_layers(teacher, teacher_cut, stage.teacher, first=stage.is_first, last=stage.is_last)
        pairs[number] = _distributed(layout, mesh, student, teacher, *sources)
    return Runner(layout, pairs, Pipeline(pairs, scheme, plan, mesh), mesh, tied=plan.tied)


def only_layers(build: Callable[[], Decoder]) -> Decoder:
    """Build a frozen teacher without its head. Raises the errors of `require_cuttable`."""
    decoder = build()
    cut = require_cuttable(decoder.config)
    keep_layers(decoder, cut, range(len(decoder.layers())), first=True, last=False, norm=True)
    return decoder.requires_grad_(False).eval()


def only_head(build: Callable[[], Decoder]) -> Decoder:
    """Build a decoder, and remove everything except its head."""
    decoder = build()
    if is_cuttable(decoder.config):
        keep_layers(decoder, require_cuttable(decoder.config), range(0), first=False, last=True, norm=False)
        return decoder
    backbone: Any = decoder.backbone
    _remove_all(backbone, decoder.pretrained.get_input_embeddings())
    backbone.forward = lambda *, inputs_embeds, **_: _Received(last_hidden_state=inputs_embeds)
    return decoder


class _Received(BaseModelOutput):
    """The output of a backbone without layers. Fields that a family reads, and that are not set, are None."""

    def __getattr__(self, name: str) -> None:
        return None


def _remove_all(module: nn.Module, embedding: nn.Module) -> None:
    """Remove the parts of a backbone. Modules that contain the embedding stay, so that transformers finds it."""
    for name, _ in list(module.named_parameters(recurse=False)):
        delattr(module, name)
        setattr(module, name, torch.empty(0))  # transformers accesses this attribute when it initializes buffers
    for name, child in list(module.named_children()):
        if child is not embedding and any(part is embedding for part in child.modules()):
            _remove_all(child, embedding)
        else:
            setattr(module, name, nn.Identity())


def load_head(source: ModelSource, layout: Layout, mesh: Mesh) -> Decoder:
    """Build and load the head of a frozen teacher, sharded in the way in which the torch engine shards a head."""
    decoder = only_head(source.build).requires_grad_(False).eval()
    apply_parallelism(decoder, replace(layout, gather_dtype=None), mesh)
    assert source.load_weights is not None
    source.load_weights(decoder)
    return decoder


def _build(
    layout: Layout, student_source: ModelSource, teacher_source: ModelSource | None
) -> tuple[Decoder, Decoder | None]:
    student, teacher = student_source.build(), None if teacher_source is None else teacher_source.build()
    # the configuration has this rule, too, but parity builds layouts that do not come from the configuration
    if student.mtp is not None and layout.stages > 1 and SCHEMES[layout.schedule].splits_backward:
        # torch (2.13) runs backward twice through the graph that MTP depths share; the first run frees its buffers
        raise ValueError(
            f"schedule {layout.schedule} with multi-token prediction: torch cannot split the backward of the last "
            "stage into input and weights; expected schedule gpipe, 1f1b or interleaved"
        )
    if (expert := layout.degrees.expert) > 1:
        require_feature("expert parallelism")  # plans of older transformers versions do not dispatch tokens
        decoders = [decoder for decoder in (student, teacher) if decoder is not None]
        if not any(map(dispatched_experts, decoders)):
            types = sorted({decoder.config.model_type for decoder in decoders})
            raise ValueError(
                f"expert={expert} for model type {' and '.join(map(repr, types))}, which has no experts that "
                "transformers' plans distribute: expected expert=1"
            )
    return student, teacher


def _plan_stages(
    layout: Layout, student: Decoder, teacher: Decoder | None, teacher_in_stages: Decoder | None
) -> StagePlan:
    """Plan the stages.

    teacher: the teacher model, or only its head.
    teacher_in_stages: the model whose layers run as the teacher's layers. It is the student if the teacher is the
        student without its adapter.
    """
    cut, teacher_cut = require_cuttable(student.config), None if teacher is None else require_cuttable(teacher.config)
    stages = split(layout.stages, cost_of(student, 3), None if teacher is None else cost_of(teacher, 1))
    if student.lora is not None or student.mtp is not None:
        require_training(student, stages)
    require_shared_states("student", cut, [stage.student for stage in stages])
    if teacher_cut is not None and teacher_in_stages is teacher:
        require_shared_states("teacher", teacher_cut, [stage.teacher for stage in stages])
    is_base = teacher_in_stages is student
    require_pairs(student, [replace(stage, teacher=stage.student) for stage in stages] if is_base else stages)

    def hidden_size(decoder: Decoder, residual_dtype: torch.dtype | None) -> HiddenSize:
        # the layers add to the embedding's output, so hidden states have the dtype of the embedding's weight
        return HiddenSize(decoder.width, residual_dtype or decoder.pretrained.get_input_embeddings().weight.dtype)

    teacher_residual = layout.residual_dtype if is_base else None
    # the gradients of embedding and head are summed only if their common weight is trained
    tied = student.tied and student.output_weight.requires_grad
    return StagePlan(
        stages,
        hidden_size(student, layout.residual_dtype),
        None if teacher_in_stages is None else hidden_size(teacher_in_stages, teacher_residual),
        (cut, teacher_cut),
        tied=tied,
        copies_embedding=tied or student.mtp is not None,
    )


def _distributed(
    layout: Layout,
    mesh: Mesh,
    student: Decoder,
    teacher: Decoder | None,
    student_source: ModelSource,
    teacher_source: ModelSource | None,
) -> TeacherStudentPair:
    # `TeacherStudentPair` freezes the teacher
    pair = TeacherStudentPair(
        student, teacher, teacher_is_base=student_source.teacher_is_base, keep_gathered=layout.stages > 1
    )
    # each process loads different shards, so an error may occur on one process only
    with mesh.ranks.all_raise(ProofError):
        for decoder, source in ((student, student_source), (teacher, teacher_source)):
            if decoder is None or source is None:
                continue
            # a dry run, whose weights have no values, does not compile layers, so that it can count their operations
            compiles, offload = layout.compile and source.has_values, layout.offload or source.offload
            model_layout = replace(layout, compile=compiles, offload=offload)
            if decoder is not student:
                model_layout = replace(model_layout, gather_dtype=None, residual_dtype=None)
            apply_parallelism(decoder, model_layout, mesh)
            if source.load_weights is not None:
                source.load_weights(decoder)
    return pair
