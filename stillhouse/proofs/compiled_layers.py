"""Proves that compiled layers give the hidden states and the gradients of the layers as they are written.

The compiled and the plain layers run the same artificial documents, in the layout and the precision of training.
Their rounding errors differ, because a compiled function keeps intermediate results in float32 and adds in another
order. Rounding can change the experts of single tokens, so errors are medians over tokens and over parameters.
"""

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from stillhouse.display import name_list
from stillhouse.models import ProofError, evaluating
from stillhouse.models.dtensors import local
from stillhouse.models.forward_modes import in_mode
from stillhouse.models.load_proof import PLACE_TOLERANCE, relative_errors
from stillhouse.parallel.apply.compiled_layers import layers_not_compiled
from stillhouse.parallel.gradients import reduce_partial_grads
from stillhouse.parallel.runner import Runner


def prove_compiled(
    runner: Runner,
    forward: Callable[[], Sequence[Tensor]],
    forward_backward: Callable[[], object],
    precision: torch.dtype | None,
) -> None:
    """Compare compiled and plain layers. A collective of all processes of the runner.

    forward: returns hidden states; an empty list on processes without the last stage.
    forward_backward: adds the gradients of a loss to the student's parameters.
    precision: the dtype of the matrix products; None: the dtype of the weights.
    Raises ProofError on processes with an error. Warns of breaks in the compiled graphs. Clears all gradients.
    """
    breaks = counters["graph_break"].copy()
    with evaluating(*runner.decoders), torch.no_grad():
        hidden = forward()
        with layers_not_compiled():
            expected = forward()
    errors = {
        "hidden states": max(
            (float(relative_errors(*pair).median()) for pair in zip(hidden, expected, strict=True)), default=0.0
        )
    }
    tolerance = PLACE_TOLERANCE[precision or next(runner.decoders[0].parameters()).dtype]
    if any(parameter.requires_grad for _, parameter in runner.named_parameters()):
        errors["gradients"] = _gradient_error(runner, forward_backward)
    new_breaks = counters["graph_break"] - breaks
    if new_breaks and runner.ranks.is_first:
        reasons = name_list(reason.partition("\n")[0] for reason in new_breaks)
        warnings.warn(
            f"train.compile: {new_breaks.total()} breaks in the graphs of the compiled layers, which run plain torch "
            f"there: {reasons}",
            stacklevel=2,
        )
    for name, error in errors.items():
        if not error <= tolerance:
            raise ProofError(
                f"the {name} of the compiled layers differ by {error:.2%} from those of the layers as they are "
                "written: expected train.compile: false"
            )


def _gradient_error(runner: Runner, forward_backward: Callable[[], object]) -> float:
    """Return the median over this process's parameters of the relative difference between both gradients."""
    devices = [runner.device] if runner.device.type == "cuda" else []

    def gradients(*, training: bool) -> tuple[dict[str, Tensor], bool]:
        """Return the gradients, and whether the passes have drawn random numbers, on any process."""
        with torch.random.fork_rng(devices), in_mode(*runner.decoders, training=training):
            torch.manual_seed(0)
            before = _random_state(devices)
            runner.zero_grad()
            forward_backward()
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
        return math.inf
    errors = [
        (compiled[name].float() - gradient.float()).norm() / gradient.float().norm()
        for name, gradient in expected.items()
        if gradient.numel()
    ]
    return float(torch.stack(errors).nanmedian()) if errors else 0.0


def _random_state(devices: Sequence[torch.device]) -> Tensor:
    return torch.cat([torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)])
