"""A teacher that runs a step ahead gives the same training.

The steps have different shapes, evaluations run between them, and some steps are not the announced ones. The layouts
with such a teacher are compared in `test_parity.py`.
"""

from dataclasses import dataclass, field
from unittest import mock

import pytest
from kit.parity_cases import LEARNING_RATE, ONE, Case, Side, alias, batches, configurations, decoder, mesh_of
from kit.shard_ranks import Rank, shared_pool

from stillhouse.data import MicroBatch, StepMicroBatches
from stillhouse.parallel import Degrees, Layout, ModelSource, TeacherStudentPair, build_runner
from stillhouse.signals import request_ahead
from stillhouse.tools.parity import relative_difference, whole, worst

STEPS, LIMIT = 4, 120.0
CASE = Case(Layout(Degrees(pipeline=2), "1f1b_ahead"), "llama", micro_batches=4)


@dataclass
class Found:
    """One rank's results. teacher_forwards: for each step, the number of forwards of this rank's teacher stage.

    weights: each parameter's relative difference from the reference after the last step.
    """

    teacher_forwards: list[int] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)


def train(rank: Rank, announced: str) -> Found | None:
    """A job. announced: "right", "wrong" (other micro-batches than those of the next step), or "nothing"."""
    mesh = mesh_of(CASE.layout)
    if rank.number >= CASE.layout.degrees.processes:
        return None
    single, sharded = Side.of(CASE, Layout(), ONE), Side.of(CASE, CASE.layout, mesh)
    steps = [StepMicroBatches(micro_batches_of(step)) for step in range(STEPS)]
    references = single.requests(steps)
    own = [sharded.shard(each) for each in steps]
    other = sharded.shard(StepMicroBatches(micro_batches_of(STEPS)))
    ahead = request_ahead(sharded.source, own)
    found = Found()
    for step in range(STEPS):
        if announced == "right":
            micro_batches, signals = next(ahead)
        else:
            micro_batches, signals = own[step], sharded.source.request(own[step])
        if announced == "wrong":
            sharded.source.request(other)
        with mock.patch.object(
            TeacherStudentPair, "teacher_forward", autospec=True, side_effect=TeacherStudentPair.teacher_forward
        ) as teacher_forward:
            sharded.step(micro_batches, signals)
        found.teacher_forwards.append(teacher_forward.call_count)
        sharded.evaluate(steps[0])
        single.step(*next(references))
        for side in (single, sharded):
            side.engine.update(LEARNING_RATE)
    expected = dict(single.runner.named_parameters())
    found.weights = {
        name: relative_difference(whole(each), expected[alias(CASE, name)])
        for name, each in sharded.runner.named_parameters()
    }
    return found


def micro_batches_of(step: int) -> list[MicroBatch]:
    """Return a step's micro-batches. Every step has another shape, and step 2 has fewer micro-batches."""
    given = [each.padded(2 + step % 2, 36 + 6 * step) for each in batches(CASE, step)]
    return given[:2] if step == 2 else given


@pytest.mark.parametrize(
    "announced",
    ["right", pytest.param("wrong", marks=pytest.mark.slow), pytest.param("nothing", marks=pytest.mark.slow)],
)
def test_announcements_do_not_change_the_weights(announced: str) -> None:
    ranks = [each for each in shared_pool(8).call(train, announced, limit=LIMIT) if each is not None]
    assert len(ranks) == CASE.layout.degrees.processes
    counts = [4, 4, 2, 4]
    for rank, found in enumerate(ranks):
        assert worst(found.weights.items())[1] <= 1e-4, rank
        if announced == "wrong":  # the announced forwards were useless, and all forwards were run again
            assert all(forwards >= count for forwards, count in zip(found.teacher_forwards, counts, strict=True))
            assert sum(found.teacher_forwards) > sum(counts)
        else:
            assert sum(found.teacher_forwards) == sum(counts)
        assert (found.teacher_forwards == counts) == (announced == "nothing"), rank


def test_a_teacher_that_cannot_run_ahead_is_refused() -> None:
    student, teacher = (ModelSource(lambda each=each: decoder(each, 0)) for each in configurations("llama"))
    layout = Layout(Degrees(pipeline=2), "1f1b_ahead")
    base, one_process = ModelSource(student.build, teacher_is_base=True), ONE
    with pytest.raises(ValueError, match="without its adapter"):
        build_runner(layout, one_process, base, None)
    with pytest.raises(ValueError, match="has no layers in its stages"):
        build_runner(
            layout,
            one_process,
            student,
            teacher,
            teacher_head_only=True,
        )
