"""What a run says of its samples: turns, calls of tools, prompts without a signal, and warnings."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from stillhouse.config import RolloutConfig
from stillhouse.generation import Completion, PromptPlan, Sample
from stillhouse.loops.rollout_warnings import SILENT_STEPS, RolloutWarnings
from stillhouse.loops.sample_statistics import equal_rewards, turn_statistics

PLAN = PromptPlan.of_one(7, 0, 2, 2, seed=3)
TOOLS, GAME = RolloutConfig(tools="a:f"), RolloutConfig(environment="a:f")


def sample(number: int, versions: Sequence[int] = (0, 0), finish: Any = "stop", **values: Any) -> Sample:
    versions_N = np.array(versions, np.int32)
    completion = Completion(versions_N + 5, np.zeros(len(versions), np.float32), versions_N, finish)
    return Sample(number, number // 2, completion, versions_N >= 0, **values)


def test_turns_and_calls_are_means_over_samples_and_errors_a_share_of_calls() -> None:
    samples = [
        sample(0, (0, -1, -1, 2, 2, -1, 3), tool_calls=3, tool_errors=1),
        sample(1, (0, -1), tool_calls=1, tool_errors=1),
        sample(2),
        sample(3, finish="length"),
    ]
    assert [one.turns for one in samples] == [3, 1, 1, 1]
    assert turn_statistics(samples, [TOOLS]) == {"turns": 1.5, "tool_calls": 1.0, "tool_errors": 0.5}
    assert turn_statistics(samples[2:], [TOOLS]) == {"turns": 1.0, "tool_calls": 0.0}
    assert turn_statistics(samples, [GAME, RolloutConfig()]) == {"turns": 1.5}
    assert turn_statistics(samples, [RolloutConfig()]) == {}
    assert [vars(Sample.from_json(one.as_json()))["tool_calls"] for one in samples] == [3, 1, 0, 0]


def test_a_prompt_whose_rewards_are_equal_has_no_signal() -> None:
    of_first = [sample(number, reward=0.25, advantage=0.0) for number in (0, 1)]
    of_second = [sample(2, reward=1.0, advantage=1.0), sample(3, reward=0.0, advantage=-1.0)]
    assert equal_rewards([*of_first, *of_second], PLAN) == {"equal_rewards": 0.5}
    assert equal_rewards([*of_first, sample(4), sample(5)], PLAN) == {"equal_rewards": 1.0}
    assert equal_rewards([sample(4)], PLAN) == {}


@pytest.mark.parametrize(
    ("rollout", "samples", "words"),
    [
        (
            TOOLS,
            [sample(0), sample(1, finish="length")],
            "none of the 10 completions of the last 5 steps has called one of rollout.tools (5 of them are cut at",
        ),
        (
            GAME,
            [sample(0), sample(1)],
            "none of the 10 completions of the last 5 steps has had a reply of rollout.env",
        ),
        (RolloutConfig(), [sample(0, finish="length")] * 2, "all 10 completions of the last 5 steps are cut at"),
        (TOOLS, [sample(0), sample(1, (0, -1, 0), tool_calls=1)], ""),
        (GAME, [sample(0), sample(1, (0, -1, 0))], ""),
        (RolloutConfig(), [sample(0), sample(1, finish="length")], ""),
    ],
    ids=range(6),
)
def test_a_warning_comes_once_after_some_steps(
    capsys: pytest.CaptureFixture[str], rollout: RolloutConfig, samples: list[Sample], words: str
) -> None:
    warnings = RolloutWarnings(PLAN, [rollout])
    cut = sum(one.completion.finish == "length" for one in samples) / len(samples)
    metrics = {"rollout/completion_tokens": 2.0, "rollout/truncated": cut}
    for _ in range(SILENT_STEPS - 1):
        warnings.watch(samples, metrics)
    assert capsys.readouterr().out == ""
    for _ in range(SILENT_STEPS + 1):
        warnings.watch(samples, metrics)
    printed = capsys.readouterr().out
    assert printed.count("\n") == bool(words)
    assert printed.startswith(f"warning: {words}" if words else "")
