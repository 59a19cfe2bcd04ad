"""Layouts that a family does not support are refused when the models are built: the error names the cause.

`test_parity.py` trains the same families under the layouts that they support.
"""

import re
from functools import partial

import pytest
import torch
from kit.causal_families import tiny_config
from kit.parity_cases import ONE

from stillhouse.libraries import is_supported
from stillhouse.models import Decoder
from stillhouse.models.pretrained import auto_class
from stillhouse.parallel import Degrees, Layout, ModelSource
from stillhouse.parallel.apply.tensor_parallel import tensor_plan
from stillhouse.proofs.layouts import build_proven_runner

PLAN = "has no tensor-parallel plan in transformers: expected tensor=1"
EXPERTS = "which has no experts that transformers' plans distribute: expected 1"


def empty(model_type: str) -> Decoder:
    config = tiny_config(model_type)
    with torch.device("meta"):
        return Decoder(auto_class(config).from_config(config), verify=False)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("bamba", f"model type 'bamba' {PLAN}"),
        ("falcon_h1", f"model type 'falcon_h1' {PLAN}"),
        ("gpt_oss", f"model type 'gpt_oss' {PLAN}"),
        ("zamba2", f"model type 'zamba2' {PLAN}"),
        ("deepseek_v4", "tensor=2 does not divide the model's num_key_value_heads=1"),
        # sizes of layers that differ
        ("gemma4_text", "tensor=2 does not divide the model's num_key_value_heads=[2, 1, 2, 1]"),
        ("inkling_text", "'inkling_text' uses all_reduce, which is not supported here"),
        ("gemma3n_text", "by their mean over all columns of a matrix"),
    ],
)
def test_tensor_parallelism(model_type: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        tensor_plan(empty(model_type), 2)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        (
            "gemma4_text",
            "layer 0 of model type 'gemma4_text' reads 'per_layer_input', which is computed from embeddings",
        ),
        ("gemma3n_text", "the layers of model type 'gemma3n_text' pass several hidden states per token"),
        ("deepseek_v4", "the layers of model type 'deepseek_v4' pass several hidden states per token"),
        ("glm_moe_dsa", "layer 1 of model type 'glm_moe_dsa' reads 'prev_topk_indices', which is computed from emb"),
        ("zamba2", "layers 1 and 3 of model type 'zamba2' share weights"),
        ("gemma4_unified_text", "layer 2 of the student reads keys and values of layer 0, and stage 2 of 2 begins"),
        ("gemma4", "layer 0 of model type 'gemma4' reads 'per_layer_input', which is computed from embeddings"),
    ],
)
def test_pipelines(model_type: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        build_proven_runner(Layout(Degrees(pipeline=2)), ONE, ModelSource(partial(empty, model_type)), None)
    assert "pipeline=1" in str(refused.value)


@pytest.mark.skipif(not is_supported("expert parallelism"), reason="needs a later version of transformers")
@pytest.mark.parametrize("model_type", ["llama4_text", "longcat_flash", "dbrx", "jetmoe", "qwen3_5_text"])
def test_expert_parallelism(model_type: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"expert=2 for model type '{model_type}', {EXPERTS}")):
        build_proven_runner(Layout(Degrees(fsdp=2, expert=2)), ONE, ModelSource(partial(empty, model_type)), None)
