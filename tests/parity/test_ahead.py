"""A teacher that runs a step ahead: steps of other shapes, evaluations between them, and others than were announced.

The layouts themselves are among those of `test_parity.py`.
"""

from dataclasses import dataclass, field
from unittest import mock

import pytest
from layouts import (
    Case,
    alias,
    batches,
    configurations,
    decoder,
    mesh_of,
    mine,
    normalizer,
    optimizer,
    origins,
    works,
)
from shard_ranks import Rank, shared_pool

from stillhouse.data import Batch
from stillhouse.parallel import Degrees, Layout, Origin, Twin, lay_out
from stillhouse.parity import apart, whole, worst

STEPS, LIMIT = 4, 120.0
CASE = Case(Layout(Degrees(pipeline=2), "1f1b_ahead"), "llama", micro_batches=4)


@dataclass
class Walk:
    """Of a rank, over some steps. spoken: of each, micro-batches that its stage of the teacher has run."""

    spoken: list[int] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)


def walk(rank: Rank, announced: str) -> Walk | None:
    """A job. announced: "right", "wrong" (always other works than will come), or "nothing"."""
    mesh = mesh_of(CASE.layout)
    if rank.number >= CASE.layout.degrees.processes:
        return None
    alone, laid = lay_out(Layout(), None, *origins(CASE)), lay_out(CASE.layout, mesh, *origins(CASE))
    optimizers = [optimizer(each) for each in (alone, laid)]
    every = [shaped(step) for step in range(STEPS + 1)]
    own = [works(CASE, mine(each, mesh), normalizer(each)) for each in every]
    other = works(CASE, mine(every[-1], mesh), normalizer(every[-1]))
    found = Walk()
    for step in range(STEPS):
        upcoming = {"right": own[step + 1] if step + 1 < STEPS else (), "wrong": other, "nothing": ()}[announced]
        with mock.patch.object(Twin, "speak", autospec=True, side_effect=Twin.speak) as spoken:
            laid.forward_backward(own[step], upcoming)
        found.spoken.append(spoken.call_count)
        laid.forward(own[0])
        alone.forward_backward(works(CASE, every[step]))
        for runner, made in zip((alone, laid), optimizers, strict=True):
            runner.clip(1.0)
            made.step()
            made.zero_grad()
    expected = dict(alone.named_parameters())
    found.weights = {name: apart(whole(each), expected[alias(CASE, name)]) for name, each in laid.named_parameters()}
    return found


def shaped(step: int) -> list[Batch]:
    """A step's micro-batches: of a shape of its own, and sometimes fewer."""
    given = [each.padded(2 + step % 2, 36 + 6 * step) for each in batches(CASE, step)]
    return given[:2] if step == 2 else given


@pytest.mark.parametrize(
    "announced",
    ["right", pytest.param("wrong", marks=pytest.mark.slow), pytest.param("nothing", marks=pytest.mark.slow)],
)
def test_the_same_weights_whatever_was_announced(announced: str) -> None:
    ranks = [each for each in shared_pool(8).call(walk, announced, limit=LIMIT) if each is not None]
    assert len(ranks) == CASE.layout.degrees.processes
    counts = [4, 4, 2, 4]
    for rank, found in enumerate(ranks):
        assert worst(found.weights.items())[1] <= 1e-4, rank
        if announced == "wrong":  # some of it in vain, and all of it again
            assert all(spoken >= count for spoken, count in zip(found.spoken, counts, strict=True))
            assert sum(found.spoken) > sum(counts)
        else:
            assert sum(found.spoken) == sum(counts)
        assert (found.spoken == counts) == (announced == "nothing"), rank


def test_a_teacher_that_cannot_run_ahead_is_refused() -> None:
    student, teacher = (Origin(lambda each=each: decoder(each, 0)) for each in configurations("llama"))
    layout = Layout(Degrees(pipeline=2), "1f1b_ahead")
    own_base = Origin(student.make, own_base=True)
    with pytest.raises(ValueError, match="without its adapter"):
        lay_out(layout, None, own_base, None)
    with pytest.raises(ValueError, match="a layout of its own"):
        lay_out(layout, None, student, teacher, (Layout(Degrees(context=2)), None))
