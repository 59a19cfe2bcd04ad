"""The prompts of each step, which depend only on the seed and the step's number, and the schedule of their requests.

Each source of prompts has two streams: groups, which are prompts with several samples each, and documents of the
dataset. Each epoch of a stream is a permutation of its documents. For each prompt of a step, a draw by weights
chooses the source (`PromptDraw`). The source's share then decides between its next group and its next documents of
the dataset. So a source has the same streams as in a run with this source alone. The numbers of groups and of samples
count from 0 over all sources.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import NamedTuple, Self

import numpy as np

from stillhouse.config import RolloutConfig
from stillhouse.data.packing import permutation

#: the number of the first epoch's permutation (see `permutation`), for prompts and for the dataset's documents
_PROMPTS, _DATASET = 1, 2**31


@dataclass(frozen=True)
class PromptSource:
    """A source of prompts.

    prompts: the number of documents with prompts.
    samples_per_prompt: the number of samples of a group.
    dataset: the number of documents with completions.
    share: the share of generated completions among all completions of this source. It is exact only over many steps,
        because a step takes whole groups.
    weight: a number proportional to the share of the run's prompts that this source gives.
    """

    prompts: int
    samples_per_prompt: int
    dataset: int = 0
    share: float = 1.0
    weight: float = 1.0


class PromptGroup(NamedTuple):
    """A prompt with its samples.

    step: the step of the group.
    source: the number of the source that gives the prompt.
    number: the number of the group among the groups of its source.
    prompt: the number of the document.
    """

    step: int
    source: int
    number: int
    prompt: int


class PromptPlan:
    """Computes the prompts of each step when they are needed.

    sources: the sources of prompts. The documents with prompts are numbered over all sources in this order, and so
        are the documents of the dataset.
    """

    def __init__(self, sources: Sequence[PromptSource], prompts_per_step: int, seed: int):
        self.sources, self.prompts_per_step, self.seed = list(sources), prompts_per_step, seed
        #: samples of a group have consecutive numbers; the next group begins at the next multiple of this number
        self.numbers_per_group = max(source.samples_per_prompt for source in sources)
        self._draw = PromptDraw([source.weight for source in sources])
        #: for each source, the numbers of its first document with a prompt and of its first document of the dataset
        self._first_prompts = list(accumulate((source.prompts for source in sources), initial=0))
        self._first_documents = list(accumulate((source.dataset for source in sources), initial=0))
        self._orders: dict[tuple[int, int], tuple[int, np.ndarray]] = {}  # the present epochs of the streams
        self._groups: list[PromptGroup] = []
        #: for each planned step, the number of groups before it; the last entry is the number of all planned groups
        self._stops = [0]
        self._from_dataset: list[list[int]] = []

    def groups(self, step: int) -> range:
        """The numbers of the groups of a step; steps count from 0."""
        self._plan(step)
        return range(self._stops[step], self._stops[step + 1])

    def group(self, number: int) -> PromptGroup:
        """The group with this number in the run."""
        while len(self._groups) <= number:
            self._plan(len(self._from_dataset))
        return self._groups[number]

    def source_of_document(self, document: int) -> int:
        """The number of the source of a document of the dataset."""
        return bisect_right(self._first_documents, document) - 1

    def from_dataset(self, step: int) -> list[int]:
        """The numbers of the dataset's documents on which a step trains."""
        self._plan(step)
        return self._from_dataset[step]

    def samples(self, group: int) -> range:
        """The numbers of a group's samples."""
        first = group * self.numbers_per_group
        return range(first, first + self.sources[self.group(group).source].samples_per_prompt)

    def group_of(self, sample: int) -> int:
        """The number of a sample's group."""
        return sample // self.numbers_per_group

    def source_of(self, sample: int) -> int:
        """The number of the source that gives a sample its prompt."""
        return self.group(self.group_of(sample)).source

    def sample_seed(self, sample: int, turn: int) -> int:
        """The seed for one turn of a sample, below 2^63. The first source's seeds do not depend on other sources."""
        group, place = divmod(sample, self.numbers_per_group)
        _, source, number, _ = self.group(group)
        source_number = number * self.sources[source].samples_per_prompt + place
        return _random_seed([self.seed, source_number, turn] + ([source] if source else []))

    def _plan(self, step: int) -> None:
        while (planned := len(self._from_dataset)) <= step:
            documents: list[int] = []
            for number in range(planned * self.prompts_per_step, (planned + 1) * self.prompts_per_step):
                source, place = self._draw.source(number)
                settings = self.sources[source]
                groups, groups_after = (math.floor(count * settings.share + 1e-6) for count in (place, place + 1))
                if groups_after > groups:
                    prompt = self._first_prompts[source] + self._document(source, settings.prompts, groups, _PROMPTS)
                    self._groups.append(PromptGroup(planned, source, groups, prompt))
                    continue
                for at in range(settings.samples_per_prompt):
                    at += (place - groups) * settings.samples_per_prompt
                    document = self._document(source, settings.dataset, at, _DATASET)
                    documents.append(self._first_documents[source] + document)
            self._from_dataset.append(documents)
            self._stops.append(len(self._groups))

    def _document(self, source: int, size: int, place: int, first_epoch: int) -> int:
        """The number of the document at position `place` of a stream, counted among the documents of its source.

        size: the number of the stream's documents.
        first_epoch: the number of the permutation of the stream's first epoch.
        """
        epoch, in_epoch = divmod(place, size)
        before, order_D = self._orders.get((source, first_epoch), (-1, None))
        if order_D is None or epoch != before:
            order_D = permutation(size, self.seed, first_epoch + epoch)
            self._orders[source, first_epoch] = epoch, order_D
        return int(order_D[in_epoch])


