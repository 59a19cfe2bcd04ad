"""A queue's state in a checkpoint: what a run cannot have had at the checkpoint's step is refused by name."""

import json
import math
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit.on_policy_runs import SAMPLES, STEPS, LateEngine, queue_of, write_on_policy_run
from kit.ranks import Ranks
from kit.runs import refused_changes
from kit.signal_hooks import signal_at
from safetensors import safe_open
from safetensors.numpy import save_file

from stillhouse.checkpoint.checkpoint_folder import ROLLOUTS
from stillhouse.checkpoint.save import read_queue, write_queue
from stillhouse.output.disk import hashes
from stillhouse.output.progress import read_state, write_state
from stillhouse.rollout import QueueState, RolloutQueue

#: the steps that are made before the checkpoint; the first groups of the next step are those from FIRST on
STEP = 5
FIRST = 4 * STEP
SCHEDULES = [(0, True, 0), (1, True, 0), (2, True, 0), (1, False, 1), (2, False, 2)]

NO_GROUPS = {"asked_at": [], "trained": []}
OF_SAMPLES = ({"reward_parts": [[math.nan]]}, {"tool_calls": [[1, 2]]}, {"object_rewards": ["1"]})
WRONG_GROUPS = (
    *('{"asked_at": [[20, 3], [20, 4]], "trained": []}', '{"asked_at": [["20", 3]]}', "["),
    *(json.dumps(NO_GROUPS | part) for part in OF_SAMPLES),
)

Change = Callable[[QueueState], QueueState]


def queue(ahead: int = 2, in_order: bool = True, slack: int = 0, seed: int = 0, share: float = 1.0) -> RolloutQueue:
    return queue_of(LateEngine(most=4, seed=seed), ahead=ahead, in_order=in_order, slack=slack, share=share)


def after(steps: int, *schedule: Any, lost: bool = False, most: int = 4, **options: Any) -> QueueState:
    """The state after so many steps. lost: the next one was begun, and its teacher was lost. most: see LateEngine."""
    made = queue(*schedule, **options)
    engine = made.servers
    assert isinstance(engine, LateEngine)
    engine.most = most
    for step in range(steps):
        engine.update_weights(step, None)
        made.start(step)
        made.take(step)
        made.trained(step)
    if lost:
        engine.update_weights(steps, None)
        made.start(steps)
        taken = made.take(steps)
        assert {sample.number for sample in taken} <= {sample.number for sample in made.state().samples}
    return made.state()


def finished() -> QueueState:
    """The state after STEP steps of two_step_off whose samples are all finished: of the groups of two steps."""
    state = after(STEP, most=99)
    return replace(state, samples=sorted(state.samples, key=lambda sample: sample.number))


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.6, 0.1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_state_that_a_run_can_have_is_taken(schedule: tuple[int, bool, int], share: float, lost: bool) -> None:
    for seed, steps in enumerate(range(STEPS + (not lost))):
        state = after(steps, *schedule, lost=lost, seed=seed, share=share)
        queue(*schedule, share=share).restore(state, steps)


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_the_state_of_another_step_is_refused(schedule: tuple[int, bool, int]) -> None:
    """It would train groups twice, or never. Under sync, the state is empty after every step."""
    state = after(STEP, *schedule)
    for step in [number for number in range(STEPS) if number != STEP]:
        with pytest.raises(ValueError, match=r"group|sample"):
            queue(*schedule).restore(state, step)


