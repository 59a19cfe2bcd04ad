"""Proves that compiled layers, and layers that tensor parallelism shards, give the same results as plain layers.

Compiled and plain layers run the same artificial documents, in the layout and the precision of training. Their
rounding errors differ, because a compiled function keeps intermediate results in float32 and adds in another order.
Rounding can change the experts of single tokens, so errors are medians over tokens and over parameters.

A plan of tensor parallelism can be wrong for a model: a function between two sharded matrices may need a mean over
all columns, of which a rank has only some. The hidden states are then equal on all ranks, but wrong. Therefore each
layer is compared with a full copy, which has weights gathered from the ranks and runs on the same inputs.

Backward passes find the parameters whose gradients have to be summed over the tensor ranks. Each rank has a full copy
of every parameter that the plan does not name. If the parameter is applied to the replicated hidden states, its
gradient is the same on all ranks. If it is applied between sharded matrices (a norm of each head, or the parameter
of an activation), a rank's gradient has only the contribution of its own heads or columns. A model is refused if its
plan does not name a matrix between the hidden states and the sharded matrices: the hidden states then get a partial
gradient, the gradients of earlier parameters mix partial and full contributions, and no sum can correct them.

T tokens, D width.
"""

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from stillhouse.display import name_list
from stillhouse.models import Decoder, OutputProcessor, ProofError, evaluating
from stillhouse.models.dtensors import gathered_tensor, local
from stillhouse.models.families import is_of_experts, plan_name
from stillhouse.models.forward_modes import in_mode
from stillhouse.models.layer_hooks import hidden_of, hooked
from stillhouse.models.lm_head import input_embedding
from stillhouse.models.load_proof import PLACE_TOLERANCE, Subject, compare, relative_errors
from stillhouse.models.model_checks import typename
from stillhouse.objective import CrossEntropy, ObjectiveOutput, OutputHead, linear_objective
from stillhouse.parallel.apply.compiled_layers import layers_not_compiled
from stillhouse.parallel.gradients import reduce_partial_grads
from stillhouse.parallel.runner import Runner
from stillhouse.parallel.teacher_student_pair import StageInputs

#: the largest allowed error of a layer's update (output − input), relative to the update. The sharded and the full
#: layer sum in different orders, and in half precision also in different dtypes
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
#: relative differences between the ranks' gradients. Up to `_EQUAL`, they are rounding errors; from `_PARTIAL`, they
#: show that the gradients are partial
_EQUAL, _PARTIAL = 1e-2, 5e-2
#: the number of backward passes with different labels. With one pass, gradients could be nearly equal by chance
_ROUNDS = 3
#: prefix of the names of hidden states, before the name of the module that returns them
_HIDDEN = "hidden states behind "


def prove_compiled(runner: Runner, subject: Subject, inputs: StageInputs, precision: torch.dtype | None) -> None:
    """Compare compiled and plain layers. Warns of breaks in the compiled graphs. Clears all gradients.

    subject: the runner's models.
    inputs: a micro-batch, with an output processor that returns a loss of the student.
    precision: the dtype of the matrix products, or None for the dtype of the weights.

    Raises ProofError on processes with an error. A collective of all processes.
    """
    breaks, probe = counters["graph_break"].copy(), subject.probe
    with evaluating(*runner.decoders), torch.no_grad():
        hidden = subject.run(probe.ids_BS, probe.position_ids_BS)
        with layers_not_compiled():
            expected = subject.run(probe.ids_BS, probe.position_ids_BS)
    errors = [("hidden states", relative_errors(*pair).median()) for pair in zip(hidden, expected, strict=True)]
    if any(parameter.requires_grad for _, parameter in runner.named_parameters()):
        errors.append(("gradients", _gradient_error(runner, [inputs] * _micro_batches(runner))))
    if (new_breaks := counters["graph_break"] - breaks) and runner.ranks.is_first:
        reasons = name_list(reason.partition("\n")[0] for reason in new_breaks)
        warnings.warn(
            f"train.compile: {new_breaks.total()} breaks in the graphs of the compiled layers; the operations at the "
            f"breaks run uncompiled: {reasons}",
            stacklevel=2,
        )
    for name, error in errors:
        compare(
            error,
            PLACE_TOLERANCE[precision or next(runner.decoders[0].parameters()).dtype],
            f"the {name} of the compiled layers differ by {{error:.2%}} from the {name} of the plain layers: "
            "expected train.compile: false",
        )