class PromptDraw:
    """The draw of prompts from weighted sources: it decides which source gives prompt number n of a run.

    Of the first n prompts, for every n, a source with the share s gives more than s·n − 1 and fewer than s·n + 1
    (Tijdeman 1980, "The chairman assignment problem"). Among the sources that can give the next prompt without
    exceeding the upper bound, the draw takes the source that would be the first to fall below the lower bound. The
    draw depends only on the weights, and computes with exact integers when a prompt is needed.

    weights: above 0, in any unit.
    """

    def __init__(self, weights: Sequence[float]):
        # the exact decimal number that the user has written, such as 7/10 for 0.7
        fractions = [Fraction(repr(weight)) for weight in weights]
        unit = lcm(*(fraction.denominator for fraction in fractions))
        self._weights = [int(fraction * unit) for fraction in fractions]
        self._total = sum(self._weights)
        self._per_weight = [lcm(*self._weights) // weight for weight in self._weights]
        self._counts = [0] * len(weights)
        self._drawn: list[tuple[int, int]] = []

    def source(self, number: int) -> tuple[int, int]:
        """Return the source of a prompt of the run, and the number of this prompt among the prompts of the source."""
        others, total = 2 * len(self._weights) - 2, self._total
        while len(self._drawn) <= number:
            best, earliest = -1, 0
            for source, weight in enumerate(self._weights):
                # total × (share · (prompts of the run, including the next one) − prompts of this source so far)
                behind = (len(self._drawn) + 1) * weight - total * self._counts[source]
                if others * behind < total and others:  # the source would exceed the upper bound
                    continue
                # proportional to the number of prompts until the source would fall below the lower bound
                due = ((others - 1) * total - others * behind) * self._per_weight[source]
                if best < 0 or due < earliest:
                    best, earliest = source, due
            self._drawn.append((best, self._counts[best]))
            self._counts[best] += 1
        return self._drawn[number]


@dataclass(frozen=True)
class PromptSeeds:
    """Replaces a `PromptPlan` in evaluations: one sample for each prompt, with the same seeds at each evaluation."""

    seed: int

    def source_of(self, sample: int) -> int:
        return 0

    def sample_seed(self, sample: int, turn: int) -> int:
        return self.seed + sample if turn == 0 else _random_seed([self.seed, sample, turn])


def _random_seed(entropy: Sequence[int]) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


_AHEAD = {"sync": 0, "one_step_off": 1, "two_step_off": 2}


@dataclass(frozen=True)
class RolloutSchedule:
    """Decides when groups of samples are requested and which groups a step trains on.

    At step s, when the weights have version s, all groups of the steps up to s + ahead have been requested. Exactly
    one step trains on each group, at most `max_staleness` steps after the group's request.

    ahead: 0 for sync, 1 for one_step_off, 2 for two_step_off, and half of `max_staleness` (rounded up) for async, so
        that a group can be delayed by the other half.
    in_order: whether each step trains on the groups that the plan gives it. Under async, a step trains on as many
        groups, but on those that finish first, as long as later steps can train on all other groups in time.
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
        """The last step whose groups have been requested when `step` begins."""
        return min(step + self.ahead, self.last_step)