def asked(changes: dict[int, int | None]) -> Change:
    """Change when groups were asked for; None removes a group and its samples."""

    def change(state: QueueState) -> QueueState:
        requested_at = {group: at for group, at in (state.requested_at | changes).items() if at is not None}
        samples = [one for one in state.samples if changes.get(one.number // SAMPLES, 0) is not None]
        return replace(state, requested_at=requested_at, samples=samples)

    return change


def first_sample(**values: Any) -> Change:
    """Change the first sample, or its completion."""

    def change(state: QueueState) -> QueueState:
        first, *others = state.samples
        of_sample = {name: value for name, value in values.items() if hasattr(first, name)}
        completion = replace(first.completion, **{name: values[name] for name in values.keys() - of_sample})
        return replace(state, samples=[replace(first, completion=completion, **of_sample), *others])

    return change


@pytest.mark.parametrize(("change", "text"), refused_changes("state of a queue"))
def test_a_state_that_this_run_cannot_have_had_is_refused(change: str, text: str) -> None:
    state = finished()
    assert state.samples[0].number == FIRST * SAMPLES
    with pytest.raises(ValueError, match=re.escape(text)):
        queue().restore(eval(change)(state), STEP)


def test_async_counts_what_was_trained_out_of_turn() -> None:
    states = [after(STEP, 2, False, 2, seed=seed) for seed in range(9)]
    state = next(state for state in states if state.trained)
    earliest = min(state.requested_at)
    for changed, message in (
        (replace(state, trained=[*state.trained, state.trained[0]]), "expected each group once"),
        (replace(state, trained=state.trained[:-1]), "without the groups"),
        (asked({earliest: None})(state), "are requested or trained, without the groups"),
        (asked({earliest: 0})(state), f"group {earliest} was requested at step 0"),
    ):
        with pytest.raises(ValueError, match=message):
            queue(2, False, 2).restore(changed, STEP)


Arrays = dict[str, np.ndarray]


TOKENS = ("ids_N", "log_probs_N", "versions_N", "is_written_N")


def intact(folder: Path) -> Any:
    """A checkpoint whose hashes are right: the file was damaged before it was hashed, or was made by hand."""
    return SimpleNamespace(path=folder, state=SimpleNamespace(files={ROLLOUTS: ""}))


def test_a_file_of_samples_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = after(STEP, 2, False, 2, seed=3)
    parts: dict[str, Any] = {"reward_parts": (0.1, 2.0), "object_reward": 2.0, "tool_calls": 3, "tool_errors": 1}
    with_parts = replace(written, samples=[replace(sample, **parts) for sample in written.samples])
    for state in (written, with_parts, QueueState()):
        write_queue(tmp_path, state)
        state_read = read_queue(intact(tmp_path))
        assert (state_read.requested_at, state_read.trained) == (state.requested_at, state.trained)
        for one, other in zip(state_read.samples, state.samples, strict=True):
            for name in ("number", "prompt", "reward", *parts):
                assert getattr(one, name) == getattr(other, name), name
            for name in ("ids_N", "log_probs_N", "versions_N"):
                assert (getattr(one.completion, name) == getattr(other.completion, name)).all()


@pytest.mark.parametrize(("change", "text"), refused_changes("file of samples"))
def test_a_file_of_samples_of_another_form_is_refused(tmp_path: Path, change: str, text: str) -> None:
    write_queue(tmp_path, finished())
    rewrite(tmp_path / ROLLOUTS, eval(change))
    with pytest.raises(ValueError, match=f"{ROLLOUTS} cannot be read: .*{re.escape(text)}"):
        read_queue(intact(tmp_path))


def test_groups_of_another_form_and_a_file_that_is_cut_are_refused(tmp_path: Path) -> None:
    write_queue(tmp_path, finished())
    intact_bytes = (tmp_path / ROLLOUTS).read_bytes()
    contents = [intact_bytes[:length] for length in range(0, len(intact_bytes), 97)]
    for groups in WRONG_GROUPS:
        rewrite(tmp_path / ROLLOUTS, lambda arrays: {}, groups)
        contents.append((tmp_path / ROLLOUTS).read_bytes())
    for content in contents:
        (tmp_path / ROLLOUTS).write_bytes(content)
        with pytest.raises(ValueError, match=f"{ROLLOUTS} cannot be read: "):
            read_queue(intact(tmp_path))


def rewrite(path: Path, change: Callable[[Arrays], Arrays], groups: str | None = None) -> None:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(arrays | change(arrays), path, metadata=metadata if groups is None else {"groups": groups})


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_refuses_samples_of_later_weights_on_all_ranks(tmp_path: Path, processes: int) -> None:
    """The file's hash is right, as if it had been written so. Rank 0 alone reads it."""
    settings = {"rollout.schedule": "one_step_off", "checkpoint.every": 2, "parallel.fsdp": processes}
    write_on_policy_run(tmp_path, **settings)
    arguments = ("distill", tmp_path / "run.yaml")
    killed = Ranks(processes, *arguments, hook=signal_at, hook_arguments=(5, signal.SIGKILL))
    assert killed.wait()[0] == -signal.SIGKILL, killed.texts
    checkpoint = tmp_path / "out" / "checkpoints" / "step-00000004"

    rewrite(checkpoint / ROLLOUTS, lambda arrays: {"versions_N": arrays["versions_N"] + np.int32(2)})
    state = read_state(checkpoint)
    [changed] = hashes(checkpoint, [ROLLOUTS]).values()
    write_state(checkpoint, replace(state, files=state.files | {ROLLOUTS: changed}))
    refused = Ranks(processes, *arguments)
    assert refused.wait(60) == [1] * processes, refused.texts
    assert re.fullmatch(
        rf"error: {checkpoint / ROLLOUTS} is not what this run has written: sample \d+ has tokens of versions 5 to 5"
        r": expected versions 3 to 4, in this order; restore it, or remove .*\n",
        refused[0].err.splitlines(keepends=True)[-1],
    ), refused.texts
