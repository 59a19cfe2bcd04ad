"""The prompts of each step, and when their completions are requested. The prompts depend only on the seed and the
step's number, so no state needs to be saved.

Each source of prompts has two streams: groups, which are prompts with several samples each, and documents of the
dataset. Each epoch of a stream is a permutation of all its documents. A step takes the next prompts of the run. For
each of them, a draw by the sources' weights decides which source gives it (`PromptDraw`). The share of the
source decides whether it is the source's next group or its next documents of the dataset. So the streams of a source
are those of a run with this source alone.

Groups are numbered from 0 over all sources, and so are samples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import NamedTuple, Self

import numpy as np

from stillhouse.config import RolloutConfig
from stillhouse.data.packing import permutation

#: the number of the first epoch's permutation (see `permutation`), of the prompts and of the dataset's documents
_PROMPTS, _DATASET = 1, 2**31


@dataclass(frozen=True)
class PromptSource:
    """A source of prompts.

    prompts: the number of documents with prompts.
    samples_per_prompt: the number of samples of a group.
    dataset: the number of documents with completions.
    share: the share of generated completions. It is exact only over many steps, because a step takes whole groups.
    weight: proportional to the share of the prompts that this source gives.
    """

    prompts: int
    samples_per_prompt: int
    dataset: int = 0
    share: float = 1.0
    weight: float = 1.0


class _Group(NamedTuple):
    """step: the step to which the group belongs. number: its number among the groups of its source. prompt: the
    number of the document."""

    step: int
    source: int
    number: int
    prompt: int


class PromptPlan:
    """Computes the prompts of each step, as far as they are needed.

    sources: their documents follow each other in this order, those with prompts and those of the dataset.
    """

    def __init__(self, sources: Sequence[PromptSource], prompts_per_step: int, seed: int):
        self.sources, self.prompts_per_step, self.seed = list(sources), prompts_per_step, seed
        #: samples of a group have consecutive numbers; the next group begins at the next multiple of this number
        self.numbers_per_group = max(source.samples_per_prompt for source in sources)
        self._draw = PromptDraw([source.weight for source in sources])
        prompts = accumulate((source.prompts for source in sources), initial=0)
        documents = accumulate((source.dataset for source in sources), initial=0)
        self._streams = [
            (
                _Stream(source.prompts, first_prompt, seed, _PROMPTS),
                _Stream(source.dataset, first_document, seed, _DATASET),
            )
            for source, first_prompt, first_document in zip(sources, prompts, documents, strict=False)
        ]
        self._groups: list[_Group] = []
        self._stops = [0]  # for each planned step, the number of groups before it; then that of all planned groups
        self._from_dataset: list[list[int]] = []

    def groups(self, step: int) -> range:
        """The numbers of the groups of a step; steps count from 0."""
        self._plan(step)
        return range(self._stops[step], self._stops[step + 1])

    def step_of(self, group: int) -> int:
        """The step to which a group belongs."""
        return self._group(group).step

    def source_of(self, group: int) -> int:
        """The number of the source that gives the group its prompt."""
        return self._group(group).source

    def prompt_of(self, group: int) -> int:
        """The number of the document that gives the group its prompt."""
        return self._group(group).prompt

    def source_of_document(self, document: int) -> int:
        """The number of the source of a document of the dataset."""
        stops = accumulate(source.dataset for source in self.sources)
        return next(number for number, stop in enumerate(stops) if document < stop)

    def from_dataset(self, step: int) -> list[int]:
        """The numbers of the dataset's documents on which a step trains."""
        self._plan(step)
        return self._from_dataset[step]

    def samples(self, group: int) -> range:
        """The numbers of a group's samples."""
        first = group * self.numbers_per_group
        return range(first, first + self.sources[self.source_of(group)].samples_per_prompt)

    def group_of(self, sample: int) -> int:
        """The group of a sample."""
        return sample // self.numbers_per_group

    def sample_seed(self, sample: int, turn: int) -> int:
        """The seed for sampling one turn of a sample, below 2^63. For the first source, it is the same without the
        other sources."""
        group, place = divmod(sample, self.numbers_per_group)
        _, source, number, _ = self._group(group)
        source_number = number * self.sources[source].samples_per_prompt + place
        entropy = [self.seed, source_number, turn] + ([source] if source else [])
        state = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
        return int(state[0] >> np.uint64(1))

    def _group(self, number: int) -> _Group:
        while len(self._groups) <= number:
            self._plan(len(self._from_dataset))
        return self._groups[number]

    def _plan(self, step: int) -> None:
        """Plan all steps up to this one."""
        while len(self._from_dataset) <= step:
            planned, documents = len(self._from_dataset), list[int]()
            for number in range(planned * self.prompts_per_step, (planned + 1) * self.prompts_per_step):
                self._add_prompt(number, planned, documents)
            self._from_dataset.append(documents)
            self._stops.append(len(self._groups))

    def _add_prompt(self, number: int, step: int, documents: list[int]) -> None:
        """Add a prompt of the run to the groups, or documents of the dataset to `documents`."""
        source, place = self._draw.source(number)
        settings, (prompts, dataset) = self.sources[source], self._streams[source]
        groups, groups_after = (math.floor(count * settings.share + 1e-6) for count in (place, place + 1))
        if groups_after > groups:
            self._groups.append(_Group(step, source, groups, prompts.document(groups)))
        else:
            first = (place - groups) * settings.samples_per_prompt
            documents += [dataset.document(first + number) for number in range(settings.samples_per_prompt)]


