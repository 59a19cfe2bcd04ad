"""Output processors: what objectives make of hidden states and head, on any model that hands them over.

    decoder(input_ids, processor=selected_log_probs(), context=Targets(labels))
    model(…, output_processor=MegatronProcessor(model, cross_entropy()), output_processor_context=Targets(labels))

A processor is set up once, with what does not change from batch to batch; its context brings a micro-batch's tensors.
No processor makes logits of all tokens, and each says the same of a vocabulary shard as of the whole head.

Row t of depth 0 predicts labels_T[t]; a head of depth k, of multi-token prediction, has the same rows and predicts
the k-th token after that one. `ahead` is the one place where anything is shifted for it.

B rows of S tokens each, T = B·S tokens in the rows' order, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from stillhouse.models.head import OutputProcessor
from stillhouse.objective import (
    CrossEntropy,
    Entropy,
    FullVocab,
    ObjectiveOutput,
    OutputHead,
    PolicyGradient,
    Signal,
    Term,
    linear_log_probs,
    linear_objective,
)
from stillhouse.objective.recipe import Recipe


@dataclass(frozen=True, eq=False)
class Targets:
    """The tokens that are to come, and what each counts.

    labels_T: of any shape, in the rows' order; negative: none. weights_T: like them; None: 1 where there is a label.
    normalizer: what the sum over tokens is divided by: the optimizer step's global count of tokens with a weight.
    valid_index: the rows with a weight, where it is known (see `linear_objective`).
    further: the same of depth 1, 2, … (see `ahead`).
    """

    labels_T: Tensor
    weights_T: Tensor | None = None
    normalizer: float | Tensor = 1.0
    valid_index: Tensor | None = None
    further: tuple[Self, ...] = ()

    _per_token: ClassVar[tuple[str, ...]] = ("labels_T", "weights_T")

    def __post_init__(self) -> None:
        if self.weights_T is None:
            object.__setattr__(self, "weights_T", (self.labels_T >= 0).float())
        for name in self._per_token:
            if isinstance(given := getattr(self, name), Tensor):
                object.__setattr__(self, name, given.flatten())

    def at(self, depth: int) -> Self:
        """Raises ValueError for a depth that `further` does not have."""
        if depth > len(self.further):
            raise ValueError(
                f"depth {depth} of multi-token prediction with targets of {len(self.further)} further depths: "
                f"expected targets.ahead(position_ids, {depth})"
            )
        return self.further[depth - 1] if depth else self

    def ahead(self, position_ids_BS: Tensor, depths: int) -> Self:
        """With `depths` further ones: of depth k, row t has what row t + k has here, where that is in the same
        document, otherwise no label and weight 0. For whole rows: context shards are cut from what it gives (`rows`).

        position_ids_BS: [B, S], restarting at each document; [1, S] for rows that are alike.
        """
        tokens, shape_BS = len(self.labels_T), tuple(position_ids_BS.shape)
        rows, rest = divmod(tokens, shape_BS[1])
        if rest or shape_BS[0] not in (1, rows):
            raise ValueError(f"position_ids of shape {shape_BS} for {tokens} labels: expected [B, S], all rows whole")
        positions_BS = position_ids_BS.expand(rows, -1)
        return replace(self, further=tuple(self._moved(*each) for each in _ahead(positions_BS, depths)))

    def rows(self, index_T: Tensor) -> Self:
        """Some of the rows, at every depth: those of a context shard."""
        return replace(self._taken(index_T), further=tuple(each._taken(index_T) for each in self.further))

    def _moved(self, index_T: Tensor, exists_T: Tensor) -> Self:
        taken = self._taken(index_T)
        assert taken.weights_T is not None
        labels_T = taken.labels_T.masked_fill(~exists_T, -1)
        return replace(taken, labels_T=labels_T, weights_T=taken.weights_T.masked_fill(~exists_T, 0.0), further=())

    def _taken(self, index_T: Tensor) -> Self:
        taken: dict[str, Any] = {
            name: each.rows(index_T) if isinstance(each, Signal) else each[index_T]
            for name in self._per_token
            if (each := getattr(self, name)) is not None
        }
        return replace(self, **taken, valid_index=None, further=())


@dataclass(frozen=True, eq=False)
class Taught(Targets):
    """Targets and what a teacher says of the same rows; None where no term asks it."""

    signal: Signal | None = None

    _per_token = (*Targets._per_token, "signal")


@dataclass(frozen=True, eq=False)
class Drawn(Targets):
    """Tokens that a policy drew, and what is known of each; as `PolicyGradient` takes it."""

    advantages_T: Tensor | None = None
    old_log_probs_T: Tensor | None = None
    reference_log_probs_T: Tensor | None = None

    _per_token = (*Targets._per_token, "advantages_T", "old_log_probs_T", "reference_log_probs_T")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("advantages_T", "old_log_probs_T"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} is missing: expected a number for each of {len(self.labels_T)} tokens")


@dataclass(frozen=True, eq=False)
class LogProbs:
    """Of the label at each row, 0 where there is none, and the entropy in nats of each row's distribution; float32 at
    least, both differentiable."""

    log_probs_BS: Tensor
    entropy_BS: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.log_probs_BS, self.entropy_BS))


@dataclass(frozen=True)
class Objective:
    """The processor of a weighted sum of terms, which are made of each micro-batch's context."""

    terms: Callable[[Any], Sequence[Term]]
    chunk_tokens: int | None = None

    def __call__(
        self, *, hidden_states: Tensor, head: OutputHead, context: Targets, depth: int = 0
    ) -> ObjectiveOutput:
        here = context.at(depth)
        return linear_objective(
            hidden_states.flatten(0, -2),
            head,
            self.terms(here),
            weights_T=here.weights_T,
            valid_index=here.valid_index,
            normalizer=here.normalizer,
            chunk_tokens=self.chunk_tokens,
        )


