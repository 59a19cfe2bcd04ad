"""The queue of samples between the engine that generates them and the steps that train on them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from stillhouse.rollout.plan import PromptPlan, RolloutSchedule
from stillhouse.rollout.queue_state import QueueState, require_groups, require_samples
from stillhouse.rollout.records import Sample
from stillhouse.rollout.reward import Deviation, with_advantages
from stillhouse.rollout.samples import SampleGenerator

#: seconds between two calls of `alive` while the queue waits for samples
_TICK = 1.0


class RolloutQueue:
    """The groups of samples that were requested and on which no step has trained yet.

    schedule: decides when a group is requested and which step trains on it.
    advantage, deviation: how advantages are computed from rewards (see `with_advantages`).
    alive: called about once per second while the queue waits for samples.
    by_student: whether the student generates the samples; a teacher's tokens always have version 0.
    """

    def __init__(
        self,
        generator: SampleGenerator,
        plan: PromptPlan,
        schedule: RolloutSchedule,
        *,
        advantage: Literal["normalized", "centered"] = "normalized",
        deviation: Deviation = "population",
        alive: Callable[[], None] = lambda: None,
        by_student: bool = True,
    ):
        self.generator, self.plan, self.schedule = generator, plan, schedule
        self.advantage, self.deviation, self._alive, self._by_student = advantage, deviation, alive, by_student
        self._requested_at: dict[int, int] = {}
        self._last_chance: dict[int, int] = {}  # for each requested group, the last step that may train on it
        self._samples: dict[int, dict[int, Sample]] = {}  # finished samples by group, until a step takes the group
        self._finished: list[int] = []  # the groups whose samples are all finished, in the order of finishing
        #: while an engine in this job generates samples of several turns: the samples that it was asked for together
        self._incomplete: frozenset[int] = frozenset()
        self._trained: set[int] = set()
        self._taken: dict[int, dict[int, dict[int, Sample]]] = {}  # by step, the groups that it took, until `trained`
        #: for the samples of the last `take`, the times of the first request and of the last finished sample
        self.taken_times = (0.0, 0.0)

    def ask(self, step: int) -> None:
        """Request all groups that are due at a step, and samples that are missing from earlier groups after a resume.

        The engine must already have the weights of this step.
        """
        for later in range(step, self.schedule.last_requested(step) + 1):
            for group in self.plan.groups(later):
                if group not in self._trained and group not in self._requested_at:
                    self._add(group, step)
        under_way = set(self.generator.under_way)
        missing = [
            (number, self.plan.prompt_of(group))
            for group, samples in self._samples.items()
            for number in self.plan.samples(group)
            if number not in samples and number not in under_way
        ]
        self.generator.start(missing)
        if self.generator.is_open_in_job and self.generator.has_turns:
            self._incomplete = frozenset(number for number, _ in missing)
        # an engine in this process has already generated all of them; samples with several turns get the others now,
        # before its weights change
        while (finished := self.generator.finished(self._patience)) or self.generator.is_open_in_job:
            self._keep(finished)
            if not finished:
                self._alive()
        self._incomplete = frozenset()

    def has_requested(self, step: int) -> bool:
        """Whether all samples of this step are finished or under way."""
        under_way = set(self.generator.under_way)
        return all(
            group in self._samples and under_way.union(self._samples[group]).issuperset(self.plan.samples(group))
            for group in self.plan.groups(step)
        )

    def wait_for(self, step: int) -> None:
        """Wait until all groups on which this step trains are finished."""
        while not self._is_ready(step):
            self._alive()
            self._keep(self.generator.finished(_TICK))

    @property
    def _patience(self) -> float:
        return _TICK if self.generator.is_open_in_job else 0.0

    def is_ready(self, step: int) -> bool:
        """Whether all groups on which this step trains are finished, with their rewards; does not wait."""
        self._keep(self.generator.finished(0.0))
        return self._is_ready(step) and all(
            self.generator.has_reward(sample)
            for group in self._chosen(step)
            for sample in self._samples[group].values()
        )

    def take(self, step: int) -> list[Sample]:
        """Wait for the samples on which a step trains; returns them in the order of their numbers, with advantages.

        The choice of the samples does not depend on how long their rewards take.

        Until `trained` is called for this step, checkpoints still contain these samples.
        """
        self.wait_for(step)
        groups = sorted(self._chosen(step))
        for samples in (self._samples[group] for group in groups):
            for number, sample in sorted(samples.items()):
                samples[number] = self.generator.rewarded(sample, self._alive)
        times = [self.generator.times.pop(number, None) for group in groups for number in self._samples[group]]
        measured = [pair for pair in times if pair is not None]  # a checkpoint does not store the times
        self.taken_times = (
            min((start for start, _ in measured), default=0.0),
            max((end for _, end in measured), default=0.0),
        )
        self._taken[step] = {group: self._samples.pop(group) for group in groups}
        self._finished = [group for group in self._finished if group not in groups]
        taken: list[Sample] = []
        for samples in self._taken[step].values():
            taken += with_advantages([samples[number] for number in sorted(samples)], self.advantage, self.deviation)
        return taken

    def trained(self, step: int) -> None:
        """Forget the samples that this step took: the optimizer has trained on them."""
        groups = self._taken.pop(step)
        for group in groups:
            del self._requested_at[group], self._last_chance[group]
        before = min(self._requested_at, default=None)
        out_of_turn = self._trained | groups.keys()
        self._trained = {group for group in out_of_turn if before is not None and group > before}

    def finish(self) -> None:
        """Wait until the environment is ready with all samples, after the last step."""
        self.generator.wait_until_dropped(self._alive)

    def state(self) -> QueueState:
        """The state for a checkpoint. After a resume, samples that are still under way are requested again, and so
        are rewards that are still computed. If `ask` has failed, so are all samples of several turns that it has
        requested from an engine in this job: without those that have ended, the engine would get other batches, with
        other roundings.
        """
        self._keep(self.generator.salvage())
        groups = {group: samples for taken in self._taken.values() for group, samples in taken.items()}
        # in the order of finishing, by which a step chooses groups
        for group in [*self._finished, *self._samples]:
            groups.setdefault(group, self._samples[group])
        samples = [
            self.generator.with_present_reward(sample)
            for of_group in groups.values()
            for sample in of_group.values()
            if sample.number not in self._incomplete
        ]
        return QueueState(samples, dict(self._requested_at), sorted(self._trained))

    def restore(self, state: QueueState, step: int) -> None:
        """Continue from the state of a checkpoint after `step` steps. The next `ask` requests the missing samples.

        Raises ValueError if this run cannot have had this state after `step` steps.
        """
        require_groups(state, self.plan, self.schedule, step)
        require_samples(
            state.samples, state.requested_at, step, self.plan, self.generator, by_student=self._by_student
        )
        self._trained = set(state.trained)
        for group, at in state.requested_at.items():
            self._add(group, at)
        self._keep(state.samples)

    def _add(self, group: int, requested_at: int) -> None:
        """Record the request of a group. If the schedule is in order, only the group's own step may train on it."""
        self._requested_at[group], self._samples[group] = requested_at, {}
        latest = requested_at + self.schedule.max_staleness
        self._last_chance[group] = self.plan.step_of(group) if self.schedule.in_order else latest

    def _keep(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            group = self.plan.group_of(sample.number)
            self._samples[group][sample.number] = sample
            if len(self._samples[group]) == len(self.plan.samples(group)):
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

        A group is due by `until` if no step after `until` may train on it. This step must train on the due groups for
        which the steps after this one, up to and including `until`, have no room. The number may be negative.
        """
        least, room = {}, 0
        for until in range(step, step + self.schedule.max_staleness + 1):
            room += len(self.plan.groups(until)) if until > step else 0
            least[until] = sum(self._last_chance[group] <= until for group in self._samples) - room
        return least


def require_versions(samples: Sequence[Sample], step: int, max_staleness: int) -> None:
    """Raise ValueError if a generated token's version is newer than `step` or older than step − max_staleness."""
    for sample in samples:
        generated_N = sample.completion.versions_N[sample.is_generated_N]
        oldest, newest = int(generated_N.min()), int(generated_N.max())
        if not step - max_staleness <= oldest <= newest <= step:
            raise ValueError(
                f"sample {sample.number} has tokens of versions {oldest} to {newest} in step {step + 1}: expected "
                f"versions {max(0, step - max_staleness)} to {step}. The engine has other weights than it was given"
            )


def staleness(samples: Sequence[Sample], step: int) -> Mapping[int, int]:
    """Count generated tokens by their staleness: the step's number minus the token's version."""
    counts: dict[int, int] = {}
    for sample in samples:
        for version in sample.completion.versions_N[sample.is_generated_N].tolist():
            counts[step - version] = counts.get(step - version, 0) + 1
    return counts
