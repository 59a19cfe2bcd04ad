"""The prompts of each step. They depend only on the seed and the step's number, so no state needs to be saved.

The prompts of a run are a stream of groups, numbered from 0. A group is one prompt with several samples. Each epoch
of the stream is a permutation of all prompts. A step takes the next groups of this stream. If a share of the
completions comes from the dataset, a step also takes the next documents of a second stream, that of the dataset.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from stillhouse.data.sequence_order import permutation

#: the number of the first epoch's permutation (see `permutation`), of the prompts and of the dataset's documents
_PROMPTS, _DATASET = 1, 2**31


@dataclass(frozen=True)
class PromptPlan:
    """Computes the prompts of each step.

    prompts: the number of documents with prompts.
    dataset: the number of documents with completions.
    share: the share of generated completions. It is exact only over many steps, because a step takes whole groups.
    """

    prompts: int
    dataset: int
    prompts_per_step: int
    samples_per_prompt: int
    seed: int
    share: float = 1.0

    def groups(self, step: int) -> range:
        """The numbers of the groups of a step; steps count from 0."""
        return range(self._groups_before(step), self._groups_before(step + 1))

    def step_of(self, group: int) -> int:
        """The step to which a group belongs; -1 if the group's number is negative."""
        return bisect_right(range(2**60), group, key=self._groups_before) - 1

    def prompt_of(self, group: int) -> int:
        """The number of the document that gives the group its prompt."""
        return self._of_stream(group, self.prompts, _PROMPTS)

    def from_dataset(self, step: int) -> list[int]:
        """The numbers of the dataset's documents on which a step trains."""
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
