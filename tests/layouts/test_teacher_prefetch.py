"""A teacher that runs a step ahead gives the same training.

The steps have different shapes, evaluations run between them, and some steps are not the announced ones. The layouts
with such a teacher are compared in `test_parity.py`.
"""

from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import pytest
from kit import slow
from kit.parity_cases import LEARNING_RATE, ONE, Case, Side, alias, batches, mesh_of
from kit.parity_models import configurations, decoder
from kit.shard_ranks import Rank, on_ranks

from stillhouse.data import MicroBatch, StepMicroBatches
from stillhouse.models.dtensors import gathered_tensor
from stillhouse.parallel import Degrees, Layout, ModelSource, TeacherStudentPair
from stillhouse.proofs.layouts import build_proven_runner
from stillhouse.signals import RequestedSteps
from stillhouse.tools.parity import relative_difference, worst

STEPS = 4
CASE = Case(Layout(Degrees(pipeline=2), "1f1b_ahead"), "llama", micro_batches=4)


@dataclass
class Result:
    """One rank's results. teacher_forwards: for each step, the number of forwards of this rank's teacher stage.

    weights: each parameter's relative difference from the reference after the last step.
    """

    teacher_forwards: list[int] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)


def train(rank: Rank, announced: str) -> Result:
    """A job. announced: "right", "wrong" (other micro-batches than those of the next step), or "nothing"."""
    mesh = mesh_of(CASE.layout.degrees)
    single, sharded = Side.of(CASE, Layout(), ONE), Side.of(CASE, CASE.layout, mesh)
    steps = [StepMicroBatches(micro_batches_of(step)) for step in range(STEPS)]
    references = single.requests(steps)
    sharded_steps = [sharded.shard(step) for step in steps]
    other = sharded.shard(StepMicroBatches(micro_batches_of(STEPS)))
    ahead = RequestedSteps(sharded.source, sharded_steps)
    result = Result()
    for step in range(STEPS):
        if announced == "right":
            micro_batches, signals = next(ahead)
        else:
            micro_batches, signals = sharded_steps[step], sharded.source.request(sharded_steps[step])
        if announced == "wrong":
            sharded.source.request(other)
        with mock.patch.object(
            TeacherStudentPair, "teacher_forward", autospec=True, side_effect=TeacherStudentPair.teacher_forward
        ) as teacher_forward:
            sharded.step(micro_batches, signals)
        result.teacher_forwards.append(teacher_forward.call_count)
        sharded.evaluate(steps[0])
        single.step(*next(references))
        for side in (single, sharded):
            side.engine.update(LEARNING_RATE)
    expected = dict(single.runner.named_parameters())
    result.weights = {
        name: relative_difference(gathered_tensor(parameter), expected[alias(name, expected)])
        for name, parameter in sharded.runner.named_parameters()
    }
    return result


def micro_batches_of(step: int) -> list[MicroBatch]:
    """Return a step's micro-batches. Every step has another shape, and step 2 has fewer micro-batches."""
    padded = [micro_batch.padded(2 + step % 2, 36 + 6 * step) for micro_batch in batches(CASE, step)]
    return padded[:2] if step == 2 else padded


@pytest.mark.parametrize("announced", ["right", slow("wrong"), slow("nothing")])
def test_announcements_do_not_change_the_weights(announced: str) -> None:
    counts = [4, 4, 2, 4]
    for rank, result in enumerate(on_ranks(train, CASE.layout.degrees.processes, announced)):
        assert worst(result.weights.items())[1] <= 1e-4, rank
        if announced == "wrong":  # the announced forwards were useless, and all forwards were run again
            assert all(forwards >= count for forwards, count in zip(result.teacher_forwards, counts, strict=True))
            assert sum(result.teacher_forwards) > sum(counts)
        else:
            assert sum(result.teacher_forwards) == sum(counts)
        assert (result.teacher_forwards == counts) == (announced == "nothing"), rank


def test_a_teacher_that_cannot_run_ahead_is_refused() -> None:
    student, teacher = (ModelSource(partial(decoder, config, 0)) for config in configurations("llama"))
    base = ModelSource(student.build, teacher_is_base=True)
    with pytest.raises(ValueError, match="without its adapter"):
        build_proven_runner(CASE.layout, ONE, base, None)
    with pytest.raises(ValueError, match="has no layers in its stages"):
        build_proven_runner(CASE.layout, ONE, student, teacher, teacher_head_only=True)
