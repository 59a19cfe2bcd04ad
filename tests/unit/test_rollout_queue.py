"""The plan of prompts and the queue of samples: every sample trained exactly once, none too old, under each schedule.

The engine of these tests gives answers in an order that a test chooses, which no real engine can be made to do. Runs
with real engines are in `test_on_policy.py`.
"""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from kit.on_policy_runs import PROMPTS, SAMPLES, STEPS, LateEngine, episodic, one_source_plan, prompts, queue_of
from kit.toy_tokenizer import toy_tokenizer

from stillhouse.agents.replies import TextReplies
from stillhouse.objective.metrics import ADVANTAGES, IS_SAMPLED, OLD_LOG_PROBS, POLICY_VERSION
from stillhouse.rollout import Completion, RolloutQueue, Sample, Samples, SourceSettings, TargetRules, step_documents
from stillhouse.rollout.plan import RolloutSchedule
from stillhouse.rollout.queue import require_versions
from stillhouse.rollout.reward import mean_and_deviation, rewards_are_equal, with_advantages
from stillhouse.rollout.turns import done
from stillhouse.user_code.functions import UserFunctionError


def numbers(samples: Sequence[Sample]) -> list[int]:
    return [sample.number for sample in samples]


def step_of(engine: LateEngine, queue: RolloutQueue, step: int, max_staleness: int) -> list[Sample]:
    """Make a step; returns its samples, none of which is too old."""
    engine.update_weights(step, None)
    queue.start(step)
    samples = queue.take(step)
    require_versions(samples, step, max_staleness)
    queue.trained(step)
    return samples


