"""The share of each teacher in a step, if each document has one teacher (`teachers.balance`).

The weights of a document's target rows are multiplied by a factor f. Over the N target tokens of a step, Σ f = N.

    documents   f = N / (D·n) for the n target tokens of a document, where D documents have targets: every document
                has the same share of the step's loss, and every teacher the share of its documents
    gradient    f = c / (√N_k · g_k) for the N_k target tokens of teacher k: every teacher's part of the gradient
                with respect to the student's last hidden states has the same norm, if g_k is that of the step before

g_k is the root mean square, over the target tokens of teacher k in the last step that had some, of the norm of the
gradient of a token's loss (f = 1) with respect to the token's last hidden state. c is the number with Σ f = N. A
teacher without g_k, as all are in the first step, or with g_k = 0 has f = 1, and the others share the rest.

T tokens of a micro-batch.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from stillhouse.data import MicroBatch, StepMicroBatches
from stillhouse.objective.metric_keys import BALANCE, GRADIENT_SQUARE
from stillhouse.parallel import ShardedMicroBatches, copied_to


@dataclass
class TeacherBalance:
    """Weighs the rows of a step's micro-batches by `kind`.

    route: the column of the data that names each document's teacher.
    gradients: g_k of each teacher, after the last step that `measure` has seen.
    """

    kind: Literal["documents", "gradient"]
    route: str
    gradients: dict[str, float] = field(default_factory=dict)
    _tokens: dict[str, int] = field(default_factory=dict, init=False)
    _factors: dict[str, float] = field(default_factory=dict, init=False)

    def weigh(self, micro_batches: ShardedMicroBatches) -> ShardedMicroBatches:
        """Return the micro-batches with other weights, and with each row's factor under `BALANCE` in `per_token`.

        The factors depend only on the step as a whole, and not on the layout or on how documents are packed.
        """
        factors = self._of_documents(micro_batches.of_all_ranks)
        on_cpu = [_factors(batch, factors) for batch in micro_batches.on_cpu]
        return ShardedMicroBatches(
            _weighed(micro_batches, on_cpu),
            micro_batches.of_all_ranks,
            uniform_shapes=micro_batches.uniform_shapes,
            on_cpu=_weighed(micro_batches.on_cpu, on_cpu),
        )

    def measure(self, sums: Mapping[str, float]) -> None:
        """Update `gradients` from the sums of the step whose micro-batches were weighed last."""
        if self.kind != "gradient":
            return
        for name, tokens in self._tokens.items():
            self.gradients[name] = math.sqrt(sums[f"{GRADIENT_SQUARE}/{name}"] / tokens) / self._factors[name]

    def shares(self, step: StepMicroBatches) -> dict[str, tuple[float, float]]:
        """Return, for each teacher of a step, its share of the target tokens and its share of their weights."""
        factors, targets = self._of_documents(step), step.target_tokens()
        tokens, weights = Counter[str](), defaultdict[str, float](float)
        for document, count in targets.items():
            name = str(step.value(document, self.route))
            tokens[name] += count
            weights[name] += factors[document] * count
        return {
            name: (tokens[name] / tokens.total(), weights[name] / sum(weights.values())) for name in sorted(tokens)
        }

    def _of_documents(self, step: StepMicroBatches) -> dict[int, float]:
        """Return the factor of each document that has targets."""
        targets, total = step.target_tokens(), step.normalizer
        if self.kind == "documents":
            return {document: total / (len(targets) * tokens) for document, tokens in targets.items()}
        teachers = {document: str(step.value(document, self.route)) for document in targets}
        of_teacher: dict[str, int] = defaultdict(int)
        for document, tokens in targets.items():
            of_teacher[teachers[document]] += tokens
        self._tokens = dict(sorted(of_teacher.items()))
        self._factors = self._of_teachers(self._tokens)
        return {document: self._factors[name] for document, name in teachers.items()}

    def _of_teachers(self, tokens: Mapping[str, int]) -> dict[str, float]:
        measured = {name: count for name, count in tokens.items() if self.gradients.get(name)}
        inverse = {name: 1 / (math.sqrt(count) * self.gradients[name]) for name, count in measured.items()}
        shared, weighted = sum(measured.values()), sum(count * inverse[name] for name, count in measured.items())
        return {name: shared * inverse[name] / weighted if name in measured else 1.0 for name in tokens}


def _factors(batch: MicroBatch, factors: Mapping[int, float]) -> Tensor:
    """The factor of each row of a micro-batch in host memory; 1 without a target, [T]."""
    factor_T = torch.ones_like(batch.weights_T)
    documents, place_C = batch.document_T[batch.valid_index].unique(return_inverse=True)
    of_documents = torch.tensor([factors[document] for document in documents.tolist()], dtype=factor_T.dtype)
    factor_T[batch.valid_index] = of_documents[place_C]
    return factor_T


def _weighed(batches: Sequence[MicroBatch], factors: Sequence[Tensor]) -> list[MicroBatch]:
    weighed = []
    for batch, factor_T in zip(batches, factors, strict=True):
        here_T = copied_to(factor_T, batch.weights_T.device)
        per_token = {**batch.per_token, BALANCE: here_T}
        weighed.append(replace(batch, weights_T=batch.weights_T * here_T, per_token=per_token))
    return weighed