def _micro_batches(runner: Runner) -> int:
    return 1 if runner.layout.stages == 1 else 2 * runner.layout.degrees.pipeline


def _gradient_error(runner: Runner, micro_batches: Sequence[StageInputs]) -> Tensor:
    """Return the median over this process's parameters of the compiled gradient's relative error."""
    devices = [runner.device] if runner.device.type == "cuda" else []

    def gradients(*, training: bool) -> tuple[dict[str, Tensor], bool]:
        """Return the gradients, and whether the passes used random numbers on any process."""
        with torch.random.fork_rng(devices), in_mode(*runner.decoders, training=training):
            torch.manual_seed(0)
            before = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
            runner.zero_grad()
            runner.forward_backward(micro_batches)
            after = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
        reduce_partial_grads(parameter for _, parameter in runner.named_parameters())
        named = runner.named_parameters()
        values = {name: local(parameter.grad) for name, parameter in named if parameter.grad is not None}
        runner.zero_grad()
        return values, bool(runner.ranks.largest(int(not all(map(torch.equal, before, after)))))

    training = True
    with layers_not_compiled():
        expected, is_random = gradients(training=True)
        if is_random:  # with dropout, the compiled layers would use other random numbers
            training = False
            expected, _ = gradients(training=False)
    compiled, _ = gradients(training=training)
    if compiled.keys() != expected.keys():
        return torch.tensor(math.inf)
    pairs = ((compiled[name].float(), gradient.float()) for name, gradient in expected.items() if gradient.numel())
    errors = [(gradient - plain).norm() / plain.norm() for gradient, plain in pairs]
    # a parameter with a gradient of 0 has the error NaN, which nanmedian ignores
    return torch.stack(errors).nanmedian() if errors else torch.zeros(())


