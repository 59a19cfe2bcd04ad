"""The prompts of each step. They depend only on the seed and the step's number, so no state needs to be saved.

Each source of prompts has two streams: groups, which are prompts with several samples each, and documents of the
dataset. Each epoch of a stream is a permutation of all its documents. A step takes the next prompts of the run. For
each of them, a draw by the sources' weights decides which source gives it (`prompt_draw.py`). The share of the
source decides whether it is the source's next group or its next documents of the dataset. So the streams of a source
are those of a run with this source alone.

Groups are numbered from 0 over all sources, and so are samples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Self

import numpy as np

from stillhouse.data.sequence_order import permutation
from stillhouse.generation.prompt_draw import PromptDraw

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

    @classmethod
    def of_one(
        cls,
        prompts: int,
        dataset: int,
        prompts_per_step: int,
        samples_per_prompt: int,
        seed: int,
        share: float = 1.0,
    ) -> Self:
        """Return the plan of a run with one source."""
        return cls([PromptSource(prompts, samples_per_prompt, dataset, share)], prompts_per_step, seed)

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
        of_source = number * self.sources[source].samples_per_prompt + place
        entropy = [self.seed, of_source, turn] + ([source] if source else [])
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
        source, of_source = self._draw.source(number)
        settings, (prompts, dataset) = self.sources[source], self._streams[source]
        groups, groups_after = (math.floor(count * settings.share + 1e-6) for count in (of_source, of_source + 1))
        if groups_after > groups:
            self._groups.append(_Group(step, source, groups, prompts.document(groups)))
        else:
            first = (of_source - groups) * settings.samples_per_prompt
            documents += [dataset.document(first + place) for place in range(settings.samples_per_prompt)]


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
