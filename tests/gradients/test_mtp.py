"""Multi-token prediction against plain logits, document by document.

B rows, S tokens per row, N tokens of one document, D width, V vocabulary, K entries of a top-k.
"""

from typing import Any

import pytest
import torch
from kit.divergence_formulas import TEXTBOOK, kl
from kit.families import build
from kit.mtp_cases import EACH_FAMILY, LENGTHS, documents, labels_of, make, packed, positions
from kit.teacher_gradients import named_gradients
from kit.tensors import Largest, assert_near
from torch import Tensor

from stillhouse.engine.loss import StepLoss
from stillhouse.models import Decoder
from stillhouse.models.mtp import MultiTokenDecoder
from stillhouse.models.processors import DistillTargets, hidden_states
from stillhouse.objective import TEACHER, TopK
from stillhouse.objective.spec import parse_objective
from stillhouse.objective.tile import chunks


def separate_document(decoder: MultiTokenDecoder, ids_N: Tensor) -> list[Tensor]:
    """Return each depth's hidden states of one document, [N − depth, D].

    Row t of a depth has the position of the token that it is computed from, as in generation.
    """
    by_depth = [decoder.main.backbone(ids_N[None], use_cache=False).last_hidden_state]
    for depth in range(1, decoder.depths + 1):
        below, at = by_depth[-1][:, : len(ids_N) - depth], torch.arange(depth, len(ids_N))[None]
        if not at.numel():
            by_depth.append(below)
            continue
        by_depth.append(decoder.mtp.forward_layer(depth - 1, below, at, None, input_ids=ids_N[None, depth:]))
    return [hidden[0] for hidden in by_depth]


TEMPERATURE, K = 1.3, 5
OBJECTIVES = {
    "cross_entropy": "cross_entropy",
    "jsd": "0.4*cross_entropy + 0.6*jsd(0.3)",
    "forward_kl": "forward_kl",
    "top_k": "forward_kl",
}


def log_probs_of(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits / TEMPERATURE, -1)


