"""The routers' load balancing in one process; under layouts it is compared in tests/parity.

T tokens, X experts.
"""

import pytest
import torch
from families import build
from transformers import AutoModelForCausalLM, OlmoeConfig, PreTrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from stillhouse.models import Decoder, RouterAuxLoss, balance_routers

ROWS, TOKENS, COEFFICIENT = 3, 11, 0.7
SHAPE = {
    "vocab_size": 251,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
}
FAMILIES = {
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, moe_intermediate_size=16, num_hidden_layers=1, norm_topk_prob=True),
    "qwen2_moe": Qwen2MoeConfig(
        **SHAPE, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_hidden_layers=1
    ),
    "olmoe": OlmoeConfig(**SHAPE, num_hidden_layers=1),
}


def decoder(config: PreTrainedConfig) -> Decoder:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, experts_implementation="eager")
    return Decoder(model, verify=False).train()


def learn(model: Decoder, ids_BS: torch.Tensor, balance: RouterAuxLoss) -> dict[str, torch.Tensor]:
    """Gradients of the load balancing alone: the logits count nothing, and so reach every parameter with zeros."""
    balance_routers(model)
    (0 * model(ids_BS, balance=balance).sum()).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_of_one_sequence_and_layer_it_is_the_family_s_own(family: str) -> None:
    """transformers' loss over all tokens and layers at once: with one of both it is ours."""
    ids_BS = torch.randint(251, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    reference = decoder(FAMILIES[family])
    outputs = reference.pretrained(ids_BS, output_router_logits=True, use_cache=False)
    (COEFFICIENT * outputs.aux_loss).backward()

    model = decoder(FAMILIES[family])
    balance = RouterAuxLoss(torch.ones(1, TOKENS, dtype=torch.bool), torch.tensor([TOKENS]), COEFFICIENT / TOKENS)
    gradients = learn(model, ids_BS, balance)
    (loss,) = balance.losses.values()
    torch.testing.assert_close(loss / TOKENS, outputs.aux_loss.detach().to(loss), rtol=1e-6, atol=0)
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)
    assert float(gradients["backbone.layers.0.mlp.gate.weight"].norm()) > 0


def test_each_sequence_and_layer_counts_by_itself_and_padding_does_not() -> None:
    """Against a plain sum of transformers' function, over sequences weighted by their targets and over layers."""
    config = Qwen3MoeConfig(**SHAPE, moe_intermediate_size=16, num_hidden_layers=3, mlp_only_layers=[1])
    random = torch.Generator().manual_seed(2)
    ids_BS = torch.randint(251, (ROWS, TOKENS), generator=random)
    counts_BS = torch.arange(TOKENS) < torch.tensor([[TOKENS], [7], [4]])
    targets_B = torch.tensor([5, 0, 3])
    reference = decoder(config)
    logits = reference.pretrained(ids_BS, output_router_logits=True, use_cache=False).router_logits
    expected = torch.zeros((), dtype=torch.float64)
    for layer_TX in logits:
        for row_SX, counts_S, targets in zip(layer_TX.view(ROWS, TOKENS, -1), counts_BS, targets_B, strict=True):
            loss = load_balancing_loss_func((row_SX[counts_S],), 5, 2)
            expected = expected + targets * loss / len(logits)
    (COEFFICIENT * expected / targets_B.sum()).backward()

    model = decoder(config)
    balance = RouterAuxLoss(counts_BS, targets_B, COEFFICIENT / int(targets_B.sum()))
    gradients = learn(model, ids_BS, balance)
    torch.testing.assert_close(sum(balance.losses.values()), expected.detach().float(), rtol=1e-5, atol=0)
    assert len(logits) == len(balance.losses) == 2
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)


def test_without_gradients_nothing_is_balanced() -> None:
    model = decoder(FAMILIES["qwen3_moe"])
    balance_routers(model)
    balance = RouterAuxLoss(torch.ones(1, TOKENS, dtype=torch.bool), torch.tensor([TOKENS]), 1.0)
    with torch.no_grad():
        model(torch.arange(TOKENS)[None], balance=balance)
    assert not balance.losses


def test_a_model_without_routers_is_refused() -> None:
    with pytest.raises(ValueError, match="model type 'llama' has no routers with an auxiliary loss"):
        balance_routers(Decoder(build("llama"), verify=False))
