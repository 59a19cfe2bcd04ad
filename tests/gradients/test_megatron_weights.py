"""Transformers' models as GPTModels of megatron-core: their configurations, and the places of their weights.

`test_megatron_engine.py` compares their gradients with those of transformers under every layout.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.config_cases import refused_calls

pytest.importorskip("megatron.core", reason="megatron-core is not installed: `make test` does")

from kit import megatron_weights_jobs
from kit.megatron_weights_jobs import MOE, YARN, Case, make_tables, model_config
from kit.shard_ranks import on_ranks
from megatron.core import parallel_state
from torch import nn
from transformers import LlamaConfig, LlamaModel

from stillhouse.megatron.families import Shard
from stillhouse.megatron.model_config import rotary_frequencies, transformer_config
from stillhouse.megatron.rows import context_positions
from stillhouse.megatron.weights import Place, WeightTable, copy_tensors, require_coverage, weight_table


@pytest.fixture(scope="module")
def tables() -> tuple[list[WeightTable], dict[str, tuple[int, ...]]]:
    """The tables of two tensor ranks of a model with a dense layer and a layer with experts, and the full shapes."""
    case = Case(MOE, tensor=2, sequence=True, options={"num_hidden_layers": 2})
    return on_ranks(make_tables, 2, case)[0]


def test_each_block_is_needed_once(tables: tuple[list[WeightTable], dict[str, tuple[int, ...]]]) -> None:
    of_ranks, shapes = tables
    require_coverage(of_ranks, shapes)
    first, second = of_ranks
    for number, block in enumerate(first.blocks):
        missing = (*first.blocks[:number], *first.blocks[number + 1 :])
        for blocks in (missing, (*first.blocks, block)):
            with pytest.raises(
                ValueError, match=rf"^parameter '{block.parameter}' in chunk 0 of rank 0.* blocks; expe"
            ):
                require_coverage([replace(first, blocks=blocks), second], shapes)


def test_a_tensor_that_ranks_share_wrongly_is_refused(
    tables: tuple[list[WeightTable], dict[str, tuple[int, ...]]],
) -> None:
    of_ranks, shapes = tables
    for wrong, message in (
        # both ranks have the first half of the rows, or each has all layers as a pipeline stage of its own
        ([of_ranks[0], of_ranks[0]], r"^tensor 'backbone\.embed_tokens\.weight' .* is in 0 blocks"),
        ([*of_ranks, replace(of_ranks[0], stage=1)], r"^tensor 'backbone\.embed_tokens\.weight' .* is in 2 blocks"),
    ):
        with pytest.raises(ValueError, match=message):
            require_coverage(wrong, shapes)
    with pytest.raises(ValueError, match=r"^tensor 'head\.linear\.weight' of Megatron-Core's model is absent"):
        require_coverage(of_ranks, {name: shape for name, shape in shapes.items() if "head" not in name})
    with pytest.raises(ValueError, match=r"^tensor 'head\.linear\.bias' .* is in 0 blocks"):
        require_coverage(of_ranks, shapes | {"head.linear.bias": (251,)})
    with pytest.raises(ValueError, match=r"^tensor 'head\.linear\.weight' .* a block is outside"):
        require_coverage(of_ranks, shapes | {"head.linear.weight": (250, 32)})


class OneLayer(nn.Module):
    """The parameters of Megatron-Core's model that a test needs, without process groups."""

    def __init__(self, parameter: str, *shape: int):
        super().__init__()
        layer = nn.Module()
        layer.layer_number = 3
        layer.add_module("norm", nn.Module())
        layer.norm.register_parameter(parameter, nn.Parameter(torch.ones(shape)))
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([layer])


def test_a_parameter_without_a_name_in_the_family_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^parameter 'decoder\.layers\.0\.norm\.scale' .* unknown in a llama model"):
        weight_table([OneLayer("scale", 4)], model_config(Case("llama")), Place())


def test_padding_rows_are_zero_and_tensors_of_another_shape_are_refused() -> None:
    chunk = nn.ModuleDict({"embedding": nn.ModuleDict({"word_embeddings": nn.Embedding(126, 32)})})
    chunk.pre_process = True
    table = weight_table([chunk], model_config(Case("llama")), Place(tensor=Shard(1, 2)))
    weight_VD = torch.rand(251, 32)
    copy_tensors([chunk], table, [("backbone.embed_tokens.weight", weight_VD)])
    (loaded,) = chunk.parameters()
    assert torch.equal(loaded[:125], weight_VD[126:])
    assert not loaded[125:].any()
    with pytest.raises(ValueError, match=r"^tensor 'backbone\.embed_tokens\.weight' has shape \(250, 32\)"):
        copy_tensors([chunk], table, [("backbone.embed_tokens.weight", weight_VD[1:])])
    with pytest.raises(ValueError, match=r"^there is no tensor 'backbone\.embed_tokens\.weight', but parameter"):
        copy_tensors([chunk], table, [])


@pytest.mark.parametrize(("call", "message"), refused_calls("megatron"))
def test_what_megatron_does_not_compute_exactly_is_refused(call: str, message: str) -> None:
    model_type, options, layout = eval(call, vars(megatron_weights_jobs))
    config = model_config(Case(model_type, options=options))
    with pytest.raises(ValueError, match=message):
        transformer_config(config, **layout)


@pytest.mark.parametrize(
    "scaling",
    [
        {},
        YARN,
        {"rope_type": "linear", "factor": 3.0},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 2.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_rotary_frequencies_are_transformers_own(scaling: dict[str, Any]) -> None:
    rotary = {"rope_type": "default", "rope_theta": 5e5} | scaling
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, head_dim=12, vocab_size=9, rope_parameters=rotary)
    config.num_hidden_layers = 0
    embedding = LlamaModel(config).rotary_emb
    frequencies_C, factor = rotary_frequencies(config)
    assert torch.equal(frequencies_C, embedding.inv_freq)
    assert factor == embedding.attention_scaling


def test_documents_that_context_ranks_cannot_divide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    assert context_positions(8).tolist() == [2, 3, 4, 5]
    with pytest.raises(ValueError, match=r"^documents of 6 tokens over 2 context ranks: expected a multiple of 4"):
        context_positions(6)
