"""Multi-token prediction against plain logits, document by document, and against what transformers drafts."""

import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import build
from largest import Largest
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, MellumConfig, PreTrainedConfig
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

from stillhouse.demo import corpus
from stillhouse.demo.corpus import Document, split_of
from stillhouse.models import Decoder
from stillhouse.models.mtp import MultiTokenDecoder, find_layers
from stillhouse.models.processors import DistillTargets, Targets, cross_entropy, distillation, hidden_states
from stillhouse.objective import FullVocab, OutputHead, TopK, fused
from stillhouse.objective.spec import parse_objective

ROOT = Path(__file__).parents[1]
V = 251
_SHAPE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _glm4_moe(**options: Any) -> PreTrainedConfig:
    return Glm4MoeConfig(**{**_SHAPE, "head_dim": 16, "n_routed_experts": 4, "use_qk_norm": True, **options})


def _deepseek_v3(**options: Any) -> PreTrainedConfig:
    ranks = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    return DeepseekV3Config(**{**_SHAPE, "num_key_value_heads": 4, **ranks, **experts, **options})


def _mellum(**options: Any) -> PreTrainedConfig:
    kinds = {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"], "num_mtp_layers": 1}
    return MellumConfig(**{**_SHAPE, "head_dim": 16, "num_experts": 4, **kinds, **options})


MAKERS: dict[str, Callable[..., PreTrainedConfig]] = {
    "glm4_moe": _glm4_moe,
    "deepseek_v3": _deepseek_v3,
    "mellum": _mellum,
}
EACH = pytest.mark.parametrize(
    ("family", "depths"),
    [("glm4_moe", 1), ("glm4_moe", 2), ("deepseek_v3", 2), ("mellum", 1)],
    ids=lambda each: str(each),
)


def make(
    family: str = "glm4_moe", depths: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any
) -> MultiTokenDecoder:
    """With norms away from 1, so that a missed one shows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(MAKERS[family](**options))
        if dtype == torch.float64:  # the grouped product of experts knows no float64
            model.set_experts_implementation("eager")
        decoder = MultiTokenDecoder.new(Decoder(model.to(dtype).eval()), depths)
        for parameter in decoder.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
    return decoder


LENGTHS = ((7, 4), (2, 9))  # of the documents in each row; one has nothing to predict at any further depth


def documents(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, V, (length,), generator=generator) for row in LENGTHS for length in row]


def packed(each: list[Tensor]) -> Tensor:
    """Something of each document's tokens as [B, S, …], packed."""
    return torch.cat(each).view(len(LENGTHS), sum(LENGTHS[0]), *each[0].shape[1:])


def positions() -> Tensor:
    return packed([torch.arange(len(each)) for each in documents()])


def labels_of(ids_N: Tensor, masked: int = 2) -> Tensor:
    """The next token, but for the first few, which are a prompt."""
    labels_N = torch.cat([ids_N[1:], torch.tensor([-1])])
    labels_N[:masked] = -1
    return labels_N


def alone(decoder: MultiTokenDecoder, ids_N: Tensor) -> list[Tensor]:
    """Each depth's hidden states of one document, [N − depth, D]: only of rows that have a token to be made of, which
    are at the position of that token, as in generation."""
    made = [decoder.main.backbone(ids_N[None], use_cache=False).last_hidden_state]
    for depth in range(1, decoder.depths + 1):
        below, at = made[-1][:, : len(ids_N) - depth], torch.arange(depth, len(ids_N))[None]
        if not at.numel():
            made.append(below)
            continue
        made.append(decoder.mtp.forward_layer(depth - 1, below, at, None, input_ids=ids_N[None, depth:]))
    return [each[0] for each in made]


TEMPERATURE, K = 1.3, 5
RECIPES = {
    "cross_entropy": "cross_entropy",
    "jsd": "0.4*cross_entropy + 0.6*jsd(0.3)",
    "forward_kl": "forward_kl",
    "top_k": "forward_kl",
}


def log_probs_of(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits / TEMPERATURE, -1)


def top_k_of(logits_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, their log-probabilities, and the log-mass outside."""
    log_p_NK, ids_NK = log_probs_of(logits_NV).topk(K)
    return ids_NK, log_p_NK, torch.log1p(-log_p_NK.exp().sum(1))


def plain_loss(kind: str, logits_NV: Tensor, labels_N: Tensor, teacher_NV: Tensor) -> Tensor:
    """The sum over tokens with a label, in operations that know no chunks."""
    has = labels_N >= 0
    hard = -torch.log_softmax(logits_NV, -1).gather(1, labels_N.clamp(min=0)[:, None])[:, 0][has].sum()
    log_q, log_p = log_probs_of(logits_NV)[has], log_probs_of(teacher_NV)[has]
    if kind == "top_k":
        ids, log_p, tail = top_k_of(teacher_NV[has])
        inside = log_q.gather(1, ids)
        outside = log_q.scatter(1, ids, float("-inf")).logsumexp(1, keepdim=True)
        log_q, log_p = torch.cat([inside, outside], 1), torch.cat([log_p, tail[:, None]], 1)
    kl = (log_p.exp() * (log_p - log_q)).sum()
    if kind == "jsd":
        log_m = torch.log(0.3 * log_p.exp() + 0.7 * log_q.exp())
        soft = 0.3 * (log_p.exp() * (log_p - log_m)).sum() + 0.7 * (log_q.exp() * (log_q - log_m)).sum()
        return 0.4 * hard + 0.6 * soft
    return hard if kind == "cross_entropy" else kl


SCALES = (1.0, 0.5, 0.2)  # of the depths: one that stands in for another would show
NORMALIZER = 13.0


def plain(decoder: MultiTokenDecoder, teacher: Decoder, kind: str) -> list[Tensor]:
    """Each depth's loss, document by document."""
    losses = [torch.zeros((), dtype=torch.float64) for _ in range(decoder.depths + 1)]
    for ids_N in documents():
        labels_N, teacher_NV = labels_of(ids_N), teacher(ids_N[None])[0].detach().double()
        for depth, hidden in enumerate(alone(decoder, ids_N)):
            logits = decoder.mtp._project_to_logits(hidden).double()
            losses[depth] = losses[depth] + plain_loss(kind, logits, labels_N[depth:], teacher_NV[depth:])
    return [loss / NORMALIZER for loss in losses]


def targets_of(teacher: Decoder, kind: str) -> DistillTargets:
    labels_BS = packed([labels_of(each) for each in documents()])
    ids_BS = packed(documents())
    signal: Any = teacher.signal(ids_BS, positions())
    if kind == "top_k":
        ids, log_p, tail = top_k_of(signal.head.logits(signal.hidden_TE))
        signal = TopK(ids, log_p, tail_log_prob_T=tail, temperature=TEMPERATURE)
    return DistillTargets(labels_BS, normalizer=NORMALIZER, signal=signal)


def gradients(decoder: MultiTokenDecoder, losses: list[Tensor]) -> dict[str, Tensor]:
    decoder.zero_grad()
    sum(scale * loss for scale, loss in zip(SCALES, losses, strict=False)).backward()  # type: ignore[union-attr]
    return {name: each.grad for name, each in decoder.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(
    ("family", "depths", "kind"),
    [
        *(("glm4_moe", depths, kind) for depths in (1, 2) for kind in RECIPES),
        ("deepseek_v3", 2, "jsd"),
        ("mellum", 1, "jsd"),
    ],
)
def test_loss_and_gradients_are_those_of_plain_logits(family: str, depths: int, kind: str) -> None:
    decoder, teacher = make(family, depths, torch.float64), Decoder(build("llama", seed=3, dtype=torch.float64))
    context = targets_of(teacher, kind).shift_for_mtp(positions(), depths)
    processor = distillation(parse_objective(RECIPES[kind], TEMPERATURE), chunk_tokens=5)
    outputs = decoder(packed(documents()), positions(), processor=processor, context=context)
    expected = plain(decoder, teacher, kind)
    assert len(outputs) == len(expected) == depths + 1
    for output, loss in zip(outputs, expected, strict=True):
        assert output.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    labels = [sum(max(length - 1 - max(depth, 2), 0) for row in LENGTHS for length in row) for depth in (0, 1, 2)]
    assert [int(each.metrics["tokens"]) for each in outputs] == labels[: depths + 1]

    given, wanted = gradients(decoder, [each.loss for each in outputs]), gradients(decoder, expected)
    names = {name for name, each in decoder.named_parameters() if each.requires_grad}
    assert given.keys() == wanted.keys() == names
    for name, gradient in wanted.items():
        assert float((given[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name


@EACH
def test_packed_rows_are_the_documents_at_every_depth(family: str, depths: int) -> None:
    decoder = make(family, depths, torch.float64)
    with torch.no_grad():
        together = decoder(packed(documents()), positions(), processor=hidden_states)
        separate = [alone(decoder, each) for each in documents()]
    for depth, rows_BSD in enumerate(together):
        given = [each for row, lengths in zip(rows_BSD, LENGTHS, strict=True) for each in row.split(lengths)]
        for document, made in zip(given, separate, strict=True):
            assert len(made[depth]) == len(document) - depth
            torch.testing.assert_close(document[: len(made[depth])], made[depth], rtol=0, atol=1e-6)


def shifted_by_hand(each_BS: list[list[Any]], at: list[list[int]], depth: int, absent: Any) -> list[Any]:
    """In the rows' order, each row's value `depth` further on in the same document."""
    moved = []
    for row, place in zip(each_BS, at, strict=True):
        for token in range(len(row)):
            inside = token + depth < len(row) and place[token + depth] == place[token] + depth
            moved.append(row[token + depth] if inside else absent)
    return moved


def test_shift_for_mtp_moves_labels_weights_and_signal_together_and_stops_at_documents() -> None:
    at_BS = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]])
    labels_BS = torch.tensor([[5, 6, -1, 8, 9, 10], [11, -1, 13, 14, 15, -1]])
    weights_BS = torch.arange(1.0, 13.0).view(2, 6) * (labels_BS >= 0)
    hidden_TE = torch.randn(12, 3)
    head = OutputHead(torch.randn(20, 3))
    targets = DistillTargets(labels_BS, weights_BS, normalizer=4.0, signal=FullVocab(hidden_TE, head))
    shifted = targets.shift_for_mtp(at_BS, 3)
    assert shifted.at(0).labels_T.tolist() == labels_BS.flatten().tolist()
    assert len(shifted.mtp_targets) == 3
    for depth in (1, 2, 3):
        here = shifted.at(depth)
        assert here.labels_T.tolist() == shifted_by_hand(labels_BS.tolist(), at_BS.tolist(), depth, -1)
        assert here.weights_T is not None
        assert here.weights_T.tolist() == shifted_by_hand(weights_BS.tolist(), at_BS.tolist(), depth, 0.0)
        assert here.normalizer == 4.0
        taught = shifted_by_hand(hidden_TE.view(2, 6, 3).tolist(), at_BS.tolist(), depth, None)
        assert isinstance(here.signal, FullVocab)
        assert here.signal.head is head
        for row, expected in enumerate(taught):
            if expected is not None:
                assert here.signal.hidden_TE[row].tolist() == expected
    with pytest.raises(ValueError, match=r"depth 4 .* targets of 3 further depths"):
        shifted.at(4)


def test_context_shards_cut_after_the_shift_have_the_rows_of_the_whole() -> None:
    """Two ranks, each with the first and the last of four pieces of each row, as in a balanced causal layout."""
    decoder, teacher = make(depths=2), Decoder(build("llama", seed=3))
    whole = targets_of(teacher, "jsd").shift_for_mtp(positions(), 2)
    processor = distillation(parse_objective(RECIPES["jsd"], TEMPERATURE))
    outputs = decoder(packed(documents()), positions(), processor=processor, context=whole)
    hidden = decoder(packed(documents()), positions(), processor=hidden_states)

    places_BS = torch.arange(positions().numel()).view(positions().shape)
    pieces = places_BS.tensor_split(4, dim=1)
    ranks = [torch.cat([pieces[0], pieces[3]], 1).flatten(), torch.cat([pieces[1], pieces[2]], 1).flatten()]
    for depth, output in enumerate(outputs):
        losses = []
        for index_T in ranks:
            rows = hidden[depth].flatten(0, 1)[index_T][None]
            part = decoder.main.head(rows, processor, whole.rows(index_T), depth)
            for name, per_token in part.per_token.items():
                torch.testing.assert_close(per_token, output.per_token[name][index_T])
            losses.append(part.loss)
        torch.testing.assert_close(sum(losses), output.loss)


def test_no_depth_makes_logits_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fused.TILE_ROWS, "cpu", (1, 32))
    rows, tokens, vocabulary = 2, 64, 4001
    decoder = make(depths=2, vocab_size=vocabulary)
    teacher = Decoder(build("llama", vocab_size=vocabulary))
    ids_BS = torch.randint(3, vocabulary, (rows, tokens))
    at_BS = torch.arange(tokens).repeat(rows, 1)
    context = DistillTargets(ids_BS.roll(-1, 1), signal=teacher.signal(ids_BS, at_BS)).shift_for_mtp(at_BS, 2)
    processor = distillation(parse_objective("0.5*cross_entropy + 0.5*forward_kl"), chunk_tokens=32)
    with Largest() as largest:
        outputs = decoder(ids_BS, at_BS, processor=processor, context=context)
        sum(each.loss for each in outputs).backward()
    assert largest.numbers <= max(32, 48) * vocabulary  # a tile, or a head's weight
    assert largest.numbers < rows * tokens * vocabulary / 2


@EACH
def test_logits_are_the_layers_through_transformers_own_projection(family: str, depths: int) -> None:
    decoder, ids_BS = make(family, depths), packed(documents())
    with torch.no_grad():
        logits = decoder(ids_BS, positions())
        hidden = decoder(ids_BS, positions(), processor=hidden_states)
        assert torch.equal(logits[0], decoder.main(ids_BS, positions()))
        for given, made in zip(logits[1:], hidden[1:], strict=True):
            assert torch.equal(given, decoder.mtp._project_to_logits(made))


@EACH
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_saved_layers_are_what_transformers_drafts_with(
    family: str, depths: int, sampled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every draft of a generation, cached and cropped as it is there, is what one pass here would give."""
    decoder = make(family, depths)
    decoder.save_pretrained(tmp_path)
    drafts, get_candidates = [], MTPCandidateGenerator.get_candidates

    def recorded(self: MTPCandidateGenerator, input_ids: Tensor, **options: Any) -> Any:
        candidates, logits = get_candidates(self, input_ids, **options)
        if logits is not None:
            drafts.append((input_ids.shape[1] - 2, candidates, logits))
        return candidates, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", recorded)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    find_layers(model)
    options = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": sampled, "top_k": 0}
    made = model.generate(documents()[0][None], use_mtp=True, **options)
    if not sampled:
        assert torch.equal(made, decoder.main.pretrained.generate(documents()[0][None], **options))
    assert len(drafts) >= 4
    for row, candidates, logits in drafts:
        with torch.no_grad():
            ours = decoder(candidates)[1:]
        expected = torch.stack([each[:, row] for each in ours], 1)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)
        if not sampled:
            assert torch.equal(candidates[:, -depths:], expected.argmax(-1))


@EACH
def test_transformers_own_forward_drafts_the_same_tokens(family: str, depths: int) -> None:
    """It is handed the main model's hidden states after the final norm, and the tokens from the second on."""
    decoder, ids_S = make(family, depths), documents()[3]
    outputs = decoder.main.pretrained(ids_S[None, :-1], output_hidden_states=-1, use_cache=False)
    at = torch.arange(1, len(ids_S))[None]
    with torch.no_grad():
        tokens, _, _ = decoder.mtp(ids_S[None, 1:], outputs.hidden_states[-1], None, at, None)
        given = decoder(torch.cat([ids_S[None], tokens], 1))[1:]
    assert torch.equal(tokens[0], torch.stack([each[0, len(ids_S) - 2].argmax() for each in given]))


@EACH
def test_saved_and_loaded_is_the_same(family: str, depths: int, tmp_path: Path) -> None:
    decoder = make(family, depths)
    decoder.save_pretrained(tmp_path)
    again = MultiTokenDecoder.from_pretrained(tmp_path)
    assert again.depths == depths
    given, expected = again.state_dict(), decoder.state_dict()
    assert given.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(given[name], tensor), name
    assert Decoder.from_pretrained(tmp_path).config.num_mtp_layers == depths


def test_at_a_released_size_plain_transformers_finds_the_layer(tmp_path: Path) -> None:
    narrow = {"hidden_size": 16, "num_hidden_layers": 46, "n_routed_experts": 2, "moe_intermediate_size": 8}
    decoder = make(depths=1, **narrow)
    decoder.save_pretrained(tmp_path)
    found = MtpModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path))
    for name, tensor in decoder.layers.state_dict().items():
        assert torch.equal(found.layers.state_dict()[name], tensor), name


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_parameters_are_there_once_and_all_train(tied: bool) -> None:
    decoder = make(tie_word_embeddings=tied)
    own = [id(each) for each in decoder.parameters()]
    main = [id(each) for each in decoder.main.pretrained.parameters()]
    layers = [id(each) for each in decoder.mtp.layers.parameters()]
    assert sorted(own) == sorted(main + layers)
    assert sum(each.numel() for each in decoder.state_dict().values()) == sum(
        each.numel() for part in (decoder.main, decoder.layers) for each in part.state_dict().values()
    )
    context = Targets(packed([labels_of(each) for each in documents()])).shift_for_mtp(positions(), 2)
    outputs = decoder(packed(documents()), positions(), processor=cross_entropy(), context=context)
    outputs[2].loss.backward()  # of the last depth alone: it is made of all others, and of the head
    assert all(each.grad is not None for each in decoder.parameters())
    assert decoder.to(torch.float64).mtp.layers[0].eh_proj.weight.dtype == torch.float64


def test_a_frozen_main_model_leaves_the_layers_to_train() -> None:
    made = make()
    decoder = MultiTokenDecoder(made.main, made.mtp, train_main=False)
    context = Targets(packed([labels_of(each) for each in documents()])).shift_for_mtp(positions(), 2)
    outputs = decoder(packed(documents()), positions(), processor=cross_entropy(), context=context)
    assert not outputs[0].loss.requires_grad
    sum(each.loss for each in outputs[1:]).backward()
    for name, each in decoder.named_parameters():
        assert (each.grad is not None) is name.startswith("layers."), name


def test_fresh_layers_are_drawn_by_the_familys_rule_and_the_main_model_stays() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_glm4_moe())
    before = {name: each.clone() for name, each in model.state_dict().items()}
    layers = MultiTokenDecoder.new(Decoder(model.eval()), 1).layers
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    for name, each in layers.named_parameters():
        if each.ndim > 1:
            assert 0.2 < each.std() < 0.3, name
            assert abs(each.mean()) < 0.05, name


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model type 'qwen3'\) has no layers for multi-token prediction"):
        MultiTokenDecoder.new(Decoder(build("qwen3")), 1)
    main = make(depths=1).main
    with pytest.raises(ValueError, match=r"0 further depths of a .*'glm4_moe'.*expected 1 or more"):
        MultiTokenDecoder.new(main, 0)
    with pytest.raises(ValueError, match=r"2 further depths of a .*'mellum'.*expected 1"):
        make("mellum", 2)
    main.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks weights of its 1 further depths: expected model\.layers\.2\.\*"):
        MultiTokenDecoder.from_pretrained(tmp_path)