class _Stream:
    """The documents of a source in their order. first_document: the number of its first document among all sources.
    first_epoch: the number of the first permutation."""

    def __init__(self, size: int, first_document: int, seed: int, first_epoch: int):
        self._size, self._first, self._seed, self._first_epoch = size, first_document, seed, first_epoch
        self._epoch, self._order_D = -1, np.zeros(0, dtype=np.int64)

    def document(self, number: int) -> int:
        epoch, place = divmod(number, self._size)
        if epoch != self._epoch:
            self._epoch, self._order_D = epoch, permutation(self._size, self._seed, self._first_epoch + epoch)
        return self._first + int(self._order_D[place])


class PromptDraw:
    """The draw of prompts from weighted sources: which source gives the prompt number n of a run.

    Of the first n prompts, for every n, a source with the share s gives more than s·n − 1 and fewer than s·n + 1
    (Tijdeman 1980, "The chairman assignment problem"). Of the sources that may give the next prompt without exceeding
    this bound, the one that would fall below it first gives it. The draw depends only on the weights, and computes
    with exact fractions.

    weights: above 0, in any unit. The draw is computed as far as it is needed.
    """

    def __init__(self, weights: Sequence[float]):
        # the decimal number that the user has written, such as 7/10 for 0.7
        fractions = [Fraction(repr(weight)) for weight in weights]
        unit = lcm(*(fraction.denominator for fraction in fractions))
        self._weights = [int(fraction * unit) for fraction in fractions]
        self._total = sum(self._weights)
        self._per_weight = [lcm(*self._weights) // weight for weight in self._weights]
        self._counts = [0] * len(weights)
        self._sources: list[int] = []
        self._numbers: list[int] = []

    def source(self, number: int) -> tuple[int, int]:
        """Return the source of a prompt of the run, and the number of this prompt among those of the source."""
        while len(self._sources) <= number:
            source = self._next()
            self._sources.append(source)
            self._numbers.append(self._counts[source])
            self._counts[source] += 1
        return self._sources[number], self._numbers[number]

    def _next(self) -> int:
        n, total, others = len(self._sources) + 1, self._total, 2 * len(self._weights) - 2
        if not others:
            return 0
        best, earliest = -1, 0
        for source, weight in enumerate(self._weights):
            # how far the source is behind its share of n prompts, times `total`
            behind = n * weight - total * self._counts[source]
            if others * behind < total:  # it would exceed the bound
                continue
            # proportional to the number of prompts until it would fall below the bound
            due = ((others - 1) * total - others * behind) * self._per_weight[source]
            if best < 0 or due < earliest:
                best, earliest = source, due
        return best


_AHEAD = {"sync": 0, "one_step_off": 1, "two_step_off": 2}


@dataclass(frozen=True)
class RolloutSchedule:
    """Decides when groups of samples are requested and which groups a step trains on. All schedules request by one
    rule:

        at step s, when the weights have version s, all groups of the steps up to s + ahead have been requested

    `ahead` is 0 for sync, 1 for one_step_off and 2 for two_step_off. In these schedules, a step trains on its own
    groups.

    In the async schedule (`in_order=False`), a step trains on the same number of groups, but on those that finish
    first. Every group must be trained at most `max_staleness` steps after its request. A step takes a group that
    finished early only if the later steps can still train on all other groups in time. `ahead` is only half of
    `max_staleness`, so that a group may be delayed by the other half.

    Under all schedules, no token is older than `max_staleness` versions, and every group is trained exactly once.

    ahead: how many steps a group is requested before the step to which the plan assigns it.
    in_order: whether a step trains on its own groups; if false, it trains on the groups that finish first.
    max_staleness: the maximum number of steps between the request of a group and its training; at least `ahead`.
    last_step: the number of the run's last step, from 0.
    """

    ahead: int
    in_order: bool
    max_staleness: int
    last_step: int

    @classmethod
    def of(cls, rollout: RolloutConfig, steps: int) -> Self:
        """The configured schedule for a run of `steps` steps."""
        ahead = min(_AHEAD.get(rollout.schedule, (rollout.max_staleness + 1) // 2), rollout.max_staleness)
        return cls(ahead, rollout.schedule != "async", rollout.max_staleness, steps - 1)

    def last_requested(self, step: int) -> int:
        """The last step whose groups have been requested once `step` begins."""
        return min(step + self.ahead, self.last_step)
