"""The tensors of every signal against float64, from a whole vocabulary and from shards of it."""

from typing import NamedTuple

import pytest
import torch
from kit.shard_ranks import Rank, on_ranks
from kit.tensors import assert_equal_tensors
from torch import Tensor

from stillhouse.objective import OutputHead, VocabShard
from stillhouse.signals.extract import SignalRows, chosen_log_probs, extract, ranked_log_probs, top_k_log_probs
from stillhouse.signals.signal_spec import SignalSpec

#: the tensors of signals, by their kinds
Signals = dict[str, dict[str, Tensor]]


class Problem(NamedTuple):
    """hidden_CE, the head's weight and bias, ids and labels. borders: the rows of each rank."""

    hidden_CE: Tensor
    weight_VE: Tensor
    bias_V: Tensor
    ids_CK: Tensor
    labels_C: Tensor
    temperature: float
    top_k: int
    borders: tuple[tuple[int, int], ...]


def problem(borders: tuple[tuple[int, int], ...], top_k: int = 7, temperature: float = 2.0) -> Problem:
    """Peaked rows, so that one id has nearly all of the mass in some of them; absent and repeated ids."""
    torch.manual_seed(0)
    hidden_CE, weight_VE = torch.randn(37, 16) * 5, torch.randn(251, 16)
    ids_CK, labels_C = torch.randint(0, 251, (37, top_k)), torch.randint(0, 251, (37,))
    ids_CK[::3, 2] = -1
    ids_CK[1::3, 3] = ids_CK[1::3, 1]
    ids_CK[5] = -1
    # the likeliest id is one of the chosen ones in some rows, and the label in others
    top_C = (hidden_CE @ weight_VE.T).argmax(1)
    ids_CK[::2, 0] = top_C[::2]
    labels_C[:5] = top_C[:5]
    return Problem(hidden_CE, weight_VE, torch.randn(251), ids_CK, labels_C, temperature, top_k, borders)


def signals(rank: Rank, case: Problem) -> Signals:
    start, stop = case.borders[rank.number]
    shard = VocabShard(start, stop, rank.groups[len(case.borders)])
    return _signals(OutputHead(case.weight_VE[start:stop], case.bias_V[start:stop], shard=shard), case)


def _signals(head: OutputHead, case: Problem) -> Signals:
    return {
        "top_k": top_k_log_probs(case.hidden_CE, head, case.top_k, case.temperature),
        "chosen": chosen_log_probs(case.hidden_CE, head, case.ids_CK, case.temperature),
        "ranked": ranked_log_probs(case.hidden_CE, head, case.labels_C, case.top_k),
    }


EVEN = ((0, 126), (126, 251))
UNEVEN = ((0, 200), (200, 203), (203, 251))
EMPTY = ((0, 84), (84, 168), (168, 251), (251, 251))


def oracle(case: Problem) -> dict[str, dict[str, Tensor]]:
    """The same in float64, with plain operations over the whole vocabulary."""
    logits_CV = case.hidden_CE.double() @ case.weight_VE.double().T + case.bias_V.double()
    log_p_CV = (logits_CV / case.temperature).log_softmax(1)
    best_CK, ids_CK = log_p_CV.topk(case.top_k)
    log_probs_CK = torch.full(case.ids_CK.shape, -torch.inf, dtype=torch.float64)
    outside_CV = log_p_CV.clone()
    for row, ids in enumerate(case.ids_CK.tolist()):
        for at, token in enumerate(ids):
            if token >= 0 and token not in ids[:at]:
                log_probs_CK[row, at] = log_p_CV[row, token]
                outside_CV[row, token] = -torch.inf
    at_1_CV, label_C1 = logits_CV.log_softmax(1), case.labels_C[:, None]
    label_log_p_C1 = at_1_CV.gather(1, label_C1)
    is_known_C1 = (ids_CK == label_C1).any(1, keepdim=True)
    label_entry_C1 = log_p_CV.gather(1, label_C1).masked_fill(is_known_C1, -torch.inf)
    top_k_outside_CV = log_p_CV.scatter(1, ids_CK, -torch.inf)
    labelled_ids = torch.cat([ids_CK, label_C1.masked_fill(is_known_C1, -1)], 1)
    labelled_tail = top_k_outside_CV.scatter(1, label_C1, -torch.inf).logsumexp(1)
    sets = {
        "top_k": (ids_CK, best_CK, top_k_outside_CV.logsumexp(1)),
        "labelled": (labelled_ids, torch.cat([best_CK, label_entry_C1], 1), labelled_tail),
        "chosen": (case.ids_CK, log_probs_CK, outside_CV.logsumexp(1)),
    }
    ranked = {"log_prob": label_log_p_C1[:, 0], "rank": (at_1_CV >= label_log_p_C1).sum(1), "ids": ids_CK}
    names = ("ids", "log_probs", "tail_log_prob")
    signals = {kind: dict(zip(names, values, strict=True)) for kind, values in sets.items()}
    return signals | {"ranked": ranked | {"log_probs": at_1_CV.topk(case.top_k)[0]}}


