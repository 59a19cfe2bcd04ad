"""Expert parallelism by transformers' own plan: each process has some complete experts of a layer.

The processes are neighbours on the shard and tensor axes of a mesh. An all-to-all dispatches each token to the
processes of its experts, and another all-to-all sends the results back. Tensor ranks have the same tokens, so each
tensor rank dispatches one slice of these tokens.
"""

from torch import nn
from torch.distributed import DeviceMesh

from stillhouse.models import Decoder
from stillhouse.models.families import ModelFacts, plan_name


def apply_expert_parallel(decoder: Decoder, experts: DeviceMesh, tensor: DeviceMesh) -> None:
    """Distribute a decoder's experts.

    experts: the processes over which the experts are distributed. tensor: the ranks with the same tokens.
    Raises ValueError for a degree that does not divide the experts.
    """
    degree = experts.size()
    # this number has another name in each family's configuration, but the same name in every module of experts
    for count in {int(module.num_experts) for module in dispatched_experts(decoder)}:  # type: ignore[arg-type]
        if count % degree:
            name = "tensor" if degree == tensor.size() else "expert"  # the degree is at least the tensor degree
            raise ValueError(
                f"{name}={degree} does not divide the {count} experts of model type '{decoder.config.model_type}': "
                f"expected a divisor of {count}"
            )
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    apply_expert_parallelism(decoder.language_model, experts, tensor, _local_plan(decoder))


def dispatched_experts(decoder: Decoder) -> list[nn.Module]:
    """Return the modules of experts in this stage's layers."""
    # ep_dispatch_experts: transformers' style for a module of experts with token dispatch
    dispatched = [name for name, style in _local_plan(decoder).items() if style == "ep_dispatch_experts"]
    return [decoder.language_model.get_submodule(name) for name in dispatched]


def _local_plan(decoder: Decoder) -> dict[str, str]:
    """Return the family's plan for this stage: styles by the names of parameters and modules."""
    plan, model = ModelFacts(decoder.config).parallel_plan("ep"), decoder.language_model
    # parameters first: they are sharded before the modules' forwards are wrapped
    parts = [*model.named_parameters(), *model.named_modules()]
    return {name: plan[plan_name(name)] for name, _ in parts if plan_name(name) in plan}