@contextmanager
def layers_compared(
    decoder: Decoder, build: Callable[[], Decoder], precision: torch.dtype | None
) -> Iterator[dict[str, Tensor]]:
    """Compare the layers of a decoder with their full copies, in the forward passes of the block. Each pass is a
    collective of the processes over which the layers are sharded. Yields errors by layer name, in units of the
    allowed error.

    build: returns the decoder before it was distributed.
    precision: the dtype of the matrix products, or None for the dtype of the hidden states.
    """
    names = {module: name for name, module in decoder.named_modules()}
    unsharded = build().eval()
    # context parallelism has given the decoder an attention function with another name
    unsharded.pretrained.set_attn_implementation(decoder.pretrained.config._attn_implementation)
    errors: dict[str, Tensor] = {}
    # layers can share a dict, for example of keys and values; their full copies then share another dict. The key is
    # the `id` of the layers' dict, the value has this dict (so that the `id` stays unique) and the copies' dict
    shadows: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}

    @torch.no_grad()
    def compare_layer(layer: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
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
        # the median if the layer has experts, because rounding can change a token's experts and cause a large error
        has_experts = any(is_of_experts(key) for key in tensors)
        error = error_T.quantile(0.5 if has_experts else 0.95)
        errors[name] = torch.maximum(error, errors.get(name, error))  # torch.maximum keeps NaN

    with hooked(*(layer.register_forward_hook(compare_layer, with_kwargs=True) for layer in decoder.layers())):
        yield errors


def require_equal_layers(decoder: Decoder, errors: Mapping[str, Tensor]) -> None:
    """Raise ProofError with the layer's name if an error of `layers_compared` is larger than allowed."""
    for name, error in errors.items():
        compare(
            error,
            1.0,
            f"{typename(decoder.pretrained)} under tensor parallelism: the results of '{name}' differ from those of "
            "the full layer, because a function between two matrices reads all columns, and a rank has only some: "
            "expected parallel.tensor=1",
        )


def _allowed_errors(output_BSD: Tensor, expected_BSD: Tensor, input_BSD: Tensor, precision: torch.dtype) -> Tensor:
    """Return the error of each token in units of the allowed error."""
    hidden = (output_BSD, expected_BSD, input_BSD)
    output_TD, expected_TD, input_TD = (value.double().flatten(0, -2) for value in hidden)
    added_T = (expected_TD - input_TD).norm(dim=-1)
    # the rounding error of input + update, in the dtype of the hidden states
    rounding_T = torch.finfo(output_BSD.dtype).eps * expected_TD.norm(dim=-1)
    error_T = (output_TD - expected_TD).norm(dim=-1)
    return error_T / (_TOLERANCE[precision] * added_T + rounding_T)


def partial_gradients(runner: Runner, inputs_of: Callable[[OutputProcessor], StageInputs]) -> list[nn.Parameter]:
    """Return the parameters of this process whose gradients have to be summed over the tensor ranks. Parameters with
    the same name in several layers are compared together. Clears all gradients. A collective of all processes.

    The sum is correct if the hidden states have complete gradients, and the parameter's module runs once per forward
    pass. (A module that runs twice could be applied both to hidden states and between sharded matrices.) Raises
    ProofError for gradients that differ between ranks and cannot be summed.
    """
    runs, squares = Counter[nn.Module](), defaultdict[str, float](float)
    hidden: dict[str, Tensor] = {}
    with evaluating(*runner.decoders), ExitStack() as stack:
        for student in runner.decoders:
            for module in student.modules():
                stack.enter_context(hooked(module.register_forward_pre_hook(lambda module, _: runs.update([module]))))
            stack.enter_context(_hidden_gradients(student, hidden))
        count = _micro_batches(runner)
        for number in range(_ROUNDS):
            runner.zero_grad()
            runner.forward_backward([inputs_of(cross_entropies(number))] * count)
            _add_squares(squares, runner, hidden)
            hidden.clear()
    total = defaultdict[str, float](float)
    for rank_squares in runner.ranks.gather(squares):
        for name, value in rank_squares.items():
            total[name] += value
    differing = {name: math.sqrt(total[f"{name} difference"] / total[name]) for name in list(total) if total[name]}
    parts = [(name, copy) for name, copy in _copies(runner) if differing.get(plan_name(name), 0.0) > _EQUAL]
    problems = [
        f"the gradients of the {name} differ by {difference:.1%} between ranks: a matrix that the model's plan does "
        "not name is used between the sharded matrices: expected parallel.tensor=1"
        for name, difference in differing.items()
        if name.startswith(_HIDDEN) and difference > _EQUAL
    ]
    for name, copy in parts:
        problems.append(_problem(runner, name, copy, differing[plan_name(name)], runs, count * _ROUNDS))
    runner.zero_grad()
    if problem := next(filter(None, problems), ""):
        raise ProofError(f"{typename(runner.decoders[0].pretrained)} under tensor parallelism: {problem}")
    return [parameter for _, parameter in parts]


def cross_entropies(number: int) -> OutputProcessor:
    """Return an output processor that sums the cross-entropies of all depths. number: determines the labels."""

    def process(*, hidden_states: Any, head: OutputHead, context: Any, depth: int = 0) -> ObjectiveOutput:
        hidden_by_depth = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
        place_T = torch.arange(hidden_by_depth[0].shape[:-1].numel(), device=hidden_by_depth[0].device)
        terms = [CrossEntropy((place_T * (number + 1)) % 7)]
        losses = [linear_objective(hidden_BSD.flatten(0, -2), head, terms).loss for hidden_BSD in hidden_by_depth]
        return ObjectiveOutput(torch.stack(losses).sum(), {}, {})

    return process


def _copies(runner: Runner) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that have a gradient and are replicated over the tensor ranks."""
    for name, parameter in runner.named_parameters():
        # expert ranks include the tensor ranks, so a parameter that is sharded over them is not replicated
        is_sharded = any(
            axis in ("tensor", "expert") and not placement.is_replicate() for axis, placement in _axes(parameter)
        )
        if parameter.grad is not None and not is_sharded:
            yield name, parameter


def _axes(parameter: nn.Parameter) -> Iterable[tuple[str, Any]]:
    """Return the axes of a parameter's mesh by name, each with its placement."""
    if not isinstance(parameter, DTensor):
        return ()
    return zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)


