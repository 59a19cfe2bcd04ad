"""The names of MTP layers in a checkpoint. Needs no transformers that can run such layers (`mtp_layers.py` does)."""

from transformers import PreTrainedConfig


def mtp_prefixes(config: PreTrainedConfig) -> list[str]:
    """Return, for each depth, the prefix of its layer's names in a checkpoint with this configuration."""
    own = config.get_text_config(decoder=True)
    depths = getattr(own, "num_mtp_layers", None) or 0
    return [f"model.layers.{own.num_hidden_layers + depth}." for depth in range(depths)]


def without_mtp(config: PreTrainedConfig) -> list[str]:
    """Take the MTP layers out of a configuration; returns the prefixes of their names in its checkpoint."""
    prefixes, own = mtp_prefixes(config), config.get_text_config(decoder=True)
    if prefixes:
        own.num_mtp_layers = 0
    for kinds in ("mtp_layer_types", "mtp_mlp_layer_types"):
        own.__dict__.pop(kinds, None)
    return prefixes
