"""The keys of an objective's metrics: a unique one for each term's value and for each of its statistics."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import count

from stillhouse.objective.terms import Term

#: the key of the only metric that is not a sum
CHUNK_TOKENS = "chunk_tokens"


def unique_names(terms: Sequence[Term]) -> list[str]:
    """Return the terms' keys in metrics: the second term of the same name gets "#2" after its name, and so on."""
    seen: dict[str, int] = defaultdict(int)
    names = []
    for term in terms:
        seen[term.name] += 1
        names.append(term.name if seen[term.name] == 1 else f"{term.name}#{seen[term.name]}")
    return names


class StatisticKeys:
    """The keys of the terms' statistics: the second term of a class gets "#2" or the next free number.

    Numbers are assigned at the first chunk, in the order of the terms. So the keys depend only on the terms.
    """

    def __init__(self, terms: Sequence[Term], names: Sequence[str]):
        kinds = [type(term) for term in terms]
        self.ordinals = [kinds[:position].count(kind) + 1 for position, kind in enumerate(kinds)]
        self.taken = {"tokens", CHUNK_TOKENS, *names}
        self.given: dict[tuple[int, str], str] = {}

    def of(self, position: int, name: str) -> str:
        """Return the key of the statistic `name` of the term at `position`."""
        if (position, name) not in self.given:
            numbers = count(self.ordinals[position])
            keys = (name if number == 1 else f"{name}#{number}" for number in numbers)
            key = next(key for key in keys if key not in self.taken)
            self.taken.add(key)
            self.given[position, name] = key
        return self.given[position, name]
