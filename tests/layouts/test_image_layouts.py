"""Vision-language models under layouts: the gradients of one process, and refusals.

B rows, S tokens per row, D width.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from kit import slow
from kit.image_documents import Document, Packed, documents_of, joined_images, model_of, packed
from kit.image_models import FAMILIES
from kit.image_runs import SETTINGS, write_image_run
from kit.layout_runs import assert_same_model, assert_same_weights, distill
from kit.parity_cases import ONE, SPEC, TRAIN, mesh_of
from kit.runs import write_run
from kit.shard_ranks import Rank, on_ranks
from torch import Tensor

from stillhouse.data import MicroBatch, StepMicroBatches
from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.images.prepare import staged_models
from stillhouse.images.proof import WholeModel, prove_image_model
from stillhouse.models import Decoder, ProofError
from stillhouse.models.document_packing import PackingError
from stillhouse.models.dtensors import gathered_tensor
from stillhouse.models.vision_language import LANGUAGE, PROJECTOR, VISION, train_parts
from stillhouse.parallel import Degrees, Layout, ModelSource, Runner
from stillhouse.parallel import teacher_student_pair as pair
from stillhouse.proofs.layouts import build_proven_runner
from stillhouse.signals import InStageTeacher
from stillhouse.tools.parity import relative_difference

TWO_STAGES, CONTEXT, FSDP = Layout(Degrees(pipeline=2)), Layout(Degrees(context=2)), Layout(Degrees(fsdp=2))
PARTS = [LANGUAGE, PROJECTOR, VISION]
#: the documents of each row of each micro-batch; the second one, which is that of the second data rank, has no images
ROWS = (((0, 1), (2,)), ((2,), (2,)), ((2, 3),))


@dataclass(frozen=True)
class Case:
    """A layout, a family, the student's number of layers (the teacher has one more), options of both models, and the
    parts of the student that are trained.
    """

    family: str
    layout: Layout = TWO_STAGES
    layers: int = 2
    with_images: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    parts: Sequence[str] = tuple(PARTS)

    def __str__(self) -> str:
        what = "images" if self.with_images else "text"
        what += "" if len(self.parts) > 1 else f"-{self.parts[0]}"
        return f"{self.family}-{self.layout.degrees}-{self.layout.schedule}-{what}".replace(" × ", "-")


def decoder_of(case: Case, seed: int, more: int, parts: Sequence[str]) -> Decoder:
    text = {"num_hidden_layers": case.layers + more}
    decoder = Decoder(model_of(case.family, seed=seed, **text, **case.options), verify=False)
    train_parts(decoder, parts)
    return decoder


def built(case: Case, layout: Layout, mesh: Any, documents: list[Document]) -> Runner:
    """A runner whose student and teacher are proven with images."""
    student = ModelSource(partial(decoder_of, case, 0, 0, case.parts), name="student")
    runner = build_proven_runner(
        layout, mesh, student, ModelSource(partial(decoder_of, case, 1, 1, PARTS), name="teacher")
    )
    if case.with_images:
        prove(runner, documents)
    for decoder in runner.decoders:
        decoder.train()
    return runner


def prove(runner: Runner, documents: list[Document]) -> None:
    if runner.ranks.size > 1:
        for _, model in staged_models(runner):
            agreed = partial(runner.ranks.all_raise, PackingError, ProofError)
            prove_image_model(model, documents, joined_images, agreed)
    else:
        for decoder in (*runner.decoders, runner.teacher):
            prove_image_model(WholeModel(decoder), documents, joined_images)


def micro_batches(decoder: Decoder, documents: list[Document]) -> Iterator[MicroBatch]:
    """The middle of micro-batches with images, at which context ranks cut them, is within an image."""
    for of_rows in ROWS:
        rows = [[documents[number] for number in row] for row in of_rows]
        batches = (packed(decoder, rows, padding) for padding in range(3, 99))
        batch = next(batch for batch in batches if not batch.arguments["images"] or is_cut_in_image(decoder, batch))
        arguments = dict(batch.arguments)
        is_padding_BS, images = arguments.pop("is_padding"), arguments.pop("images")
        labels_T = batch.labels_BS.flatten()
        yield MicroBatch(
            inputs=arguments,
            labels_T=labels_T,
            weights_T=(labels_T >= 0).float(),
            document_T=-is_padding_BS.flatten().long(),
            valid_index=(labels_T >= 0).nonzero()[:, 0],
            media=images,
        )


def is_cut_in_image(decoder: Decoder, batch: Packed) -> bool:
    is_image_BS = batch.arguments["input_ids"] == decoder.config.image_token_id
    middle = (is_image_BS.shape[1] + 1) // 2
    return bool(is_image_BS[:, middle - 1 : middle + 1].all(1).any())


def step_of(runner: Runner, documents: list[Document]) -> tuple[float, float, dict[str, Tensor]]:
    """Return the loss of an evaluation, the loss of a step, and the gradients by the parameters' names."""
    step = StepMicroBatches(list(micro_batches(runner.decoders[0], documents)))
    engine, source = TorchEngine(runner, SPEC, train=TRAIN), InStageTeacher()
    held_out = runner.shard(step, training=False)
    evaluated = engine.evaluate([(held_out, source.request(held_out).result())])["loss"]
    batches = runner.shard(step, training=True)
    sums = engine.forward_backward(batches, source.request(batches).result(), step.normalizer).sums
    engine.gradient_norm()
    gradients = {
        runner.shared_name(name): gathered_tensor(weight.grad)
        for name, weight in runner.named_parameters()
        if weight.grad is not None
    }
    return evaluated, sums["loss"], gradients


