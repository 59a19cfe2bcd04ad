"""The queue of samples between the engine that generates them and the steps that train on them.

The queue's state in a checkpoint must belong to the checkpoint's step. Otherwise, a resumed run could train on
samples twice or never. Dimension: N tokens of a completion.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stillhouse.config import RolloutConfig
from stillhouse.rollout.engines import RemoteEngine
from stillhouse.rollout.plan import PromptPlan, RolloutSchedule
from stillhouse.rollout.records import Sample
from stillhouse.rollout.reward import with_advantages
from stillhouse.rollout.samples import SECONDS_BETWEEN_LOOKS, Samples, SourceSettings


@dataclass
class QueueState:
    """The state of a queue in a checkpoint.

    samples: the finished samples on which no step has trained yet.
    requested_at: for each requested group on which no step has trained yet, the step at which it was requested.
    trained: the trained groups whose number is larger than that of a requested group on which no step has trained
        yet; empty if the schedule is in order.
    """

    samples: list[Sample] = field(default_factory=list)
    requested_at: dict[int, int] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)


class RolloutQueue:
    """The groups of samples that were requested and on which no step has trained yet.

    samples: the samples that are being generated.
    servers: the servers that generate completions, or None if an engine in this job generates them. Such an engine
        gets its requests from `samples`.
    schedule: decides when a group is requested and which step trains on it.
    config: the section rollout of the first source of prompts, or None for its defaults.
    """

    def __init__(
        self,
        samples: Samples,
        plan: PromptPlan,
        schedule: RolloutSchedule,
        servers: RemoteEngine | None = None,
        config: RolloutConfig | None = None,
    ):
        self.samples, self.plan, self.schedule, self.servers = samples, plan, schedule, servers
        self._config = config or RolloutConfig()
        self._requested_at: dict[int, int] = {}
        self._last_chance: dict[int, int] = {}  # for each requested group, the last step that may train on it
        self._groups: dict[int, dict[int, Sample]] = {}  # finished samples by group, until a step takes the group
        self._finished: list[int] = []  # the groups whose samples are all finished, in the order of finishing
        #: the samples that an engine in this job is generating together, if they have several turns; otherwise empty
        self._incomplete: frozenset[int] = frozenset()
        self._trained: set[int] = set()
        self._taken: dict[int, dict[int, dict[int, Sample]]] = {}  # the groups that each step took, until `trained`
        #: for the samples of the last `take`, the times of the first request and of the last finished sample
        self.taken_times = (0.0, 0.0)

    def start(self, step: int) -> None:
        """Start the samples of all groups that are due at a step, and samples that are missing after a resume.

        The engine must have the step's weights. Servers get the requests now; an engine in this job must complete
        `samples` before `collect` is called.
        """
        for later in range(step, self.schedule.last_requested(step) + 1):
            for group in self.plan.groups(later):
                if group not in self._trained and group not in self._requested_at:
                    self._add(group, step)
        under_way = self.samples.under_way
        missing = [
            (number, self.plan.group(group).prompt)
            for group, samples in self._groups.items()
            for number in self.plan.samples(group)
            if number not in samples and number not in under_way
        ]
        self.samples.start(missing)
        if self.servers is None and self.samples.max_turns > 1:
            self._incomplete = frozenset(number for number, _ in missing)
        self._receive(0.0)

    def collect(self) -> None:
        """Keep the samples that an engine in this job has finished."""
        self._keep(self.samples.finished())
        self._incomplete = frozenset()

    def has_requested(self, step: int) -> bool:
        """Whether all samples of this step are finished or under way."""
        under_way = self.samples.under_way
        return all(
            group in self._groups and under_way.union(self._groups[group]).issuperset(self.plan.samples(group))
            for group in self.plan.groups(step)
        )

    def wait_for(self, step: int) -> None:
        """Wait until all groups on which this step trains are finished."""
        while not self._is_ready(step):
            self.samples.alive()
            self._receive(SECONDS_BETWEEN_LOOKS)

    def is_ready(self, step: int) -> bool:
        """Whether all groups on which this step trains are finished and have their rewards. Does not wait."""
        self._receive(0.0)
        return self._is_ready(step) and all(
            self.samples.has_reward(sample) for group in self._chosen(step) for sample in self._groups[group].values()
        )

    def take(self, step: int) -> list[Sample]:
        """Wait for the samples on which a step trains, and return them in the order of their numbers.

        The samples have their advantages. The choice of groups does not depend on the time that rewards take. Until
        `trained` is called, checkpoints still contain these samples.
        """
        self.wait_for(step)
        groups = sorted(self._chosen(step))
        for samples in (self._groups[group] for group in groups):
            for number, sample in sorted(samples.items()):
                samples[number] = self.samples.rewarded(sample)
        self._taken[step] = {group: self._groups.pop(group) for group in groups}
        self._finished = [group for group in self._finished if group not in groups]
        taken: list[Sample] = []
        for samples in self._taken[step].values():
            in_order = [samples[number] for number in sorted(samples)]
            taken += with_advantages(in_order, self._config.advantage, self._config.deviation)
        times = self.samples.times  # samples from a checkpoint have no times
        starts, ends = zip((0.0, 0.0), *(times.pop(one.number) for one in taken if one.number in times), strict=True)
        self.taken_times = min(starts[1:], default=0.0), max(ends)
        return taken

    def trained(self, step: int) -> None:
        """Forget the samples that this step took: the optimizer has trained on them."""
        groups = self._taken.pop(step)
        for group in groups:
            del self._requested_at[group], self._last_chance[group]
        before = min(self._requested_at, default=None)
        out_of_turn = self._trained | groups.keys()
        self._trained = {group for group in out_of_turn if before is not None and group > before}

    def state(self) -> QueueState:
        """The state for a checkpoint.

        After a resume, unfinished samples and rewards are requested again. If an engine in this job has failed, all
        samples of several turns that were requested together are requested again. If only the unfinished samples were
        requested again, the engine would get other batches, with other rounding errors.
        """
        self._keep(self.samples.salvage())
        groups = {group: samples for taken in self._taken.values() for group, samples in taken.items()}
        # in the order in which groups finished, because a step chooses its groups by this order
        for group in [*self._finished, *self._groups]:
            groups.setdefault(group, self._groups[group])
        samples = [
            self.samples.with_present_reward(sample)
            for members in groups.values()
            for sample in members.values()
            if sample.number not in self._incomplete
        ]
        return QueueState(samples, dict(self._requested_at), sorted(self._trained))

    def restore(self, state: QueueState, step: int) -> None:
        """Continue from a checkpoint after `step` steps; `start` then requests the missing samples. Raises ValueError
        if this run cannot have had this state after `step` steps.
        """
        _require_groups(state, self.plan, self.schedule, step)
        by_student = self._config.writer == "student"
        _require_samples(state, step, self.plan, self.samples, by_student=by_student)
        self._trained = set(state.trained)
        for group, at in state.requested_at.items():
            self._add(group, at)
        self._keep(state.samples)

    def _receive(self, seconds: float) -> None:
        """If servers generate: wait up to `seconds` for completions, keep finished samples, request next turns."""
        if self.servers is None:
            return
        self.samples.receive(seconds)
        self._keep(self.samples.finished())
        if requests := self.samples.take_requests():
            self.servers.generate(requests, self.samples.inbox)

    def _add(self, group: int, requested_at: int) -> None:
        """Record the request of a group. If the schedule is in order, only the group's own step may train on it."""
        self._requested_at[group], self._groups[group] = requested_at, {}
        latest = requested_at + self.schedule.max_staleness
        self._last_chance[group] = self.plan.group(group).step if self.schedule.in_order else latest

    def _keep(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            group = self.plan.group_of(sample.number)
            self._groups[group][sample.number] = sample
            if len(self._groups[group]) == len(self.plan.samples(group)):
                self._finished.append(group)

    def _is_ready(self, step: int) -> bool:
        return len(self._finished) >= len(self.plan.groups(step)) and all(
            sum(self._last_chance[group] <= until for group in self._finished) >= least
            for until, least in self._least(step).items()
        )

    def _chosen(self, step: int) -> Sequence[int]:
        chosen: list[int] = []
        for until, least in self._least(step).items():
            in_time = [group for group in self._finished if self._last_chance[group] <= until]
            missing = max(0, least - len(set(chosen).intersection(in_time)))
            chosen += [group for group in in_time if group not in chosen][:missing]
        others = [group for group in self._finished if group not in chosen]
        return [*chosen, *others[: len(self.plan.groups(step)) - len(chosen)]]

    def _least(self, step: int) -> dict[int, int]:
        """For each step `until` from this step on: how many of the groups due by `until` this step must train on.

        A group is due by `until` if no step after `until` may train on it. The later steps up to and including
        `until` have room for some of the due groups. This step must train on all others. The number can be negative.
        """
        least, room = {}, 0
        for until in range(step, step + self.schedule.max_staleness + 1):
            room += len(self.plan.groups(until)) if until > step else 0
            least[until] = sum(self._last_chance[group] <= until for group in self._groups) - room
        return least


def require_versions(samples: Sequence[Sample], step: int, max_staleness: int) -> None:
    """Raise ValueError if a generated token's version is newer than `step` or older than step − max_staleness."""
    for sample in samples:
        generated_N = sample.completion.versions_N[sample.is_generated_N]
        oldest, newest = int(generated_N.min()), int(generated_N.max())
        if not step - max_staleness <= oldest <= newest <= step:
            raise ValueError(
                f"sample {sample.number} has tokens of versions {oldest} to {newest} in step {step + 1}: expected "
                f"versions {max(0, step - max_staleness)} to {step}. The engine does not have the weights that it "
                "was given"
            )


def staleness(samples: Sequence[Sample], step: int) -> Mapping[int, int]:
    """Count generated tokens by their staleness: the step's number minus the token's version."""
    generated = (sample.completion.versions_N[sample.is_generated_N] for sample in samples)
    return Counter(step - version for versions_N in generated for version in versions_N.tolist())


def _require_groups(state: QueueState, plan: PromptPlan, schedule: RolloutSchedule, step: int) -> None:
    """Raise ValueError unless a run can have these groups after `step` steps. The last step that requested groups is
    step − 1, or `step` if the run lost its servers during `step`.
    """
    requested_at, trained, ahead = state.requested_at, state.trained, schedule.ahead
    if both := sorted(requested_at.keys() & set(trained)):
        raise ValueError(f"group {both[0]} is both requested and trained: expected only one of the two")
    if trained and (schedule.in_order or len(set(trained)) < len(trained)):
        in_order = "none, because this schedule trains on the groups in their order"
        expected = in_order if schedule.in_order else "each group once"
        raise ValueError(f"the checkpoint has the trained groups {trained[:9]}: expected {expected}")
    earliest, latest = max(0, step - schedule.max_staleness), schedule.last_requested(step)
    for group, at in requested_at.items():
        # a damaged checkpoint can have a huge number, for which the plan would compute all groups before it
        is_planned = 0 <= group < plan.groups(latest).stop
        due = plan.group(group).step if is_planned else -1
        if not (earliest <= due <= latest and max(0, due - ahead, earliest) <= at <= min(due, step)):
            raise ValueError(
                f"group {group} was requested at step {at}: after {step} steps, expected a group of the steps "
                f"{earliest} to {latest} that was requested at most {ahead} steps before its own step, and at one of "
                f"the steps {earliest} to {step}"
            )
    # every group up to the last requested one is either requested or trained
    due = plan.groups(step).start  # the number of trained groups; under async, these are not always the first groups
    first, kept = min(requested_at, default=due), sorted([*requested_at, *trained])
    stops = {
        max(due, plan.groups(schedule.last_requested(begun)).stop) if begun >= 0 else 0 for begun in (step - 1, step)
    }
    if kept != list(range(first, first + len(kept))) or first + len(kept) not in stops:
        missing = sorted(set(range(first, max(stops))) - set(kept))
        raise ValueError(
            f"the groups {kept[:9]} are requested or trained, without the groups {missing[:9]}: after {step} steps, "
            f"expected all groups from {first} to {' or '.join(str(stop - 1) for stop in sorted(stops))}"
        )
    if first + len(trained) != due:
        raise ValueError(
            f"{first + len(trained)} groups have been trained after {step} steps: expected {due}, because each step "
            "trains on as many groups as the plan gives it"
        )


def _require_samples(state: QueueState, step: int, plan: PromptPlan, under_way: Samples, *, by_student: bool) -> None:
    """Raise ValueError for a sample that a run cannot have after `step` steps. by_student: whether the student
    generates the samples; a teacher's tokens always have version 0.
    """
    seen, vocabulary = set[int](), max(under_way.tokenizer.get_vocab().values()) + 1
    for sample in state.samples:
        group, problem = plan.group_of(sample.number), ""
        if group not in state.requested_at:
            problem = f"is of group {group}, which was not requested or is trained already"
        elif sample.number not in (numbers := plan.samples(group)):
            problem = f"has a number that its group does not have: expected one of {numbers}"
        elif sample.number in seen:
            problem = "is in the checkpoint more than once"
        elif sample.prompt != (prompt := plan.group(group).prompt):
            problem = f"has prompt {sample.prompt}: expected {prompt}, the prompt of its group"
        else:
            oldest, newest = (state.requested_at[group], step) if by_student else (0, 0)
            settings = under_way.settings_of(sample.number)
            problem = _problem(sample, settings, vocabulary, range(oldest, newest + 1))
        if problem:
            raise ValueError(f"sample {sample.number} {problem}")
        seen.add(sample.number)


def _problem(sample: Sample, settings: SourceSettings, vocabulary: int, versions: range) -> str:
    ids_N, generated_N = sample.completion.ids_N, sample.completion.versions_N[sample.is_generated_N]
    if len(ids_N) > settings.max_new_tokens:
        return f"has {len(ids_N)} tokens: expected at most rollout.max_new_tokens, {settings.max_new_tokens}"
    if ids_N.min() < 0 or ids_N.max() >= vocabulary:
        return f"has the token ids {ids_N.min()} to {ids_N.max()}: expected 0 to {vocabulary - 1}"
    if not len(generated_N):
        return "has no token that a model generated"
    if settings.environment is None and len(generated_N) < len(ids_N):
        return "has tokens of an environment: this run has no rollout.environment and no rollout.tools"
    oldest, newest = generated_N.min(), generated_N.max()
    if oldest not in versions or newest not in versions or (generated_N[1:] < generated_N[:-1]).any():
        return (
            f"has tokens of versions {oldest} to {newest}: expected versions {versions.start} to "
            f"{versions.stop - 1}, in this order"
        )
    if sample.reward is not None and settings.reward is None:
        return f"has the reward {sample.reward}: this run has no rollout.reward"
    if settings.object_gives_reward != (sample.object_reward is not None):
        expected = "one" if settings.object_gives_reward else "none, because rollout.reward has no part environment"
        return f"has {sample.object_reward} as the reward of its environment: expected {expected}"
    if sample.reward is not None and not math.isfinite(sample.reward):
        return f"has the reward {sample.reward}: expected a finite number"
    return ""
