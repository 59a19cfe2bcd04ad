"""The order of a pipeline whose teacher runs ahead: its dependencies and its idle time. No process is started."""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

from stillhouse.parallel.teacher_prefetch import Action, Order, bubble_schedule

STEPS = 12


def steps(ranks: int, counts: list[int], teacher: float) -> Iterator[tuple[int, tuple[int, ...], Order]]:
    """Yield each step's number of micro-batches, the teacher forwards that were done before it, and its order.

    The last step has no next step.
    """
    done = (0,) * ranks
    for count, next_micro_batches in zip(counts, [*counts[1:], 0], strict=True):
        order = bubble_schedule(count, next_micro_batches, teacher, done)
        yield count, done, order
        done = order.done


@pytest.mark.parametrize("teacher", [0.0, 0.5, 4.0, 9.7])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_no_rank_waits_forever_and_no_action_runs_twice(ranks: int, teacher: float) -> None:
    for count in range(ranks, 4 * ranks + 1):
        run: Counter[Action] = Counter()
        for step, (micro_batches, _, order) in enumerate(steps(ranks, [count, count, ranks, count, count], teacher)):
            for action in executed(order, step, run):
                run[action] += 1
            expected = {(rank, number) for rank in range(ranks) for number in range(micro_batches)}
            for kind in "FBT":
                assert {work[1::2] for work in run if work.step == step and work.kind == kind} == expected
        assert set(run.values()) == {1}


def executed(order: Order, step: int, before: Counter[Action]) -> Iterator[Action]:
    """Yield the actions in the order of their execution. A rank waits until its next action has all its inputs."""
    ranks = len(order.ranks)
    waiting = [[work._replace(step=step + work.step) for work in rank] for rank in order.ranks]
    done = set(before)
    while any(waiting):
        heads = [rank[0] for rank in waiting if rank]
        ready = [head for head in heads if needed(head, ranks) <= done]
        assert ready, heads
        for work in ready:
            waiting[work.stage].pop(0)
            done.add(work)
            yield work


def needed(action: Action, ranks: int) -> set[Action]:
    behind = {action._replace(stage=action.stage + 1)} if action.stage + 1 < ranks else set()
    if action.kind == "B":
        return {action._replace(kind="F")} | behind
    before = {action._replace(stage=action.stage - 1)} if action.stage else set()
    return before | ({action._replace(kind="T")} if action.kind == "F" and not behind else set())


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 5), (4, 4), (4, 10)])
def test_the_student_follows_torchs_order(ranks: int, micro_batches: int) -> None:
    for rank, actions in enumerate(bubble_schedule(micro_batches, micro_batches, 4.0, (0,) * ranks).ranks):
        stage = SimpleNamespace(stage_index=rank, num_stages=ranks, is_first=not rank, submod=nn.Identity())
        stage.is_last = rank + 1 == ranks
        torch_actions = Schedule1F1B(stage, micro_batches, loss_fn=nn.Identity()).pipeline_order[rank]
        expected = [
            action.computation_type.value for action in torch_actions if action is not None and action.is_compute_op
        ]
        student = [action for action in actions if action.kind != "T"]
        assert [action.kind for action in student] == expected
        for kind in "FB":
            assert [work.micro_batch for work in student if work.kind == kind] == list(range(micro_batches))


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "idle"),
    [(2, 4, 0.0), (2, 8, 0.0), (4, 4, 0.211), (4, 8, 0.051), (4, 16, 0.018), (8, 16, 0.118), (8, 32, 0.065)],
)
def test_idle_share_for_a_teacher_of_four_times_the_size(ranks: int, micro_batches: int, idle: float) -> None:
    """The numbers are those of docs/scaling.md. With the teacher in the student's forward, 1F1B has an idle share of
    (p - 1)/(m + p - 1).
    """
    times = [order.time for _, _, order in steps(ranks, [micro_batches] * 2 * STEPS, 4.0)][STEPS - 1 : -1]
    idle_share = 1 - 7 * micro_batches * len(times) / sum(times)
    assert idle_share == pytest.approx(idle, abs=1e-3)
    plain = (ranks - 1) / (micro_batches + ranks - 1)
    assert 1 - (1 - plain) / (1 - idle_share) >= 0.1  # at least 10 % of a step's time is saved


def test_a_step_without_a_next_one_is_1f1b() -> None:
    assert not any(action.kind == "T" for rank in bubble_schedule(8, 0, 4.0, (8,) * 4).ranks for action in rank)
    assert bubble_schedule(8, 0, 4.0, (8,) * 4).time == 3 * (8 + 3)
