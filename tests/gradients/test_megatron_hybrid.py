"""What Megatron-Core's HybridModel needs for output processors: docs/upstream/hybrid_hook.md, as a test."""

import inspect
from typing import Any

import pytest
from kit import slow

pytest.importorskip("megatron.core", reason="megatron-core is not installed: `make test` does")

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import megatron.core
import torch
from kit.megatron_engine_jobs import silent_model
from kit.megatron_jobs import apart
from kit.megatron_models import LAYERS, ROWS_V, Layout, Norm, S, build, laid_out, micro_batch
from kit.megatron_weights_jobs import Case
from kit.pages import code_blocks
from kit.shard_ranks import Rank, on_ranks
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from stillhouse.megatron.processor import MegatronProcessor
from stillhouse.models.processors import Targets, cross_entropy
from stillhouse.tools.parity import worst

PAGE = Path(__file__).parents[2] / "docs" / "upstream" / "hybrid_hook.md"


def with_change(name: str, diff: str) -> ModuleType:
    """Return a copy of an installed module, to which the hunks of a diff are applied in memory."""
    source = Path(str(import_module(name).__file__)).read_text()
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = [(line[:1], line[1:]) for line in hunk.splitlines()]
        old, new = ("\n".join(text for mark, text in lines if mark != other) + "\n" for other in ("+", "-"))
        assert source.count(old) == 1, f"{name} has {source.count(old)} places for\n{old}"
        source = source.replace(old, new)
    changed = ModuleType(name)
    exec(compile(source, name, "exec"), changed.__dict__)
    return changed


@contextmanager
def hooked_hybrid() -> Iterator[None]:
    """Give HybridModel the forward of the page's change."""
    (diff,) = code_blocks(PAGE.read_text(), "diff")
    changed = with_change(HybridModel.__module__, diff).HybridModel
    with patch.object(HybridModel, "forward", changed.forward):
        yield


def build_hybrid(layout: Layout) -> HybridModel:
    """Return a model of attention and MLP layers. Its stack asks Transformer Engine for the last norm."""
    like = build(layout, 0)
    layers = get_gpt_layer_local_submodules()
    layers.self_attention.submodules.core_attention = type(like.decoder.layers[0].self_attention.core_attention)
    attention = TransformerLayerSubmodules(
        input_layernorm=Norm, self_attention=layers.self_attention, self_attn_bda=layers.self_attn_bda
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=Norm, mlp=layers.mlp, mlp_bda=layers.mlp_bda)
    submodules = hybrid_block.HybridStackSubmodules(
        attention_layer=ModuleSpec(TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(MLPLayer, submodules=mlp),
    )
    with patch.object(hybrid_block, "TENorm", Norm):
        return HybridModel(
            like.config,
            ModuleSpec(hybrid_block.HybridStack, submodules=submodules),
            ROWS_V,
            S,
            hybrid_layer_pattern="*-" * LAYERS,
            share_embeddings_and_output_weights=layout.tied,
            position_embedding_type="learned_absolute",
        )


def compare_hybrid(rank: Rank, layout: Layout) -> tuple[float, dict[str, float]]:
    """A job: the differences of loss and gradients between the processor and the model's own loss from logits."""
    batch = micro_batch(0, packed=False)
    inputs = (batch.input_ids_BS, batch.position_ids_BS, None)
    with ExitStack() as stack:
        stack.enter_context(laid_out(layout))
        stack.enter_context(hooked_hybrid())
        model = build_hybrid(layout)
        has_BS = batch.labels_BS >= 0
        own = (model(*inputs, labels=batch.labels_BS.clamp(min=0)) * has_BS).sum()
        expected = gradients(model, own)
        hook = MegatronProcessor(model, cross_entropy())
        made = model(*inputs, output_processor=hook, output_processor_context=Targets(batch.labels_BS)).loss
        actual = gradients(model, made)
    least = 1e-3 * torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    differences = {name: apart(actual[name], gradient, least) for name, gradient in expected.items()}
    return abs(float(made / own) - 1), differences


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


HOOK = {"output_processor", "output_processor_context"}


def test_what_the_installed_hybrid_model_lacks() -> None:
    assert inspect.signature(GPTModel.forward).parameters.keys() >= HOOK
    missing = HOOK - inspect.signature(HybridModel.forward).parameters.keys()
    assert missing == HOOK, (
        f"HybridModel of megatron-core {megatron.core.__shortversion__} has {sorted(HOOK - missing)}. If it calls "
        "the processor, build models with it, and delete docs/upstream/hybrid_hook.md and this test"
    )


@pytest.mark.parametrize(
    "layout",
    [Layout(tensor=2, tied=True), slow(Layout(tensor=2, sequence=True)), slow(Layout(context=2))],
    ids=lambda layout: layout.name,
)
def test_the_change_that_is_described_gives_the_gradients_of_logits(layout: Layout) -> None:
    for loss, gradients in on_ranks(compare_hybrid, 2, layout):
        assert loss < 1e-5
        assert worst(gradients.items())[1] < 1e-5, gradients


def test_a_model_that_does_not_call_the_processor_in_the_proof_is_refused_by_name() -> None:
    for message in on_ranks(silent_model, 2, Case("llama", tensor=2)):
        assert message.startswith("MultiTokenGPTModel of megatron-core 0.")
        assert message.endswith("called the output processor 0 times for 2 micro-batches: expected one call for each")
