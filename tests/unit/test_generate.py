"""Completions in this process: their log-probabilities, ends, draws, and what must have no effect on them.

V vocabulary, N tokens of a completion.
"""

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kit.families import FAMILIES, build
from kit.generation_requests import CPU, SAMPLING, as_lists, requests
from kit.toy_tokenizer import toy_tokenizer
from transformers import GenerationConfig

from stillhouse.generation import Completion, GenerationRequest, Sampling
from stillhouse.generation.generate import Generator, check_generation
from stillhouse.generation.token_sampler import TokenSampler, _gumbel
from stillhouse.models import Decoder, add_lora, eos_ids


def reference_log_probs(decoder: Decoder, prompt: np.ndarray, ids_N: np.ndarray, temperature: float) -> np.ndarray:
    """The tokens' log-probabilities in float64, from one forward pass without cache and padding."""
    ids = torch.from_numpy(np.concatenate([prompt, ids_N]).astype(np.int64))
    with torch.no_grad():
        logits_NV = decoder(ids[None])[0, len(prompt) - 1 : -1].double() / temperature
    return logits_NV.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0].numpy()


def ids_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.ids_N.tolist() for completion in completions]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.6, 0.0])
def test_log_probs_are_those_of_a_forward_pass_in_float64(family: str, temperature: float) -> None:
    decoder, exact = Decoder(build(family)), Decoder(build(family, dtype=torch.float64))
    check_generation(decoder, CPU)
    asked = requests()
    given = Generator(decoder, replace(SAMPLING, temperature=temperature), CPU).generate(asked, version=7)
    for request, completion in zip(asked, given, strict=True):
        expected = reference_log_probs(exact, request.prompt_ids, completion.ids_N, temperature or 1.0)
        np.testing.assert_allclose(completion.log_probs_N, expected, rtol=0, atol=2e-5)
        assert completion.versions_N.tolist() == [7] * len(completion.ids_N)
        assert completion.ids_N.dtype == completion.versions_N.dtype == np.int32
        assert completion.log_probs_N.dtype == np.float32
        assert 2 not in completion.ids_N[:-1]
        assert completion.finish == ("stop" if completion.ids_N[-1] == 2 else "length")
        assert completion.finish == "stop" or len(completion.ids_N) == 9


def test_greedy_takes_the_likeliest_token() -> None:
    decoder = Decoder(build("llama"))
    for request in requests():
        (completion,) = Generator(decoder, replace(SAMPLING, temperature=0.0), CPU).generate([request], 0)
        ids = request.prompt_ids.tolist()
        for token in completion.ids_N.tolist():
            with torch.no_grad():
                assert int(decoder(torch.tensor([ids]))[0, -1].argmax()) == token
            ids.append(token)


def test_bfloat16_weights_and_autocast() -> None:
    asked = requests()
    half = Decoder(build("qwen3", dtype=torch.bfloat16))
    check_generation(half, CPU)
    whole = Decoder(build("qwen3"))
    autocast = Generator(whole, SAMPLING, CPU, torch.bfloat16)
    for generator in (Generator(half, SAMPLING, CPU), autocast):
        for request, completion in zip(asked, generator.generate(asked, 0), strict=True):
            expected = reference_log_probs(whole, request.prompt_ids, completion.ids_N, 1.0)
            differences = np.abs(completion.log_probs_N - expected)
            assert 0 < np.median(differences) < 0.3


def test_a_completion_depends_on_its_own_seed_alone() -> None:
    decoder, asked = Decoder(build("qwen3")), requests()
    generator = Generator(decoder, SAMPLING, CPU)
    together = generator.generate(asked, 0)
    assert as_lists(generator.generate(asked, 0)) == as_lists(together)
    assert ids_of(generator.generate(asked[::-1], 0)) == ids_of(together)[::-1]
    alone = [generator.generate([request], 0)[0] for request in asked]
    assert ids_of(alone) == ids_of(together)
    for given, expected in zip(alone, together, strict=True):
        np.testing.assert_allclose(given.log_probs_N, expected.log_probs_N, rtol=0, atol=1e-5)
    others = generator.generate([replace(request, seed=request.seed + 1) for request in asked], 0)
    assert all(given != expected for given, expected in zip(ids_of(others), ids_of(together), strict=True))


def test_the_global_random_state_has_no_effect_and_does_not_change() -> None:
    generator = Generator(Decoder(build("phi3")), SAMPLING, CPU)  # a family with dropout
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first = generator.generate(requests(), 0)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(4)
    assert as_lists(generator.generate(requests(), 0)) == as_lists(first)


