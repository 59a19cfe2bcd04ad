"""The engine on Megatron-Core. This file imports nothing from Megatron-Core, which is an optional dependency.

`model_config.py` converts a transformers configuration, `chunks.py` builds this rank's part of the model, and
`weights.py` maps its parameters to the tensors of the full model, by the names in `families.py`.
"""
