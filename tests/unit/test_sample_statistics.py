"""What a run says of its samples: turns, calls of tools, prompts without a signal, and warnings."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from kit.config_cases import refused_calls
from kit.on_policy_runs import one_source_plan

from stillhouse.config import RolloutConfig
from stillhouse.loops.rollout_records import equal_rewards, shown_numbers, turn_statistics
from stillhouse.loops.rollout_warnings import SILENT_STEPS, RolloutWarnings
from stillhouse.rollout import Completion, PromptPlan, Sample
from stillhouse.rollout.plan import PromptSource

PLAN = one_source_plan(7, 0, 2, 2, seed=3)
TOOLS, GAME = RolloutConfig(tools="a:f"), RolloutConfig(environment="a:f")


def sample(number: int, versions: Sequence[int] = (0, 0), finish: Any = "stop", **values: Any) -> Sample:
    versions_N = np.array(versions, np.int32)
    completion = Completion(versions_N + 5, np.zeros(len(versions), np.float32), versions_N, finish)
    return Sample(number, number // 2, completion, **values)


def test_turns_and_calls_are_means_over_samples_and_errors_a_share_of_calls() -> None:
    called = [sample(0, (0, -1, -1, 2, 2, -1, 3), tool_calls=3, tool_errors=1)]
    called.append(sample(1, (0, -1), tool_calls=1, tool_errors=1))
    samples = [*called, sample(2), sample(3, finish="length")]
    assert [one.turns for one in samples] == [3, 1, 1, 1]
    assert turn_statistics(samples, [TOOLS]) == {"turns": 1.5, "tool_calls": 1.0, "tool_errors": 0.5}
    assert turn_statistics(samples[2:], [TOOLS]) == {"turns": 1.0, "tool_calls": 0.0}
    assert turn_statistics(samples, [GAME, RolloutConfig()]) == {"turns": 1.5}
    assert turn_statistics(samples, [RolloutConfig()]) == {}
    assert [vars(Sample.from_json(one.as_json()))["tool_calls"] for one in samples] == [3, 1, 0, 0]


def test_a_prompt_whose_rewards_are_equal_has_no_signal() -> None:
    of_first = [sample(0, reward=0.1 + 0.2), sample(1, reward=0.3)]
    of_second = [sample(2, reward=8e6 + 5), sample(3, reward=8e6)]
    assert equal_rewards([*of_first, *of_second], PLAN) == {"equal_rewards": 0.5}
    assert equal_rewards([*of_first, sample(4), sample(5)], PLAN) == {"equal_rewards": 1.0}
    assert equal_rewards([sample(4)], PLAN) == {}


def test_samples_jsonl_has_all_completions_of_some_prompts() -> None:
    samples = [sample(number) for number in range(6)]
    shown = {most: shown_numbers(samples, PLAN, 0, most) for most in (0, 1, 2, 3, 4, 6)}
    assert shown == {0: [], 1: [0], 2: [0, 1], 3: [0, 1], 4: [0, 1, 2, 3], 6: [0, 1, 2, 3, 4, 5]}
    assert [shown_numbers(samples, PLAN, step, 2) for step in range(4)] == [[0, 1], [2, 3], [4, 5], [0, 1]]
    of_two = PromptPlan([PromptSource(5, 3), PromptSource(5, 1)], 2, seed=3)
    mixed = [sample(number) for number in (0, 1, 2, 3, 6, 7, 8)]
    assert [shown_numbers(mixed, of_two, step, 4) for step in range(3)] == [[0, 1, 2, 3], [3, 4, 5, 6], [3, 4, 5, 6]]
    assert shown_numbers([], PLAN, 1, 4) == []


@pytest.mark.parametrize(("call", "words"), refused_calls("warnings of samples"))
def test_a_warning_comes_once_after_some_steps(capsys: pytest.CaptureFixture[str], call: str, words: str) -> None:
    rollout, samples = eval(call)
    warnings = RolloutWarnings(PLAN, [rollout])
    cut = sum(one.completion.finish == "length" for one in samples) / len(samples)
    metrics = {"rollout/completion_tokens": 2.0, "rollout/truncated": cut, "rollout/reward": 0.5}
    metrics |= {f"rollout/{name}": value for name, value in equal_rewards(samples, PLAN).items()}
    for _ in range(SILENT_STEPS - 1):
        warnings.watch(samples, metrics)
    assert capsys.readouterr().out == ""
    for _ in range(SILENT_STEPS + 1):
        warnings.watch(samples, metrics)
    printed = capsys.readouterr().out
    assert printed.count("\n") == bool(words)
    assert printed.startswith(f"warning: {words}" if words else "")


def test_calls_that_take_most_of_a_step_cause_one_hint(capsys: pytest.CaptureFixture[str]) -> None:
    times = {"rollout.reward": (16, 1.5), "rollout.tools": (4, 1.0)}
    RolloutWarnings(PLAN, [RolloutConfig(tools="a:f", reward="a:f", workers=2)]).watch_calls(times, 4.0)
    warnings = RolloutWarnings(PLAN, [RolloutConfig(tools="a:f", reward="a:f")])
    warnings.watch_calls(times, 6.0)
    assert capsys.readouterr().out == ""
    for _ in range(2):
        warnings.watch_calls(times, 4.0)
    printed = capsys.readouterr().out
    assert printed.startswith(
        "warning: 20 calls of rollout.reward, rollout.tools, one after the other, took 2.5 s of"
    )
    assert printed.count("\n") == 1
