"""Output processors against the logits of the same Hugging Face models: values, and every parameter's gradient.

B rows of two documents each, S tokens per row, T = B·S, V vocabulary, K ids per token.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.config_cases import assert_refused, refused_calls
from kit.families import build
from kit.objective_cases import distance, generator
from kit.processor_cases import (
    DOCUMENTS,
    IDS_BS,
    KNOWN_T,
    LABELLED,
    LABELS_BS,
    LABELS_T,
    POSITIONS_BS,
    SOME_T,
    at_depth,
)
from kit.teacher_gradients import named_gradients
from kit.tensors import Largest, assert_equal_tensors, assert_near
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.engine.loss import StepLoss
from stillhouse.models import Decoder, OutputProcessor
from stillhouse.models.processors import (
    DistillTargets,
    LogProbs,
    PolicyTargets,
    Targets,
    by_depth,
    cross_entropy,
    full_vocab,
    hidden_states,
    policy_gradient,
    selected_log_probs,
)
from stillhouse.objective import TEACHER
from stillhouse.objective.spec import parse_objective
from stillhouse.objective.tile import chunks

B, S = LABELS_BS.shape
T = B * S
MODELS = {
    "tied": ("qwen3", True),
    "untied": ("qwen3", False),
    "softcap": ("gemma2", True),
    "divided": ("granite", False),
    "multiplied": ("cohere", True),
}
EACH_MODEL = pytest.mark.parametrize("model", MODELS)


@functools.cache
def built(name: str, seed: int) -> PreTrainedModel:
    family, tied = MODELS[name]
    return build(family, tied=tied, seed=seed, dtype=torch.float64)


def model_of(name: str, seed: int = 0) -> PreTrainedModel:
    return built(name, seed)  # the cache takes an argument that is left out for another one


def decoder_of(name: str, seed: int = 0) -> Decoder:
    return Decoder(model_of(name, seed), verify=False)


def logits_of(name: str, seed: int = 0) -> Tensor:
    """Return the logits of the Hugging Face model, [T, V]."""
    return model_of(name, seed)(input_ids=IDS_BS, position_ids=POSITIONS_BS, use_cache=False).logits.flatten(0, 1)


def log_probs_of(logits_TV: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the labels' log-probabilities [T], 0 without a label, and the entropies [T]."""
    log_q_TV = torch.log_softmax(logits_TV / temperature, 1)
    at_label_T = log_q_TV.gather(1, LABELS_T.clamp_min(0)[:, None])[:, 0]
    return at_label_T.masked_fill(~KNOWN_T, 0.0), -(log_q_TV.exp() * log_q_TV).sum(1)


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    actual = named_gradients(model)
    model.zero_grad()
    return actual


def assert_as_from_logits(
    name: str,
    processor: OutputProcessor,
    context: Any,
    plain: Callable[[Tensor], Tensor],
    loss: Callable[[Any], Tensor] = lambda made: made.loss,
) -> Any:
    """Assert that `loss` of the processor's result equals `plain` of logits [T, V], with all gradients.

    Returns the processor's result.
    """
    model = model_of(name)
    made = decoder_of(name)(IDS_BS, POSITIONS_BS, processor=processor, context=context)
    actual, wanted = loss(made), plain(logits_of(name))
    assert distance(actual, wanted) < 1e-12
    actual_gradients = gradients(model, actual)
    assert actual_gradients.keys() == {key for key, _ in model.named_parameters()}
    assert_near(actual_gradients, gradients(model, wanted), 1e-7)  # the norms of these models compute in float32
    return made


