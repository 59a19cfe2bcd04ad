"""The functions of causal-conv1d that transformers calls; see `segments`."""

from functools import partial

from segments import borders_of, by_document, convolution
from torch import Tensor


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    of_document = partial(convolution, weight_CW=weight, bias_C=bias, activation=activation)
    return by_document(of_document, borders_of(seq_idx), x.transpose(1, 2)).transpose(1, 2)


def causal_conv1d_update(*_: object, **__: object) -> Tensor:
    raise NotImplementedError("generation with the stub")
