"""LoRA on a decoder: its gradients equal those of peft's own model, and only the requested layers have an adapter."""

import copy
import math
from typing import Any

import pytest
import torch
from kit.causal_families import build as build_causal
from kit.families import FAMILIES, build
from kit.shard_ranks import Rank, on_ranks
from kit.teacher_gradients import named_gradients
from kit.tensors import assert_near
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from stillhouse.config import TrainConfig
from stillhouse.engine.optimizer import make_optimizer
from stillhouse.models import Decoder, add_lora, initialize_lora, without_lora
from stillhouse.models.adapter import is_lora
from stillhouse.objective import CrossEntropy, Distill, OutputHead, linear_objective, reverse_kl
from stillhouse.parallel import Degrees, Layout, Mesh, ModelSource
from stillhouse.proofs.layouts import build_proven_runner

IDS = torch.arange(3, 40)[None]
LABELS = IDS[0].roll(-1)


def adapted(family: str = "llama", *, fresh: bool = False, **options: Any) -> Decoder:
    tied, dtype = options.pop("tied", None), options.pop("dtype", torch.float32)
    decoder = Decoder(build(family, tied=tied, dtype=dtype))
    add_lora(decoder, **{"r": 4, "alpha": 10.0} | options)
    initialize_lora(decoder, 0, fresh=fresh)
    return decoder


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family in ("llama", "gpt2") else pytest.mark.slow) for family in FAMILIES],
)
def test_gradients_are_those_of_peft_and_plain_logits(family: str) -> None:
    """The objective is cross-entropy plus reverse KL to the model without its adapter, in float64."""
    decoder = adapted(family, dtype=torch.float64)
    with torch.no_grad(), without_lora(decoder):
        signal = decoder.signal(IDS)

    def processor(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> Tensor:
        terms = [CrossEntropy(LABELS, scale=0.3), Distill(signal, reverse_kl(), scale=0.7)]
        return linear_objective(hidden_states.flatten(0, 1), head, terms).loss

    decoder(IDS, processor=processor).backward()
    peft_decoder = peft_model(build(family, dtype=torch.float64), decoder)
    with torch.no_grad(), peft_decoder.disable_adapter():
        log_p = torch.log_softmax(peft_decoder(IDS, use_cache=False).logits[0], -1)
    log_q = torch.log_softmax(peft_decoder(IDS, use_cache=False).logits[0], -1)
    cross_entropy = -log_q.gather(1, LABELS[:, None]).sum()
    (0.3 * cross_entropy + 0.7 * (log_q.exp() * (log_q - log_p)).sum()).backward()
    expected = named_gradients(peft_decoder)
    prefix = f"base_model.model.{decoder.pretrained.base_model_prefix}."
    actual = {
        prefix + name.removeprefix("backbone."): gradient for name, gradient in named_gradients(decoder).items()
    }
    assert all(gradient.abs().max() > 1e-6 for gradient in actual.values())
    assert_near(actual, expected, 1e-10)


def peft_model(model: PreTrainedModel, like: Decoder) -> Any:
    """Return peft's model with the same A and B as the decoder."""
    peft_config = like.pretrained.peft_config["default"]
    config = LoraConfig(r=peft_config.r, lora_alpha=peft_config.lora_alpha, target_modules=peft_config.target_modules)
    peft_decoder = get_peft_model(model, config)
    matrices = {name: matrix for name, matrix in like.named_parameters() if is_lora(name)}
    prefix = f"base_model.model.{model.base_model_prefix}."
    trained = {name: matrix for name, matrix in peft_decoder.named_parameters() if matrix.requires_grad}
    assert trained.keys() == {prefix + name.removeprefix("backbone.") for name in matrices}
    with torch.no_grad():
        for name, matrix in matrices.items():
            trained[prefix + name.removeprefix("backbone.")].copy_(matrix)
    return peft_decoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_leaves_the_rest_as_it_was_to_the_byte(dtype: torch.dtype) -> None:
    decoder = adapted(tied=True, dtype=dtype)
    before = copy.deepcopy(decoder.state_dict())
    optimizer = make_optimizer([decoder], TrainConfig(learning_rate=1e-2, weight_decay=0.1))
    for _ in range(3):
        decoder(IDS).float().logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in decoder.state_dict().items():
        assert torch.equal(weight, before[name]) == (not is_lora(name)), name
        assert weight.dtype == (torch.float32 if is_lora(name) else dtype), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_fresh_adapter_changes_nothing_and_is_initialised_like_pefts(dtype: torch.dtype) -> None:
    model = build("llama", dtype=dtype)
    before = model(IDS, use_cache=False).logits
    decoder = adapted(fresh=True, dtype=dtype, r=16)
    assert torch.equal(decoder(IDS), before)
    matrices = {name: parameter.detach() for name, parameter in decoder.named_parameters() if is_lora(name)}
    assert all(parameter.requires_grad == (name in matrices) for name, parameter in decoder.named_parameters())
    for name, matrix in matrices.items():
        assert matrix.dtype == torch.promote_types(dtype, torch.float32)
        limit = 1 / math.sqrt(matrix.shape[1])
        assert bool(matrix.any()) == (".lora_A." in name)
        assert matrix.abs().max() <= limit
        if ".lora_A." in name:
            assert float(matrix.std()) == pytest.approx(limit / math.sqrt(3), rel=0.2)
    again, other = adapted(fresh=True, dtype=dtype, r=16), adapted(fresh=True, dtype=dtype, r=16)
    initialize_lora(other, 1)
    initial = [name for name in matrices if ".lora_A." in name]
    assert all(torch.equal(matrices[name], again.get_parameter(name)) for name in initial)
    assert not any(torch.equal(matrices[name], other.get_parameter(name)) for name in initial)
    assert not torch.equal(*(matrices[name][:, :48] for name in initial[:2]))  # modules have different matrices


def test_an_error_while_the_adapter_is_off_leaves_it_on() -> None:
    decoder = adapted()
    with_it = decoder(IDS)
    with pytest.raises(KeyError), without_lora(decoder):
        raise KeyError
    assert torch.equal(decoder(IDS), with_it)


@pytest.mark.parametrize(
    ("targets", "placed"),
    [
        (["q_proj", "v_proj"], {"self_attn.q_proj", "self_attn.v_proj"}),
        (["mlp.up_proj"], {"mlp.up_proj"}),
        (["model.layers.1.mlp.up_proj", "layers.1.self_attn.o_proj"], {"mlp.up_proj", "self_attn.o_proj"}),
    ],
)
def test_targets_are_ends_of_names(targets: list[str], placed: set[str]) -> None:
    decoder = adapted(targets=targets)
    names = {name.partition(".lora_")[0] for name, parameter in decoder.named_parameters() if parameter.requires_grad}
    layers = (1,) if "1" in targets[0] else (0, 1)
    assert names == {f"backbone.layers.{layer}.{name}" for layer in layers for name in placed}
    assert decoder.lora is not None
    assert decoder.lora.layers == len(names)


def test_a_head_that_is_not_the_embedding_is_named_alone() -> None:
    with pytest.raises(ValueError, match=r"'lm_head' is the output head \('lm_head'\), which cannot have a LoRA"):
        adapted(tied=False, targets=["lm_head"])


def test_names_that_peft_takes_for_experts_are_refused() -> None:
    config = FAMILIES["qwen3_moe"](mlp_only_layers=[0])
    decoder = Decoder(AutoModelForCausalLM.from_config(config), verify=False)
    with pytest.raises(ValueError, match="peft puts the LoRA on other layers of model type"):
        add_lora(decoder)


@pytest.mark.parametrize(("family", "module"), [("llama4", "router"), ("deepseek_v4", "o_a_proj")])
def test_modules_that_do_more_than_a_product_have_no_lora(family: str, module: str) -> None:
    decoder = Decoder(build_causal(family), verify=False)
    with pytest.raises(ValueError, match=f"'{module}' is a .*: expected linear layers"):
        add_lora(decoder, targets=[module])
    add_lora(decoder)
    initialize_lora(decoder, seed=1)
    assert not any(f".{module}." in name for name, _ in decoder.named_parameters() if is_lora(name))
    assert bool(decoder(IDS).isfinite().all())


def test_a_vision_tower_has_no_lora() -> None:
    """Without images, its matrices would have no gradient."""
    decoder = Decoder(build_causal("llava"), verify=False)
    add_lora(decoder)
    names = [name for name, _ in decoder.named_parameters() if is_lora(name)]
    assert names
    assert all(name.startswith("backbone.language_model.") for name in names)


def drop_under_tensor_parallel(rank: Rank) -> list[Tensor]:
    """Return the gradients of the replicated LoRA matrices after three passes with dropout."""
    mesh = Mesh(Degrees(tensor=2), torch.device("cpu"))
    torch.manual_seed(0)
    origin = ModelSource(lambda: adapted(dropout=0.5), lambda decoder: initialize_lora(decoder, 0, fresh=False))
    runner = build_proven_runner(Layout(Degrees(tensor=2)), mesh, origin, None)
    (student,) = runner.decoders
    student.train()
    for _ in range(3):
        student(
            IDS, processor=lambda *, hidden_states, head, context, depth=0: hidden_states.square().sum()
        ).backward()
    return [
        parameter.grad
        for name, parameter in student.named_parameters()
        if is_lora(name) and not isinstance(parameter, DTensor) and parameter.grad is not None
    ]


def test_dropout_drops_the_same_for_what_every_tensor_rank_has() -> None:
    one, two = on_ranks(drop_under_tensor_parallel, 2)
    assert len(one) == len(two) == 14
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)
