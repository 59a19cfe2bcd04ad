"""Expert parallelism, applied to a decoder from outside: whole experts on each process, by transformers' own plan.

The processes among which a layer's experts are dealt out are neighbours on the shard and tensor axes of a mesh. A
token goes to its experts' processes by one all-to-all and comes back by another; those that share a token by tensor
parallelism send a slice each.
"""

from torch import nn
from torch.distributed import DeviceMesh

from stillhouse.models import Decoder
from stillhouse.parallel.tensor_parallel import generic

#: transformers' name for a module of experts whose tokens come to it
DISPATCHED = "ep_dispatch_experts"


def apply_expert_parallel(decoder: Decoder, experts: DeviceMesh, tensor: DeviceMesh) -> None:
    """experts: of one dim, the processes that share the experts. tensor: of those, the ones with the same tokens.

    Raises ValueError for experts that cannot be dealt out evenly, and for a transformers that cannot.
    """
    config = decoder.config.get_text_config()
    degree, count = experts.size(), config.num_local_experts
    if count % degree:
        raise ValueError(
            f"parallel.expert={degree} does not divide the {count} experts of model type '{config.model_type}': "
            "expected a divisor of it"
        )
    try:
        from transformers.distributed.expert_parallel import apply_expert_parallelism
    except ImportError as error:
        raise ValueError(f"parallel.expert={degree} needs transformers 5.22 or later ({error})") from error
    plan = _plan(decoder)
    parts = [*decoder.backbone.named_parameters(), *decoder.backbone.named_modules()]  # weights are cut first
    here = {name: plan[generic(name)] for name, _ in parts if generic(name) in plan}
    apply_expert_parallelism(decoder.backbone, experts, tensor, here)


def dispatched_experts(decoder: Decoder) -> list[nn.Module]:
    """The modules that hold the experts of the layers that are here; none for a model without."""
    plan = _plan(decoder)
    named = decoder.backbone.named_modules()
    return [module for name, module in named if plan.get(generic(name)) == DISPATCHED]


def _plan(decoder: Decoder) -> dict[str, str]:
    return getattr(decoder.config.get_text_config(), "base_model_ep_plan", None) or {}
