"""The routers' load balancing in one process; under layouts it is compared in `tests/layouts/test_parity.py`.

T tokens, X experts.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kit.families import build
from kit.teacher_gradients import named_gradients
from torch import Tensor
from torch.utils.checkpoint import CheckpointError
from transformers import AutoModelForCausalLM, OlmoeConfig, PreTrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from stillhouse.models import Decoder, RouterAuxLoss, add_lora, balance_routers, initialize_lora
from stillhouse.models.router_balancing import RouterBalance

ROWS, TOKENS, COEFFICIENT = 3, 11, 0.7
SHAPE: dict[str, Any] = {"vocab_size": 251, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 2, "num_experts": 5, "num_experts_per_tok": 2, "initializer_range": 0.3}
FAMILIES = {
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, moe_intermediate_size=16, num_hidden_layers=1, norm_topk_prob=True),
    "qwen2_moe": Qwen2MoeConfig(
        **SHAPE, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_hidden_layers=1
    ),
    "olmoe": OlmoeConfig(**SHAPE, num_hidden_layers=1),
}
THREE_LAYERS = Qwen3MoeConfig(**SHAPE, moe_intermediate_size=16, num_hidden_layers=3, mlp_only_layers=[1])
#: forward passes (F) and backward passes (B) of two micro-batches, in the orders of several schedules
ORDERS = ["F0 B0 F1 B1", "F0 F1 B0 B1", "F0 F1 B1 B0"]


def decoder(config: PreTrainedConfig) -> Decoder:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, experts_implementation="eager")
    return Decoder(model, verify=False).train()


@dataclass
class Batch:
    """Padded sequences and their numbers of targets."""

    ids_BS: Tensor
    counts_BS: Tensor
    targets_B: Tensor

    @classmethod
    def make(cls, seed: int) -> "Batch":
        ids_BS = torch.randint(251, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed))
        lengths = torch.tensor([[TOKENS], [7], [4]])
        return cls(ids_BS, torch.arange(TOKENS) < lengths.roll(seed, 0), torch.tensor([5, 0, 3 + seed]))

    @classmethod
    def unpadded(cls) -> "Batch":
        """Return one sequence without padding."""
        ids_BS = torch.randint(251, (1, TOKENS), generator=torch.Generator().manual_seed(1))
        return cls(ids_BS, torch.ones(1, TOKENS, dtype=torch.bool), torch.tensor([TOKENS]))

    def loss(self) -> RouterAuxLoss:
        return RouterAuxLoss(self.counts_BS, self.targets_B, COEFFICIENT / int(self.targets_B.sum()))

    def formula(self, model: Decoder) -> Tensor:
        """Sum transformers' function over sequences, weighted by their targets, and average it over layers."""
        logits = model.pretrained(self.ids_BS, output_router_logits=True, use_cache=False).router_logits
        total = torch.zeros((), dtype=torch.float64)
        for layer_TX in logits:
            rows = zip(layer_TX.view(ROWS, TOKENS, -1), self.counts_BS, self.targets_B, strict=True)
            for row_SX, counts_S, targets in rows:
                total = total + targets * load_balancing_loss_func((row_SX[counts_S],), 5, 2) / len(logits)
        return total