def test_layers_through_which_documents_leak_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()
    plain_masks = made.mtp.create_masks_for_mtp_layer
    monkeypatch.setattr(
        made.mtp,
        "create_masks_for_mtp_layer",
        lambda layer, embeds, cache, at: plain_masks(layer, embeds, cache, torch.arange(at.shape[1])[None]),
    )
    with pytest.raises(ValueError, match="see each other"):
        MultiTokenDecoder(made.main, made.mtp)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_sharding_hooks_fire_at_every_depth(tied: bool) -> None:
    """FSDP2 shows each depth the whole head, and its gradient is the sum of all depths'."""
    context = replace(Targets(packed([labels_of(each) for each in documents()])), normalizer=NORMALIZER)

    def trained(decoder: MultiTokenDecoder) -> MultiTokenDecoder:
        outputs = decoder(
            packed(documents()), positions(), processor=cross_entropy(), context=context.shift_for_mtp(positions(), 2)
        )
        sum(each.loss for each in outputs).backward()
        return decoder

    plainly = trained(make(tie_word_embeddings=tied))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        decoder = make(tie_word_embeddings=tied)
        for layer in decoder.layers:
            fully_shard(layer)
        if not tied:
            fully_shard(decoder.main.head)
        fully_shard(decoder)
        trained(decoder)
        for (name, given), (_, expected) in zip(decoder.named_parameters(), plainly.named_parameters(), strict=True):
            torch.testing.assert_close(given.grad.full_tensor(), expected.grad, msg=name)
    finally:
        dist.destroy_process_group()


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "mtp.md").read_text()
    training, drafting = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {"main": make().main, "teacher": Decoder(build("llama")), "tokens_of_the_step": 20}
    names |= {"ids": packed(documents()), "labels": packed([labels_of(each) for each in documents()])}
    exec(training, {**globals(), **names, "position_ids": positions()})
    assert names["main"].backbone.embed_tokens.weight.grad is not None
    exec(drafting, globals() | {"decoder": make(), "prompt": documents()[0][None]})


def test_the_example_measures_both_drafters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [
        next(name for name in map(str, range(999)) if split_of(name) == split) for split in ("student", "held_out")
    ]
    text = "Return the next item from the iterator, or raise StopIteration. " * 20
    monkeypatch.setattr(corpus, "collect_documents", lambda: [Document(name, text) for name in names])
    main = runpy.run_path(str(ROOT / "examples" / "mtp.py"))["main"]
    table = main(steps=2, depths=2, prompts=1, new_tokens=8, seed=0)
    assert table.keys() == {(name, sampled) for name in ("cross-entropy", "distilled") for sampled in (False, True)}
    assert all(0 <= accepted <= 2 for accepted in table.values())
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0].strip() for line in lines[-2:]] == ["cross-entropy", "distilled"]