def hidden_states(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> Tensor:
    """[B, S, D] after the last norm, as they are: for serving, and for teachers whose head is elsewhere."""
    return alike(hidden_states, head)


def alike(hidden_states: Tensor, head: OutputHead) -> Tensor:
    """Hidden states for arithmetic that all ranks of a vocabulary shard do alike, as a value head's.

    Under sequence parallelism the layer below sums their gradient over these ranks (`VocabShard.reduce_hidden_grad`),
    as a shard's own part needs it: what all of them have whole, each hands back a part of.
    """
    shard = head.shard
    if shard is None or shard.is_alone or shard.reduce_hidden_grad:
        return hidden_states
    assert shard.group is not None
    return _PartOfGradient.apply(hidden_states, shard.group.size())


def full_vocab(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> FullVocab:
    """What a teacher says, exactly, without a gradient."""
    if head.weight_VD.requires_grad:  # a frozen one as it is: where its rows travel, they do so once for a tensor
        head = replace(
            head, weight_VD=head.weight_VD.detach(), bias=None if head.bias is None else head.bias.detach()
        )
    return FullVocab(hidden_states.detach().flatten(0, -2), head)


def selected_log_probs(*, temperature: float = 1.0) -> OutputProcessor:
    """`LogProbs` of the context's labels (`Targets`), in the shape of the rows, whatever their weights."""

    def process(*, hidden_states: Tensor, head: OutputHead, context: Targets, depth: int = 0) -> LogProbs:
        hidden_TD, labels_T = hidden_states.flatten(0, -2), context.at(depth).labels_T
        made = linear_log_probs(hidden_TD, head, labels_T, temperature=temperature)
        return LogProbs(*(each_T.view(hidden_states.shape[:-1]) for each_T in made))

    return process


def cross_entropy(*, label_smoothing: float = 0.0, z_loss: float = 0.0) -> OutputProcessor:
    """`ObjectiveOutput` of cross-entropy with the context's labels (`Targets`)."""
    return Objective(lambda context: [CrossEntropy(context.labels_T, 1.0, label_smoothing, z_loss)])


def distillation(recipe: Recipe, *, chunk_tokens: int | None = None) -> OutputProcessor:
    """`ObjectiveOutput` of `parse_recipe("0.3*cross_entropy + 0.7*jsd(0.5)")`, of which the context is `Taught`."""

    def terms(context: Taught) -> list[Term]:
        if recipe.needs_teacher and context.signal is None:
            raise ValueError(f"signal is missing: expected what a teacher says of {len(context.labels_T)} tokens")
        return recipe.terms(context.labels_T, context.signal)

    return Objective(terms, chunk_tokens)


def policy_gradient(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_scale: float = 0.0,
    entropy_bonus: float = 0.0,
    temperature: float = 1.0,
) -> OutputProcessor:
    """`ObjectiveOutput` of PPO's and GRPO's clipped surrogate, of which the context is `Drawn`; see `PolicyGradient`.

    entropy_bonus: what the entropy is multiplied by before it is taken off the loss.
    """

    def terms(context: Drawn) -> Iterator[Term]:
        assert context.advantages_T is not None
        assert context.old_log_probs_T is not None
        yield PolicyGradient(
            context.labels_T,
            context.advantages_T,
            context.old_log_probs_T,
            context.reference_log_probs_T,
            clip_low,
            clip_high,
            kl_scale,
            temperature=temperature,
        )
        if entropy_bonus:
            yield Entropy(-entropy_bonus, temperature)

    objective = Objective(lambda context: list(terms(context)))

    def process(*, hidden_states: Tensor, head: OutputHead, context: Drawn, depth: int = 0) -> ObjectiveOutput:
        if depth:
            raise ValueError(
                f"a policy gradient at depth {depth}: expected 0, the head that tokens are drawn from; "
                "by_depth(policy_gradient(…), cross_entropy()) has another objective for the others"
            )
        return objective(hidden_states=hidden_states, head=head, context=context)

    return process


def by_depth(main: OutputProcessor, further: OutputProcessor) -> OutputProcessor:
    """`main` for the main head, `further` for the depths of multi-token prediction; one context for both."""

    def process(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> Any:
        chosen = further if depth else main
        return chosen(hidden_states=hidden_states, head=head, context=context, depth=depth)

    return process


class _PartOfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, parts: int) -> Tensor:
        ctx.parts = parts
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.parts, None


def _ahead(position_ids_BS: Tensor, depths: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each depth k from 1 on: of every row, the row k further, and whether it is in the same document [T]."""
    rows, tokens = position_ids_BS.shape
    document_BS = (position_ids_BS == 0).cumsum(1)
    place_S = torch.arange(tokens, device=position_ids_BS.device)
    starts_B1 = torch.arange(rows, device=position_ids_BS.device)[:, None] * tokens
    for depth in range(1, depths + 1):
        further_S = (place_S + depth).clamp(max=tokens - 1)
        same_BS = (document_BS[:, further_S] == document_BS) & (place_S + depth < tokens)
        yield (starts_B1 + further_S).flatten(), same_BS.flatten()