def forward(model: Decoder, batch: Batch, loss: RouterAuxLoss) -> Tensor:
    """Return a loss of the load balancing only: 0 times the logits keeps all parameters in the graph."""
    with model.layer_loss(RouterBalance).using(loss):
        return 0 * model(batch.ids_BS).sum()


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close({name: actual[name] for name in expected}, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_one_sequence_and_layer_is_transformers_own(family: str) -> None:
    """transformers computes its loss over all tokens and layers; for one sequence and layer it equals ours."""
    batch, reference = Batch.unpadded(), decoder(FAMILIES[family])
    outputs = reference.pretrained(batch.ids_BS, output_router_logits=True, use_cache=False)
    (COEFFICIENT * outputs.aux_loss).backward()

    model, balance = decoder(FAMILIES[family]), batch.loss()
    balance_routers(model)
    forward(model, batch, balance).backward()
    (loss,) = balance.losses.values()
    torch.testing.assert_close(loss / TOKENS, outputs.aux_loss.detach().to(loss), rtol=1e-6, atol=0)
    assert_close(named_gradients(model), named_gradients(reference))
    assert float(named_gradients(model)["backbone.layers.0.mlp.gate.weight"].norm()) > 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("recomputed", ["kept", "recomputed", "recomputed, then balanced"])
@pytest.mark.parametrize("threads", [False, True], ids=["one thread", "backward in a thread"])
def test_each_micro_batch_sequence_and_layer_counts_by_itself(order: str, recomputed: str, threads: bool) -> None:
    """Padding does not count. A layer that is recomputed after another micro-batch keeps its own loss."""
    batches, reference = [Batch.make(0), Batch.make(1)], decoder(THREE_LAYERS)
    formulas = [batch.formula(reference) for batch in batches]
    for formula, batch in zip(formulas, batches, strict=True):
        (COEFFICIENT * formula / batch.targets_B.sum()).backward()

    model, losses = decoder(THREE_LAYERS), [batch.loss() for batch in batches]
    if recomputed == "recomputed, then balanced":
        model.gradient_checkpointing_enable()
    balance_routers(model)
    if recomputed == "recomputed":
        model.gradient_checkpointing_enable()
    results: dict[str, Tensor] = {}
    for action, number in order.split():
        if action == "F":
            results[number] = forward(model, batches[int(number)], losses[int(number)])
        elif threads:  # as on a GPU
            with ThreadPoolExecutor(1) as thread:
                thread.submit(results[number].backward).result()
        else:
            results[number].backward()
    assert_close(named_gradients(model), named_gradients(reference))
    for actual, expected in zip(losses, formulas, strict=True):
        assert actual.losses.keys() == {f"backbone.layers.{layer}.mlp.gate" for layer in (0, 2)}
        torch.testing.assert_close(sum(actual.losses.values()), expected.detach().float(), rtol=1e-5, atol=0)


def test_router_balance_beside_a_lora() -> None:
    """The adapter's gradient through the frozen routers equals the formula's."""
    actual = []
    for formula in (True, False):
        model, batch = decoder(THREE_LAYERS), Batch.make(0)
        add_lora(model, targets=["q_proj", "v_proj"])
        initialize_lora(model, 0, fresh=False)
        if formula:
            (COEFFICIENT * batch.formula(model) / batch.targets_B.sum()).backward()
        else:
            balance_routers(model)
            model.gradient_checkpointing_enable()
            forward(model, batch, batch.loss()).backward()
        actual.append(named_gradients(model))
    assert_close(actual[1], actual[0])
    assert all("lora" in name for name in actual[1])
    assert max(float(gradient.norm()) for gradient in actual[1].values()) > 1e-4


def test_without_gradients_and_outside_of_the_context_nothing_is_balanced_and_a_router_runs_once() -> None:
    model, batch = decoder(FAMILIES["qwen3_moe"]), Batch.unpadded()
    balance_routers(model)
    balance = batch.loss()
    with torch.no_grad():
        forward(model, batch, balance)
    assert not balance.losses
    forward(model, batch, balance)
    with pytest.raises(ValueError, match=r"'backbone\.layers\.0\.mlp\.gate' ran twice with one RouterAuxLoss"):
        forward(model, batch, balance)
    with pytest.raises(RuntimeError, match="cannot run"), model.layer_loss(RouterBalance).using(batch.loss()):
        raise RuntimeError("cannot run")
    (0 * model(batch.ids_BS).sum()).backward()
    assert not any(gradient.any() for gradient in named_gradients(model).values())


def test_models_and_routers_without_hooks_are_refused() -> None:
    with pytest.raises(ValueError, match="model type 'llama' has no routers with an auxiliary loss"):
        balance_routers(Decoder(build("llama"), verify=False))
    with pytest.raises(ValueError, match=r"has no RouterBalance: expected a call of Decoder\.add_layer_loss before"):
        decoder(FAMILIES["olmoe"]).layer_loss(RouterBalance)


@pytest.mark.parametrize(
    ("module", "output", "message"),
    [
        ("mlp", lambda hidden: hidden, r"Layer ran without calling its router 'backbone\.layers\.2\.mlp\.gate'"),
        (
            "mlp.gate",
            lambda hidden: torch.zeros(len(hidden), 5),
            r"'backbone\.layers\.2\.mlp\.gate' \(Qwen3MoeTopKRouter\) returned a Tensor: expected a tuple",
        ),
    ],
    ids=["a router that is not called", "a router of other outputs"],
)
def test_a_layer_of_another_kind_is_refused(module: str, output: Callable[[Tensor], Tensor], message: str) -> None:
    model, batch = decoder(THREE_LAYERS), Batch.make(0)
    balance_routers(model)
    model.get_submodule(f"backbone.layers.2.{module}").forward = output
    with pytest.raises(ValueError, match=message):
        forward(model, batch, batch.loss())


def test_recomputation_past_the_decoder_is_an_error() -> None:
    """transformers' method does not restore the loss, so torch finds that the recomputation differs."""
    model, batch = decoder(THREE_LAYERS), Batch.make(0)
    balance_routers(model)
    pretrained: Any = model.pretrained
    # the first name is that of later versions of transformers
    name = "activation_checkpointing_enable"
    is_later = hasattr(pretrained, name)
    enable = getattr(pretrained, name) if is_later else pretrained.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    with pytest.raises(CheckpointError, match="different number of tensors"):
        forward(model, batch, batch.loss()).backward()
    if not is_later:
        return  # there, the hooks of a layer run within the recomputed part, without gradients
    enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="recomputation only by Decoder"):
        forward(model, batch, batch.loss()).backward()