@EACH_MODEL
def test_hidden_states_are_the_backbones(model: str) -> None:
    backbone, probe_BSD = model_of(model).base_model, torch.randn(B, S, 48, generator=generator(1))
    actual = decoder_of(model)(IDS_BS, POSITIONS_BS, processor=hidden_states)
    wanted = backbone(input_ids=IDS_BS, position_ids=POSITIONS_BS, use_cache=False).last_hidden_state
    assert torch.equal(actual, wanted)
    actual_gradients = gradients(model_of(model), (actual * probe_BSD).sum())
    wanted_gradients = gradients(model_of(model), (wanted * probe_BSD).sum())
    assert_equal_tensors(actual_gradients, wanted_gradients)


@EACH_MODEL
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_selected_log_probs_under_a_loss_over_sequences(model: str, temperature: float) -> None:
    """The loss has GSPO's length-normalised ratio of each row, and entropies: it is not a sum over tokens."""
    with torch.no_grad():
        old_T, _ = log_probs_of(logits_of(model), temperature)
    old_BS = (old_T + 0.1 * torch.randn(T, generator=generator(2))).masked_fill(~KNOWN_T, 0.0).view(B, S)
    advantages_B = torch.tensor([1.5, -0.5])

    def over_sequences(log_q_BS: Tensor, entropy_BS: Tensor) -> Tensor:
        ratio_B = ((log_q_BS - old_BS).sum(1) / KNOWN_T.view(B, S).sum(1)).exp()
        return (ratio_B * advantages_B).sum() - 0.01 * entropy_BS.mean(1).square().sum()

    made = assert_as_from_logits(
        model,
        selected_log_probs(temperature=temperature),
        Targets(LABELS_BS),
        lambda logits_TV: over_sequences(*(values_T.view(B, S) for values_T in log_probs_of(logits_TV, temperature))),
        lambda made: over_sequences(*made),
    )
    assert isinstance(made, LogProbs)
    assert made.log_probs_BS.shape == made.entropy_BS.shape == (B, S)
    assert (made.log_probs_BS[LABELS_BS < 0] == 0).all()


@EACH_MODEL
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_cross_entropy(model: str, smoothing: float, z_loss: float) -> None:
    def plain(logits_TV: Tensor) -> Tensor:
        smoothed = F.cross_entropy(logits_TV, LABELS_T, reduction="sum", label_smoothing=smoothing)
        return (smoothed + z_loss * logits_TV.logsumexp(1)[KNOWN_T].square().sum()) / LABELLED

    processor = cross_entropy(label_smoothing=smoothing, z_loss=z_loss, normalizer=LABELLED)
    made = assert_as_from_logits(model, processor, Targets(LABELS_BS), plain)
    assert made.metrics["tokens"] == LABELLED


@EACH_MODEL
def test_distillation_from_a_second_model(model: str) -> None:
    """Student and teacher have different weights, and the teacher gets no gradient."""
    teacher = decoder_of(model, seed=1)
    signal = teacher(IDS_BS, POSITIONS_BS, processor=full_vocab)
    assert not signal.hidden_TE.requires_grad
    assert not signal.head.weight_VD.requires_grad
    weights_BS = torch.rand(B, S, generator=generator(3)).round(decimals=1)
    weights_BS[0, 4:7] = 0
    teacher_TV = logits_of(model, seed=1).detach()

    def plain(logits_TV: Tensor) -> Tensor:
        log_p_TV, log_q_TV = (torch.log_softmax(logits / 2.0, 1) for logits in (teacher_TV, logits_TV))
        log_m_TV = ((log_p_TV.exp() + log_q_TV.exp()) / 2).log()
        jsd_TV = log_p_TV.exp() * (log_p_TV - log_m_TV) / 2 + log_q_TV.exp() * (log_q_TV - log_m_TV) / 2
        of_labels_T, _ = log_probs_of(logits_TV)
        return ((0.7 * jsd_TV.sum(1) - 0.3 * of_labels_T) * weights_BS.flatten()).sum() / 11.0

    spec = parse_objective("0.3*cross_entropy + 0.7*jsd(0.5)", temperature=2.0)
    processor = StepLoss(spec, normalizer=11.0, chunk_tokens=5)
    context = DistillTargets(LABELS_BS, weights_BS, signals={TEACHER: signal})
    made = assert_as_from_logits(model, processor, context, plain)
    assert made.metrics["chunk_tokens"] == 5
    assert all(parameter.grad is None for parameter in teacher.parameters())