def test_draws_have_the_models_probabilities() -> None:
    decoder = Decoder(build("llama", vocab_size=7))
    prompt, count = np.array([3, 4, 5], dtype=np.int32), 4000
    asked = [GenerationRequest(number, prompt, seed=number) for number in range(count)]
    sampling = Sampling(max_new_tokens=1, temperature=3.0)
    drawn = [int(completion.ids_N[0]) for completion in Generator(decoder, sampling, CPU).generate(asked, 0)]
    with torch.no_grad():
        expected_V = (decoder(torch.from_numpy(prompt.astype(np.int64))[None])[0, -1] / 3.0).softmax(-1).numpy()
    counts_V = np.bincount(drawn, minlength=7)
    deviation = (counts_V - count * expected_V) / np.sqrt(count * expected_V * (1 - expected_V) + 1e-9)
    assert np.abs(deviation).max() < 4
    assert (expected_V * count > 50).sum() >= 3, "the test needs several likely tokens"


@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}], ids=str)
def test_cut_distributions_draw_likely_tokens_and_report_log_probs_of_the_whole(cut: dict[str, Any]) -> None:
    decoder, asked = Decoder(build("llama")), requests()
    sampling = replace(SAMPLING, temperature=1.5, **cut)
    for request, completion in zip(asked, Generator(decoder, sampling, CPU).generate(asked, 0), strict=True):
        expected = reference_log_probs(decoder, request.prompt_ids, completion.ids_N, 1.5)
        np.testing.assert_allclose(completion.log_probs_N, expected, rtol=0, atol=2e-5)
        ids = torch.from_numpy(np.concatenate([request.prompt_ids, completion.ids_N]).astype(np.int64))
        with torch.no_grad():
            probabilities_NV = (decoder(ids[None])[0, len(request.prompt_ids) - 1 : -1] / 1.5).softmax(-1)
        for probabilities_V, token in zip(probabilities_NV, completion.ids_N.tolist(), strict=True):
            likelier = probabilities_V[probabilities_V > probabilities_V[token] + 1e-6]
            assert len(likelier) < cut.get("top_k", 251)
            assert float(likelier.sum()) < cut.get("top_p", 2.0)
            assert float(probabilities_V[token]) >= cut.get("min_p", 0.0) * float(probabilities_V.max()) - 1e-6


HOSTILE = {
    "repetition_penalty": 5.0,
    "no_repeat_ngram_size": 1,
    "temperature": 0.01,
    "top_k": 1,
    "top_p": 0.01,
    "typical_p": 0.1,
    "do_sample": True,
    "num_beams": 4,
    "num_return_sequences": 2,
    "max_length": 2,
    "max_new_tokens": 1,
    "min_new_tokens": 8,
    "max_time": 1e-6,
    "suppress_tokens": list(range(100)),
    "begin_suppress_tokens": list(range(200)),
    "forced_eos_token_id": 5,
    "forced_bos_token_id": 5,
    "bad_words_ids": [[17]],
    "exponential_decay_length_penalty": (1, 5.0),
    "sequence_bias": [[[9], 50.0]],
    "guidance_scale": 3.0,
    "eos_token_id": list(range(3, 251)),
    "pad_token_id": 2,
    "use_cache": False,
    "return_dict_in_generate": True,
    "output_scores": True,
    "renormalize_logits": True,
    "remove_invalid_values": True,
    "cache_implementation": "static",
    "stop_strings": ["a"],
}


def test_the_models_generation_config_has_no_effect() -> None:
    decoder = Decoder(build("qwen3"))
    expected = as_lists(Generator(decoder, SAMPLING, CPU).generate(requests(), 0))
    hostile = GenerationConfig()
    for name, value in HOSTILE.items():
        setattr(hostile, name, value)
    decoder.pretrained.generation_config = hostile
    assert as_lists(Generator(decoder, SAMPLING, CPU).generate(requests(), 0)) == expected
    assert decoder.pretrained.generation_config is hostile


