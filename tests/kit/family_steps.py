"""Runs of any causal families, and the loss and gradients that plain transformers has for their first step."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kit.causal_families import build, tiny_config
from kit.runs import session_of
from kit.teacher_gradients import named_gradients
from kit.toy_tokenizer import toy_tokenizer
from torch import Tensor

from stillhouse.loops.session import Session
from stillhouse.models.families import text_config
from stillhouse.models.pretrained import load_causal_lm


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


def plain(
    session: Session, folder: Path, dtype: str = "float32", load: Callable[..., Any] = load_causal_lm
) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of the first step: 0.3 cross-entropy + 0.7 JSD(0.5), a document at a time."""
    student, teacher = (load(folder / name, dtype=dtype) for name in ("student", "teacher"))
    documents, losses = session.data.train.documents, []
    for sequence in np.concatenate(session.schedule.step_schedule.micro_batches(session.data.train, 0).rows):
        for document in session.data.train.members(sequence):
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


def require_equal(gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare gradients by name. Errors are relative to the norm of all expected gradients."""
    nonzero = {name for name, gradient in expected.items() if gradient.any()}
    assert nonzero <= gradients.keys()
    scale = torch.cat([expected[name].flatten() for name in nonzero]).norm()
    for name, gradient in gradients.items():
        error = (gradient - expected.get(name, torch.zeros(()))).norm()
        assert error <= 1e-5 * scale, (name, float(error / scale))
