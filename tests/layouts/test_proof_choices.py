"""Under a layout, the proof decides as in one process how a model packs documents and which rule its logits have."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.causal_families import build
from kit.shard_ranks import Rank, message_of, on_ranks
from transformers import PreTrainedModel

from stillhouse.models import Decoder, document_packing
from stillhouse.models.families import LogitRule
from stillhouse.objective import TEACHER
from stillhouse.parallel import Degrees, Layout, Mesh, ModelSource, build_runner, empty_decoder
from stillhouse.parallel.teacher_student_pair import IN_STAGE
from stillhouse.proofs.layouts import ProbeForward, build_proven_runner


@cache
def mesh_of(degrees: Degrees) -> Mesh:
    return Mesh(degrees, torch.device("cpu"))


@dataclass(frozen=True)
class Pair:
    """Two families, how their documents are packed, and options of the student's configuration."""

    degrees: Degrees
    student: str
    teacher: str
    packings: tuple[str, str] = ("packed", "packed")
    options: dict[str, Any] = field(default_factory=dict)

    def builds(self) -> list[Callable[[], PreTrainedModel]]:
        return [partial(build, self.student, **self.options), partial(build, self.teacher, seed=1)]


def unproven(build_model: Callable[[], PreTrainedModel]) -> Decoder:
    return Decoder(build_model(), verify=False)


def proven(_: Rank, case: Pair) -> list[tuple[str, bool, float]]:
    """A job: for both models of a runner that has been proven, how documents are packed, whether the logits have a
    rule, and the error of the hidden states.
    """
    builds = case.builds()
    sources = [ModelSource(partial(unproven, build)) for build in builds]
    runner = build_proven_runner(Layout(case.degrees), mesh_of(case.degrees), *sources)
    forward = ProbeForward(runner, {TEACHER: IN_STAGE})
    ids_BS, position_ids_BS = forward.probe.ids_BS, forward.probe.position_ids_BS
    results = []
    decoders = runner.decoders[0], runner.teacher
    for decoder, build_model, hidden in zip(decoders, builds, forward.run(ids_BS, position_ids_BS), strict=True):
        assert decoder is not None
        with torch.no_grad():
            expected = Decoder(build_model())(ids_BS, position_ids_BS, head=False)
        error = float((hidden - expected).norm() / expected.norm())
        results.append((decoder.packing.name, decoder.head.rule != LogitRule(), error))
    return results


FSDP, TENSOR = Degrees(fsdp=2), Degrees(tensor=2)


@pytest.mark.parametrize(
    "case",
    [
        # openai-gpt raises a RuntimeError for masks
        Pair(FSDP, "openai-gpt", "gpt_oss", ("rows", "masked")),
        Pair(FSDP, "gpt_oss", "openai-gpt", ("masked", "rows")),
        # models that ignore the rule of logits in their configuration; cohere obeys it
        Pair(FSDP, "aya_vision", "cohere"),
        Pair(TENSOR, "llama", "llama", options={"logit_scale": 0.5}),
    ],
    ids=lambda case: f"{case.student}-{case.teacher}",
)
def test_the_proof_finds_how_models_compute(case: Pair) -> None:
    for of_rank in on_ranks(proven, 2, case):
        for (packing, has_rule, error), expected, family in zip(
            of_rank, case.packings, (case.student, case.teacher), strict=True
        ):
            assert packing == expected
            assert has_rule == (family == "cohere")
            assert error < 1e-6


def refused(_: Rank, folder: str) -> str:
    """A job: the error of a student in bfloat16 under fsdp."""
    source = ModelSource(partial(empty_decoder, folder, dtype="bfloat16"))
    return message_of(build_runner, Layout(FSDP), mesh_of(FSDP), source, None)


def test_a_layer_that_trains_several_dtypes_is_refused(tmp_path: Path) -> None:
    build("deepseek_v4").save_pretrained(tmp_path)
    for error in on_ranks(refused, 2, str(tmp_path)):
        assert "'ffn_hc.scale' in float32" in error
        assert "FSDP trains one dtype per layer; expected dtype float32" in error


def with_other_kernels(rank: Rank, family: str) -> str:
    """A job: the error of a runner if one of the two machines has the kernels of layers with a state."""
    original = document_packing.find_spec
    if rank.number == 1:
        document_packing.find_spec = lambda name: original("torch")  # type: ignore[assignment]
    try:
        source = ModelSource(partial(unproven, partial(build, family)))
        return message_of(build_proven_runner, Layout(FSDP), mesh_of(FSDP), source, None)
    finally:
        document_packing.find_spec = original


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2"])
def test_kernels_on_one_machine_only_are_refused_by_all_ranks(family: str) -> None:
    expected = "rank 0 would pack documents as 'rows', and rank 1 as 'lengths': expected causal-conv1d"
    for error in on_ranks(with_other_kernels, 2, family):
        assert expected in error
