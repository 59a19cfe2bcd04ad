"""Expert parallelism, applied to a decoder from outside by transformers' own plan: each process has whole experts.

A layer's experts are distributed over processes that are neighbours on the shard and tensor axes of a mesh. One
all-to-all sends each token to the processes of its experts, and another one sends the results back. Tensor-parallel
ranks have the same tokens, so each of them sends a slice.
"""

from torch import nn
from torch.distributed import DeviceMesh

from stillhouse.models import Decoder
from stillhouse.models.model_parts import parallel_plan, plan_name


def apply_expert_parallel(decoder: Decoder, experts: DeviceMesh, tensor: DeviceMesh) -> None:
    """Distribute a decoder's experts.

    experts: a 1-D mesh of the processes over which the experts are distributed. tensor: those with the same tokens.
    Raises ValueError for a degree that does not divide the experts.
    """
    degree = experts.size()
    # families name this number in their configurations in several ways, but the modules of experts in one way
    for count in {int(module.num_experts) for module in dispatched_experts(decoder)}:  # type: ignore[arg-type]
        if count % degree:
            name = "tensor" if degree == tensor.size() else "expert"  # tensor ranks always share the experts
            raise ValueError(
                f"{name}={degree} does not divide the {count} experts of model type '{decoder.config.model_type}': "
                f"expected a divisor of {count}"
            )
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    apply_expert_parallelism(decoder.backbone, experts, tensor, _local_plan(decoder))


def dispatched_experts(decoder: Decoder) -> list[nn.Module]:
    """Return the modules of experts in this stage's layers; an empty list for a model without experts."""
    # transformers' name for the style of a module of experts to which tokens are sent
    dispatched = [name for name, style in _local_plan(decoder).items() if style == "ep_dispatch_experts"]
    return [decoder.backbone.get_submodule(name) for name in dispatched]


def _local_plan(decoder: Decoder) -> dict[str, str]:
    """The family's plan, by the names of the parameters and modules in this stage's layers."""
    plan, backbone = parallel_plan(decoder.config, "ep"), decoder.backbone
    # parameters first: they are sharded before the modules' forwards are wrapped
    parts = [*backbone.named_parameters(), *backbone.named_modules()]
    return {name: plan[plan_name(name)] for name, _ in parts if plan_name(name) in plan}
