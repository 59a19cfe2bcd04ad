"""The cache of keys and values: the same tokens to the bit, for the models that may have it."""

import pytest
import torch
from kit.families import build
from kit.on_policy_runs import CPU, SAMPLING, as_lists, requests

from stillhouse.models import Decoder
from stillhouse.rollout import generate
from stillhouse.rollout.generate import Generator, RoomyLayer, roomy_cache

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