def test_the_models_generation_config_is_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(build("qwen3"))
    own = decoder.pretrained.generation_config

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(type(decoder.pretrained), "forward", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        Generator(decoder, SAMPLING, CPU).generate(requests(), 0)
    assert decoder.pretrained.generation_config is own
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
    decoder, asked = Decoder(build("llama")), requests()
    free = Generator(decoder, Sampling(max_new_tokens=9), CPU).generate(asked, 0)
    ends = tuple({int(free[0].ids_N[2]), int(free[3].ids_N[0]), 0})  # 0 is the id that pads
    given = Generator(decoder, Sampling(max_new_tokens=9, eos_ids=ends), CPU).generate(asked, 0)
    for whole, cut in zip(free, given, strict=True):
        stops = [at for at, token in enumerate(whole.ids_N.tolist()) if token in ends]
        length = stops[0] + 1 if stops else 9
        assert cut.ids_N.tolist() == whole.ids_N[:length].tolist()
        np.testing.assert_allclose(cut.log_probs_N, whole.log_probs_N[:length], rtol=0, atol=1e-5)
        assert cut.finish == ("stop" if stops else "length")
    assert {completion.finish for completion in given} == {"stop", "length"}
    assert len(given[3].ids_N) == 1


def test_an_end_of_sequence_in_the_prompt_does_not_count() -> None:
    request = GenerationRequest(0, np.array([5, 2, 2], dtype=np.int32), seed=1)
    (completion,) = Generator(Decoder(build("llama")), SAMPLING, CPU).generate([request], 0)
    assert len(completion.ids_N) > 1 or completion.ids_N[0] == 2


def test_lengths_of_single_requests() -> None:
    limits = (1, 4, None, 9, 30)
    asked = [replace(request, max_new_tokens=most) for request, most in zip(requests(), limits, strict=True)]
    decoder = Decoder(build("gemma3"))
    free = Generator(decoder, Sampling(max_new_tokens=9), CPU).generate(requests(), 0)
    given = Generator(decoder, Sampling(max_new_tokens=9), CPU).generate(asked, 0)
    for cut, whole, most in zip(given, free, (1, 4, 9, 9, 9), strict=True):
        assert cut.ids_N.tolist() == whole.ids_N[:most].tolist()
        assert cut.finish == "length"


def test_stop_texts_end_a_completion_and_stay_in_it() -> None:
    tokenizer = toy_tokenizer()
    decoder, asked = Decoder(build("llama", vocab_size=len(tokenizer))), requests(vocabulary=len(tokenizer))
    free = Generator(decoder, Sampling(max_new_tokens=20), CPU).generate(asked, 0)
    texts = [tokenizer.decode(completion.ids_N) for completion in free]
    stops = (texts[0][3:6], tokenizer.decode(free[1].ids_N[4:7]))
    given = Generator(decoder, Sampling(max_new_tokens=20, stop=stops), CPU, tokenizer=tokenizer).generate(asked, 0)
    for whole, cut in zip(free, given, strict=True):
        lengths = [
            length for length in range(1, 21) if any(stop in tokenizer.decode(whole.ids_N[:length]) for stop in stops)
        ]
        assert cut.ids_N.tolist() == whole.ids_N[: lengths[0] if lengths else 20].tolist()
        assert cut.finish == ("stop" if lengths else "length")
    assert given[0].finish == given[1].finish == "stop"
    with pytest.raises(ValueError, match="stop texts need the tokenizer"):
        Generator(decoder, Sampling(max_new_tokens=20, stop=stops), CPU)


def test_a_stop_text_that_begins_in_the_prompt_does_not_count() -> None:
    tokenizer = toy_tokenizer()
    decoder, request = Decoder(build("llama", vocab_size=len(tokenizer))), requests((6,), len(tokenizer))[0]
    greedy = Sampling(max_new_tokens=20, temperature=0.0)
    (whole,) = Generator(decoder, greedy, CPU).generate([request], 0)
    later = replace(request, prompt_ids=np.concatenate([request.prompt_ids, whole.ids_N[:5]]))
    stop = tokenizer.decode(whole.ids_N[4:6])
    assert stop not in tokenizer.decode(whole.ids_N[5:8])
    with_stop = replace(greedy, max_new_tokens=3, stop=(stop,))
    (found,) = Generator(decoder, with_stop, CPU, tokenizer=tokenizer).generate([later], 0)
    assert found.ids_N.tolist() == whole.ids_N[5:8].tolist()
    assert found.finish == "length"


def test_tokens_are_drawn_as_often_as_their_probabilities_say() -> None:
    count = 20_000
    logits_V = torch.tensor([-math.inf, 0.0, 1.0, 2.0, -1.0, -math.inf])
    draws = TokenSampler(Sampling(max_new_tokens=1), list(range(count)), 1, 6, CPU)
    ids_B = draws(torch.zeros(count, 1), logits_V.repeat(count, 1)).argmax(-1)
    share_V = torch.bincount(ids_B, minlength=6) / count
    probability_V = logits_V.softmax(-1)
    error_V = 4 * (probability_V * (1 - probability_V) / count).sqrt()  # four standard deviations
    assert ((share_V - probability_V).abs() <= error_V).all()


def test_neighbouring_seeds_and_counters_have_independent_noise() -> None:
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


@pytest.mark.parametrize(("rows", "vocabulary"), [(251, 251), (251, 200), (128, 128), (40, 37)])
@pytest.mark.parametrize("top_k", [0, 90])
def test_blocks_of_tokens_are_drawn_as_often_as_their_probabilities_say(
    rows: int, vocabulary: int, top_k: int
) -> None:
    """Tokens in whole blocks, in the last one, which is not whole, and rows that have no token."""
    torch.manual_seed(0)
    logits_V, count = 2 * torch.randn(rows), 20000
    draws = TokenSampler(Sampling(1, temperature=0.7, top_k=top_k), range(count), 1, vocabulary, CPU)
    draws(torch.zeros(count, 1, dtype=torch.int64), logits_V.expand(count, -1).clone())
    (ids_B1, log_probs_B1) = draws.result()
    scores_V = (logits_V / 0.7)[:vocabulary]
    if top_k and top_k < vocabulary:
        scores_V = scores_V.where(scores_V >= scores_V.topk(top_k).values[-1], -torch.inf)
    expected_V = scores_V.double().softmax(0)
    found_V = torch.from_numpy(ids_B1[:, 0]).bincount(minlength=vocabulary) / count
    assert len(found_V) == vocabulary
    assert not found_V[expected_V == 0].any()
    error_V = (found_V - expected_V) / (expected_V * (1 - expected_V) / count).sqrt()
    assert error_V[expected_V * count >= 20].abs().max() < 4.5
    whole_V = (logits_V / 0.7).double().log_softmax(0).numpy()
    np.testing.assert_allclose(log_probs_B1[:, 0], whole_V[ids_B1[:, 0]], atol=1e-5)


def test_noise_is_finite_where_the_uniform_number_rounds_to_1() -> None:
    """Noise of −inf would let a filtered token be drawn, if the only other one has it."""
    seeds_B2 = torch.tensor([[2033801605, 1788975990], [463643221, 524684293], [835851283, 1572763043]]).int()
    counters_BC = torch.tensor([[904073], [84142], [38428]]).int()
    noise_BC = _gumbel(seeds_B2, counters_BC)
    torch.testing.assert_close(noise_BC, torch.full((3, 1), -math.log(24 * math.log(2))))


@pytest.mark.parametrize("seed", range(20))
def test_a_token_without_probability_is_never_drawn(seed: int) -> None:
    draws = TokenSampler(Sampling(max_new_tokens=1, top_k=3), [seed], 1, 251, CPU)
    logits_BV = torch.zeros(1, 251).index_fill(1, torch.tensor([17, 33, 128]), 1.0)
    assert int(draws(torch.zeros(1, 1), logits_BV).argmax()) in (17, 33, 128)


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_rows_that_the_tokenizer_does_not_have_are_never_drawn(temperature: float) -> None:
    model = build("llama", tied=False)
    model.lm_head.weight.data[200:] *= 4.0  # so that they would be drawn nearly always
    decoder, asked = Decoder(model), requests(vocabulary=200)
    sampling = Sampling(max_new_tokens=9, temperature=temperature)
    free = Generator(decoder, sampling, CPU).generate(asked, 0)
    assert max(max(ids) for ids in ids_of(free)) >= 200
    for request, cut in zip(asked, Generator(decoder, sampling, CPU, vocabulary=200).generate(asked, 0), strict=True):
        assert max(cut.ids_N) < 200
        expected = reference_log_probs(decoder, request.prompt_ids, cut.ids_N, temperature or 1.0)
        np.testing.assert_allclose(cut.log_probs_N, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("top_k", [0, 5])
def test_log_probs_are_over_the_rows_that_count(top_k: int) -> None:
    model = build("llama", tied=False)
    model.lm_head.weight.data *= 3.0
    decoder, asked = Decoder(model), requests(vocabulary=190)
    cut = copy.deepcopy(model)
    cut.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:200].clone())
    sampling = Sampling(max_new_tokens=9, top_k=top_k)
    found = Generator(decoder, sampling, CPU, vocabulary=190, counted_rows=200).generate(asked, 0)
    for request, completion in zip(asked, found, strict=True):
        ids = torch.from_numpy(np.concatenate([request.prompt_ids, completion.ids_N]).astype(np.int64))
        with torch.no_grad():
            log_probs_SV = cut(ids[None]).logits[0].log_softmax(-1)
        own_N = log_probs_SV[len(request.prompt_ids) - 1 : -1].gather(1, ids[len(request.prompt_ids) :, None])[:, 0]
        np.testing.assert_allclose(completion.log_probs_N, own_N.numpy(), rtol=1e-4, atol=1e-4)
        assert completion.ids_N.max() < 190


