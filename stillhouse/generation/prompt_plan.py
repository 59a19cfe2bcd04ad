"""The prompts of each step. They depend on the step's number alone, so a resumed run needs no saved state.

The prompts of a run are a stream of groups, numbered from 0. A group is one prompt with several samples. Each epoch
of the stream is a permutation of all prompts. A step has the next groups of the stream and, if a share of its
completions is the dataset's, the next documents of a stream of the dataset's documents.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from stillhouse.data.sequence_order import permutation

#: the draws of permutations (see `permutation`): of prompts from here on, of the dataset's documents after it
_PROMPTS, _DATASET = 1, 2**31


@dataclass(frozen=True)
class PromptPlan:
    """The prompts of each step.

    prompts: the number of documents with prompts.
    dataset: the number of documents with completions.
    share: the share of completions that the student samples. It is exact over many steps; no group is split.
    """

    prompts: int
    dataset: int
    prompts_per_step: int
    samples_per_prompt: int
    seed: int
    share: float = 1.0

    def groups(self, step: int) -> range:
        """The numbers of the groups of a step (from 0)."""
        return range(self._groups_before(step), self._groups_before(step + 1))

    def step_of(self, group: int) -> int:
        """The step that has a group; -1 for a negative number."""
        return bisect_right(range(2**60), group, key=self._groups_before) - 1

    def prompt_of(self, group: int) -> int:
        """The number of the document with a group's prompt."""
        return self._of_stream(group, self.prompts, _PROMPTS)

    def from_dataset(self, step: int) -> list[int]:
        """The numbers of the dataset's documents in a step."""
        start, stop = (
            (at * self.prompts_per_step - self._groups_before(at)) * self.samples_per_prompt
            for at in (step, step + 1)
        )
        return [self._of_stream(number, self.dataset, _DATASET) for number in range(start, stop)]

    def samples(self, group: int) -> range:
        """The numbers of a group's samples."""
        return range(group * self.samples_per_prompt, (group + 1) * self.samples_per_prompt)

    def sample_seed(self, sample: int, turn: int) -> int:
        """The seed for sampling one turn of a sample, below 2^63."""
        state = np.random.SeedSequence([self.seed, sample, turn]).generate_state(1, np.uint64)
        return int(state[0] >> np.uint64(1))

    def _groups_before(self, step: int) -> int:
        return math.floor(step * self.prompts_per_step * self.share + 1e-6)

    def _of_stream(self, number: int, size: int, draw: int) -> int:
        epoch, place = divmod(number, size)
        return int(permutation(size, self.seed, draw + epoch)[place])
