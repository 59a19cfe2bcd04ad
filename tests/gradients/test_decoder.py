"""The decoder against the model that it wraps: logits, loss, gradients, files, packing, checkpointing, signal."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.families import FAMILIES, SOFTCAP, build
from kit.tensors import assert_near
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from stillhouse.models import Decoder
from stillhouse.models.processors import hidden_states
from stillhouse.objective import CrossEntropy, OutputHead, linear_objective

EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)
EACH_TIE = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
LENGTHS = (9, 1, 14, 7)


def token_ids(rows: int, length: int) -> Tensor:
    return torch.randint(3, 251, (rows, length), generator=torch.Generator().manual_seed(0))


def pack(documents: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Pack documents into one row [1, S]; return the row and its position ids."""
    positions = [torch.arange(len(document)) for document in documents]
    return torch.cat(documents)[None], torch.cat(positions)[None]


def mean_cross_entropy(*, hidden_states: Tensor, head: OutputHead, context: Tensor, depth: int = 0) -> Tensor:
    """Compute the next-token cross-entropy of `context` [B, S] from hidden states and head, in plain operations."""
    logits = hidden_states @ head.weight_VD.T
    logits = (logits if head.bias is None else logits + head.bias) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    log_probs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    return -log_probs.gather(-1, context[:, 1:, None]).mean()


def engine_cross_entropy(*, hidden_states: Tensor, head: OutputHead, context: Tensor, depth: int = 0) -> Tensor:
    labels = torch.cat([context[:, 1:], torch.full_like(context[:, :1], -1)], dim=1).flatten()
    weights = (labels >= 0).float()
    terms = [CrossEntropy(labels)]
    return linear_objective(
        hidden_states.flatten(0, 1), head, terms, weights_T=weights, normalizer=float(weights.sum())
    ).loss


def gradients(module: nn.Module, loss: Tensor) -> dict[int, Tensor]:
    """Return gradients by the parameter's id(), because the model and its decoder use different names."""
    module.zero_grad()
    loss.backward()
    grads = {id(weight): weight.grad.clone() for weight in module.parameters() if weight.grad is not None}
    module.zero_grad()
    return grads


@EACH_FAMILY
@pytest.mark.parametrize(
    ("dtype", "tied"),
    [(torch.float32, True), (torch.float32, False), (torch.bfloat16, None), (torch.float16, None)],
    ids=str,
)
def test_logits_are_the_models_own(family: str, dtype: torch.dtype, tied: bool | None) -> None:
    model = build(family, tied=tied, dtype=dtype)
    decoder, ids = Decoder(model), token_ids(2, 17)
    with torch.no_grad():
        actual, expected = decoder(ids), model(ids).logits
    assert actual.dtype == dtype
    # Granite divides by 3.0 and the head multiplies by 1/3, which differ by one rounding
    rounding = {torch.float32: 2.4e-7}.get(dtype, torch.finfo(dtype).eps) if family == "granite" else 0.0
    torch.testing.assert_close(actual, expected, rtol=rounding, atol=0)
    if family.startswith("gemma") and dtype == torch.float32:
        assert expected.abs().max() > 0.9 * SOFTCAP, "no logit is near the softcap"
    assert decoder.tied is tied or tied is None


@EACH_FAMILY
@EACH_TIE
def test_loss_and_gradients_are_the_models_own(family: str, tied: bool) -> None:
    model = build(family, tied=tied, dtype=torch.float64)
    decoder, ids = Decoder(model), token_ids(3, 17)
    model_loss = model(ids, labels=ids, use_cache=False).loss
    expected = gradients(model, model_loss)
    assert len(expected) == len(list(model.parameters()))

    # the model's own loss rounds its logits to float32, so the tolerance is float32's
    for processor in (mean_cross_entropy, engine_cross_entropy):
        loss = decoder(ids, processor=processor, context=ids)
        assert loss.item() == pytest.approx(model_loss.item(), rel=1e-6)
        assert_near(gradients(decoder, loss), expected, 2e-6)


def test_head_with_a_bias() -> None:
    model = build("gpt2", tied=False, dtype=torch.float64)
    model.lm_head.bias = nn.Parameter(torch.linspace(-2, 2, 251, dtype=torch.float64))
    decoder, ids = Decoder(model), token_ids(3, 17)
    model_loss = model(ids, labels=ids).loss
    expected = gradients(model, model_loss)
    assert id(model.lm_head.bias) in expected
    loss = decoder(ids, processor=engine_cross_entropy, context=ids)
    assert_near(gradients(decoder, loss), expected, 2e-6)
    assert torch.equal(decoder(ids), model(ids).logits)


@EACH_FAMILY
@EACH_TIE
def test_saved_files_give_the_same_model(family: str, tied: bool, tmp_path: Path) -> None:
    decoder, ids = Decoder(build(family, tied=tied)), token_ids(2, 9)
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.1)
    decoder(ids, processor=mean_cross_entropy, context=ids).backward()
    optimizer.step()  # change the weights, so that the test sees that the trained weights are saved
    decoder.save_pretrained(tmp_path)

    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    wrapped = Decoder.from_pretrained(tmp_path)
    assert type(plain) is type(decoder.pretrained)
    for loaded in (plain, wrapped.pretrained):
        pairs = itertools.zip_longest(loaded.named_parameters(), decoder.pretrained.named_parameters())
        for (name, actual), (expected_name, expected) in pairs:
            assert name == expected_name
            assert torch.equal(actual, expected), name
    with torch.no_grad():
        expected_logits = decoder.eval()(ids)
        assert torch.equal(wrapped(ids), expected_logits)
    assert not list(tmp_path.glob("*.bin"))
    assert wrapped.tied is tied


