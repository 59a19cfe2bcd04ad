"""The part of flash-linear-attention that transformers calls; see `segments`."""