def policy_targets(name: str, temperature: float, weights_BS: Tensor | None) -> PolicyTargets:
    """Return targets with ratios below, between and above the clips and advantages of both signs.

    Rows without a label hold NaN or infinity.
    """
    with torch.no_grad():
        log_q_T, _ = log_probs_of(logits_of(name), temperature)
    ratios = torch.tensor([0.5, 0.9, 1.1, 2.0, 2.0, 1.1, 0.9, 0.5], dtype=torch.float64).repeat(T)
    advantages = torch.tensor([1.0, 0.3, 2.0, 0.7, -1.0, -0.3, -2.0, -0.7], dtype=torch.float64).repeat(T)
    nothing_T = torch.tensor([math.inf, math.nan, -math.inf], dtype=torch.float64).repeat(T)[:T]
    old_T, advantages_T, reference_T = nothing_T.clone(), nothing_T.clone(), nothing_T.clone()
    old_T[KNOWN_T] = log_q_T[KNOWN_T] - ratios[:LABELLED].log()
    advantages_T[KNOWN_T] = advantages[:LABELLED]
    reference_T[KNOWN_T] = log_q_T[KNOWN_T] + torch.randn(LABELLED, generator=generator(4))
    per_token = (values_T.view(B, S) for values_T in (advantages_T, old_T, reference_T))
    return PolicyTargets(LABELS_BS, weights_BS, None, (), *per_token)


@EACH_MODEL
@pytest.mark.parametrize("rows", ["labelled", "all"])
def test_policy_gradient(model: str, rows: str) -> None:
    """If a row without a label has a weight, only its entropy counts."""
    weights_BS = None if rows == "labelled" else torch.ones(B, S)
    context = policy_targets(model, 0.7, weights_BS)
    counted_T = KNOWN_T if weights_BS is None else torch.ones_like(KNOWN_T)
    assert context.advantages_T is not None
    assert context.old_log_probs_T is not None
    assert context.reference_log_probs_T is not None
    advantages_N, old_N = context.advantages_T[KNOWN_T], context.old_log_probs_T[KNOWN_T]
    reference_N = context.reference_log_probs_T[KNOWN_T]

    def plain(logits_TV: Tensor) -> Tensor:
        log_q_T, entropy_T = log_probs_of(logits_TV, 0.7)
        ratio_N = (log_q_T[KNOWN_T] - old_N).exp()
        gain_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(0.8, 1.28) * advantages_N)
        r_N = reference_N - log_q_T[KNOWN_T]
        penalty_N = r_N.exp() - r_N - 1
        return ((0.3 * penalty_N - gain_N).sum() - 0.02 * entropy_T[counted_T].sum()) / LABELLED

    processor = policy_gradient(
        clip_low=0.2, clip_high=0.28, kl_scale=0.3, entropy_bonus=0.02, temperature=0.7, normalizer=float(LABELLED)
    )
    metrics = assert_as_from_logits(model, processor, context, plain).metrics
    # of eight consecutive tokens two are clipped: the fourth (large ratio, positive advantage) and the last
    assert metrics["clipped"] == sum(number % 8 in (3, 7) for number in range(LABELLED)) > 1
    assert metrics["tokens"] == counted_T.sum()
    assert metrics["reference_kl"] > 0


PROCESSORS: dict[str, Callable[[], OutputProcessor]] = {
    "selected_log_probs": selected_log_probs,
    "cross_entropy": lambda: cross_entropy(label_smoothing=0.1, z_loss=1e-3),
    "distillation": lambda: StepLoss(parse_objective("0.3*cross_entropy + 0.7*jsd(0.5)")),
    "policy_gradient": lambda: policy_gradient(kl_scale=0.1, entropy_bonus=0.01),
}


