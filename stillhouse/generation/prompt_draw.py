"""The draw of prompts from weighted sources: which source gives the prompt number n of a run.

Of the first n prompts, for every n, a source with the share s gives more than s·n − 1 and fewer than s·n + 1
(Tijdeman 1980, "The chairman assignment problem"). Of the sources that may give the next prompt without exceeding
this bound, the one that would fall below it first gives it. The draw depends only on the weights, and computes with
exact fractions.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm


class PromptDraw:
    """weights: above 0, in any unit. The draw is computed as far as it is needed."""

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