def top_k_of(logits_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, their log-probabilities, and the log-probability of all other tokens."""
    log_p_NK, ids_NK = log_probs_of(logits_NV).topk(K)
    return ids_NK, log_p_NK, torch.log1p(-log_p_NK.exp().sum(1))


def plain_loss(kind: str, logits_NV: Tensor, labels_N: Tensor, teacher_NV: Tensor) -> Tensor:
    """Return the sum over tokens with a label, computed from whole logits."""
    has = labels_N >= 0
    hard = -torch.log_softmax(logits_NV, -1).gather(1, labels_N.clamp(min=0)[:, None])[:, 0][has].sum()
    log_q, log_p = log_probs_of(logits_NV)[has], log_probs_of(teacher_NV)[has]
    if kind == "top_k":
        ids, log_p, tail = top_k_of(teacher_NV[has])
        inside = log_q.gather(1, ids)
        outside = log_q.scatter(1, ids, float("-inf")).logsumexp(1, keepdim=True)
        log_q, log_p = torch.cat([inside, outside], 1), torch.cat([log_p, tail[:, None]], 1)
    if kind == "jsd":
        return 0.4 * hard + 0.6 * TEXTBOOK["jsd(0.3)"](log_p.exp(), log_q.exp())
    return hard if kind == "cross_entropy" else kl(log_p.exp(), log_q.exp())


SCALES = (1.0, 0.5, 0.2)  # weights of the depths; they differ, so that exchanged depths change the gradients
NORMALIZER = 13.0


def plain(decoder: MultiTokenDecoder, teacher: Decoder, kind: str) -> list[Tensor]:
    """Return each depth's loss, computed document by document."""
    losses = [torch.zeros((), dtype=torch.float64) for _ in range(decoder.depths + 1)]
    for ids_N in documents():
        labels_N, teacher_NV = labels_of(ids_N), teacher(ids_N[None])[0].detach().double()
        for depth, hidden in enumerate(separate_document(decoder, ids_N)):
            logits = decoder.mtp._project_to_logits(hidden).double()
            losses[depth] = losses[depth] + plain_loss(kind, logits, labels_N[depth:], teacher_NV[depth:])
    return [loss / NORMALIZER for loss in losses]


def targets_of(teacher: Decoder, kind: str) -> DistillTargets:
    labels_BS = packed([labels_of(document_N) for document_N in documents()])
    ids_BS = packed(documents())
    signal: Any = teacher.signal(ids_BS, positions())
    if kind == "top_k":
        ids, log_p, tail = top_k_of(signal.head.logits(signal.hidden_TE))
        signal = TopK(ids, log_p, tail_log_prob_T=tail, temperature=TEMPERATURE)
    return DistillTargets(labels_BS, signals={TEACHER: signal})


def gradients(decoder: MultiTokenDecoder, losses: list[Tensor]) -> dict[str, Tensor]:
    decoder.zero_grad()
    sum(scale * loss for scale, loss in zip(SCALES, losses, strict=False)).backward()  # type: ignore[union-attr]
    return named_gradients(decoder)


@pytest.mark.parametrize(
    ("family", "depths", "kind"),
    [
        *(("glm4_moe", 2, kind) for kind in OBJECTIVES),
        ("deepseek_v3", 2, "jsd"),
        ("mellum", 1, "jsd"),
        ("qwen3", 2, "jsd"),
    ],
)
def test_loss_and_gradients_are_those_of_plain_logits(family: str, depths: int, kind: str) -> None:
    decoder, teacher = make(family, depths, torch.float64), Decoder(build("llama", seed=3, dtype=torch.float64))
    context = targets_of(teacher, kind).shift_for_mtp(positions(), depths)
    processor = StepLoss(parse_objective(OBJECTIVES[kind], TEMPERATURE), NORMALIZER, chunk_tokens=5)
    outputs = decoder(packed(documents()), positions(), processor=processor, context=context)
    expected = plain(decoder, teacher, kind)
    assert len(outputs) == len(expected) == depths + 1
    for output, loss in zip(outputs, expected, strict=True):
        assert output.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    labels = [sum(max(length - 1 - max(depth, 2), 0) for row in LENGTHS for length in row) for depth in (0, 1, 2)]
    assert [int(output.metrics["tokens"]) for output in outputs] == labels[: depths + 1]

    actual, expected_gradients = gradients(decoder, [output.loss for output in outputs]), gradients(decoder, expected)
    assert actual.keys() == {name for name, parameter in decoder.named_parameters() if parameter.requires_grad}
    assert_near(actual, expected_gradients, 1e-5)


@EACH_FAMILY
def test_packed_rows_are_the_documents_at_every_depth(family: str, depths: int) -> None:
    decoder = make(family, depths, torch.float64)
    with torch.no_grad():
        together = decoder(packed(documents()), positions(), processor=hidden_states)
        separate = [separate_document(decoder, document_N) for document_N in documents()]
    for depth, rows_BSD in enumerate(together):
        actual = [part for row, lengths in zip(rows_BSD, LENGTHS, strict=True) for part in row.split(lengths)]
        for document, by_depth in zip(actual, separate, strict=True):
            assert len(by_depth[depth]) == len(document) - depth
            torch.testing.assert_close(document[: len(by_depth[depth])], by_depth[depth], rtol=0, atol=1e-6)


def test_no_depth_makes_logits_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunks.TILE_ROWS, "cpu", (1, 32))
    rows, tokens, vocabulary = 2, 64, 4001
    decoder = make(depths=2, vocab_size=vocabulary)
    teacher = Decoder(build("llama", vocab_size=vocabulary))
    ids_BS = torch.randint(3, vocabulary, (rows, tokens))
    at_BS = torch.arange(tokens).repeat(rows, 1)
    targets = DistillTargets(ids_BS.roll(-1, 1), signals={TEACHER: teacher.signal(ids_BS, at_BS)})
    context = targets.shift_for_mtp(at_BS, 2)
    processor = StepLoss(parse_objective("0.5*cross_entropy + 0.5*forward_kl"), chunk_tokens=32)
    with Largest() as largest:
        outputs = decoder(ids_BS, at_BS, processor=processor, context=context)
        sum(output.loss for output in outputs).backward()
    assert largest.numbers <= max(32, 48) * vocabulary  # the size of a tile or of a head's weight
    assert largest.numbers < rows * tokens * vocabulary / 2


@EACH_FAMILY
def test_logits_are_the_layers_through_transformers_own_projection(family: str, depths: int) -> None:
    decoder, ids_BS = make(family, depths), packed(documents())
    with torch.no_grad():
        logits = decoder(ids_BS, positions())
        hidden = decoder(ids_BS, positions(), processor=hidden_states)
        assert torch.equal(logits[0], decoder.main(ids_BS, positions()))
        for actual, by_depth in zip(logits[1:], hidden[1:], strict=True):
            assert torch.equal(actual, decoder.mtp._project_to_logits(by_depth))
