"""Top-k, chosen and ranked log-probabilities against float64, from a whole vocabulary and from shards of it."""

import pytest
import torch
from kit.extract_jobs import Problem, problem, signals, whole
from kit.shard_ranks import RankPool, shared_pool
from torch import Tensor

from stillhouse.objective import OutputHead
from stillhouse.signals.extract import Extract, SignalRows
from stillhouse.signals.id_log_probs import chosen_log_probs, ranked_log_probs
from stillhouse.signals.signal_spec import SignalSpec

EVEN = ((0, 126), (126, 251))
UNEVEN = ((0, 200), (200, 203), (203, 251))
EMPTY = ((0, 84), (84, 168), (168, 251), (251, 251))


def oracle(given: Problem) -> dict[str, dict[str, Tensor]]:
    """The same in float64, with plain operations over the whole vocabulary."""
    logits_CV = given.hidden_CE.double() @ given.weight_VE.double().T + given.bias_V.double()
    log_p_CV = (logits_CV / given.temperature).log_softmax(1)
    best_CK, ids_CK = log_p_CV.topk(given.top_k)
    log_probs_CK = torch.full(given.ids_CK.shape, -torch.inf, dtype=torch.float64)
    outside_CV = log_p_CV.clone()
    for row, ids in enumerate(given.ids_CK.tolist()):
        for at, token in enumerate(ids):
            if token >= 0 and token not in ids[:at]:
                log_probs_CK[row, at] = log_p_CV[row, token]
                outside_CV[row, token] = -torch.inf
    at_1_CV, label_C1 = logits_CV.log_softmax(1), given.labels_C[:, None]
    label_log_p_C1 = at_1_CV.gather(1, label_C1)
    return {
        "top_k": {
            "ids": ids_CK,
            "log_probs": best_CK,
            "tail_log_prob": log_p_CV.scatter(1, ids_CK, -torch.inf).logsumexp(1),
        },
        "chosen": {"ids": given.ids_CK, "log_probs": log_probs_CK, "tail_log_prob": outside_CV.logsumexp(1)},
        "ranked": {
            "log_prob": label_log_p_C1[:, 0],
            "rank": (at_1_CV >= label_log_p_C1).sum(1),
            "ids": ids_CK,
            "log_probs": at_1_CV.topk(given.top_k)[0],
        },
    }


def assert_equal(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    for kind, tensors in expected.items():
        assert found[kind].keys() == tensors.keys()
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                own = found[kind][name].double()
                torch.testing.assert_close(own, tensor, rtol=2e-6, atol=5e-5, msg=f"{kind} {name}")
            else:
                assert torch.equal(found[kind][name].long(), tensor), f"{kind} {name}"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_every_signal_equals_float64(temperature: float) -> None:
    given = problem((), temperature=temperature)
    expected = oracle(given)
    assert (expected["chosen"]["tail_log_prob"] < -3).any()
    assert_equal(whole(given), expected)


@pytest.fixture(scope="module")
def pool() -> RankPool:
    return shared_pool()


@pytest.mark.parametrize("top_k", [1, 7, 100])
@pytest.mark.parametrize("borders", [EVEN, UNEVEN, EMPTY], ids=["even", "uneven", "a rank without rows"])
def test_shards_of_the_vocabulary_give_the_signals_of_the_whole(
    pool: RankPool, borders: tuple[tuple[int, int], ...], top_k: int
) -> None:
    """A rank may hold fewer than K ids."""
    given = problem(borders, max(top_k, 4))._replace(top_k=top_k)
    given = given._replace(ids_CK=given.ids_CK[:, :top_k])
    results = pool.call(signals, given)[: len(borders)]
    for found in results:
        assert_equal(found, oracle(given))
    for name, result in results[0]["top_k"].items():
        assert torch.equal(result, results[1]["top_k"][name])


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    head = OutputHead(torch.randn(9, 4))
    with pytest.raises(ValueError, match="id 9 of a teacher with a vocabulary of 9"):
        chosen_log_probs(torch.randn(3, 4), head, torch.tensor([[1], [9], [2]]), 1.0)
    with pytest.raises(ValueError, match="top_k=10 of a teacher with a vocabulary of 9"):
        ranked_log_probs(torch.randn(3, 4), head, torch.tensor([1, 2, 3]), 10)


def test_no_rows_give_empty_tensors() -> None:
    head, none = OutputHead(torch.randn(9, 4)), torch.zeros(0, 2, dtype=torch.int32)
    assert chosen_log_probs(torch.zeros(0, 4), head, none, 1.0)["log_probs"].shape == (0, 2)
    assert ranked_log_probs(torch.zeros(0, 4), head, none[:, 0], 3)["ids"].shape == (0, 3)


def test_nan_stays_nan_in_every_signal() -> None:
    """A NaN that became −inf or a number would be trained on."""
    head, hidden_CE = OutputHead(torch.randn(9, 4)), torch.full((1, 4), torch.nan)
    ids_CK = torch.tensor([[3, -1]])
    assert chosen_log_probs(hidden_CE, head, ids_CK, 1.0)["tail_log_prob"].isnan().all()
    extract = Extract(SignalSpec("chosen", "float32", 2, 1.0))
    found = extract(hidden_states=hidden_CE[None], head=head, context=SignalRows(torch.tensor([0]), ids_CK))
    assert found["log_probs"].isnan().any()
    assert ranked_log_probs(hidden_CE, head, ids_CK[:, 0], 2)["log_prob"].isnan().all()