def test_batches_stay_in_their_budget_and_contain_every_request_once() -> None:
    generator = Generator(Decoder(build("llama")), SAMPLING, CPU, batch_tokens=40)
    asked = requests((3, 30, 1, 7, 5, 1, 50, 2, 2, 9))
    batches = generator.batches(asked)
    assert sorted(at for batch in batches for at in batch) == list(range(10))
    for batch in batches:
        assert len(batch) * (max(len(asked[at].prompt_ids) for at in batch) + 9) <= 40 or len(batch) == 1
    assert 4 <= len(batches) < 10
    whole = Generator(generator.decoder, SAMPLING, CPU)
    assert len(whole.batches(asked)) == 1
    assert [len(batch) for batch in whole.batches(asked, least=3)] == [4, 4, 2]
    assert generator.batches([]) == [] == generator.generate([], 0)
    assert ids_of(generator.generate(asked, 0)) == ids_of(whole.generate(asked, 0))


def test_the_mode_gradients_and_checkpointing_stay_as_they_are() -> None:
    decoder = Decoder(build("phi3")).train()
    decoder.gradient_checkpointing_enable()
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    decoder.layers()[0].register_forward_hook(count)
    training = Generator(decoder, SAMPLING, CPU).generate(requests((4,)), 0)
    assert calls == len(training[0].ids_N)  # one forward pass for each token: with the cache, and nothing twice
    assert all(module.training for module in decoder.modules())
    ids = torch.tensor([[5, 6, 7]])
    decoder(ids).sum().backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())
    plain = Generator(Decoder(build("phi3")), SAMPLING, CPU).generate(requests((4,)), 0)
    assert as_lists(training) == as_lists(plain)