def _add_squares(squares: defaultdict[str, float], runner: Runner, hidden: Mapping[str, Tensor]) -> None:
    """Add the sum of squares of each gradient on this process to squares[name], and that of (gradient − mean over the
    tensor ranks) to squares[name + " difference"]. name: its `plan_name`. A collective of the tensor ranks.
    """
    reduce_partial_grads(parameter for _, parameter in runner.named_parameters())
    copies = [(plan_name(name), local(parameter.grad)) for name, parameter in _copies(runner)]
    copies += [(f"{_HIDDEN}{name}", gradient) for name, gradient in hidden.items()]
    if not copies:
        return
    values = torch.cat([gradient.flatten().to(runner.device, torch.float32) for _, gradient in copies])
    mean = values.clone()
    group = runner.mesh.weights.get_group("tensor")
    dist.all_reduce(mean, group=group)
    mean /= group.size()
    sizes = [gradient.numel() for _, gradient in copies]
    for suffix, terms in (("", values), (" difference", values - mean)):
        sums = torch.stack([part.square().sum() for part in terms.split(sizes)]).tolist()
        for (name, _), value in zip(copies, sums, strict=True):
            squares[name + suffix] += value


def _problem(
    runner: Runner, name: str, parameter: nn.Parameter, difference: float, runs: Counter[nn.Module], count: int
) -> str:
    """Return why a parameter's gradients cannot be summed, or "". runs: each module's number of runs in all `count`
    forward passes.
    """
    if difference < _PARTIAL:
        return f"the gradients of '{name}' differ by {difference:.1%} between ranks, but should be equal"
    if any(axis == "tensor" for axis, _ in _axes(parameter)):
        return f"ranks have different gradients of '{name}', which the plan replicates: expected parallel.tensor=1"
    owner = name.rpartition(".")[0]
    owners = [module for part in runner.decoders for path, module in part.named_modules() if path == owner]
    times = sum(runs[module] for module in owners)
    if times != count:
        return (
            f"ranks have different gradients of '{name}', whose module runs {times / count:g} times in a forward "
            "pass, so that the gradients cannot be summed: expected parallel.tensor=1"
        )
    return ""


def _hidden_gradients(student: Decoder, into: dict[str, Tensor]) -> AbstractContextManager[None]:
    """Return a context that adds the gradients of the embedding's and the layers' outputs to `into`, by module."""

    def add(name: str, gradient: Tensor) -> None:
        value = local(gradient).detach().float()
        into[name] = into[name] + value if name in into else value

    def watch(module: nn.Module, _: Any, output: Any) -> None:
        hidden_BSD = hidden_of(output)
        if hidden_BSD.requires_grad:
            hidden_BSD.register_hook(partial(add, f"'{names[module]}'"))

    names = {module: name for name, module in student.named_modules()}
    embedding = input_embedding(student.pretrained)
    watched = [*([] if embedding is None else [embedding]), *student.layers()]
    return hooked(*(module.register_forward_hook(watch) for module in watched))
