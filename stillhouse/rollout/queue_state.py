"""The state of a queue of samples in a checkpoint, and checks that it fits the checkpoint's step.

Without these checks, a state of another run, step or schedule would raise no error, and samples would be trained
twice or never. N tokens of a completion.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stillhouse.rollout.plan import PromptPlan, RolloutSchedule
from stillhouse.rollout.records import Sample
from stillhouse.rollout.samples import NOT_GENERATED, SampleGenerator


@dataclass
class QueueState:
    """The state of a queue in a checkpoint.

    samples: the finished samples on which no step has trained yet.
    requested_at: for each requested group that is not trained yet, the step at which it was requested.
    trained: the trained groups with a larger number than some untrained group; empty if the schedule is in order.
    """

    samples: list[Sample] = field(default_factory=list)
    requested_at: dict[int, int] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)


def require_groups(state: QueueState, plan: PromptPlan, schedule: RolloutSchedule, step: int) -> None:
    """Raise ValueError unless a run can have these groups after `step` steps.

    The last step that requested groups is step − 1, or `step` if the run lost its servers during `step`.
    """
    requested_at, trained, ahead = state.requested_at, state.trained, schedule.ahead
    if both := sorted(requested_at.keys() & set(trained)):
        raise ValueError(f"group {both[0]} is both asked for and trained: expected one of them")
    if trained and (schedule.in_order or len(set(trained)) < len(trained)):
        raise ValueError(
            f"the trained groups {trained[:9]}: expected none, because this schedule trains the groups in their order"
            if schedule.in_order
            else f"the trained groups {trained[:9]}: expected each of them once"
        )
    earliest, latest = max(0, step - schedule.max_staleness), schedule.last_requested(step)
    for group, at in requested_at.items():
        is_planned = 0 <= group < plan.groups(latest).stop  # the plan must not be made for any number
        due = plan.step_of(group) if is_planned else -1
        if not (earliest <= due <= latest and max(0, due - ahead, earliest) <= at <= min(due, step)):
            raise ValueError(
                f"group {group}, asked for at step {at}: after {step} steps, expected a group of the steps "
                f"{earliest} to {latest}, asked for at most {ahead} steps before its own, and at step {earliest} to "
                f"{step}"
            )
    _require_all(state, plan, schedule, step)


def _require_all(state: QueueState, plan: PromptPlan, schedule: RolloutSchedule, step: int) -> None:
    """Raise ValueError unless every group up to the last requested one is either requested or trained."""
    due = plan.groups(step).start  # the number of trained groups; in the async schedule, not always the first groups
    first = min(state.requested_at, default=due)
    kept = sorted([*state.requested_at, *state.trained])
    stops = {
        max(due, plan.groups(schedule.last_requested(begun)).stop) if begun >= 0 else 0 for begun in (step - 1, step)
    }
    if kept != list(range(first, first + len(kept))) or first + len(kept) not in stops:
        missing = sorted(set(range(first, max(stops))) - set(kept))
        raise ValueError(
            f"the groups {kept[:9]} are asked for or trained, without the groups {missing[:9]}: after {step} steps, "
            f"expected all from {first} to {' or '.join(str(stop - 1) for stop in sorted(stops))}"
        )
    if first + len(state.trained) != due:
        raise ValueError(
            f"{first + len(state.trained)} groups have been trained after {step} steps: expected {due}, as each step "
            "trains as many groups as the plan gives it"
        )


def require_samples(
    samples: Sequence[Sample],
    requested_at: Mapping[int, int],
    step: int,
    plan: PromptPlan,
    generator: SampleGenerator,
    *,
    by_student: bool,
) -> None:
    """Raise ValueError for a sample that a run cannot have after `step` steps.

    by_student: whether the student generates the samples; a teacher's tokens always have version 0.
    """
    seen = set[int]()
    vocabulary = max(generator.tokenizer.get_vocab().values()) + 1
    for sample in samples:
        group = plan.group_of(sample.number)
        if group not in requested_at:
            raise ValueError(f"sample {sample.number} is of group {group}, which was not asked for or is trained")
        if sample.number not in plan.samples(group):
            raise ValueError(f"sample {sample.number}: expected one of {plan.samples(group)}, those of its group")
        if sample.number in seen:
            raise ValueError(f"sample {sample.number} is there more than once")
        seen.add(sample.number)
        if sample.prompt != (prompt := plan.prompt_of(group)):
            raise ValueError(
                f"sample {sample.number} has prompt {sample.prompt}: expected {prompt}, that of its group"
            )
        oldest, newest = (requested_at[group], step) if by_student else (0, 0)
        if problem := _problem(sample, generator, vocabulary, range(oldest, newest + 1)):
            raise ValueError(f"sample {sample.number} {problem}")


def _problem(sample: Sample, generator: SampleGenerator, vocabulary: int, versions: range) -> str:
    ids_N, versions_N = sample.completion.ids_N, sample.completion.versions_N
    settings = generator.settings_of(sample.number)
    if len(ids_N) > settings.max_new_tokens:
        return f"has {len(ids_N)} tokens: expected at most rollout.max_new_tokens, {settings.max_new_tokens}"
    if ids_N.min() < 0 or ids_N.max() >= vocabulary:
        return f"has the ids {ids_N.min()} to {ids_N.max()}: expected 0 to {vocabulary - 1}"
    if (sample.is_generated_N != (versions_N != NOT_GENERATED)).any() or not sample.is_generated_N.any():
        return "has tokens with a version that no model wrote, or tokens of a model without one"
    if settings.environment is None and not sample.is_generated_N.all():
        return "has tokens of an environment: this run has no rollout.environment and no rollout.tools"
    generated_N = versions_N[sample.is_generated_N]
    oldest, newest = generated_N.min(), generated_N.max()
    if oldest not in versions or newest not in versions or (generated_N[1:] < generated_N[:-1]).any():
        return (
            f"has tokens of versions {oldest} to {newest}: expected versions {versions.start} to "
            f"{versions.stop - 1}, in this order"
        )
    if sample.reward is not None and settings.reward is None:
        return f"has the reward {sample.reward}: this run has no rollout.reward"
    if settings.object_gives_reward != (sample.object_reward is not None):
        expected = "one" if settings.object_gives_reward else "none, as rollout.reward has no part environment"
        return f"has {sample.object_reward} as the reward of its environment: expected {expected}"
    if sample.reward is not None and not math.isfinite(sample.reward):
        return f"has the reward {sample.reward}: expected a finite number"
    return ""
