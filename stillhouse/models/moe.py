"""The routers of a mixture of experts: finds them, and adds hooks for their load-balancing loss."""

from stillhouse.models.decoder import Decoder
from stillhouse.models.model_parts import router_classes, text_config
from stillhouse.models.router_aux_loss import RouterBalance


def balance_routers(decoder: Decoder) -> None:
    """Prepare the routers of an unsharded decoder for a load-balancing loss, by adding a `RouterBalance`.

    Raises ValueError for a model without softmax routers or without transformers' `router_aux_loss_coef`.
    """
    config, kinds = text_config(decoder.config), router_classes(decoder.pretrained)
    named = [(name, module) for name, module in decoder.named_modules() if isinstance(module, kinds)]
    if not named or not hasattr(config, "router_aux_loss_coef"):
        raise ValueError(
            f"model type '{config.model_type}' has no routers with an auxiliary loss: expected a mixture of experts "
            "whose configuration has router_aux_loss_coef"
        )
    balance, layers = RouterBalance(len(named)), set(decoder.layers())
    for name, layer in decoder.named_modules():
        if layer in layers:
            balance.attach(layer, {path: router for path, router in named if path.startswith(f"{name}.")})
    decoder.add_layer_loss(balance)
