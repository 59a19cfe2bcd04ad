"""The settings of `parallel.megatron`, which Megatron-Core takes by its own names.

    transformer, data_parallel = split_options({"moe_token_dispatcher_type": "alltoall", "overlap_grad_reduce": True})

Passed on are settings of memory, communication and speed. Those that would change the model, the loss or the dtypes
are refused, because the models and other keys determine them. Not passed on either are settings that need more than
the model and its gradients: graphs of a whole step (rows have other lengths, and the loss another divisor, in each),
buffers that a trainer allocates, schedules of their own, and a gradient of the head in the output layer, which the
output processor replaces.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, get_type_hints

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.transformer_config import MLATransformerConfig
from pydantic import ConfigDict, TypeAdapter, ValidationError

#: fields of TransformerConfig
_TRANSFORMER = {
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "distribute_saved_activations",
    "deallocate_pipeline_outputs",
    "overlap_p2p_comm",
    "batch_p2p_comm",
    "batch_p2p_sync",
    "moe_token_dispatcher_type",
    "moe_flex_dispatcher_backend",
    "moe_flex_dispatcher_num_sms",
    "moe_shared_expert_overlap",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
}
#: fields of DistributedDataParallelConfig
_DATA_PARALLEL = {"overlap_grad_reduce", "bucket_size", "pad_buckets_for_high_nccl_busbw"}
#: each layer is computed again
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of TransformerConfig and those of DistributedDataParallelConfig.

    Raises ValueError, with the key, for a name of neither, a setting that is not passed on, a value of another type
    than the field's, and modules that need Transformer Engine.
    """
    types = get_type_hints(MLATransformerConfig) | get_type_hints(DistributedDataParallelConfig)
    names = {field.name for kind in (MLATransformerConfig, DistributedDataParallelConfig) for field in fields(kind)}
    for name, value in options.items():
        if name not in names:
            raise ValueError(
                f"parallel.megatron.{name}: Megatron-Core has no such setting; expected a field of TransformerConfig "
                "or DistributedDataParallelConfig"
            )
        if name not in _TRANSFORMER | _DATA_PARALLEL:
            raise ValueError(
                f"parallel.megatron.{name}: the models or other keys determine it, or it is not supported here; "
                f"expected one of {', '.join(sorted(_TRANSFORMER | _DATA_PARALLEL))}"
            )
        try:
            TypeAdapter(types[name], config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ValueError(f"parallel.megatron.{name}={value!r}: {reason[0].lower()}{reason[1:]}") from error
    if "layernorm" in (options.get("recompute_modules") or ()) and not HAVE_TE:
        raise ValueError(
            "parallel.megatron.recompute_modules: Megatron-Core needs Transformer Engine to compute layernorm again; "
            "expected other modules"
        )
    data_parallel = {name: value for name, value in options.items() if name in _DATA_PARALLEL}
    return {name: value for name, value in options.items() if name in _TRANSFORMER}, data_parallel


@contextmanager
def refused_settings() -> Iterator[None]:
    """Raise ValueError, with the key, where Megatron-Core refuses settings or lacks a library for one of them."""
    try:
        yield
    except (AssertionError, ImportError, ValueError) as error:
        raise ValueError(f"parallel.megatron: Megatron-Core refuses these settings: {error}") from error
