"""The sampling of tokens in this process, and the cache of keys and values: the same tokens to the bit."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from kit.families import build
from kit.on_policy_runs import CPU, SAMPLING, as_lists, requests
from torch import Tensor

from stillhouse.models import Decoder
from stillhouse.rollout import Sampling, generate
from stillhouse.rollout.generate import Generator, RoomyLayer, roomy_cache
from stillhouse.rollout.sampler import TokenSampler, _gumbel


def filtered(scores_V: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """The probabilities of the tokens that these filters leave, written from their definitions."""
    probabilities_V = scores_V.double().softmax(0)
    order_V = probabilities_V.argsort(descending=True)
    before_V = torch.empty_like(probabilities_V)
    before_V[order_V] = probabilities_V[order_V].cumsum(0) - probabilities_V[order_V]
    is_kept_V = (before_V < top_p) & (probabilities_V >= min_p * probabilities_V.max())
    is_kept_V[order_V[top_k or len(order_V) :]] = False
    kept_V = torch.where(is_kept_V, probabilities_V, 0.0)
    return kept_V / kept_V.sum()


@pytest.mark.parametrize(
    ("rows", "counted", "vocabulary", "filters"),
    [
        *((251, 251, 251, {}), (251, 230, 200, {}), (251, 230, 200, {"top_k": 9}), (128, 128, 128, {"top_p": 0.7})),
        *((40, 40, 37, {"min_p": 0.1}), (40, 40, 37, {"top_p": 0.7})),
    ],
)
def test_tokens_are_sampled_by_probability(rows: int, counted: int, vocabulary: int, filters: dict[str, Any]) -> None:
    """Tokens in full blocks, in the last one, which is not full, and rows that have no token.

    The log-probabilities are over all counted rows, whatever the filters leave.
    """
    torch.manual_seed(0)
    logits_V, count = torch.randn(rows), 20000
    logits_V[1] = -torch.inf
    sampler = TokenSampler(Sampling(1, temperature=0.7, **filters), range(count), 1, vocabulary, CPU, counted)
    sampler(torch.zeros(count, 1, dtype=torch.int64), logits_V.expand(count, -1).clone())
    ids_B1, log_probs_B1 = sampler.result()
    expected_V = filtered((logits_V / 0.7)[:vocabulary], **filters)
    share_V = torch.from_numpy(ids_B1[:, 0]).bincount(minlength=vocabulary) / count
    assert len(share_V) == vocabulary
    assert not share_V[expected_V == 0].any()
    error_V = (share_V - expected_V) / (expected_V * (1 - expected_V) / count).sqrt()
    assert error_V[expected_V * count >= 20].abs().max() < 4.5
    log_probs_V = (logits_V / 0.7)[:counted].double().log_softmax(0).numpy()
    np.testing.assert_allclose(log_probs_B1[:, 0], log_probs_V[ids_B1[:, 0]], atol=1e-5)


def test_noise_is_independent_and_finite() -> None:
    seeds_B2 = torch.stack([torch.arange(400, dtype=torch.int32), torch.zeros(400, dtype=torch.int32)], 1)
    noise_BC = _gumbel(seeds_B2, torch.arange(251, dtype=torch.int32)[None]).double()
    assert noise_BC.isfinite().all()
    assert torch.corrcoef(noise_BC).fill_diagonal_(0).abs().max() < 0.35
    assert torch.corrcoef(noise_BC.T).fill_diagonal_(0).abs().max() < 0.35
    assert float(noise_BC.mean()) == pytest.approx(0.5772, abs=0.02)  # Euler's constant
    assert float(noise_BC.var()) == pytest.approx(math.pi**2 / 6, rel=0.03)
    # the distribution function of the noise is exp(-exp(-x)): its values are uniform
    uniform = (-(-noise_BC).exp()).exp().flatten().sort().values
    assert (uniform - torch.linspace(0, 1, len(uniform))).abs().max() < 0.006
    seeds_B2 = torch.tensor([[2033801605, 1788975990], [463643221, 524684293], [835851283, 1572763043]]).int()
    counters_BC = torch.tensor([[904073], [84142], [38428]]).int()
    noise_BC = _gumbel(seeds_B2, counters_BC)
    torch.testing.assert_close(noise_BC, torch.full((3, 1), -math.log(24 * math.log(2))))


#: whether all layers of a family have full attention
FAMILIES = {"llama": True, "qwen3": False, "gemma3": False}


@pytest.mark.parametrize("family", FAMILIES)
def test_completions_are_those_of_transformers_own_cache(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(build(family))
    generator = Generator(decoder, SAMPLING, CPU)
    completions = generator.generate(requests(), 0)
    assert (roomy_cache(decoder.pretrained, 9) is not None) == FAMILIES[family]
    monkeypatch.setattr(generate, "roomy_cache", lambda model, tokens: None)
    assert as_lists(completions) == as_lists(generator.generate(requests(), 0))


def test_keys_are_not_copied_and_more_tokens_than_there_is_room_for_are_kept() -> None:
    layer, keys, values = RoomyLayer(5), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    layer.update(keys[:, :, :2], values[:, :, :2])
    place = layer.keys.data_ptr()
    for token in range(2, 7):
        cached = layer.update(keys[:, :, token : token + 1], values[:, :, token : token + 1])
        torch.testing.assert_close(cached, (keys[:, :, : token + 1], values[:, :, : token + 1]), rtol=0, atol=0)
        assert (layer.keys.data_ptr() == place) == (token < 5)
    layer.crop(-3)
    assert layer.get_seq_length() == 4
    layer.reset()
    assert layer.get_seq_length() == 0
    cached = layer.update(keys[:, :, 3:5], values[:, :, 3:5])
    torch.testing.assert_close(cached, (keys[:, :, 3:5], values[:, :, 3:5]), rtol=0, atol=0)
