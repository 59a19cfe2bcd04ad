"""A step's loss and gradient for models of all families, against transformers' model on one document at a time.

The divergence is computed in float64 from float32 logits. Documents of unlike lengths share micro-batches: packed,
packed with masks, or in rows, as the proof at load decides for each model.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.causal_families import CAUSAL, build, tiny_config
from kit.runs import forward_backward, session_of
from kit.toy_tokenizer import toy_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.models import Decoder
from stillhouse.models.model_parts import text_config
from stillhouse.models.pretrained import load_causal_lm
from stillhouse.parallel import single_process_runner
from stillhouse.run.session import Session
from stillhouse.signals.scorer import Scorer, ScoreRequest
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

#: how documents of a few families are packed
QUICK = {"qwen3": "packed", "gpt_oss": "masked", "qwen3_5": "rows", "nemotron_h": "rows", "llama4": "rows"}


def save(folder: Path, model_type: str, seed: int) -> Path:
    tokenizer = toy_tokenizer()
    sizes = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), len(tokenizer))
    if not hasattr(text_config(tiny_config(model_type)), "vocab_size_per_layer_input"):
        del sizes["vocab_size_per_layer_input"]
    build(model_type, seed=seed, **sizes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def of_pair(folder: Path, student: str, teacher: str, **settings: Any) -> Session:
    save(folder / "student", student, 1)
    save(folder / "teacher", teacher, 2)
    return session_of(folder, **{"train.micro_batch_tokens": 128} | settings)


def plain(session: Session, folder: Path) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of the first step: 0.3 cross-entropy + 0.7 JSD(0.5), a document at a time."""
    student, teacher = (load_causal_lm(folder / name, dtype="float32") for name in ("student", "teacher"))
    documents, losses = session.train.documents, []
    for sequence in np.concatenate(session.step_schedule.micro_batches(session.train, 0).rows):
        for document in session.train.members(sequence):
            ids_1S = torch.from_numpy(documents.tokens(document).astype(np.int64))[None]
            predicting = torch.from_numpy(np.flatnonzero(documents.targets(document))) - 1
            log_q, log_p = (
                model(input_ids=ids_1S, use_cache=False).logits[0, predicting].double().log_softmax(-1)
                for model in (student, teacher)
            )
            log_m = torch.log((log_p.exp() + log_q.exp()) / 2)
            jsd = sum((log.exp() * (log - log_m)).sum(-1) for log in (log_p, log_q)) / 2
            cross_entropy = -log_q.gather(1, ids_1S[0, predicting + 1, None])[:, 0]
            losses.append(0.3 * cross_entropy + 0.7 * jsd)
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), named_gradients(student)


def named_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def require_plain_step(session: Session, folder: Path) -> None:
    session.student.eval()  # some families have dropout
    loss = forward_backward(session).sums["loss"]
    expected_loss, expected = plain(session, folder)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    gradients = named_gradients(session.student.pretrained)
    nonzero = {name for name, gradient in expected.items() if gradient.any()}
    assert nonzero <= gradients.keys()
    scale = torch.cat([expected[name].flatten() for name in nonzero]).norm()
    for name, gradient in gradients.items():
        error = (gradient - expected.get(name, torch.zeros(()))).norm()
        assert error <= 1e-5 * scale, (name, float(error / scale))


#: families whose models or tokenizers need more than a folder of a tiny model
LEFT_OUT = {
    "modernbert-decoder": "a layer between the last hidden states and the head",
    "emu3": "no class for its text configuration",
    "mllama": "no class for its text configuration",
    "hyperclovax_vision_v2": "its tokenizer's class differs from the teacher's",
    "ovis2": "its vocabulary has another key in the configuration",
}
#: transformers loads a tokenizer of these families as another class than a qwen3's, so the teacher is of the family
OWN_TOKENIZER = ("qwen2", "qwen3_5_moe", "qwen3_5_moe_text")
#: families that people distil, and that positions alone do not keep apart, or whose structure is unlike others'
NAMED = [
    "afmoe",
    "aya_vision",
    "bailing_hybrid",
    "bamba",
    "bloom",
    "deepseek_v32",
    "deepseek_v4",
    "falcon",
    "falcon_h1",
    "falcon_mamba",
    "gemma3n_text",
    "gemma4",
    "gemma4_text",
    "glm46v",
    "glm4_moe",
    "glm5_next",
    "gpt_oss",
    "granitemoehybrid",
    "inkling_text",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "lfm2_vl",
    "lfm3",
    "llama4",
    "mamba",
    "mamba2",
    "minimax",
    "mistral3",
    "mpt",
    "nemotron_h",
    "olmo_hybrid",
    "opt",
    "qwen2_5_vl",
    "qwen3_5_moe",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
    "xlstm",
    "zamba2",
    "zaya",
]
FAMILIES = sorted({*NAMED, *CAUSAL[::4]} - {*LEFT_OUT, *QUICK})


