"""The metrics of an objective: a unique key for each value and statistic of its terms, and the sums of a pass.

T tokens, C rows of a chunk.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import count

import torch
from torch import Tensor

from stillhouse.objective.terms import Distill, Term, labelled
from stillhouse.objective.tile.tile import Tile

#: the key of the only metric that is not a sum
CHUNK_TOKENS = "chunk_tokens"

#: the key of the sum of the rows' weights; `StepLoss` adds it to the metrics
WEIGHTS = "weights"

# keys of the float32 `per_token` tensors of a batch of rollouts; the value of a row is about the row's label
#: the advantage of the token
ADVANTAGES = "advantages"
#: the log-probability of the token when it was sampled, at the sampling temperature
OLD_LOG_PROBS = "old_log_probs"
#: the index of the token's sampling temperature in `ObjectiveSpec.sampling_temperatures`
SAMPLING = "sampling"
#: 1 if the student's policy sampled the token, 0 if it comes from the dataset or a teacher
IS_SAMPLED = "is_sampled"
#: the version of the weights that generated the token; −1 if no model of the run generated it
POLICY_VERSION = "policy_version"


def unique_names(terms: Sequence[Term]) -> list[str]:
    """Return the terms' keys in metrics. The second term with the same name gets the suffix "#2", and so on."""
    names = [term.name for term in terms]
    numbers = [names[: position + 1].count(name) for position, name in enumerate(names)]
    return [name if number == 1 else f"{name}#{number}" for name, number in zip(names, numbers, strict=True)]


class StatisticKeys:
    """The keys of the terms' statistics. The second term of a class gets the suffix "#2" or the next free number.

    A term's label is appended to the names of its statistics, and terms are numbered separately for each label. The
    student's entropy does not depend on the teacher. So if at least one distillation term has a label, and all
    distillation terms have the same temperature and no `weights_T`, only the first distillation term reports this
    entropy, without a label.
    """

    def __init__(self, terms: Sequence[Term], names: Sequence[str]):
        kinds = [(type(term), term.label) for term in terms]
        self.labels = [term.label for term in terms]
        self.ordinals = [kinds[:position].count(kind) + 1 for position, kind in enumerate(kinds)]
        self.taken = {"tokens", CHUNK_TOKENS, *names}
        self.assigned: dict[tuple[int, str], str] = {}
        distilled = {position: term for position, term in enumerate(terms) if isinstance(term, Distill)}
        one_entropy = len({term.temperature for term in distilled.values()}) == 1
        one_entropy &= all(term.weights_T is None for term in distilled.values())
        is_labelled = any(term.label is not None for term in distilled.values())
        #: the positions of the distillation terms that share one student entropy; empty if each reports its own
        self.share_entropy = list(distilled) if one_entropy and is_labelled else []

    def key(self, position: int, name: str) -> str | None:
        """Return the key of the statistic `name` of the term at `position`, or None if an earlier term reports it."""
        label = self.labels[position]
        if name == "student_entropy" and position in self.share_entropy:
            if position != self.share_entropy[0]:
                return None
            label = None
        if (position, name) not in self.assigned:
            name_and_label = labelled(name, label)
            numbers = count(self.ordinals[position])
            keys = (name_and_label if number == 1 else f"{name_and_label}#{number}" for number in numbers)
            key = next(key for key in keys if key not in self.taken)
            self.taken.add(key)
            self.assigned[position, name] = key
        return self.assigned[position, name]


class Totals:
    """The results of a pass: the loss, the metrics, and the value of each term at every token.

    Sums are float64, because a float32 running sum loses a digit every few hundred chunks. They are float32 on
    Apple's GPUs, which have no float64.
    """

    def __init__(self, terms: Sequence[Term], tokens: int, dtype: torch.dtype, device: torch.device):
        self.names = unique_names(terms)
        self.keys = StatisticKeys(terms, self.names)
        self.per_token = {name: torch.zeros(tokens, dtype=dtype, device=device) for name in self.names}
        self.loss = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        self.sums: dict[str, Tensor] = defaultdict(partial(torch.zeros_like, self.loss))
        self.chunk_tokens = 0

    def plus(self, other: "Totals") -> "Totals":
        """Add the totals of a pass over other rows to these totals, and return them."""
        self.loss += other.loss
        self.chunk_tokens = max(self.chunk_tokens, other.chunk_tokens)
        for name, value in other.sums.items():
            self.sums[name] += value
        for name, value_T in other.per_token.items():
            self.per_token[name] = self.per_token[name] + value_T if name in self.per_token else value_T
        return self

    def add_tile(self, terms: Sequence[Term], tile: Tile) -> None:
        """Add the values of all terms on a chunk. The terms add their gradient to the tile."""
        self.sums["tokens"] += (tile.weights_C != 0).sum()
        for position, (name, term) in enumerate(zip(self.names, terms, strict=True)):
            weights_C = tile.weights_C
            if term.weights_T is not None:
                weights_C = weights_C * tile.take(term.weights_T).to(weights_C.dtype)
            result = term.add_to(tile, weights_C * term.scale)
            # a row of weight 0 adds 0, even if its value is NaN
            value_C = result.value_C.masked_fill(weights_C == 0, 0.0)
            self.per_token[name][tile.rows] = value_C
            value = (value_C.to(self.loss.dtype) * weights_C).sum()
            self.sums[name] += value
            if term.scale:  # a term of scale 0 is only a metric; 0 times an infinite value would be NaN
                self.loss += term.scale * value
            for statistic, values_C in (result.statistics | result.parts).items():
                if key := self.keys.key(position, statistic):
                    values_C = values_C.masked_fill(weights_C == 0, 0.0)
                    self.sums[key] += (values_C.to(self.loss.dtype) * weights_C).sum()
