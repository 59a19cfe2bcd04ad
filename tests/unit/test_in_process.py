"""The engine in this process, and over several processes that each hold a copy of a distributed student."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit import first_is_quick
from kit.generation_jobs import Problem, an_error_on_one_rank, on_ranks, one_process, student, told_early, values
from kit.generation_requests import CPU, requests
from kit.shard_ranks import shared_pool

from stillhouse.parallel import Degrees
from stillhouse.rollout import Completion, RolloutEngine, Sampling
from stillhouse.rollout.engines import InJobEngine
from stillhouse.rollout.generate import Generator

SAMPLED = Sampling(max_new_tokens=8, eos_ids=(2, 9), top_p=0.95)
GREEDY = replace(SAMPLED, temperature=0.0)

PROBLEMS = [
    Problem(Degrees(fsdp=2), SAMPLED),
    Problem(Degrees(fsdp=2), GREEDY),
    Problem(Degrees(tensor=2), SAMPLED, family="qwen3", batch_tokens=40),
    Problem(Degrees(tensor=2), GREEDY, tied=True),
    Problem(Degrees(pipeline=2), SAMPLED, tied=True, on_meta=False),
    Problem(Degrees(pipeline=2), GREEDY, family="qwen3"),
    Problem(Degrees(fsdp=2), SAMPLED, family="qwen3_moe"),
    Problem(Degrees(pipeline=2), SAMPLED, lora=True),
    Problem(Degrees(pipeline=2, fsdp=2), SAMPLED),
    Problem(Degrees(fsdp=2, tensor=2), SAMPLED, lora=True),
]


def same(actual: list[Any], expected: list[Any]) -> None:
    for (ids, log_probs, *rest), (expected_ids, expected_log_probs, *expected_rest) in zip(
        actual, expected, strict=True
    ):
        assert (ids, rest) == (expected_ids, expected_rest)
        np.testing.assert_allclose(log_probs, expected_log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("problem", first_is_quick(PROBLEMS), ids=str)
def test_every_rank_has_the_completions_of_one_process(problem: Problem) -> None:
    before, after = one_process(problem)
    assert [ids for ids, *_ in before] != [ids for ids, *_ in after]
    assert {version for _, _, versions, _ in after for version in versions} == {1}
    answers = [answer for answer in shared_pool(4).call(on_ranks, problem) if answer is not None]
    assert len(answers) == problem.degrees.processes
    for answer in answers:
        for actual, expected in zip(answer, (before, after), strict=True):
            same(actual, expected)
    assert all(answer == answers[0] for answer in answers), "the ranks differ"


def test_the_first_rank_is_told_of_completions_while_another_rank_still_generates(tmp_path: Path) -> None:
    first, second, *_ = shared_pool(4).call(told_early, (Problem(Degrees(fsdp=2), SAMPLED), tmp_path / "told"))
    told, expected = first
    assert [[*completion] for _, completion in told] == [[*expected[at]] for at, _ in told]
    assert second == [True]


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    answers = shared_pool(4).call(an_error_on_one_rank, Problem(Degrees(fsdp=2), SAMPLED))
    assert [answer is None for answer in answers] == [False, False, True, True]
    assert all("its logits are not finite" in answer for answer in answers if answer is not None)


def test_the_engine_of_one_process() -> None:
    generator = Generator(student(PROBLEMS[0]), SAMPLED, CPU)
    engine: RolloutEngine = InJobEngine(generator, version=4)
    ended: list[tuple[int, Completion]] = []
    futures = engine.generate(requests(), lambda at, completion: ended.append((at, completion)))
    assert all(future.done() for future in futures)
    expected = [future.result() for future in futures]
    assert sorted(at for at, _ in ended) == [*range(len(expected))]
    same([values(completion) for _, completion in ended], [values(expected[at]) for at, _ in ended])
    assert len(ended[0][1].ids_N) < len(ended[-1][1].ids_N)
    assert {version for future in futures for version in future.result().versions_N.tolist()} == {4}
    engine.update_weights(5, None)
    assert engine.generate(requests()[:1])[0].result().versions_N[0] == 5
    assert engine.generate([]) == []
    engine.close()