@pytest.mark.parametrize("family", QUICK)
def test_a_step_of_a_few_families_is_the_plain_one(tmp_path: Path, family: str) -> None:
    session = of_pair(tmp_path, family, "qwen3")
    assert session.student.packing.name == QUICK[family]
    require_plain_step(session, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_more_families_is_the_plain_one(tmp_path: Path, family: str) -> None:
    teacher = family if family in OWN_TOKENIZER else "qwen3"
    require_plain_step(of_pair(tmp_path, family, teacher), tmp_path)


@pytest.mark.parametrize(("student", "teacher"), [("qwen3", "qwen3_5"), ("mamba2", "gpt_oss"), ("opt", "nemotron_h")])
def test_student_and_teacher_may_be_packed_in_different_ways(tmp_path: Path, student: str, teacher: str) -> None:
    session = of_pair(tmp_path, student, teacher)
    assert session.teacher is not None
    assert session.student.packing.name != session.teacher.packing.name
    require_plain_step(session, tmp_path)


#: losses beside the objective that read hidden states inside the model, or at further depths
LOSSES_INSIDE: dict[str, dict[str, Any]] = {
    "none": {},
    "hidden states": {
        "objective.hidden": [{"student": 0, "teacher": 1}, {"student": -1, "teacher": -1, "loss": "cosine"}],
        "train.activation_checkpointing": True,
    },
    "multi-token prediction": {"student.mtp": {"depths": 2}},
}


@pytest.mark.parametrize("losses", LOSSES_INSIDE)
def test_rows_and_packing_give_the_same_step(tmp_path: Path, losses: str) -> None:
    """A model that can be packed, both ways, on all documents in one step."""
    one_step = {"train.steps": None, "train.epochs": 1, "train.tokens_per_step": 8192, **LOSSES_INSIDE[losses]}
    steps = []
    for packing in ("packed", "rows"):
        session = of_pair(tmp_path, "qwen3", "qwen3", **one_step, **{"data.packing": packing})
        assert session.step_schedule.steps == 1
        loss = forward_backward(session).sums["loss"]
        steps.append((loss, {name: weight.grad for name, weight in session.student.named_parameters()}))
    (packed_loss, packed), (rows_loss, rows) = steps
    assert rows_loss == pytest.approx(packed_loss, rel=1e-6)
    for name, gradient in packed.items():
        torch.testing.assert_close(rows[name], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", ["qwen3_5", "gpt_oss"])
def test_a_teacher_scores_documents_of_unlike_lengths_as_it_does_alone(family: str) -> None:
    decoder = Decoder(build(family, vocab_size=251))
    ids = [np.arange(3, 3 + length, dtype=np.int32) for length in (5, 17, 2, 9)]
    spec = SignalSpec("hidden", "float32")
    requests = [ScoreRequest(DocumentRows(tokens, range(len(tokens))), spec) for tokens in ids]
    scorer = Scorer(single_process_runner(decoder, None), torch.device("cpu"))
    for batch_tokens in (None, 20):
        for tokens, tensors in zip(ids, scorer.tensors(requests, batch_tokens), strict=True):
            ids_1S = torch.from_numpy(tokens.astype(np.int64))[None]
            with torch.no_grad():
                expected = decoder.backbone(input_ids=ids_1S, use_cache=False).last_hidden_state[0]
            torch.testing.assert_close(tensors["hidden"], expected, rtol=1e-5, atol=1e-5)
