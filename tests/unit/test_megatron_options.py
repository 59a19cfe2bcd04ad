"""`parallel.megatron`: what is passed on to Megatron-Core, and what is refused by its key."""

import pytest
from kit.config_cases import refused_calls

pytest.importorskip("megatron.core")

from kit.causal_families import tiny_config

from stillhouse.megatron.model_config import RECOMPUTE, split_options, transformer_config


def test_settings_go_to_the_configuration_that_has_them() -> None:
    mixed = {"moe_token_dispatcher_type": "allgather", "overlap_grad_reduce": True}
    transformer, data_parallel = split_options(mixed | {"recompute_granularity": "selective"})
    assert transformer == {"moe_token_dispatcher_type": "allgather", "recompute_granularity": "selective"}
    assert data_parallel == {"overlap_grad_reduce": True}
    config = transformer_config(tiny_config("qwen3"), **transformer)
    assert (config.moe_token_dispatcher_type, config.recompute_granularity) == ("allgather", "selective")
    assert split_options(RECOMPUTE) == (RECOMPUTE, {})


@pytest.mark.parametrize("name", ["overlap_gradient_reduce", "moe_dispatcher", "micro_batch_size", ""])
def test_a_name_that_megatron_core_lacks_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^parallel\.megatron\.{name}: Megatron-Core has no such setting; expected"
    ):
        split_options({name: 1})


@pytest.mark.parametrize(
    "name",
    [
        *("num_layers", "params_dtype", "fp8", "hidden_dropout", "moe_expert_capacity_factor", "moe_aux_loss_coeff"),
        *("tensor_model_parallel_size", "sequence_parallel", "calculate_per_token_loss", "moe_router_topk"),
        *("use_distributed_optimizer", "grad_reduce_in_fp32", "average_in_collective", "overlap_param_gather"),
        # a graph of a step, other schedules, and the gradient of an output layer that the processor replaces
        *("cuda_graph_impl", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "tp_comm_overlap"),
        *("defer_embedding_wgrad_compute", "microbatch_group_size_per_vp_stage", "mla_down_proj_fusion"),
    ],
)
def test_what_the_model_the_loss_or_another_key_determines_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^parallel\.megatron\.{name}: the models or other keys determine it"):
        split_options({name: 1})


@pytest.mark.parametrize(("call", "expected"), refused_calls("options of Megatron"))
def test_a_value_of_another_type_is_refused(call: str, expected: str) -> None:
    name, value = eval(call)
    with pytest.raises(ValueError, match=rf"^parallel\.megatron\.{name}={value!r}: {expected}"):
        split_options({name: value})


def test_settings_that_megatron_core_refuses_are_named() -> None:
    with pytest.raises(ValueError, match=r"^parallel\.megatron\.recompute_modules: Megatron-Core needs Transf"):
        split_options({"recompute_granularity": "selective", "recompute_modules": ["layernorm"]})
    with pytest.raises(ValueError, match=r"^parallel\.megatron: Megatron-Core refuses these settings: moe_act in"):
        transformer_config(tiny_config("qwen3_moe"), recompute_granularity="selective", recompute_modules=["moe_act"])
