"""The engine computes one optimizer step, for every training loop and under every layout.

    engine.forward_backward(micro_batches, signals, normalizer)     adds the step's gradient
    engine.clip()                                                   clips the gradient and returns its norm
    engine.update(learning_rate)                                    makes the optimizer step
    engine.evaluate(parts)                                          returns held-out sums

The loss of every micro-batch is a sum over its tokens, divided by the number of target tokens of the whole step. So
neither the loss nor the gradient depends on how the step is cut into micro-batches.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from stillhouse.data import MicroBatch
from stillhouse.engine.layer_losses import ROUTER_LOSS, HiddenLosses, RouterAuxLosses
from stillhouse.engine.optimizer import (
    OptimizerSettings,
    embedding_weights,
    make_optimizer,
    make_step,
)
from stillhouse.models import HiddenPair, OutputProcessor, evaluating
from stillhouse.models.mtp_objective import MtpObjective, multi_token, with_positions
from stillhouse.models.processors import cross_entropy, distillation, with_teacher_cross_entropy
from stillhouse.models.targets import DistillTargets
from stillhouse.objective import ObjectiveOutput, RoutedSignals, Signal, SortedTopK, SpanSignal
from stillhouse.objective.divergence import forward_kl, total_variation
from stillhouse.objective.keys import CHUNK_TOKENS
from stillhouse.objective.signals import SparseSignal
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import Computation, NamedSignals, NextTokens, PairSignal, Runner, watchdog
from stillhouse.signals.weight_average import WeightAverage

#: the held-out objective of the depths of multi-token prediction: 1 − total variation is the share of sampled drafts
#: that the student accepts, and top-1 agreement the share of greedy ones
ACCEPTANCE = MtpObjective(ObjectiveSpec(cross_entropy=1.0, divergence=total_variation()), scale=1.0, of_student=True)


class StepOutput:
    """The result of one forward and backward over a step's micro-batches.

    own: the objective's outputs for this process's micro-batches, with their losses detached. Empty on processes
    without the last stage, and on all but the first of the tensor ranks, which all have the same tokens.
    """

    def __init__(self, own: list[ObjectiveOutput], totals: Callable[[], dict[str, float]]):
        self.own, self._totals = own, totals

    @cached_property
    def sums(self) -> dict[str, float]:
        """Metric sums over all tokens of the step, the same on every process; the loss has the key `loss`.

        Reading them for the first time is a collective of all processes, which waits for the device.
        """
        return self._totals()


class Engine:
    """Trains a student on micro-batches and the teacher's signals for them.

    objective: the minimised loss. bf16: compute matrix products in bfloat16; the weights keep their own dtype.
    chunk_tokens: rows of a logits tile; None: chosen by a memory budget. router_aux_loss: the coefficient of the
    load-balancing loss of a mixture of experts. mtp: the objective of the student's MTP layers, if it has them.

    average: of the student's weights, if a teacher needs one; it follows every update.
    """

    def __init__(
        self,
        runner: Runner,
        objective: ObjectiveSpec,
        device: torch.device,
        *,
        optimizer: OptimizerSettings | None = None,
        bf16: bool = False,
        chunk_tokens: int | None = None,
        router_aux_loss: float = 0.0,
        mtp: MtpObjective | None = None,
    ):
        self.runner, self.objective, self.device = runner, objective, device
        self.settings = optimizer or OptimizerSettings()
        self.bf16, self.chunk_tokens, self.router_aux_loss = bf16, chunk_tokens, router_aux_loss
        self.mtp = mtp
        self.average: WeightAverage | None = None
        self.compares_hidden = True

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        parameters = (each for _, each in self.runner.named_parameters())
        return make_optimizer(parameters, self.settings, embedding_weights(self.runner.students()))

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], signals: Sequence[PairSignal], normalizer: float
    ) -> StepOutput:
        """Add the gradient of the micro-batches' losses to the student's gradient. A collective of all processes.

        signals: one for each micro-batch, from a `SignalSource`. normalizer: the number of target tokens of the whole
        step, over all processes.
        """
        routers = self._router_aux_losses(normalizer)
        hidden = HiddenLosses(normalizer) if self.hidden else None
        processor = distillation(self.objective, chunk_tokens=self.chunk_tokens)
        computation = self._computation(processor, partial(_targets, normalizer=normalizer), self.mtp)
        computation = replace(
            computation,
            router_aux_loss=None if routers is None else routers.start,
            hidden_loss=None if hidden is None else hidden.start,
        )
        outputs = self.runner.forward_backward(computation, micro_batches, signals)
        return StepOutput(outputs if self.runner.has_results else [], partial(self._totals, outputs, routers, hidden))

    def clip(self) -> float:
        """Clip the gradient; returns the norm of the whole gradient before clipping, the same on every process."""
        return float(self.runner.clip(self.settings.clip))

    def update(self, learning_rate: float) -> None:
        """Apply the gradient to the weights, then set every gradient to None."""
        make_step(self.optimizer, learning_rate)
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()

    def evaluate(
        self, parts: Iterable[tuple[Sequence[MicroBatch], Sequence[PairSignal]]], *, of_teacher: bool = False
    ) -> dict[str, float]:
        """Sums over all target tokens: the cross-entropy and, if there are signals, the forward KL.

        Both are at temperature 1, but the forward KL of a sparse signal is at the signal's own temperature. Every
        process returns the same sums. They do not depend on the engine's own objective. Of sorted probabilities, the
        result is their distance, `uld`, at the objective's temperature. Of MTP layers, the sums have what
        `ACCEPTANCE` measures. of_teacher: also the teacher's own cross-entropy; the signals have to be exact.
        """
        outputs: list[ObjectiveOutput] = []
        for micro_batches, signals in parts:
            processor = distillation(self._held_out_objective(signals), chunk_tokens=self.chunk_tokens)
            processor = with_teacher_cross_entropy(processor) if of_teacher else processor
            mtp = None if self.mtp is None else replace(ACCEPTANCE, depths=self.mtp.depths)
            outputs += self.process(processor, partial(_targets, normalizer=1.0), micro_batches, signals, mtp)
            del micro_batches, signals  # a teacher's hidden states are large, and the next part comes first
        return self._totals(outputs)

    def _held_out_objective(self, signals: Sequence[PairSignal]) -> ObjectiveSpec:
        """The cross-entropy, and the forward KL if there are signals."""
        given = [each for each in signals if each is not None]
        if not given:
            return ObjectiveSpec(cross_entropy=1.0)
        if isinstance(given[0], SortedTopK):
            return ObjectiveSpec(cross_entropy=1.0, uld=1.0, temperature=self.objective.temperature)
        named = given[0].named if isinstance(given[0], NamedSignals) else {}
        shares = self.objective.teachers
        return ObjectiveSpec(
            cross_entropy=1.0,
            divergence=forward_kl(),
            temperature=_temperature(given[0]),
            teachers={name: replace(shares[name], temperature=_temperature(each)) for name, each in named.items()},
            is_mixture=self.objective.is_mixture,
        )

    def process(
        self,
        processor: OutputProcessor,
        context: Callable[[MicroBatch, Signal | RoutedSignals | None], Any],
        micro_batches: Sequence[MicroBatch],
        signals: Sequence[PairSignal],
        mtp: MtpObjective | None = None,
    ) -> list[Any]:
        """Run another output processor on each micro-batch, without gradients and in eval mode; returns its results.

        The list is empty on processes whose results do not count (see `Runner.has_results`). context: makes the
        processor's context from a micro-batch and its signal. mtp: the objective of the MTP layers; None: they do
        not run.
        """
        with ExitStack() as modes:
            for student in self.runner.students():
                modes.enter_context(evaluating(student))
            computation = self._computation(processor, context, mtp=mtp)
            results = self.runner.forward(computation, micro_batches, signals)
        return results if self.runner.has_results else []

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """The student's log-probability of the label of each row of each micro-batch, at temperature 1.

        A collective of all processes. Empty on processes whose results do not count.
        """
        context = partial(_targets, normalizer=1.0)
        outputs = self.process(cross_entropy(), context, micro_batches, [None] * len(micro_batches))
        return [-each.per_token["cross_entropy"] for each in outputs]

    def with_objective(self, objective: ObjectiveSpec) -> "Engine":
        """The same student and optimizer with this objective alone: no loss of routers, no comparison of hidden
        states, and MTP layers run, but their loss has the factor 0.
        """
        other = copy.copy(self)
        other.objective, other.optimizer = objective, self.optimizer
        other.mtp = None if self.mtp is None else replace(self.mtp, scale=0.0)
        other.compares_hidden, other.router_aux_loss = False, 0.0
        return other

    def single_losses(self) -> Iterator[tuple[str, "Engine"]]:
        """For each loss beside the objective, its name and the same student with this loss alone."""
        none = ObjectiveSpec(entropy=0.0)  # a term of scale 0 has no gradient
        if self.mtp is not None and self.mtp.scale:
            alone = self.with_objective(none)
            alone.mtp = self.mtp
            yield "student.mtp", alone
        if self.hidden:
            alone = self.with_objective(none)
            alone.compares_hidden = self.compares_hidden
            yield "objective.hidden", alone
        if self.router_aux_loss:
            alone = self.with_objective(none)
            alone.router_aux_loss = self.router_aux_loss
            yield ROUTER_LOSS, alone

    @property
    def hidden(self) -> Sequence[HiddenPair]:
        """The pairs of layers whose hidden states are compared (`match_hidden`)."""
        match = self.runner.students()[0].hidden_match
        return () if match is None or not self.compares_hidden else match.all_pairs

    @property
    def needs_teacher(self) -> bool:
        """Whether a step needs a teacher's signals."""
        return self.objective.needs_teacher or bool(self.hidden) or (self.mtp is not None and self.mtp.needs_teacher)

    def zero_grad(self) -> None:
        self.runner.zero_grad()

    def _computation(
        self,
        processor: OutputProcessor,
        context: Callable[[MicroBatch, Signal | RoutedSignals | None], Any],
        mtp: MtpObjective | None = None,
    ) -> Computation:
        next_tokens = None
        if mtp is not None:
            further, group = distillation(mtp.spec, chunk_tokens=self.chunk_tokens), self.runner.context_group
            next_tokens = NextTokens(mtp.depths, group)
            processor = multi_token(
                processor,
                further,
                mtp.scale,
                of_student=mtp.of_student,
                next_tokens=None if group is None else next_tokens,
            )
            context = with_positions(context)
        return Computation(processor, context, self.precision, mtp=next_tokens)

    def precision(self) -> torch.autocast:
        """The student's autocast. Every forward calls this, so it also tells the watchdog of the run's progress."""
        watchdog.progress()
        # The cache would keep bfloat16 copies of all layers' weights, also of gathered ones, until a forward ends.
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False)

    def _router_aux_losses(self, normalizer: float) -> RouterAuxLosses | None:
        if not self.router_aux_loss:
            return None
        return RouterAuxLosses(self.router_aux_loss / normalizer, self.runner.context_group)

    def _totals(
        self,
        outputs: Sequence[ObjectiveOutput],
        routers: RouterAuxLosses | None = None,
        hidden: HiddenLosses | None = None,
    ) -> dict[str, float]:
        """Metric sums over all processes, the same on every process."""
        runner = self.runner
        own = summed_metrics(outputs if runner.has_results else ())
        if runner.is_counted:
            own |= {} if routers is None else routers.total()
            own |= {} if hidden is None else hidden.total()
        sums = add_up(runner.ranks.gather(own))
        if ROUTER_LOSS in sums:
            sums["loss"] += self.router_aux_loss * sums[ROUTER_LOSS] / max(1.0, sums["tokens"])
        for pair in self.hidden if hidden is not None else ():
            sums["loss"] += pair.scale * sums.get(pair.name, 0.0) / max(1.0, sums["tokens"])
        return sums


