"""Kimi Delta Attention (Kimi team 2025, arXiv:2510.26692): a decay for each component of a key; see `segments`."""

from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

chunk_kda, fused_recurrent_kda = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
