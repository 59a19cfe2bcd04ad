"""A step's loss and gradient for models of all families, against transformers' model on one document at a time.

The divergence is computed in float64 from float32 logits. Documents of unlike lengths share micro-batches: packed,
packed with masks, or in rows, as the proof at load decides for each model.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.causal_families import CAUSAL, build
from kit.family_steps import of_pair, plain, require_equal
from kit.runs import forward_backward
from kit.teacher_gradients import named_gradients

from stillhouse.loops.session import Session
from stillhouse.models import Decoder
from stillhouse.parallel import single_process_runner
from stillhouse.signals.scorer import Scorer, ScoreRequest
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

#: how documents of a few families are packed
QUICK = {"qwen3": "packed", "gpt_oss": "masked", "qwen3_5": "rows", "nemotron_h": "rows", "llama4": "rows"}


def require_plain_step(session: Session, folder: Path) -> None:
    session.models.student.eval()  # some families have dropout
    loss = forward_backward(session).sums["loss"]
    expected_loss, expected = plain(session, folder)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    require_equal(named_gradients(session.models.student.pretrained), expected)


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
NAMED = (
    *("afmoe", "aya_vision", "bailing_hybrid", "bamba", "bloom", "deepseek_v32", "deepseek_v4", "falcon"),
    *("falcon_h1", "falcon_mamba", "gemma3n_text", "gemma4", "gemma4_text", "glm46v", "glm4_moe", "glm5_next"),
    *("gpt_oss", "granitemoehybrid", "inkling_text", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm2_vl", "lfm3"),
    *("llama4", "mamba", "mamba2", "minimax", "mistral3", "mpt", "nemotron_h", "olmo_hybrid", "opt", "qwen2_5_vl"),
    *("qwen3_5_moe", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba2", "zaya"),
)
FAMILIES = sorted({*NAMED, *CAUSAL[::4]} - {*LEFT_OUT, *QUICK})


@pytest.mark.parametrize("family", QUICK)
def test_a_step_of_a_few_families_is_the_plain_one(tmp_path: Path, family: str) -> None:
    session = of_pair(tmp_path, family, "qwen3")
    assert session.models.student.packing.name == QUICK[family]
    require_plain_step(session, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_more_families_is_the_plain_one(tmp_path: Path, family: str) -> None:
    teacher = family if family in OWN_TOKENIZER else "qwen3"
    require_plain_step(of_pair(tmp_path, family, teacher), tmp_path)


@pytest.mark.parametrize(("student", "teacher"), [("qwen3", "qwen3_5"), ("mamba2", "gpt_oss"), ("opt", "nemotron_h")])
def test_student_and_teacher_may_be_packed_in_different_ways(tmp_path: Path, student: str, teacher: str) -> None:
    session = of_pair(tmp_path, student, teacher)
    assert session.models.teacher is not None
    assert session.models.student.packing.name != session.models.teacher.packing.name
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
        assert session.schedule.step_schedule.steps == 1
        loss = forward_backward(session).sums["loss"]
        steps.append((loss, {name: weight.grad for name, weight in session.models.student.named_parameters()}))
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