def summed_metrics(outputs: Sequence[ObjectiveOutput]) -> dict[str, float]:
    """Add up the metrics of several micro-batches; `loss` is the sum of their losses.

    The value of `CHUNK_TOKENS`, the rows of a logits tile, is the largest one instead. Waits for the device once.
    """
    if not outputs:
        return {}
    named = [(name, each) for output in outputs for name, each in [("loss", output.loss), *output.metrics.items()]]
    values = torch.stack([each for _, each in named]).tolist()
    return add_up([{name: value} for (name, _), value in zip(named, values, strict=True)])


def add_up(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the `summed_metrics` of several processes into one."""
    total: dict[str, float] = {}
    for each in sums:
        for name, value in each.items():
            both = (total.get(name, 0.0), value)
            total[name] = max(both) if name == CHUNK_TOKENS else sum(both)
    return total


def _temperature(signal: object) -> float:
    """The temperature of a held-out divergence: 1, or the only one at which a sparse signal is known."""
    sparse = signal.first if isinstance(signal, SpanSignal) else signal
    known = sparse.temperature if isinstance(sparse, SparseSignal) else None
    return 1.0 if known is None else known


def _targets(micro_batch: MicroBatch, signal: Signal | RoutedSignals | None, *, normalizer: float) -> DistillTargets:
    return DistillTargets(
        micro_batch.labels_T,
        micro_batch.weights_T,
        normalizer,
        micro_batch.valid_index,
        signal=signal,
        per_token=micro_batch.per_token,
        document_T=micro_batch.document_T,
    )
