"""The draw of prompts from weighted sources, the streams of each source, and warnings about steps of prompts."""

import random
from collections import Counter

from stillhouse.config import RolloutConfig, TrainConfig
from stillhouse.objective.policy_parameters import PolicySettings
from stillhouse.rollout import PromptPlan, PromptSource
from stillhouse.rollout.plan import PromptDraw
from stillhouse.run.preflight import prompt_warnings


def test_every_beginning_of_a_run_has_the_weights_within_one_prompt() -> None:
    draw_of_weights = random.Random(0)
    for _ in range(60):
        sources = draw_of_weights.randint(1, 7)
        weights = [draw_of_weights.choice([0.7, 0.3, 2.0, 1 / 3, 0.015, 5e-3]) for _ in range(sources)]
        draw, counts = PromptDraw(weights), [0] * sources
        for number in range(400):
            source, of_source = draw.source(number)
            assert of_source == counts[source]
            counts[source] += 1
            for count, weight in zip(counts, weights, strict=True):
                assert abs(count - weight / sum(weights) * (number + 1)) < 1 - 1e-9


SOURCES = (
    PromptSource(7, samples_per_prompt=2, weight=0.7),
    PromptSource(5, samples_per_prompt=3, dataset=4, share=0.6, weight=0.2),
    PromptSource(2, samples_per_prompt=1, dataset=6, share=0.25, weight=0.1),
)


def test_the_streams_of_a_source_are_those_of_a_run_with_this_source_alone() -> None:
    plan = PromptPlan(SOURCES, prompts_per_step=5, seed=3)
    first_prompt = first_document = 0
    groups = [group for step in range(40) for group in plan.groups(step)]
    documents = [document for step in range(40) for document in plan.from_dataset(step)]
    assert groups == list(range(len(groups)))
    for number, source in enumerate(SOURCES):
        alone = PromptPlan([source], prompts_per_step=5, seed=3)
        of_source = [group for group in groups if plan.group(group).source == number]
        for here, there in enumerate(of_source):
            assert plan.group(there).prompt == first_prompt + alone.group(here).prompt
            assert len(plan.samples(there)) == source.samples_per_prompt
            for sample, of_alone in zip(plan.samples(there), alone.samples(here), strict=True):
                assert (plan.group_of(sample), plan.source_of(sample)) == (there, number)
                is_same = plan.sample_seed(sample, 1) == alone.sample_seed(of_alone, 1)
                assert is_same == (number == 0)
        last = first_document + source.dataset
        of_dataset = [document - first_document for document in documents if first_document <= document < last]
        expected = [document for step in range(40) for document in alone.from_dataset(step)]
        assert of_dataset == expected[: len(of_dataset)]
        assert all(plan.source_of_document(document) == number for document in range(first_document, last))
        first_prompt, first_document = first_prompt + source.prompts, last
    assert Counter(plan.group(group).source for group in groups) == {0: 140, 1: 24, 2: 5}
    assert len({plan.group(group).step for group in groups}) == 40
    seeds = [plan.sample_seed(sample, 0) for group in groups for sample in plan.samples(group)]
    assert len(set(seeds)) == len(seeds)
    forwards, backwards = (PromptPlan(SOURCES, prompts_per_step=3, seed=1) for _ in range(2))
    later = [(backwards.groups(step), backwards.from_dataset(step)) for step in reversed(range(30))]
    assert [(forwards.groups(step), forwards.from_dataset(step)) for step in range(30)] == later[::-1]


def test_keys_without_effect_on_the_completions_of_a_step_are_warned_of() -> None:
    plan, clipped = PromptPlan(SOURCES, prompts_per_step=5, seed=3), [PolicySettings(clip_low=0.2)]

    def warnings(rollout: RolloutConfig, policies: list[PolicySettings], **train: int) -> list[str]:
        return list(prompt_warnings(TrainConfig(**train), rollout, plan, 128, policies))

    fixed, ahead = RolloutConfig(prompts_per_step=5), RolloutConfig(prompts_per_step=5, schedule="one_step_off")
    assert warnings(fixed, [PolicySettings()]) == warnings(ahead, clipped) == []
    (of_batch,) = warnings(ahead, clipped, tokens_per_step=1024)
    assert of_batch.startswith("train.tokens_per_step=1,024 has no effect")
    for same_weights in (fixed, ahead.model_copy(update={"max_staleness": 0})):
        (of_limits,) = warnings(same_weights, clipped)
        assert of_limits.startswith("the limits of policy_gradient do not act")
