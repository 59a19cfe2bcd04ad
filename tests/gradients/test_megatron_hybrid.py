"""What Megatron-Core's HybridModel needs for output processors: docs/upstream/hybrid_hook.md, as a test."""

import inspect
from typing import Any

import pytest
from kit import slow
from torch import nn

pytest.importorskip("megatron.core", reason="megatron-core is not installed: `make test` does")

import megatron.core
from kit.megatron_engine_jobs import silent_model
from kit.megatron_hybrid_jobs import compare_hybrid, refusal
from kit.megatron_models import Layout
from kit.megatron_weights_jobs import Case
from kit.shard_ranks import pool_of_meshes
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel

from stillhouse.megatron.processor import MegatronProcessor
from stillhouse.models.processors import hidden_states
from stillhouse.tools.parity import worst

HOOK = {"output_processor", "output_processor_context"}


def test_what_the_installed_hybrid_model_lacks() -> None:
    assert inspect.signature(GPTModel.forward).parameters.keys() >= HOOK
    missing = HOOK - inspect.signature(HybridModel.forward).parameters.keys()
    assert missing == HOOK, (
        f"HybridModel of megatron-core {megatron.core.__shortversion__} has {sorted(HOOK - missing)}. If it calls "
        "the processor, build models with it, and delete docs/upstream/hybrid_hook.md and this test"
    )


def test_a_hybrid_model_is_refused_by_name_when_it_is_built() -> None:
    for message in pool_of_meshes(2).call(refusal, Layout(tensor=2)):
        assert message.startswith(
            f"HybridModel of megatron-core {megatron.core.__shortversion__} does not call an output"
        )


@pytest.mark.parametrize(
    "layout",
    [Layout(tensor=2, tied=True), slow(Layout(tensor=2, sequence=True)), slow(Layout(context=2))],
    ids=lambda layout: layout.name,
)
def test_the_change_that_is_described_gives_the_gradients_of_logits(layout: Layout) -> None:
    for loss, gradients in pool_of_meshes(2).call(compare_hybrid, layout):
        assert loss < 1e-5
        assert worst(gradients.items())[1] < 1e-5, gradients


def test_a_model_that_does_not_call_the_processor_in_the_proof_is_refused_by_name() -> None:
    for message in pool_of_meshes(2).call(silent_model, Case("llama", tensor=2)):
        assert message.startswith("MultiTokenGPTModel of megatron-core 0.")
        assert message.endswith("called the output processor 0 times for 2 micro-batches: expected one call for each")


def test_a_model_that_accepts_the_processor_and_drops_it_is_refused() -> None:
    class Dropping(nn.Module):
        """The `_postprocess` of Megatron-LM#4942: it has the arguments, and computes logits."""

        def forward(self, ids: Any, output_processor: Any = None, output_processor_context: Any = None) -> Any:
            return self._postprocess(ids, output_processor, output_processor_context)

        def _postprocess(self, ids: Any, output_processor: Any, output_processor_context: Any) -> Any:
            return ids

    with pytest.raises(ValueError, match=r"^Dropping of megatron-core .* does not call an output processor"):
        MegatronProcessor(Dropping(), hidden_states)