@pytest.mark.parametrize("share", [1.0, 0.6, 0.1])
@pytest.mark.parametrize(
    ("ahead", "in_order", "slack"),
    [(0, True, 0), (1, True, 0), (2, True, 0), (0, False, 0), (1, False, 0), (1, False, 1), (2, False, 2)],
)
def test_every_sample_is_trained_once_and_in_time(ahead: int, in_order: bool, slack: int, share: float) -> None:
    engine = LateEngine(most=5, seed=ahead)
    queue = queue_of(engine, ahead=ahead, in_order=in_order, share=share, slack=slack)
    trained: list[int] = []
    for step in range(STEPS):
        if in_order and queue.has_requested(step):
            queue.wait_for(step)
        samples = step_of(engine, queue, step, ahead + slack)
        assert numbers(samples) == sorted(numbers(samples))
        assert len(samples) == len(queue.plan.groups(step)) * SAMPLES
        if in_order:
            assert {rollout.number // SAMPLES for rollout in samples} == set(queue.plan.groups(step))
        trained += numbers(samples)
    total = queue.plan.groups(STEPS - 1).stop * SAMPLES
    assert sorted(trained) == list(range(total)) == sorted(engine.requested)


@pytest.mark.parametrize(("ahead", "in_order", "slack"), [(1, True, 0), (2, True, 0), (1, False, 1), (2, False, 2)])
def test_a_queue_from_a_checkpoint_loses_nothing_and_repeats_nothing(ahead: int, in_order: bool, slack: int) -> None:
    trained: list[int] = []
    engine = LateEngine(most=4)
    queue = queue_of(engine, ahead=ahead, in_order=in_order, slack=slack)
    for step in range(STEPS):
        trained += numbers(step_of(engine, queue, step, ahead + slack))
        kept = queue.state()  # here the trainer and the engine are killed
        engine = LateEngine(most=4, seed=step)
        engine.update_weights(step + 1, None)
        queue = queue_of(engine, ahead=ahead, in_order=in_order, slack=slack)
        queue.restore(kept, step + 1)
        assert not engine.requested
        if step + 1 < STEPS:
            queue.start(step + 1)
        assert not set(engine.requested) & set(numbers(kept.samples))
    assert sorted(trained) == list(range(queue.plan.groups(STEPS - 1).stop * SAMPLES))


def test_a_step_can_be_taken_while_the_one_before_is_trained() -> None:
    """Its samples are asked for once, stay in a checkpoint until they are trained, and are those of its groups."""
    engine = LateEngine(most=50)
    queue = queue_of(engine, ahead=2, in_order=True)
    trained: list[int] = []
    early: dict[int, list[Sample]] = {}
    for step in range(STEPS):
        engine.update_weights(step, None)
        queue.start(step)
        samples = early.pop(step) if step in early else queue.take(step)
        engine.answer()
        if step + 1 < STEPS and queue.is_ready(step + 1):
            early[step + 1] = queue.take(step + 1)
        kept = numbers(queue.state().samples)
        assert {*kept} >= {*numbers(samples)}.union(*map(numbers, early.values()))
        assert len(kept) == len(set(kept))
        assert {rollout.number // SAMPLES for rollout in samples} == set(queue.plan.groups(step))
        trained += numbers(samples)
        queue.trained(step)
        assert not set(numbers(samples)) & set(numbers(queue.state().samples))
        later = queue_of(LateEngine(most=4), ahead=2, in_order=True)
        later.restore(queue.state(), step + 1)
    assert trained == list(range(queue.plan.groups(STEPS - 1).stop * SAMPLES))
    assert len(engine.requested) == len(trained)


def test_a_checkpoint_is_written_although_no_server_answers() -> None:
    engine = LateEngine(most=0)
    queue = queue_of(engine, ahead=1, in_order=True)
    queue.start(0)
    for number, (request, inbox) in enumerate(engine.waiting):
        if number % 3 == 0:
            inbox.put((request.number, OSError("no server has answered")))
        elif number % 3 == 1:
            ids_N = np.array([7, 2], dtype=np.int32)
            completion = Completion(ids_N, np.zeros(2, np.float32) - 1, np.zeros(2, np.int32), "stop")
            inbox.put((request.number, completion))
    answered = {request.number for number, (request, _) in enumerate(engine.waiting) if number % 3 == 1}
    with pytest.raises(OSError, match="no server has answered"):
        queue.wait_for(0)
    kept = set(numbers(queue.state().samples))
    assert kept <= answered
    assert len(kept) >= len(answered) - 1


def test_an_error_that_arrives_before_a_checkpoint_is_raised_after_it() -> None:
    engine = LateEngine(most=0)
    queue = queue_of(engine, ahead=1, in_order=True)
    queue.start(0)
    for request, inbox in engine.waiting:
        inbox.put((request.number, OSError("no server has answered")))
    assert not queue.state().samples
    with pytest.raises(OSError, match="no server has answered"):
        queue.wait_for(0)


def test_a_turn_that_arrives_before_a_checkpoint_gets_its_reply_after_it() -> None:
    def reply(*arguments: Any) -> Future[Any]:
        return done(" no!" if len(arguments[-1].turns) < 2 else None)

    engine, plan = LateEngine(most=99), one_source_plan(PROMPTS, 5, 4, SAMPLES, seed=3)
    settings = SourceSettings(30, environment=TextReplies(episodic(reply), toy_tokenizer()), max_turns=4)
    samples = Samples(prompts(), plan, toy_tokenizer(), [settings], alive=engine.answer)
    queue = RolloutQueue(samples, plan, RolloutSchedule(1, True, 1, STEPS - 1), engine)
    queue.start(0)
    engine.answer()
    assert not queue.state().samples
    turns = [sample.completion.ids_N.tolist().count(2) for sample in queue.take(0)]
    assert turns == [2] * len(plan.samples(plan.groups(0)[0])) * len(plan.groups(0))


class EngineInJob(LateEngine):
    def start(self, queue: RolloutQueue) -> None:
        queue.start(0)
        while requests := queue.samples.next_requests():
            self.generate(requests, queue.samples.inbox)
            self.answer()
        queue.collect()


def test_after_a_failed_reply_an_engine_in_the_job_gets_the_batches_of_an_undisturbed_run() -> None:
    """So samples that had ended are generated again, together with the others."""

    def queue_with(failing: int = -1) -> RolloutQueue:
        def reply(*arguments: Any) -> Future[Any]:
            episode = arguments[-1]
            if (episode.number, len(episode.turns)) == (failing, 2):
                raise UserFunctionError("the reply fails")
            return done(None if episode.number % 2 or len(episode.turns) == 3 else " no!")

        source = SourceSettings(30, environment=TextReplies(episodic(reply), toy_tokenizer()), max_turns=4)
        plan = one_source_plan(PROMPTS, 0, 2, SAMPLES, seed=3)
        samples = Samples(prompts(), plan, toy_tokenizer(), [source], together=True)
        return RolloutQueue(samples, plan, RolloutSchedule(0, True, 0, STEPS - 1))

    engine, expected = EngineInJob(most=99), EngineInJob(most=99)
    failed = queue_with(failing=4)
    with pytest.raises(UserFunctionError):
        EngineInJob(most=99).start(failed)
    state = failed.state()
    assert (state.samples, list(state.requested_at)) == ([], [0, 1])
    resumed, undisturbed = queue_with(), queue_with()
    resumed.restore(state, 0)
    engine.start(resumed)
    expected.start(undisturbed)
    assert engine.requested == expected.requested
    assert numbers(resumed.take(0)) == numbers(undisturbed.take(0))


def test_async_trains_on_what_is_finished_first_as_far_as_the_bound_allows() -> None:
    """The engine answers the latest requests first, so that each step would leave the first ones behind."""
    engine = LateEngine(most=1)
    engine.draw.shuffle = lambda waiting: waiting.sort(key=lambda entry: -entry[0].number)  # type: ignore[assignment]
    queue = queue_of(engine, ahead=2, in_order=False, slack=2)
    for step in range(STEPS):
        samples = step_of(engine, queue, step, max_staleness=4)
        if step == 0:
            assert {rollout.number // SAMPLES for rollout in samples} == set(queue.plan.groups(2))


def test_a_plan_has_every_prompt_once_an_epoch_and_seeds_that_are_those_of_the_run() -> None:
    plan = one_source_plan(PROMPTS, 5, 4, SAMPLES, seed=3)
    starts = range(0, 3 * PROMPTS, PROMPTS)
    epochs = {tuple(plan.group(start + group).prompt for group in range(PROMPTS)) for start in starts}
    assert all(sorted(prompts) == list(range(PROMPTS)) for prompts in epochs)
    assert len(epochs) == 3
    seeds = [plan.sample_seed(sample, turn) for sample in range(50) for turn in range(3)]
    assert len(set(seeds)) == 150
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert plan.sample_seed(7, 1) == one_source_plan(1, 0, 9, 2, seed=3).sample_seed(7, 1)
    assert plan.sample_seed(7, 1) != one_source_plan(PROMPTS, 5, 4, SAMPLES, seed=4).sample_seed(7, 1)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.75, 1.0])
def test_the_share_is_exact_over_many_steps_and_each_step_has_as_many_completions(share: float) -> None:
    plan = one_source_plan(PROMPTS, 5, 4, SAMPLES, seed=3, share=share)
    generated_groups = sum(len(plan.groups(step)) for step in range(100))
    assert generated_groups == pytest.approx(400 * share)
    for step in range(100):
        assert len(plan.groups(step)) * SAMPLES + len(plan.from_dataset(step)) == 4 * SAMPLES
    counts = Counter(number for step in range(100) for number in plan.from_dataset(step))
    assert not counts or max(counts.values()) - min(counts.values()) <= 1


def sample(number: int, reward: Any = None, versions: Sequence[int] = (0, 0), finish: Any = "stop") -> Sample:
    ids_N, versions_N = np.arange(10, 10 + len(versions), dtype=np.int32), np.array(versions, dtype=np.int32)
    completion = Completion(ids_N, 10 - ids_N.astype(np.float32), versions_N, finish)
    return Sample(number, number % PROMPTS, completion, reward)


def advantages(rewards: Sequence[float | None], *how: Any) -> list[float]:
    samples = [sample(number, reward) for number, reward in enumerate(rewards)]
    return [with_advantage.advantage for with_advantage in with_advantages(samples, *how)]


@pytest.mark.parametrize("scale", [1e308, 5e-324, 1e-310])
def test_rewards_of_any_size_have_advantages(scale: float) -> None:
    rewards = [scale, -scale, scale, -scale]
    assert advantages(rewards, "normalized") == [1.0, -1.0, 1.0, -1.0]
    assert mean_and_deviation(rewards) == (0.0, scale)
    assert mean_and_deviation([scale, scale]) == (scale, 0.0)
    if scale > 1:
        with pytest.raises(ValueError, match=r"rewards from -1e\+308 to 1e\+308 .* rollout\.advantage=centered"):
            advantages(rewards, "centered")
    else:
        assert advantages(rewards, "centered") == rewards


def exact_advantages(rewards: Sequence[float], how: str, deviation: str) -> list[float]:
    """The advantages of rewards by rational arithmetic, rounded once; the root has 50 digits."""
    exact = [Fraction(reward) for reward in rewards]
    mean = sum(exact) / len(exact)
    centered = [reward - mean for reward in exact]
    scale = Fraction(1)
    if how == "normalized":
        variance = sum(one * one for one in centered) / (len(exact) - (deviation == "sample"))
        with localcontext() as context:
            context.prec = 50
            scale = Fraction((Decimal(variance.numerator) / Decimal(variance.denominator)).sqrt())
    return [float(one / scale) for one in centered]


#: rewards that differ at most by the rounding of float64 or of float32, and rewards that differ by more
EQUAL = [
    *([one] * 3 for one in (0.1, 0.0, -8e6 - 0.1, 1e308, 5e-324)),
    [0.7],
    [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6],
    [float(np.float32(0.1 + step)) for step in (0.0, 1e-8, 2e-8)],
    [float(np.float32(one)) for one in (0.99999976, 1.0, 1.00000023)],  # cosines of equal vectors
    [-8e6 + 0.5, -8e6],
]
DIFFERENT = [
    *([offset + one for one in (5.0, 10.0, 15.0, 0.0)] for offset in (0.0, 1.0, -3e3, 8e6, 1e8, -1e12, 1e15)),
    *([offset + one * 8 for one in (1.0, 2.0, 0.0)] for offset in (1e8, 2.0**40)),
    *([offset + one for one in (0.1, 0.2, 0.4)] for offset in (1e6, -1e9)),
    *([offset + one * step for one in (1, 0, 3)] for offset, step in ((1.0, 1e-6), (0.1, 1e-7))),
    [8e6, 8e6 + 5],
    [0.0, 1e-320, 5e-324],
    [1e-310, 1e-310 + 5e-324 * 2**30],
    [-1e30, 2.5, 1e-30, 0.0],
    [0.1] * 3 + [0.2] * 4,
]


@pytest.mark.parametrize("deviation", ["population", "sample"])
@pytest.mark.parametrize("rewards", EQUAL + DIFFERENT, ids=str)
def test_advantages_are_those_of_exact_arithmetic(rewards: list[float], deviation: str) -> None:
    assert rewards_are_equal(rewards) == (rewards in EQUAL)
    for how in ("centered", "normalized"):
        if how == "normalized" and rewards in EQUAL:
            assert advantages(rewards, how, deviation) == [0.0] * len(rewards)
            continue
        expected = exact_advantages(rewards, how, deviation)
        precision = max(map(abs, expected)) * 1e-15
        assert advantages(rewards, how, deviation) == pytest.approx(expected, rel=1e-13, abs=precision)


@pytest.mark.parametrize("versions", [(1, 5), (5, 9)])
def test_a_token_of_foreign_weights_stops_the_run(versions: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"sample 4 .* versions \d to \d in step 9: expected versions 2 to 8"):
        require_versions([sample(4, versions=versions)], step=8, max_staleness=6)


def test_the_documents_of_a_step() -> None:
    all_prompts = prompts()
    samples = [sample(0, versions=(2, -1, 3)), sample(8, versions=(3, 3), finish="length")]
    object.__setattr__(samples[0], "advantage", 0.5)
    dataset = all_prompts.select([5, 6])
    targets_N = np.ones(len(dataset.tokens_N), dtype=bool)
    targets_N[dataset.offsets[:-1]] = False
    object.__setattr__(dataset, "targets_N", targets_N)
    rules = TargetRules(mask_truncated=True, position_decay=0.5)
    documents = step_documents(all_prompts, samples, rules, dataset, [1])
    texts = [[*all_prompts.tokens(0), 10, 11, 12], [*all_prompts.tokens(1), 10, 11], dataset.tokens(1).tolist()]
    assert [documents.tokens(number).tolist() for number in range(3)] == texts
    prompt = len(all_prompts.tokens(0))
    assert documents.targets(0).tolist() == [False] * prompt + [True, False, True]  # the environment's token
    assert not documents.targets(1).any()  # it was cut
    assert documents.targets(2).tolist() == [False, True]
    assert documents.part(documents.weights_N, 0)[prompt:].tolist() == [1.0, 0.5, 0.25]  # type: ignore[arg-type]
    of_first = {name: documents.part(each_N, 0)[prompt:].tolist() for name, each_N in documents.per_token.items()}
    expected = {ADVANTAGES: [0.5] * 3, OLD_LOG_PROBS: [0.0, -1.0, -2.0], IS_SAMPLED: [1.0] * 3}
    assert of_first == expected | {POLICY_VERSION: [2.0, -1.0, 3.0]}
    assert not documents.part(documents.per_token[IS_SAMPLED], 2).any()
    assert documents.sources[:2] == ["train.jsonl:1 (sample 0)", "train.jsonl:2 (sample 8)"]
    vanishing = step_documents(all_prompts, samples, TargetRules(position_decay=1e-30), dataset, [1])
    assert vanishing.weights_N is not None
    assert vanishing.part(vanishing.weights_N, 0)[-3:].tolist() == pytest.approx([1.0, 1e-30, 0.0], abs=1e-37)
    assert vanishing.weights_N[vanishing.targets_N].min() > 0  # a target stays in the normaliser
    by_teacher = step_documents(all_prompts, samples, TargetRules(by_student=False))
    assert not by_teacher.per_token[IS_SAMPLED].any()
    assert by_teacher.targets(1).sum() == 2