def test_an_adapter_writes_the_completions() -> None:
    decoder = Decoder(build("qwen3"))
    plain = Generator(decoder, SAMPLING, CPU).generate(requests(), 0)
    add_lora(decoder, r=4, alpha=8.0)
    for name, parameter in decoder.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    asked = requests()
    given = Generator(decoder, SAMPLING, CPU).generate(asked, 0)
    assert ids_of(given) != ids_of(plain)
    for request, completion in zip(asked, given, strict=True):
        expected = reference_log_probs(decoder, request.prompt_ids, completion.ids_N, 1.0)
        np.testing.assert_allclose(completion.log_probs_N, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "ids", [[], [-1], [251], [5, 2**30]], ids=["no token", "negative", "beyond the rows", "far beyond"]
)
def test_prompts_that_cannot_be_completed(ids: list[int]) -> None:
    request = GenerationRequest(17, np.array(ids, dtype=np.int32), seed=0)
    with pytest.raises(ValueError, match=r"request 17: .* expected"):
        Generator(Decoder(build("llama")), SAMPLING, CPU).generate([request], 0)


def test_a_prompt_that_is_too_long_for_learned_positions() -> None:
    generator = Generator(Decoder(build("gpt2")), SAMPLING, CPU)
    (fits,) = generator.generate(requests((119,)), 0)
    assert len(fits.ids_N) <= 9
    with pytest.raises(ValueError, match="learned positions for 128 tokens"):
        generator.generate(requests((120,)), 0)


def test_weights_that_give_no_finite_logits() -> None:
    decoder = Decoder(build("llama"))
    decoder.get_parameter("backbone.layers.1.mlp.down_proj.weight").data[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"model type 'llama'.* its logits are not finite"):
        Generator(decoder, SAMPLING, CPU).generate(requests(), 0)


def test_a_model_whose_cache_is_wrong_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    prepare = type(model).prepare_inputs_for_generation

    def without_mask(self: Any, *args: Any, **kwargs: Any) -> Any:
        return prepare(self, *args, **kwargs) | {"attention_mask": None}

    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", without_mask)
    with pytest.raises(ValueError, match=r"model type 'llama'.* expected a model that supports a cache and padding"):
        check_generation(Decoder(model), CPU)
