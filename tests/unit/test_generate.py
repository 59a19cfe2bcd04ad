"""Completions in this process: their log-probabilities and ends, and what must have no effect on them.

V vocabulary, N tokens of a completion.
"""

import copy
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kit.families import FAMILIES, build
from kit.on_policy_runs import CPU, SAMPLING, as_lists, requests
from kit.toy_tokenizer import toy_tokenizer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from stillhouse.models import Decoder, eos_ids
from stillhouse.rollout import Completion, GenerationRequest, Sampling
from stillhouse.rollout import generate as generate_module
from stillhouse.rollout.generate import Generator, RoomyLayer, check_generation, roomy_cache
from stillhouse.rollout.sampler import TokenSampler, _gumbel


def reference_log_probs(decoder: Decoder, prompt: np.ndarray, ids_N: np.ndarray, temperature: float) -> np.ndarray:
    """The tokens' log-probabilities in float64, from one forward pass without cache and padding.

    At temperature 0, raises AssertionError for a token that has not the largest logit.
    """
    ids = torch.from_numpy(np.concatenate([prompt, ids_N]).astype(np.int64))
    with torch.no_grad():
        logits_NV = decoder(ids[None])[0, len(prompt) - 1 : -1].double() / (temperature or 1.0)
    assert temperature or (logits_NV.argmax(-1) == ids[len(prompt) :]).all()
    return logits_NV.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0].numpy()


def ids_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.ids_N.tolist() for completion in completions]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.6, 0.0])
def test_log_probs_are_those_of_a_forward_pass_in_float64(family: str, temperature: float) -> None:
    decoder, exact = Decoder(build(family)), Decoder(build(family, dtype=torch.float64))
    check_generation(decoder, CPU)
    all_requests = requests()
    sampling = replace(SAMPLING, temperature=temperature)
    completions = Generator(decoder, sampling, CPU).generate(all_requests, version=7)
    for request, completion in zip(all_requests, completions, strict=True):
        expected = reference_log_probs(exact, request.prompt_ids, completion.ids_N, temperature)
        np.testing.assert_allclose(completion.log_probs_N, expected, rtol=0, atol=2e-5)
        assert completion.versions_N.tolist() == [7] * len(completion.ids_N)
        assert completion.ids_N.dtype == completion.versions_N.dtype == np.int32
        assert completion.log_probs_N.dtype == np.float32
        assert 2 not in completion.ids_N[:-1]
        assert completion.finish == ("stop" if completion.ids_N[-1] == 2 else "length")
        assert completion.finish == "stop" or len(completion.ids_N) == 9


