"""Draws from a teacher's distribution: unbiased, the same for a document and row wherever it is, and never a trap."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.runs import write_run
from kit.teacher_gradients import gradients
from torch import Tensor

from stillhouse.config import ConfigError
from stillhouse.objective import DenseLogits, Distill, OutputHead, Signal, linear_objective, parse_divergence
from stillhouse.signals import SignalCache
from stillhouse.signals.extract import draw_ids, uniform_numbers
from stillhouse.signals.signal_spec import SignalSpec
from stillhouse.tools.write_cache import write_cache

VOCABULARY, DRAWS, SHARD_BYTES = 251, 50, 5000
FORWARD_KL = {"objective.loss": "forward_kl"}


def uniform(rows: int, draws: int = DRAWS, document: int = 7) -> Tensor:
    return torch.from_numpy(uniform_numbers(document.to_bytes(16, "little"), range(rows), draws))


def dense(signal: dict[str, Tensor]) -> Tensor:
    """How often each id of the vocabulary was drawn, [C, V] float64."""
    total_CV = torch.zeros(len(signal["ids"]), VOCABULARY + 1, dtype=torch.float64)
    columns_CM = signal["ids"].long().where(signal["ids"] >= 0, VOCABULARY)
    return total_CV.scatter_add_(1, columns_CM, signal["counts"].double())[:, :-1]


def test_draws_are_unbiased() -> None:
    """6 rows, 40,000 draws each: the chi-square statistic of 250 degrees of freedom stays below its 1e-6 quantile."""
    torch.manual_seed(0)
    hidden_CE, weight_VE = torch.randn(6, 16), torch.randn(VOCABULARY, 16) * 0.5
    p_CV = (hidden_CE.double() @ weight_VE.double().T / 2.0).softmax(1)
    total_CV = torch.zeros(6, VOCABULARY, dtype=torch.float64)
    for document in range(800):
        total_CV += dense(draw_ids(hidden_CE, OutputHead(weight_VE), uniform(6, document=document), 2.0))
    assert (total_CV.sum(1) == 40_000).all()
    expected_CV = 40_000 * p_CV
    likely_CV = expected_CV > 5
    squares_CV = ((total_CV - expected_CV).square() / expected_CV).masked_fill(~likely_CV, 0.0)
    assert (squares_CV.sum(1) < 370).all()
    assert (squares_CV.sum(1) > 0.4 * likely_CV.sum(1)).all()  # a copy of p would have no variance


def test_peaked_rows_and_ids_without_mass() -> None:
    logits_V3 = torch.full((VOCABULARY, 3), -torch.inf)
    logits_V3[[4, 250], 0] = 0.0
    logits_V3[:, 1] = torch.linspace(-300, 300, VOCABULARY)
    logits_V3[17, 2] = 5.0
    signals = [draw_ids(torch.ones(1, 1), head_of(logits_V), uniform(1), 1.0) for logits_V in logits_V3.T]
    assert signals[0]["ids"][0, :3].tolist() == [4, 250, -1]
    assert signals[0]["counts"][0].sum() == DRAWS
    assert set(signals[1]["ids"][0].tolist()) <= {-1, 247, 248, 249, 250}
    assert signals[1]["counts"].sum() == DRAWS
    assert (signals[2]["ids"][0, :2].tolist(), signals[2]["counts"][0, 0]) == ([17, -1], DRAWS)


def test_uniform_numbers_at_the_ends_draw_ids_that_have_mass() -> None:
    """0 and the largest number below 1; the first and the last ids have no mass."""
    logits_V = torch.full((VOCABULARY,), -torch.inf)
    logits_V[[3, 100, 247]] = torch.tensor([0.1, 0.7, -2.0])
    ends = torch.tensor([[0.0, 1 - 2.0**-53]], dtype=torch.float64)
    assert draw_ids(torch.ones(1, 1), head_of(logits_V), ends, 1.0)["ids"].tolist() == [[3, 247]]


def test_a_row_of_nan_has_no_ids() -> None:
    logits_V = torch.zeros(VOCABULARY)
    logits_V[3] = torch.nan
    signal = draw_ids(torch.ones(1, 1), head_of(logits_V), uniform(1), 1.0)
    assert (signal["ids"] == -1).all()
    assert not signal["counts"].any()


def head_of(logits_V: Tensor) -> OutputHead:
    """A head whose logits are these for a hidden state of 1 (−inf times 0 would be NaN)."""
    return OutputHead(torch.zeros(len(logits_V), 1), logits_V)


def test_uniform_numbers_do_not_depend_on_the_rows_around() -> None:
    document = bytes(range(16))
    all_rows = uniform_numbers(document, range(37), 50)
    np.testing.assert_array_equal(uniform_numbers(document, range(11, 14), 50), all_rows[11:14])
    assert ((all_rows >= 0) & (all_rows < 1)).all()
    assert not np.isin(uniform_numbers(bytes(16), range(37), 50), all_rows).any()
    # numpy's raw stream of Philox is fixed; another stream would be another cache
    assert all_rows[0, :2].tolist() == [0.7761366048984066, 0.9612052412461628]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sampled")


def rows_of(cache: SignalCache) -> dict[bytes, dict[str, Tensor]]:
    return {document: cache.read_document(document, stored.rows) for document, stored in cache.documents.items()}


def test_the_same_draws_in_other_batches_and_shards(folder: Path, tmp_path: Path) -> None:
    write_cache(write_run(folder, **FORWARD_KL), tmp_path / "a", "sampled", top_k=DRAWS, shard_bytes=SHARD_BYTES)
    first = rows_of(SignalCache(tmp_path / "a"))
    config = write_run(folder, **FORWARD_KL, **{"train.micro_batch_tokens": 32, "train.tokens_per_step": 32})
    write_cache(config, tmp_path / "b", "sampled", top_k=DRAWS, shard_bytes=2000)
    second = rows_of(SignalCache(tmp_path / "b"))
    assert first.keys() == second.keys()
    for document, tensors in first.items():
        assert all(torch.equal(value, second[document][name]) for name, value in tensors.items())


def test_a_run_from_draws_approaches_the_live_teachers_gradients(folder: Path, tmp_path: Path) -> None:
    """With 255 draws of each of 100+ rows, the gradient of forward KL is near the exact one, and 15 draws less so."""

    def gradient(**settings: Any) -> Tensor:
        named = gradients(folder, **FORWARD_KL, **settings)[1]
        return torch.cat([value.flatten() for value in named.values()]).double()

    exact, errors = gradient(), []
    for draws in (15, 255):
        out = tmp_path / f"{draws}"
        write_cache(write_run(folder, **FORWARD_KL), out, "sampled", top_k=draws)
        errors.append(float((gradient(**{"teacher.cache": str(out)}) - exact).norm() / exact.norm()))
    assert errors[1] < 0.45 * errors[0]  # √(15 / 255) = 0.24
    assert errors[1] < 0.5


def test_the_mean_gradient_over_draws_is_the_exact_one() -> None:
    """Of 1,000 repetitions, within 5.5 standard deviations, for every hidden state's every number."""
    torch.manual_seed(0)
    teacher_CE, weight_VE = torch.randn(5, 16), torch.randn(VOCABULARY, 16) * 0.5
    student_CD, head = torch.randn(5, 9, dtype=torch.float64), OutputHead(torch.randn(VOCABULARY, 9).double())

    def gradient(signal: Signal) -> Tensor:
        hidden_CD = student_CD.clone().requires_grad_()
        loss = linear_objective(
            hidden_CD, head, [Distill(signal, parse_divergence("forward_kl"), temperature=2.0)]
        ).loss
        return torch.autograd.grad(loss, hidden_CD)[0]

    exact_CD = gradient(DenseLogits(teacher_CE.double() @ weight_VE.double().T))
    spec, estimates = SignalSpec("sampled", "float32", DRAWS, 2.0), []
    for document in range(1000):
        sampled = draw_ids(teacher_CE, OutputHead(weight_VE), uniform(5, document=document), 2.0)
        estimates.append(gradient(spec.as_signal(sampled, "bucket")))
    stacked = torch.stack(estimates)
    deviation_CD = stacked.std(0) / 1000**0.5
    assert ((stacked.mean(0) - exact_CD).abs() <= 5.5 * deviation_CD + 1e-6).all()
    assert (deviation_CD < 0.05 * exact_CD.norm()).all()


def test_other_divergences_than_forward_kl_are_refused(folder: Path, tmp_path: Path) -> None:
    write_cache(write_run(folder, **FORWARD_KL), tmp_path / "cache", "sampled", top_k=DRAWS)
    with pytest.raises(ConfigError, match="sampled ids can only estimate forward_kl"):
        gradients(folder, **{"objective.loss": "jsd(0.5)", "teacher.cache": str(tmp_path / "cache")})
