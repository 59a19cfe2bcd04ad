"""The keys of an objective's metrics: one for each term's value, one for each of its statistics, all different."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import count

from stillhouse.objective.terms import Term

#: the key that is no sum
CHUNK_TOKENS = "chunk_tokens"


def unique_names(terms: Sequence[Term]) -> list[str]:
    """The terms' keys in metrics: a second one of the same name has "#2" behind it."""
    seen: dict[str, int] = defaultdict(int)
    names = []
    for term in terms:
        seen[term.name] += 1
        names.append(term.name if seen[term.name] == 1 else f"{term.name}#{seen[term.name]}")
    return names


class StatisticKeys:
    """The terms' keys of statistics: those of the second term of a kind have "#2", or the next number that is free.

    A number is given at the first chunk, where every term passes in its order: keys depend on the terms alone.
    """

    def __init__(self, terms: Sequence[Term], names: Sequence[str]):
        kinds = [type(term) for term in terms]
        self.ordinals = [kinds[:position].count(kind) + 1 for position, kind in enumerate(kinds)]
        self.taken = {"tokens", CHUNK_TOKENS, *names}
        self.given: dict[tuple[int, str], str] = {}

    def of(self, position: int, name: str) -> str:
        """The key of the statistic `name` of the term at `position`."""
        if (position, name) not in self.given:
            numbers = count(self.ordinals[position])
            keys = (name if number == 1 else f"{name}#{number}" for number in numbers)
            key = next(key for key in keys if key not in self.taken)
            self.taken.add(key)
            self.given[position, name] = key
        return self.given[position, name]
