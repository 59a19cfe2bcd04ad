"""Proves that a layer that is sharded by tensor parallelism gives the same results as the full layer.

A plan can be wrong for a model. For example, a function between two sharded matrices may need a mean over all
columns, but a rank has only some columns. The hidden states are then equal on all ranks, but wrong. Therefore a full
copy of every layer, with weights gathered from the ranks, runs once on the same inputs. A process has only one full
layer in memory at a time.

T tokens, D width.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stillhouse.models import Decoder, ProofError, model_parts
from stillhouse.models.dtensors import gathered_tensor
from stillhouse.models.layer_hooks import hidden_of, hooked
from stillhouse.models.model_checks import describe

#: the largest allowed error of a layer's update (output − input), relative to the update. Sharded and full layer sum
#: in different orders, and in half precision also in different dtypes.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@contextmanager
def layers_compared(
    decoder: Decoder, build: Callable[[], Decoder], precision: torch.dtype | None
) -> Iterator[dict[str, float]]:
    """Compare the layers of a decoder with their full copies, in the forward passes of the block.

    build: returns the decoder before it was distributed, with or without weights.
    precision: the dtype of the matrix products; None: the dtype of the hidden states.
    Yields the errors by layer name, in units of the allowed error. In the block, a forward pass is a collective of
    the processes over which the decoder's layers are sharded.
    """
    names = {module: name for name, module in decoder.named_modules()}
    unsharded = build().eval()
    # context parallelism has replaced the attention function by one with another name
    unsharded.pretrained.set_attn_implementation(decoder.pretrained.config._attn_implementation)
    errors: dict[str, float] = {}
    # layers can share a dict, for example of keys and values; their full copies then share another dict. By the `id`
    # of the layers' dict: this dict (kept alive, so that the `id` stays unique) and the dict of the copies
    shadows: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}

    @torch.no_grad()
    def compare(layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        """A forward hook of a layer: write the error of its output to `errors`."""
        input_BSD = options["hidden_states"] if "hidden_states" in options else arguments[0]
        named = (*layer.named_parameters(), *layer.named_buffers())
        tensors = {key: gathered_tensor(value, input_BSD.device) for key, value in named}
        shadow_options = {
            key: shadows.setdefault(id(value), (value, dict(value)))[1] if isinstance(value, dict) else value
            for key, value in options.items()
        }
        name = names[layer]
        expected = functional_call(unsharded.get_submodule(name), tensors, arguments, shadow_options)
        error_T = _errors(hidden_of(output), hidden_of(expected), input_BSD, precision or input_BSD.dtype)
        # with experts, the median: rounding can change a token's experts, which gives a large error for this token
        has_experts = any(model_parts.is_of_experts(key) for key in tensors)
        error = error_T.quantile(0.5 if has_experts else 0.95)
        errors[name] = float(torch.maximum(error, error.new_tensor(errors.get(name, 0.0))))  # NaN stays NaN

    with hooked(*(layer.register_forward_hook(compare, with_kwargs=True) for layer in decoder.layers())):
        yield errors


def require_equal_layers(decoder: Decoder, errors: Mapping[str, float]) -> None:
    """Raise ProofError with the layer's name if an error of `layers_compared` is larger than allowed."""
    for name, error in errors.items():
        if not error <= 1.0:
            raise ProofError(
                f"{describe(decoder.pretrained)} under tensor parallelism: '{name}' does not compute what the whole "
                "layer does, because something between two matrices reads all columns, of which a rank has a part: "
                "expected tensor=1"
            )


def _errors(output_BSD: Tensor, expected_BSD: Tensor, input_BSD: Tensor, precision: torch.dtype) -> Tensor:
    """Return the error of each token, in units of the allowed error."""
    output_TD, expected_TD, input_TD = (
        value.double().flatten(0, -2) for value in (output_BSD, expected_BSD, input_BSD)
    )
    added_T = (expected_TD - input_TD).norm(dim=-1)
    # the rounding error of input + update, in the dtype of the hidden states
    rounding_T = torch.finfo(output_BSD.dtype).eps * expected_TD.norm(dim=-1)
    error_T = (output_TD - expected_TD).norm(dim=-1)
    return error_T / (_TOLERANCE[precision] * added_T + rounding_T)