class Roundings(TorchDispatchMode):
    """Counts how often a weight is rounded to bfloat16, by the address of the weight."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self._addresses = {weight.data_ptr() for weight in decoder.parameters()}
        self.counts: Counter[int] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default and (options or {}).get("dtype") == torch.bfloat16:
            self.counts.update({args[0].data_ptr()} & self._addresses)
        return function(*args, **(options or {}))


@pytest.mark.parametrize("trained", [True, False])
def test_a_matrix_is_rounded_once_and_not_for_each_token(trained: bool) -> None:
    decoder = Decoder(build("qwen3"))
    decoder.requires_grad_(trained)
    with Roundings(decoder) as roundings:
        completions = Generator(decoder, SAMPLING, CPU, torch.bfloat16).generate(requests()[:1], 0)
    assert len(completions[0].ids_N) > 1
    matrices = sum(isinstance(module, torch.nn.Linear) for module in decoder.modules())
    assert list(roundings.counts.values()) == [1] * matrices
    assert all(weight.requires_grad == trained for weight in decoder.parameters())


def test_bfloat16_weights_and_autocast() -> None:
    all_requests = requests()
    half = Decoder(build("qwen3", dtype=torch.bfloat16))
    check_generation(half, CPU)
    full_precision = Decoder(build("qwen3"))
    autocast = Generator(full_precision, SAMPLING, CPU, torch.bfloat16)
    for generator in (Generator(half, SAMPLING, CPU), autocast):
        for request, completion in zip(all_requests, generator.generate(all_requests, 0), strict=True):
            expected = reference_log_probs(full_precision, request.prompt_ids, completion.ids_N, 1.0)
            differences = np.abs(completion.log_probs_N - expected)
            assert 0 < np.median(differences) < 0.3


def test_a_completion_depends_on_its_own_seed_alone() -> None:
    decoder, all_requests = Decoder(build("qwen3")), requests()
    generator = Generator(decoder, SAMPLING, CPU)
    together = generator.generate(all_requests, 0)
    assert as_lists(generator.generate(all_requests, 0)) == as_lists(together)
    assert ids_of(generator.generate(all_requests[::-1], 0)) == ids_of(together)[::-1]
    alone = [generator.generate([request], 0)[0] for request in all_requests]
    assert ids_of(alone) == ids_of(together)
    for single, expected in zip(alone, together, strict=True):
        np.testing.assert_allclose(single.log_probs_N, expected.log_probs_N, rtol=0, atol=1e-5)
    others = generator.generate([replace(request, seed=request.seed + 1) for request in all_requests], 0)
    assert all(other != expected for other, expected in zip(ids_of(others), ids_of(together), strict=True))


def test_the_global_random_state_has_no_effect_and_does_not_change() -> None:
    generator = Generator(Decoder(build("phi3")), SAMPLING, CPU)  # a family with dropout
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first = generator.generate(requests(), 0)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(4)
    assert as_lists(generator.generate(requests(), 0)) == as_lists(first)


HOSTILE = {
    **{"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "temperature": 0.01, "top_k": 1, "top_p": 0.01},
    **{"typical_p": 0.1, "do_sample": True, "num_beams": 4, "num_return_sequences": 2, "max_length": 2},
    **{"max_new_tokens": 1, "min_new_tokens": 8, "max_time": 1e-6, "suppress_tokens": list(range(100))},
    **{"begin_suppress_tokens": list(range(200)), "forced_eos_token_id": 5, "forced_bos_token_id": 5},
    **{"bad_words_ids": [[17]], "exponential_decay_length_penalty": (1, 5.0), "sequence_bias": [[[9], 50.0]]},
    **{"guidance_scale": 3.0, "eos_token_id": list(range(3, 251)), "pad_token_id": 2, "use_cache": False},
    **{"return_dict_in_generate": True, "output_scores": True, "renormalize_logits": True},
    **{"remove_invalid_values": True, "cache_implementation": "static", "stop_strings": ["a"]},
}


def test_the_models_generation_config_has_no_effect_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(build("qwen3"))
    expected = as_lists(Generator(decoder, SAMPLING, CPU).generate(requests(), 0))
    hostile = GenerationConfig()
    for name, value in HOSTILE.items():
        setattr(hostile, name, value)
    decoder.pretrained.generation_config = hostile
    assert as_lists(Generator(decoder, SAMPLING, CPU).generate(requests(), 0)) == expected
    assert decoder.pretrained.generation_config is hostile

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(type(decoder.pretrained), "forward", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        Generator(decoder, SAMPLING, CPU).generate(requests(), 0)
    assert decoder.pretrained.generation_config is hostile
    with pytest.raises(ValueError, match=r"model type 'qwen3'.*generate\(\) fails: RuntimeError: no memory"):
        check_generation(decoder, CPU)


def test_ends_of_sequence_of_tokenizer_and_model_are_united() -> None:
    decoder, tokenizer = Decoder(build("qwen3")), toy_tokenizer()
    assert tokenizer.eos_token_id == 2
    for named, expected in [(None, (2,)), (2, (2,)), (7, (2, 7)), ([9, 2, 7], (2, 7, 9))]:
        decoder.pretrained.generation_config = GenerationConfig(eos_token_id=named)
        assert eos_ids(tokenizer, decoder) == expected
    tokenizer.eos_token = None
    decoder.pretrained.generation_config = GenerationConfig()
    assert eos_ids(tokenizer, decoder) == ()


def test_a_completion_ends_at_its_first_end_of_sequence_even_if_the_padding_is_the_same() -> None:
    decoder, all_requests = Decoder(build("llama")), requests()
    free = Generator(decoder, Sampling(max_new_tokens=9), CPU).generate(all_requests, 0)
    ends = tuple({int(free[0].ids_N[2]), int(free[3].ids_N[0]), 0})  # 0 is the id that pads
    completions = Generator(decoder, Sampling(max_new_tokens=9, eos_ids=ends), CPU).generate(all_requests, 0)
    for uncut, cut in zip(free, completions, strict=True):
        stops = [at for at, token in enumerate(uncut.ids_N.tolist()) if token in ends]
        length = stops[0] + 1 if stops else 9
        assert cut.ids_N.tolist() == uncut.ids_N[:length].tolist()
        np.testing.assert_allclose(cut.log_probs_N, uncut.log_probs_N[:length], rtol=0, atol=1e-5)
        assert cut.finish == ("stop" if stops else "length")
    assert {completion.finish for completion in completions} == {"stop", "length"}
    assert len(completions[3].ids_N) == 1
    request = GenerationRequest(0, np.array([5, 2, 2], dtype=np.int32), seed=1)
    (completion,) = Generator(decoder, SAMPLING, CPU).generate([request], 0)
    assert len(completion.ids_N) > 1 or completion.ids_N[0] == 2  # one in the prompt does not count


def test_lengths_of_single_requests() -> None:
    limits = (1, 4, None, 9, 30)
    all_requests = [replace(request, max_new_tokens=most) for request, most in zip(requests(), limits, strict=True)]
    decoder = Decoder(build("gemma3"))
    free = Generator(decoder, Sampling(max_new_tokens=9), CPU).generate(requests(), 0)
    completions = Generator(decoder, Sampling(max_new_tokens=9), CPU).generate(all_requests, 0)
    for cut, uncut, most in zip(completions, free, (1, 4, 9, 9, 9), strict=True):
        assert cut.ids_N.tolist() == uncut.ids_N[:most].tolist()
        assert cut.finish == "length"


def test_stop_texts_end_a_completion_and_stay_in_it() -> None:
    tokenizer = toy_tokenizer()
    decoder, all_requests = Decoder(build("llama", vocab_size=len(tokenizer))), requests(vocabulary=len(tokenizer))
    free = Generator(decoder, Sampling(max_new_tokens=20), CPU).generate(all_requests, 0)
    texts = [tokenizer.decode(completion.ids_N) for completion in free]
    stops = (texts[0][3:6], tokenizer.decode(free[1].ids_N[4:7]))
    sampling = Sampling(max_new_tokens=20, stop=stops)
    completions = Generator(decoder, sampling, CPU, tokenizer=tokenizer).generate(all_requests, 0)
    for uncut, cut in zip(free, completions, strict=True):
        prefixes = [tokenizer.decode(uncut.ids_N[:length]) for length in range(1, 21)]
        lengths = [length for length, text in enumerate(prefixes, 1) if any(stop in text for stop in stops)]
        assert cut.ids_N.tolist() == uncut.ids_N[: lengths[0] if lengths else 20].tolist()
        assert cut.finish == ("stop" if lengths else "length")
    assert completions[0].finish == completions[1].finish == "stop"
    with pytest.raises(ValueError, match="stop texts need the tokenizer"):
        Generator(decoder, sampling, CPU)


def test_a_stop_text_that_begins_in_the_prompt_does_not_count() -> None:
    tokenizer = toy_tokenizer()
    decoder, request = Decoder(build("llama", vocab_size=len(tokenizer))), requests((6,), len(tokenizer))[0]
    greedy = Sampling(max_new_tokens=20, temperature=0.0)
    (uncut,) = Generator(decoder, greedy, CPU).generate([request], 0)
    later = replace(request, prompt_ids=np.concatenate([request.prompt_ids, uncut.ids_N[:5]]))
    stop = tokenizer.decode(uncut.ids_N[4:6])
    assert stop not in tokenizer.decode(uncut.ids_N[5:8])
    with_stop = replace(greedy, max_new_tokens=3, stop=(stop,))
    (completion,) = Generator(decoder, with_stop, CPU, tokenizer=tokenizer).generate([later], 0)
    assert completion.ids_N.tolist() == uncut.ids_N[5:8].tolist()
    assert completion.finish == "length"


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 5.0}, {"top_k": 5}], ids=str)
def test_rows_without_a_token_are_never_sampled_and_others_have_no_probability(settings: dict[str, Any]) -> None:
    model = build("llama", tied=False)
    model.lm_head.weight.data *= 3.0
    model.lm_head.weight.data[190:] *= 4.0  # so that these rows would be sampled nearly always
    decoder, all_requests = Decoder(model), requests(vocabulary=190)
    counted = copy.deepcopy(model)
    counted.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:200].clone())
    sampling = Sampling(max_new_tokens=9, **settings)
    free = Generator(decoder, sampling, CPU).generate(all_requests, 0)
    assert max(max(ids) for ids in ids_of(free)) >= 200
    generator = Generator(decoder, sampling, CPU, vocabulary=190, counted_rows=200)
    for request, completion in zip(all_requests, generator.generate(all_requests, 0), strict=True):
        assert completion.ids_N.max() < 190
        temperature = settings.get("temperature") or 1.0
        expected = reference_log_probs(Decoder(counted), request.prompt_ids, completion.ids_N, temperature)
        np.testing.assert_allclose(completion.log_probs_N, expected, rtol=1e-4, atol=1e-4)


def test_batches_stay_in_their_budget_and_contain_every_request_once() -> None:
    generator = Generator(Decoder(build("llama")), SAMPLING, CPU, batch_tokens=40)
    all_requests = requests((3, 30, 1, 7, 5, 1, 50, 2, 2, 9))
    batches = generator.batches(all_requests)
    assert sorted(at for batch in batches for at in batch) == list(range(10))
    for batch in batches:
        assert len(batch) * (max(len(all_requests[at].prompt_ids) for at in batch) + 9) <= 40 or len(batch) == 1
    assert 4 <= len(batches) < 10
    one_batch = Generator(generator.decoder, SAMPLING, CPU)
    assert len(one_batch.batches(all_requests)) == 1
    assert [len(batch) for batch in one_batch.batches(all_requests, least=3)] == [4, 4, 2]
    assert generator.batches([]) == [] == generator.generate([], 0)
    assert ids_of(generator.generate(all_requests, 0)) == ids_of(one_batch.generate(all_requests, 0))


def test_the_mode_gradients_and_checkpointing_stay_as_they_are() -> None:
    decoder = Decoder(build("phi3")).train()
    decoder.gradient_checkpointing_enable()
    calls: list[object] = []
    decoder.layers()[0].register_forward_hook(lambda *_: calls.append(None))
    training = Generator(decoder, SAMPLING, CPU).generate(requests((4,)), 0)
    assert len(calls) == len(training[0].ids_N)  # one forward pass for each token: with the cache, and nothing twice
    assert all(module.training for module in decoder.modules())
    decoder(torch.tensor([[5, 6, 7]])).sum().backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())
    plain = Generator(Decoder(build("phi3")), SAMPLING, CPU).generate(requests((4,)), 0)
    assert as_lists(training) == as_lists(plain)


@pytest.mark.parametrize(
    "ids", [[], [-1], [251], [5, 2**30]], ids=["no token", "negative", "beyond the rows", "far beyond"]
)
def test_prompts_that_cannot_be_completed(ids: list[int]) -> None:
    request = GenerationRequest(17, np.array(ids, dtype=np.int32), seed=0)
    with pytest.raises(ValueError, match=r"request 17 has .* expected"):
        Generator(Decoder(build("llama")), SAMPLING, CPU).generate([request], 0)


def test_a_prompt_that_is_too_long_for_learned_positions() -> None:
    generator = Generator(Decoder(build("gpt2")), SAMPLING, CPU)
    (fits,) = generator.generate(requests((119,)), 0)
    assert len(fits.ids_N) <= 9
    with pytest.raises(ValueError, match="learned positions for 128 tokens"):
        generator.generate(requests((120,)), 0)


def test_a_model_whose_cache_is_wrong_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    prepare = type(model).prepare_inputs_for_generation

    def without_mask(self: Any, *args: Any, **kwargs: Any) -> Any:
        return prepare(self, *args, **kwargs) | {"attention_mask": None}

    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", without_mask)
    with pytest.raises(ValueError, match=r"model type 'llama'.* expected a model that supports a cache and padding"):
        check_generation(Decoder(model), CPU)


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
IS_FULL = {"llama": True, "qwen3": False, "gemma3": False}


@pytest.mark.parametrize("family", IS_FULL)
def test_completions_are_those_of_transformers_own_cache(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(build(family))
    generator = Generator(decoder, SAMPLING, CPU)
    completions = generator.generate(requests(), 0)
    assert (roomy_cache(decoder.pretrained, 9) is not None) == IS_FULL[family]
    monkeypatch.setattr(generate_module, "roomy_cache", lambda model, tokens: None)
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
