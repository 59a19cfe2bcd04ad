"""The keys of an objective's metrics: one unique key for each term's value and for each statistic of a term."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import count

from stillhouse.objective.terms import Distill, Term, labelled

#: the key of the only metric that is not a sum
CHUNK_TOKENS = "chunk_tokens"

#: the key of the sum of the rows' weights; `StepLoss` adds it to the metrics
WEIGHTS = "weights"

# keys of the float32 `per_token` tensors of a micro-batch of rollouts; a row's value is about the token it predicts
#: the advantage of the token
ADVANTAGES = "advantages"
#: the log-probability of the token when it was sampled, at the sampling temperature
OLD_LOG_PROBS = "old_log_probs"
#: the number of the token's sampling temperature among `ObjectiveSpec.sampling_temperatures`
SAMPLING = "sampling"
#: 1 if the student's policy sampled the token, 0 if it comes from the dataset or a teacher
IS_SAMPLED = "is_sampled"
#: the version of the weights that generated the token; −1 if no model of the run did
POLICY_VERSION = "policy_version"


def unique_names(terms: Sequence[Term]) -> list[str]:
    """Return the terms' keys in metrics. The second term with the same name gets the suffix "#2", and so on."""
    seen: dict[str, int] = defaultdict(int)
    names = []
    for term in terms:
        seen[term.name] += 1
        names.append(term.name if seen[term.name] == 1 else f"{term.name}#{seen[term.name]}")
    return names


class StatisticKeys:
    """The keys of the terms' statistics. The second term of a class gets the suffix "#2" or the next free number.

    If a term has a label, the label follows the names of its statistics, and only terms with this label are numbered
    together. The student's entropy does not depend on the teacher: if some distillation term has a label, and all
    distillation terms have the same temperature and no `weights_T`, then only the first of them reports the student's
    entropy, without a label. The keys depend only on the terms and their order.
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
        #: the distillation terms that share one value of the student's entropy; empty if every term reports its own
        self.share_entropy = list(distilled) if one_entropy and is_labelled else []

    def of(self, position: int, name: str) -> str | None:
        """Return the key of the statistic `name` of the term at `position`; None: an earlier term reports it."""
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
