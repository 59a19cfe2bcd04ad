"""The part of mamba-ssm that transformers calls; see `segments`."""
