"""Proves that layers that are compiled, or sharded by tensor parallelism, compute what they do as they are written.

Compiled and plain layers run the same artificial documents, in the layout and the precision of training. Their
rounding errors differ, because a compiled function keeps intermediate results in float32 and adds in another order.
Rounding can change the experts of single tokens, so errors are medians over tokens and over parameters.

A plan of tensor parallelism can be wrong for a model. For example, a function between two sharded matrices may need
a mean over all columns, but a rank has only some columns. The hidden states are then equal on all ranks, but wrong.
Therefore a full copy of every layer, with weights gathered from the ranks, runs once on the same inputs. A process
has only one full layer in memory at a time.

T tokens, D width.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.func import functional_call

from stillhouse.display import name_list
from stillhouse.models import Decoder, evaluating
from stillhouse.models.dtensors import gathered_tensor, local
from stillhouse.models.families import is_of_experts
from stillhouse.models.forward_modes import in_mode
from stillhouse.models.layer_hooks import hidden_of, hooked
from stillhouse.models.load_proof import PLACE_TOLERANCE, Subject, compare, relative_errors
from stillhouse.models.model_checks import describe
from stillhouse.parallel.apply.compiled_layers import layers_not_compiled
from stillhouse.parallel.gradients import reduce_partial_grads
from stillhouse.parallel.runner import Runner
from stillhouse.parallel.teacher_student_pair import StageInputs

#: the largest allowed error of a layer's update (output − input), relative to the update. Sharded and full layer sum
#: in different orders, and in half precision also in different dtypes.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def prove_compiled(
    runner: Runner, subject: Subject, micro_batches: Sequence[StageInputs], precision: torch.dtype | None
) -> None:
    """Compare compiled and plain layers. A collective of all processes of the runner.

    subject: the runner's models. micro_batches: add the gradients of a loss to the student's parameters.
    precision: the dtype of the matrix products; None: the dtype of the weights.
    Raises ProofError on processes with an error. Warns of breaks in the compiled graphs. Clears all gradients.
    """
    breaks, probe = counters["graph_break"].copy(), subject.probe
    with evaluating(*runner.decoders), torch.no_grad():
        hidden = subject.run(probe.ids_BS, probe.position_ids_BS)
        with layers_not_compiled():
            expected = subject.run(probe.ids_BS, probe.position_ids_BS)
    errors = [("hidden states", relative_errors(*pair).median()) for pair in zip(hidden, expected, strict=True)]
    if any(parameter.requires_grad for _, parameter in runner.named_parameters()):
        errors.append(("gradients", _gradient_error(runner, micro_batches)))
    new_breaks = counters["graph_break"] - breaks
    if new_breaks and runner.ranks.is_first:
        reasons = name_list(reason.partition("\n")[0] for reason in new_breaks)
        warnings.warn(
            f"train.compile: {new_breaks.total()} breaks in the graphs of the compiled layers, which run plain torch "
            f"there: {reasons}",
            stacklevel=2,
        )
    for name, error in errors:
        compare(
            error,
            PLACE_TOLERANCE[precision or next(runner.decoders[0].parameters()).dtype],
            f"the {name} of the compiled layers differ by {{error:.2%}} from those of the layers as they are written"
            ": expected train.compile: false",
        )


def _gradient_error(runner: Runner, micro_batches: Sequence[StageInputs]) -> Tensor:
    """Return the median over this process's parameters of the relative difference between both gradients."""
    devices = [runner.device] if runner.device.type == "cuda" else []

    def gradients(*, training: bool) -> tuple[dict[str, Tensor], bool]:
        """Return the gradients, and whether the passes have drawn random numbers, on any process."""
        with torch.random.fork_rng(devices), in_mode(*runner.decoders, training=training):
            torch.manual_seed(0)
            before = _random_state(devices)
            runner.zero_grad()
            runner.forward_backward(micro_batches)
            is_random = not torch.equal(before, _random_state(devices))
        held = reduce_partial_grads(parameter for _, parameter in runner.named_parameters())
        names = {id(parameter): name for name, parameter in runner.named_parameters()}
        values = {names[id(parameter)]: local(parameter.grad) for parameter in held if parameter.grad is not None}
        runner.zero_grad()
        return values, bool(runner.ranks.largest(int(is_random)))

    training = True
    with layers_not_compiled():
        expected, is_random = gradients(training=True)
        if is_random:  # dropout: the compiled layers draw other random numbers
            training = False
            expected, _ = gradients(training=False)
    compiled, _ = gradients(training=training)
    if compiled.keys() != expected.keys():
        return torch.tensor(math.inf)
    errors = [
        (compiled[name].float() - gradient.float()).norm() / gradient.float().norm()
        for name, gradient in expected.items()
        if gradient.numel()
    ]
    # the gradient of a parameter may be 0
    return torch.stack(errors).nanmedian() if errors else torch.zeros(())


def _random_state(devices: Sequence[torch.device]) -> Tensor:
    return torch.cat([torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)])


@contextmanager
def layers_compared(
    decoder: Decoder, build: Callable[[], Decoder], precision: torch.dtype | None
) -> Iterator[dict[str, Tensor]]:
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
    errors: dict[str, Tensor] = {}
    # layers can share a dict, for example of keys and values; their full copies then share another dict. By the `id`
    # of the layers' dict: this dict (kept alive, so that the `id` stays unique) and the dict of the copies
    shadows: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}

    @torch.no_grad()
    def compare_layer(layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
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
        error_T = _allowed_errors(hidden_of(output), hidden_of(expected), input_BSD, precision or input_BSD.dtype)
        # with experts, the median: rounding can change a token's experts, which gives a large error for this token
        has_experts = any(is_of_experts(key) for key in tensors)
        error = error_T.quantile(0.5 if has_experts else 0.95)
        errors[name] = torch.maximum(error, errors.get(name, error))  # NaN stays NaN

    with hooked(*(layer.register_forward_hook(compare_layer, with_kwargs=True) for layer in decoder.layers())):
        yield errors


def require_equal_layers(decoder: Decoder, errors: Mapping[str, Tensor]) -> None:
    """Raise ProofError with the layer's name if an error of `layers_compared` is larger than allowed."""
    for name, error in errors.items():
        compare(
            error,
            1.0,
            f"{describe(decoder.pretrained)} under tensor parallelism: '{name}' does not compute what the whole "
            "layer does, because something between two matrices reads all columns, of which a rank has a part: "
            "expected tensor=1",
        )


def _allowed_errors(output_BSD: Tensor, expected_BSD: Tensor, input_BSD: Tensor, precision: torch.dtype) -> Tensor:
    """Return the error of each token, in units of the allowed error."""
    output_TD, expected_TD, input_TD = (
        value.double().flatten(0, -2) for value in (output_BSD, expected_BSD, input_BSD)
    )
    added_T = (expected_TD - input_TD).norm(dim=-1)
    # the rounding error of input + update, in the dtype of the hidden states
    rounding_T = torch.finfo(output_BSD.dtype).eps * expected_TD.norm(dim=-1)
    error_T = (output_TD - expected_TD).norm(dim=-1)
    return error_T / (_TOLERANCE[precision] * added_T + rounding_T)
