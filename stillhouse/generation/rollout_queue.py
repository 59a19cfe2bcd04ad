"""The samples of a run between the engine that generates them and the steps that train on them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from stillhouse.generation.advantages import Deviation, with_advantages
from stillhouse.generation.prompt_plan import PromptPlan
from stillhouse.generation.rollout_queue_state import QueueState, require_groups, require_samples
from stillhouse.generation.rollout_schedule import RolloutSchedule
from stillhouse.generation.sample import Sample
from stillhouse.generation.sample_generator import SampleGenerator

#: seconds between two calls of `alive` while the queue waits for samples
_TICK = 1.0


class RolloutQueue:
    """The groups of samples that were asked for and are not trained.

    schedule: when they are asked for, and which of them a step trains on.
    advantage, deviation: how rewards become advantages (see `with_advantages`).
    alive: called now and then while waiting.
    by_student: whether the versions of tokens are those of the student.
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
        self._last_chance: dict[int, int] = {}  # the last step that may train on a group that was asked for
        self._samples: dict[int, dict[int, Sample]] = {}  # of the groups that were asked for and not taken
        self._finished: list[int] = []  # the groups with all their samples, in the order in which they finished
        self._trained: set[int] = set()
        self._taken: dict[int, dict[int, dict[int, Sample]]] = {}  # by step, the groups it has taken, not trained
        #: when the samples that were taken last were asked for, and when the last one of them was finished
        self.taken_times = (0.0, 0.0)

    def ask(self, step: int) -> None:
        """Ask for all groups that are due at a step, and for samples of earlier groups that a checkpoint did not
        keep.

        The engine has the weights of this step.
        """
        for later in range(step, self.schedule.last_requested(step) + 1):
            for group in self.plan.groups(later):
                if group not in self._trained and group not in self._requested_at:
                    self._add(group, step)
        under_way = set(self.generator.under_way)
        self.generator.start(
            [
                (number, self.plan.prompt_of(group))
                for group, samples in self._samples.items()
                for number in self.plan.samples(group)
                if number not in samples and number not in under_way
            ]
        )
        # an engine in this process has generated all of them by now
        while finished := self.generator.finished(0.0):
            self._keep(finished)

    def has_requested(self, step: int) -> bool:
        """Whether all samples of this step are finished or under way."""
        under_way = set(self.generator.under_way)
        return all(
            group in self._samples and under_way.union(self._samples[group]).issuperset(self.plan.samples(group))
            for group in self.plan.groups(step)
        )

    def wait_for(self, step: int) -> None:
        """Wait until there are the groups that this step trains on."""
        while not self._is_ready(step):
            self._alive()
            self._keep(self.generator.finished(_TICK))

    def is_ready(self, step: int) -> bool:
        """Whether there are the groups that this step trains on, without waiting for them."""
        self._keep(self.generator.finished(0.0))
        return self._is_ready(step)

    def take(self, step: int) -> list[Sample]:
        """The samples that a step trains on, in the order of their numbers, with advantages. Waits for them.

        Until `trained` is called for the step, a checkpoint still has them.
        """
        self.wait_for(step)
        groups = sorted(self._chosen(step))
        times = [self.generator.times.pop(number, None) for group in groups for number in self._samples[group]]
        known = [seconds for seconds in times if seconds is not None]  # an earlier process's times are unknown
        self.taken_times = (
            min((start for start, _ in known), default=0.0),
            max((end for _, end in known), default=0.0),
        )
        self._taken[step] = {group: self._samples.pop(group) for group in groups}
        self._finished = [group for group in self._finished if group not in groups]
        taken: list[Sample] = []
        for samples in self._taken[step].values():
            taken += with_advantages([samples[number] for number in sorted(samples)], self.advantage, self.deviation)
        return taken

    def trained(self, step: int) -> None:
        """The optimizer has made the step on the samples that it has taken: no later call gives them again."""
        groups = self._taken.pop(step)
        for group in groups:
            del self._requested_at[group], self._last_chance[group]
        before = min(self._requested_at, default=None)
        out_of_turn = self._trained | groups.keys()
        self._trained = {group for group in out_of_turn if before is not None and group > before}

    def state(self) -> QueueState:
        """What a checkpoint keeps. Samples that are under way are asked for again after a resume."""
        self._keep(self.generator.salvage())
        groups = dict(self._samples)
        for taken in self._taken.values():
            groups |= taken
        samples = [sample for group in sorted(groups) for sample in groups[group].values()]
        return QueueState(samples, dict(self._requested_at), sorted(self._trained))

    def restore(self, state: QueueState, step: int) -> None:
        """Go on with what a checkpoint of this step kept. The next `ask` asks for what it lacks.

        Raises ValueError for a state that this run cannot have had after so many steps.
        """
        require_groups(state, self.plan, self.schedule, step)
        require_samples(state.samples, state.requested_at, step, self.generator, by_student=self._by_student)
        self._trained = set(state.trained)
        for group, at in state.requested_at.items():
            self._add(group, at)
        self._keep(state.samples)

    def _add(self, group: int, requested_at: int) -> None:
        """Note that a group was asked for. In order, the last step that may train on it is its own."""
        self._requested_at[group], self._samples[group] = requested_at, {}
        latest = requested_at + self.schedule.max_staleness
        self._last_chance[group] = self.plan.step_of(group) if self.schedule.in_order else latest

    def _keep(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            group = sample.number // self.plan.samples_per_prompt
            self._samples[group][sample.number] = sample
            if len(self._samples[group]) == self.plan.samples_per_prompt:
                self._finished.append(group)

    def _is_ready(self, step: int) -> bool:
        return len(self._finished) >= len(self.plan.groups(step)) and all(
            sum(self._last_chance[group] <= until for group in self._finished) >= least
            for until, least in self._least(step).items()
        )

    def _chosen(self, step: int) -> Sequence[int]:
        """The groups that the step trains on, of those that are finished."""
        chosen: list[int] = []
        for until, least in self._least(step).items():
            in_time = [group for group in self._finished if self._last_chance[group] <= until]
            missing = max(0, least - len(set(chosen).intersection(in_time)))
            chosen += [group for group in in_time if group not in chosen][:missing]
        others = [group for group in self._finished if group not in chosen]
        return [*chosen, *others[: len(self.plan.groups(step)) - len(chosen)]]

    def _least(self, step: int) -> dict[int, int]:
        """For this step and each later step `until`: the least number of groups that this step must train, among
        those whose last chance is `until` or earlier.

        It is the number of these groups minus the room in the steps after this one, up to `until`.
        """
        least, room = {}, 0
        for until in range(step, step + self.schedule.max_staleness + 1):
            room += len(self.plan.groups(until)) if until > step else 0
            least[until] = sum(self._last_chance[group] <= until for group in self._samples) - room
        return least


def require_versions(samples: Sequence[Sample], step: int, max_staleness: int) -> None:
    """Raise ValueError for a token whose version is newer than the step's, or older than the bound."""
    for sample in samples:
        generated_N = sample.completion.versions_N[sample.is_generated_N]
        oldest, newest = int(generated_N.min()), int(generated_N.max())
        if not step - max_staleness <= oldest <= newest <= step:
            raise ValueError(
                f"sample {sample.number} has tokens of versions {oldest} to {newest} in step {step + 1}: expected "
                f"versions {max(0, step - max_staleness)} to {step}. The engine has other weights than it was given"
            )


def staleness(samples: Sequence[Sample], step: int) -> Mapping[int, int]:
    """The number of tokens of the samples, by their age in versions."""
    counts: dict[int, int] = {}
    for sample in samples:
        for version in sample.completion.versions_N[sample.is_generated_N].tolist():
            counts[step - version] = counts.get(step - version, 0) + 1
    return counts
