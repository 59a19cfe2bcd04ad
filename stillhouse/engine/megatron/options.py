"""The settings of `parallel.megatron`, which Megatron-Core takes by its own names.

    transformer, data_parallel = split_options({"moe_token_dispatcher_type": "alltoall", "overlap_grad_reduce": True})

Passed on are settings of memory, communication and speed. Those that would change the model, the loss or the dtypes
are refused, because the models and other keys determine them.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

#: fields of TransformerConfig
_TRANSFORMER = re.compile(
    r"recompute_.*|overlap_(?!param_gather).*|tp_comm_.*|cuda_graph_.*|cpu_offloading.*|.*_fusion|batch_p2p_.*"
    r"|moe_(token_dispatcher_type|grouped_gemm|shared_expert_overlap|enable_deepep|flex_dispatcher_.*|deepep_.*"
    r"|hybridep_.*|layer_recompute)"
    r"|attention_backend|persist_layer_norm|distribute_saved_activations|deallocate_pipeline_outputs"
    r"|delay_wgrad_compute|defer_embedding_wgrad_compute|wgrad_deferral_limit|microbatch_group_size_per_vp_stage"
    r"|fine_grained_activation_offloading|offload_modules"
)
#: fields of DistributedDataParallelConfig
_DATA_PARALLEL = re.compile(r"overlap_grad_reduce|bucket_size|pad_buckets_for_high_nccl_busbw")
#: each layer is computed again
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of TransformerConfig and those of DistributedDataParallelConfig.

    Raises ValueError, with the key, for a name of neither, and for a setting that is not passed on.
    """
    names = {field.name for kind in (MLATransformerConfig, DistributedDataParallelConfig) for field in fields(kind)}
    for name in options:
        if name not in names:
            raise ValueError(
                f"parallel.megatron.{name}: Megatron-Core has no such setting; expected a field of TransformerConfig "
                "or DistributedDataParallelConfig"
            )
        if not (_TRANSFORMER.fullmatch(name) or _DATA_PARALLEL.fullmatch(name)):
            raise ValueError(
                f"parallel.megatron.{name}: the models or other keys determine it; expected a setting of memory, "
                "communication or speed, such as recompute_granularity, moe_token_dispatcher_type or "
                "overlap_grad_reduce"
            )
    data_parallel = {name: value for name, value in options.items() if _DATA_PARALLEL.fullmatch(name)}
    return {name: value for name, value in options.items() if name not in data_parallel}, data_parallel