def assert_equal(by_kind: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    for kind, tensors in by_kind.items():
        assert tensors.keys() == expected[kind].keys()
        for name, values in tensors.items():
            if values.is_floating_point():
                reference = expected[kind][name]
                torch.testing.assert_close(values.double(), reference, rtol=2e-6, atol=5e-5, msg=f"{kind} {name}")
            else:
                assert torch.equal(values.long(), expected[kind][name]), f"{kind} {name}"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_every_signal_equals_float64(temperature: float) -> None:
    """Some rows are so peaked that 1 − Σp has no correct digit in float32; some labels are among the top-k ids."""
    case = problem((), temperature=temperature)
    expected = oracle(case)
    assert (expected["top_k"]["tail_log_prob"] < -20).any()
    assert (expected["chosen"]["tail_log_prob"] < -3).any()
    assert 5 <= (expected["labelled"]["ids"] < 0).sum() < 20
    head = OutputHead(case.weight_VE, case.bias_V)
    labelled = top_k_log_probs(case.hidden_CE, head, case.top_k, case.temperature, labels_C=case.labels_C)
    results = _signals(head, case) | {"labelled": labelled}  # shards cannot give the one with a label
    assert results.keys() == expected.keys()
    assert_equal(results, expected)


@pytest.mark.parametrize("top_k", [1, 7, 100])
@pytest.mark.parametrize("borders", [EVEN, UNEVEN, EMPTY], ids=["even", "uneven", "a rank without rows"])
def test_shards_give_the_signals_of_the_whole(borders: tuple[tuple[int, int], ...], top_k: int) -> None:
    case = problem(borders, max(top_k, 4))._replace(top_k=top_k)
    case = case._replace(ids_CK=case.ids_CK[:, :top_k])
    results = on_ranks(signals, len(borders), case)
    for by_kind in results:
        assert_equal(by_kind, oracle(case))
    assert_equal_tensors(results[0]["top_k"], results[1]["top_k"])


def test_limits_of_ids_rows_and_numbers() -> None:
    head, none = OutputHead(torch.randn(9, 4)), torch.zeros(0, 2, dtype=torch.int32)
    assert top_k_log_probs(torch.randn(3, 4), head, 9, 1.0)["tail_log_prob"].tolist() == [-torch.inf] * 3
    assert chosen_log_probs(torch.zeros(0, 4), head, none, 1.0)["log_probs"].shape == (0, 2)
    assert ranked_log_probs(torch.zeros(0, 4), head, none[:, 0], 3)["ids"].shape == (0, 3)
    hidden_CE, head, message = torch.randn(3, 4), OutputHead(torch.randn(9, 4)), "top_k=10 of a teacher with a vocab"
    with pytest.raises(ValueError, match="id 9 of a teacher with a vocabulary of 9"):
        chosen_log_probs(hidden_CE, head, torch.tensor([[1], [9], [2]]), 1.0)
    with pytest.raises(ValueError, match=message):
        ranked_log_probs(hidden_CE, head, torch.tensor([1, 2, 3]), 10)
    with pytest.raises(ValueError, match=message):
        top_k_log_probs(hidden_CE, head, 10, 1.0)
    head, hidden_CE = OutputHead(torch.randn(9, 4)), torch.full((1, 4), torch.nan)
    rows = SignalRows(torch.tensor([0]), torch.tensor([[3, -1]]))
    tensors = extract(SignalSpec("chosen", "float32", 2, 1.0), hidden_CE[None], head, rows)
    assert tensors["tail_log_prob"].isnan().all()
    assert tensors["log_probs"].isnan().any()
    assert ranked_log_probs(hidden_CE, head, torch.tensor([3]), 2)["log_prob"].isnan().all()
