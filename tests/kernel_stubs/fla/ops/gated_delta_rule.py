"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464); see `segments`."""

from functools import partial
from typing import Any

from segments import by_document, delta_rule
from torch import Tensor


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    assert cu_seqlens is None or len(q) == 1, "a kernel got several rows"
    borders = None if cu_seqlens is None else cu_seqlens.tolist()
    return by_document(partial(delta_rule, normalize=use_qk_l2norm_in_kernel), borders, q, k, v, g, beta), None


def fused_recurrent_gated_delta_rule(*_: Any, **__: Any) -> tuple[Tensor, None]:
    raise NotImplementedError("generation with the stub")