def compare(rank: Rank, case: Case) -> tuple[float, float, dict[str, float], set[str]]:
    """A job: return relative differences of both losses and of this rank's gradients, and all names with one."""
    with TemporaryDirectory() as folder:
        sizes = {} if case.with_images else {"sizes": ((),) * 4}
        documents = documents_of(case.family, Path(folder), **sizes)
    evaluated, loss, gradients = step_of(built(case, Layout(), ONE, documents), documents)
    for part in case.parts if case.with_images else ():
        weights = decoder_of(case, 0, 0, [part]).named_parameters()
        assert any(gradients[name].any() for name, weight in weights if weight.requires_grad), part
    mesh = mesh_of(case.layout.degrees)
    of_stages = step_of(built(case, case.layout, mesh, documents), documents)
    differences = {
        name: relative_difference(gradient, gradients[name], 1e-3) for name, gradient in of_stages[2].items()
    }
    return abs(of_stages[0] / evaluated - 1), abs(of_stages[1] / loss - 1), differences, set(gradients)


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen3_vl"),
        *(slow(Case(family)) for family in ("idefics3", "internvl", "llava_onevision", "gemma3")),
        slow(Case("qwen3_vl", Layout(Degrees(pipeline=2), "zbv"), layers=4)),
        slow(Case("internvl", with_images=False)),
        *(slow(Case(family, CONTEXT)) for family in ("qwen3_vl", "internvl")),
        slow(Case("qwen3_vl", CONTEXT, with_images=False)),
        # a rank without images does not let others wait
        *(slow(Case("qwen3_vl", FSDP, parts=parts)) for parts in (PARTS, [LANGUAGE], [PROJECTOR])),
        slow(Case("gemma3", FSDP)),
        slow(Case("qwen3_vl", Layout(Degrees(replicate=2)))),
        *(slow(Case(family, Layout(Degrees(tensor=2)))) for family in ("internvl", "gemma3")),
    ],
    ids=str,
)
def test_two_processes_have_the_gradients_of_one(case: Case) -> None:
    answers = on_ranks(compare, 2, case)
    names = set().union(*(differences for _, _, differences, _ in answers))
    for evaluated, loss, differences, expected in answers:
        assert evaluated < 1e-5
        assert loss < 1e-5
        assert names == expected
        assert case.layout.degrees.pipeline > 1 or differences.keys() == expected
        # a bias of the keys shifts all scores of a query alike, so its gradient is rounding alone
        assert not [name for name, error in differences.items() if not error < 1e-5 and "k_proj.bias" not in name]
    has_vision = VISION in case.parts or (PROJECTOR in case.parts and "qwen" in case.family)
    assert any("vis" in name for name in names) == has_vision


def refused(rank: Rank, case: tuple[Case, str]) -> str:
    """A job: return the error of a proof whose later stages do not get an input of this name."""
    of_family, missing = case
    with TemporaryDirectory() as folder:
        documents = documents_of(of_family.family, Path(folder))
    inputs_of = pair.model_inputs

    def without(micro_batch: MicroBatch, hidden: Tensor | None) -> dict[str, Any]:
        inputs = inputs_of(micro_batch, hidden)
        return {name: value for name, value in inputs.items() if hidden is None or name != missing}

    mesh = mesh_of(of_family.layout.degrees)
    with pytest.raises(ProofError) as caught, patch.object(pair, "model_inputs", without):
        built(of_family, of_family.layout, mesh, documents)
    return str(caught.value)


TOWER = FAMILIES["qwen3_vl"].options["vision_config"]
TWO_FEATURES = {"vision_config": {**TOWER, "deepstack_visual_indexes": [0, 1]}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "missing", "error"),
    [
        (Case("qwen3_vl", options=TWO_FEATURES), "", "adds features of images after its layer 1, and"),
        (Case("qwen3_vl"), "axis_position_ids", "from those of the plain model on that document alone: expected"),
        (Case("gemma3"), "token_type_ids", "from those of the plain model on that document alone: expected"),
    ],
    ids=["features on a later stage", "no positions of axes", "no kinds of tokens"],
)
def test_stages_that_differ_from_the_plain_model_are_refused(case: Case, missing: str, error: str) -> None:
    for answer in on_ranks(refused, 2, (case, missing)):
        assert error in answer


@pytest.mark.slow
def test_a_run_in_two_stages_has_the_model_of_one_process(tmp_path: Path) -> None:
    """All parts are trained. A run in one process continues from the checkpoint of both stages."""
    write_image_run(tmp_path, "qwen3_vl")
    write_run(tmp_path, **SETTINGS, **{"train.steps": 3, "checkpoint.every": 2, "student.train": PARTS})
    distill(tmp_path, "one", 1)
    distill(tmp_path, "two", 2, "parallel.pipeline=2")
    assert_same_model(tmp_path / "one", tmp_path / "two")
    again = f"checkpoint.resume={tmp_path / 'two' / 'checkpoints' / 'step-00000002'}"
    assert distill(tmp_path, "again", 1, again).out.count("resuming from") == 1
    assert_same_weights(tmp_path / "again", tmp_path / "one")