@pytest.mark.parametrize("processor", PROCESSORS)
def test_no_tensor_is_as_large_as_the_logits(processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, including the backbone, create no tensor of this size; the control with logits does."""
    monkeypatch.setitem(chunks.TILE_ROWS, "cpu", (1, 64))
    rows, tokens, vocabulary = 16, 40, 1021
    decoder = Decoder(build("qwen3", tied=False, vocab_size=vocabulary), verify=False)
    ids_BS = torch.randint(3, vocabulary, (rows, tokens), generator=generator(5))
    labels_BS, some_T = ids_BS.roll(-1, 1), torch.zeros(rows * tokens)
    signal = Decoder(build("qwen3", seed=1, vocab_size=vocabulary), verify=False).signal(ids_BS)
    contexts = {
        "distillation": DistillTargets(labels_BS, signals={TEACHER: signal}),
        "policy_gradient": PolicyTargets(
            labels_BS, advantages_T=some_T, old_log_probs_T=some_T, reference_log_probs_T=some_T
        ),
    }
    with Largest() as largest:
        made = decoder(ids_BS, processor=PROCESSORS[processor](), context=contexts.get(processor, Targets(labels_BS)))
        (made.log_probs_BS.sum() + made.entropy_BS.sum() if isinstance(made, LogProbs) else made.loss).backward()
    with Largest() as largest_of_logits:
        decoder(ids_BS).logsumexp(-1).sum().backward()
    assert largest_of_logits.numbers >= rows * tokens * vocabulary
    assert largest.numbers < rows * tokens * vocabulary / 4


def test_without_a_label_anywhere_the_loss_is_0_and_reaches_every_parameter() -> None:
    decoder, context = decoder_of("untied"), Targets(torch.full((B, S), -100))
    loss = decoder(IDS_BS, POSITIONS_BS, processor=cross_entropy(), context=context).loss
    actual = gradients(decoder.pretrained, loss)
    assert loss == 0
    assert actual.keys() == {key for key, _ in decoder.pretrained.named_parameters()}
    assert not any(gradient.any() for gradient in actual.values())


def test_a_depth_is_the_objective_at_its_own_targets() -> None:
    decoder = decoder_of("tied")
    hidden_BSD = decoder(IDS_BS, POSITIONS_BS, processor=hidden_states).detach()
    context = Targets(LABELS_BS).shift_for_mtp(POSITIONS_BS, 1)
    actual = decoder.head(hidden_BSD, cross_entropy(), context, 1)
    assert torch.equal(actual.loss, decoder.head(hidden_BSD, cross_entropy(), Targets(context.at(1).labels_T)).loss)
    assert actual.metrics["tokens"] == sum(length - 3 for row in DOCUMENTS for length in row)


def test_another_objective_for_further_depths() -> None:
    context = PolicyTargets(LABELS_BS, advantages_T=SOME_T, old_log_probs_T=SOME_T).shift_for_mtp(POSITIONS_BS, 1)
    processor = by_depth(policy_gradient(), cross_entropy())
    assert "policy_gradient" in at_depth(processor, context, 0).metrics
    (actual, expected) = (at_depth(candidate, context, 1) for candidate in (processor, cross_entropy()))
    assert torch.equal(actual.loss, expected.loss)


CONSTANTS = {"advantages_T": SOME_T, "old_log_probs_T": SOME_T}
SAMPLED = PolicyTargets(LABELS_BS, **CONSTANTS)
TRAINED = PolicyTargets(LABELS_BS, **CONSTANTS | {"old_log_probs_T": torch.zeros(T, requires_grad=True)})


@pytest.mark.parametrize(("call", "message"), refused_calls("processors"))
def test_errors(call: str, message: str) -> None:
    assert_refused(call, message, globals())
