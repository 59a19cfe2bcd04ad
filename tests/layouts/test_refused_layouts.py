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
from stillhouse.models.mtp import add_mtp
from stillhouse.models.pretrained import auto_class
from stillhouse.parallel import Degrees, Layout, ModelSource
from stillhouse.parallel.apply.tensor_parallel import tensor_plan
from stillhouse.proofs.layouts import build_proven_runner

PLAN = "has no tensor-parallel plan in transformers: expected parallel.tensor=1"
EARLY = "reads 'per_layer_input', which is computed from embeddings"
SEVERAL = "pass several hidden states per token"
EXPERTS = "which has no experts that transformers' plans distribute: expected expert=1"


def empty(model_type: str) -> Decoder:
    config = tiny_config(model_type)
    with torch.device("meta"):
        return Decoder(auto_class(config).from_config(config), verify=False)


def refuse(model_type: str, message: str, **degrees: int) -> None:
    source, layout = ModelSource(partial(empty, model_type)), Layout(Degrees(**degrees))
    build = partial(build_proven_runner, layout, ONE, source, None)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        tensor_plan(source.build(), 2) if "tensor" in degrees else build()
    assert "pipeline" not in degrees or "pipeline=1" in str(refused.value)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        *((kind, f"model type '{kind}' {PLAN}") for kind in ("bamba", "falcon_h1", "gpt_oss", "zamba2")),
        ("deepseek_v4", "tensor=2 does not divide the model's num_key_value_heads=1"),
        # sizes of layers that differ
        ("gemma4_text", "tensor=2 does not divide the model's num_key_value_heads=[2, 1, 2, 1]"),
        ("inkling_text", "'inkling_text' uses all_reduce, but this package supports only"),
        ("gemma3n_text", "by their mean over all columns of a matrix"),
    ],
)
def test_tensor_parallelism(model_type: str, message: str) -> None:
    refuse(model_type, message, tensor=2)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        *((kind, f"layer 0 of model type '{kind}' {EARLY}") for kind in ("gemma4_text", "gemma4")),
        *((kind, f"the layers of model type '{kind}' {SEVERAL}") for kind in ("gemma3n_text", "deepseek_v4")),
        ("glm_moe_dsa", "layer 1 of model type 'glm_moe_dsa' reads 'prev_topk_indices', which is computed from emb"),
        ("zamba2", "layers 1 and 3 of model type 'zamba2' share weights"),
        ("gemma4_unified_text", "layer 2 of the student reads keys and values of layer 0, and stage 2 of 2 begins"),
    ],
)
def test_pipelines(model_type: str, message: str) -> None:
    refuse(model_type, message, pipeline=2)


@pytest.mark.skipif(not is_supported("expert parallelism"), reason="needs a later version of transformers")
@pytest.mark.parametrize("model_type", ["llama4_text", "longcat_flash", "dbrx", "jetmoe", "qwen3_5_text"])
def test_expert_parallelism(model_type: str) -> None:
    refuse(model_type, f"expert=2 for model type '{model_type}', {EXPERTS}", fsdp=2, expert=2)


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
def test_several_mtp_depths_under_a_split_backward(schedule: str) -> None:
    """`stillhouse parity` tries schedules that the configuration does not have, so that no rule refuses them."""

    def student() -> Decoder:
        decoder = empty("llama")
        with torch.device("meta"):
            add_mtp(decoder, 2, is_new=True)
        return decoder

    layout = Layout(Degrees(pipeline=2), schedule)
    with pytest.raises(ValueError, match="torch cannot split the backward of the last stage"):
        build_proven_runner(layout, ONE, ModelSource(student), None)