@EACH_FAMILY
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_equals_separate(family: str, attention: str) -> None:
    if attention == "sdpa" and family == "gemma2":
        pytest.skip("transformers has no sdpa for Gemma 2")
    decoder = Decoder(build(family, attention=attention))
    documents = list(token_ids(1, sum(LENGTHS))[0].split(LENGTHS))
    row, positions = pack(documents)
    together = torch.cat([row, row.flip(1)]), torch.cat([positions, torch.arange(row.shape[1])[None]])
    packed = decoder(*together, processor=hidden_states)[0]  # the second row is one document
    separate = torch.cat([decoder(document[None], processor=hidden_states)[0] for document in documents])
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-5)
    assert (decoder(row, processor=hidden_states)[0] - separate).abs().max() > 1, "the test must notice a leak"

    probe = torch.randn(separate.shape, generator=torch.Generator().manual_seed(1))
    expected = gradients(decoder, (separate * probe).sum())
    assert_near(gradients(decoder, (packed * probe).sum()), expected, 1e-5)


def test_a_mask_for_padding_works_and_one_over_packed_rows_is_refused() -> None:
    model = build("qwen3")
    decoder, ids = Decoder(model), token_ids(2, 10)
    left = torch.tensor([[0, 0, 0] + [1] * 7, [1] * 10])
    # these are the positions that transformers' generate makes
    positions = (left.cumsum(1) - 1).masked_fill(left == 0, 1)
    expected = model(ids, attention_mask=left, position_ids=positions).logits
    assert torch.equal(decoder(ids, positions, left), expected)
    row, restarts = pack([ids[0, :4], ids[0, 4:]])
    with pytest.raises(ValueError, match="expected attention_mask=None for packed rows"):
        decoder(row, restarts, torch.ones_like(row))


@EACH_FAMILY
def test_gradient_checkpointing_recomputes_layers_but_not_the_head(family: str) -> None:
    decoder, ids = Decoder(build(family, dtype=torch.float64)), token_ids(2, 12)
    for module in decoder.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    decoder.train()
    expected = gradients(decoder, decoder(ids, processor=mean_cross_entropy, context=ids))

    runs = {"attention": 0, "processor": 0}

    def counting(**arguments: Any) -> Tensor:
        runs["processor"] += 1
        return mean_cross_entropy(**arguments)

    layers = [module for name, module in decoder.named_modules() if name.endswith((".self_attn", ".attn"))]
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: runs.update(attention=runs["attention"] + 1))
    decoder.gradient_checkpointing_enable()
    actual = gradients(decoder, decoder(ids, processor=counting, context=ids))
    assert runs == {"attention": 2 * len(layers), "processor": 1}
    assert_near(actual, expected, 0.0)


def test_signal_is_exact_and_without_grad_whatever_the_mode() -> None:
    model = build("phi3")  # this family has dropout
    decoder, ids = Decoder(model), token_ids(2, 11)
    expected = decoder(ids, processor=hidden_states).flatten(0, 1)
    decoder.train()
    decoder.backbone.layers[0].eval()
    modes = [module.training for module in decoder.modules()]
    signal = decoder.signal(ids)
    assert torch.equal(signal.hidden_TE, expected)
    assert not signal.hidden_TE.requires_grad
    assert not signal.hidden_TE.is_inference()  # FSDP does not support inference tensors
    assert not signal.head.weight_VD.requires_grad
    assert signal.head.weight_VD.data_ptr() == model.lm_head.weight.data_ptr()
    assert [module.training for module in decoder.modules()] == modes
    with torch.no_grad():
        assert torch.equal(signal.head.logits(signal.hidden_TE), model.eval()(ids).logits.flatten(0, 1))


@EACH_TIE
@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_state_dict_holds_a_tied_weight_once_and_loads(tied: bool, assign: bool, nested: bool) -> None:
    source, target = Decoder(build("llama", tied=tied, seed=1)), Decoder(build("llama", tied=tied, seed=2))
    state = source.state_dict()
    assert ("head.linear.weight" in state) is not tied
    if nested:
        pair = nn.ModuleDict({"student": target, "teacher": Decoder(build("llama", tied=False))})
        state = nn.ModuleDict({"student": source, "teacher": pair["teacher"]}).state_dict()
        pair.load_state_dict(state, assign=assign)
    else:
        target.load_state_dict(state, assign=assign)
    assert (target.head.linear.weight is target.pretrained.get_input_embeddings().weight) is tied
    ids = token_ids(1, 6)
    with torch.no_grad():
        assert torch.equal(target(ids), source(ids))
        assert torch.equal(target.pretrained(ids).logits, source(ids))
    if not (tied or nested):
        del state["head.linear.weight"]
        with pytest.raises(RuntimeError, match=r"Missing key.*head\.linear\.weight"):
            target.load_state_dict(state)
