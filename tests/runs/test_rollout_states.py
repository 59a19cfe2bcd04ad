"""A queue's state in a checkpoint: what a run cannot have had at the checkpoint's step is refused by name."""

import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit.on_policy_runs import PROMPTS, SAMPLES, STEPS, LateEngine, queue_of, write_on_policy_run
from kit.ranks import Ranks
from kit.signal_hooks import signal_at
from safetensors import safe_open
from safetensors.numpy import save_file

from stillhouse.checkpoint.checkpoint_folder import ROLLOUTS
from stillhouse.checkpoint.save import read_queue, write_queue
from stillhouse.output.disk import hashes
from stillhouse.output.progress import read_state, write_state
from stillhouse.rollout import QueueState, RolloutQueue, Sample

#: the steps that are made before the checkpoint; the first groups of the next step are those from FIRST on
STEP = 5
FIRST = 4 * STEP
SCHEDULES = [(0, True, 0), (1, True, 0), (2, True, 0), (1, False, 1), (2, False, 2)]

WRONG_PARTS = '{"asked_at": [], "trained": [], "reward_parts": [[NaN]]}'
WRONG_CALLS = '{"asked_at": [], "trained": [], "tool_calls": [[1, 2]]}'
WRONG_REWARDS = '{"asked_at": [], "trained": [], "object_rewards": ["1"]}'

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
        gone = {group for group, at in changes.items() if at is None}
        return replace(
            state,
            requested_at=requested_at,
            samples=[sample for sample in state.samples if sample.number // SAMPLES not in gone],
        )

    return change


def first_sample(**values: Any) -> Change:
    def change(state: QueueState) -> QueueState:
        first, *others = state.samples
        return replace(state, samples=[with_values(first, **values), *others])

    return change


def with_values(sample: Sample, **values: Any) -> Sample:
    of_sample = {name: value for name, value in values.items() if hasattr(sample, name)}
    others = {name: value for name, value in values.items() if name not in of_sample}
    return replace(sample, completion=replace(sample.completion, **others), **of_sample)


REFUSED: dict[str, tuple[Change, str]] = {
    "a group that was not asked for": (first_sample(number=SAMPLES * 99), "sample 297 is of group 99, which was not"),
    "a trained sample": (first_sample(number=0), "group 0, which was not requested or is trained already"),
    "asked for after the checkpoint": (asked({FIRST: STEP + 1}), f"group {FIRST} was requested at step {STEP + 1}"),
    "asked for before the schedule does": (asked({FIRST: 1}), f"group {FIRST} was requested at step 1"),
    "asked for before the run": (asked({FIRST: -1}), f"group {FIRST} was requested at step -1"),
    "a group of a step long ago": (asked({0: 0}), "group 0 was requested at step 0"),
    "a group of a later step": (asked({FIRST + 9: STEP}), rf"without the groups \[{FIRST + 8}"),
    "a missing group": (asked({FIRST + 2: None}), rf"without the groups \[{FIRST + 2}"),
    "the first groups missing": (asked(dict.fromkeys(range(FIRST, FIRST + 4))), "groups have been trained after 5"),
    "the last groups missing": (asked({FIRST + 7: None}), "are requested or trained, without the groups"),
    "no groups": (lambda state: QueueState(), "are requested or trained, without the groups"),
    "trained and asked for": (lambda state: replace(state, trained=[FIRST]), "is both requested and trained"),
    "trained out of turn": (
        lambda state: replace(state, trained=[FIRST - 1]),
        "expected none, because this schedule",
    ),
    "a sample twice": (lambda state: replace(state, samples=[*state.samples, state.samples[0]]), "more than once"),
    "the prompt of another group": (first_sample(prompt=PROMPTS + 1), f"has prompt {PROMPTS + 1}: expected"),
    "a version of the future": (
        first_sample(versions_N=np.array([STEP, STEP + 1], np.int32)),
        f"versions {STEP} to {STEP + 1}: expected versions 3 to {STEP}",
    ),
    "a version before it was asked for": (first_sample(versions_N=np.array([2, 3], np.int32)), "versions 2 to 3"),
    "versions backwards": (first_sample(versions_N=np.array([4, 3], np.int32)), "in this order"),
    "tokens of an environment": (
        first_sample(versions_N=np.array([4, -1], np.int32)),
        "this run has no rollout.environment and no rollout.tools",
    ),
    "a reward": (first_sample(reward=1.0), r"has the reward 1.0: this run has no rollout.reward"),
    "a reward of the environment": (first_sample(object_reward=1.0), "has 1.0 as the reward of its environment"),
    "an id outside of the vocabulary": (first_sample(ids_N=np.array([7, 10**6], np.int32)), "ids 7 to 1000000"),
    "too many tokens": (
        first_sample(
            ids_N=np.ones(9, np.int32),
            log_probs_N=-np.ones(9, np.float32),
            versions_N=np.full(9, 4, np.int32),
        ),
        "has 9 tokens: expected at most",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_that_this_run_cannot_have_had_is_refused(case: str) -> None:
    change, message = REFUSED[case]
    state = finished()
    assert state.samples[0].number == FIRST * SAMPLES
    with pytest.raises(ValueError, match=message):
        queue().restore(change(state), STEP)


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
#: what is changed in the arrays of a file
FILES: dict[str, tuple[Callable[[Arrays], Arrays], str]] = {
    "shifted": (lambda arrays: {"versions_N": arrays["versions_N"][1:]}, "versions_N has 23 values: expected 24"),
    "half": (lambda arrays: {name: arrays[name][:12] for name in TOKENS}, "has 12 values: expected 24"),
    "lengths": (
        lambda arrays: {"tokens_R": np.array([0, *(arrays["tokens_R"][:1] + 2), *arrays["tokens_R"][2:]])},
        "a sample has no tokens",
    ),
    "NaN": (lambda arrays: {"log_probs_N": arrays["log_probs_N"] * np.float32("nan")}, "that are not finite"),
    "above 0": (lambda arrays: {"log_probs_N": -arrays["log_probs_N"]}, "that are not finite, or above 0"),
    "another type": (
        lambda arrays: {"ids_N": arrays["ids_N"].astype(np.float32)},
        "ids_N has dtype float32 and 1 dimensions: expected",
    ),
    "another array": (lambda arrays: {"rewards": arrays["reward_R"]}, "the arrays .* expected"),
    "tokens without a version": (
        lambda arrays: {"is_written_N": np.zeros(24, np.uint8)},
        "sample 60 has generated tokens without a version of the weights",
    ),
    "an unknown end": (
        lambda arrays: {"finish_R": arrays["finish_R"] + np.uint8(7)},
        "finish_R has the value 7: expected 0 to 1",
    ),
}


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
            assert (one.number, one.prompt, one.reward) == (other.number, other.prompt, other.reward)
            assert (one.reward_parts, one.object_reward) == (other.reward_parts, other.object_reward)
            assert (one.tool_calls, one.tool_errors) == (other.tool_calls, other.tool_errors)
            for name in ("ids_N", "log_probs_N", "versions_N"):
                assert (getattr(one.completion, name) == getattr(other.completion, name)).all()


@pytest.mark.parametrize("case", FILES)
def test_a_file_of_samples_of_another_form_is_refused(tmp_path: Path, case: str) -> None:
    change, message = FILES[case]
    state = finished()
    write_queue(tmp_path, state)
    rewrite(tmp_path / ROLLOUTS, change)
    with pytest.raises(ValueError, match=rf"{ROLLOUTS} cannot be read: .*{message}"):
        read_queue(intact(tmp_path))


def test_groups_of_another_form_and_a_file_that_is_cut_are_refused(tmp_path: Path) -> None:
    write_queue(tmp_path, finished())
    intact_bytes = (tmp_path / ROLLOUTS).read_bytes()
    contents = [intact_bytes[:length] for length in range(0, len(intact_bytes), 97)]
    for groups in (
        '{"asked_at": [[20, 3], [20, 4]], "trained": []}',
        '{"asked_at": [["20", 3]]}',
        "[",
        WRONG_PARTS,
        WRONG_CALLS,
        WRONG_REWARDS,
    ):
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
