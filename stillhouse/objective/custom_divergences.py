"""Divergences of users and of other packages: their classes, and a check of each one that an expression names.

The check evaluates the divergence on a few fixed distributions: different, equal, close and peaked ones, and ones
with tiny probabilities and zeros. It compares the slopes with finite differences of the value in float64, requires
numbers that are finite in float32, too, and requires elementwise functions, as vocabulary shards need them.

R rows (pairs of distributions), V outcomes.
"""

import inspect
import math
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from stillhouse.display import first_line
from stillhouse.objective.divergence import Divergence, Pivot, Sides, sides
from stillhouse.objective.divergence_parameters import Parameters

#: logits of a teacher and of a student, by a description for error messages
_LOGITS = {
    "different distributions": ([0.3, -1.2, 0.8, -0.5, 0.1], [-0.4, 0.9, 0.2, -1.5, 0.6]),
    "equal distributions": ([0.3, -1.2, 0.8, -0.5, 0.1], [0.3, -1.2, 0.8, -0.5, 0.1]),
    "close distributions": ([0.3, -1.2, 0.8, -0.5, 0.1], [0.31, -1.24, 0.83, -0.52, 0.08]),
    "peaks at the same outcome": ([0.0, -12.0, -14.0, -13.0, -15.0], [0.0, -11.0, -16.0, -12.0, -14.0]),
    "peaks at different outcomes": ([0.0, -9.0, -10.0, -11.0, -12.0], [-9.0, 0.0, -12.0, -10.0, -11.0]),
    "tiny probabilities": ([0.0, -1.0, -45.0, -30.0, -60.0], [-1.0, 0.0, -30.0, -60.0, -45.0]),
}
#: the same with probabilities of zero, and with probabilities that are zero in float32
_ZEROS = {
    "probabilities of zero": ([0.0, -1.0, -math.inf, -math.inf, -2.0], [0.0, -math.inf, -1.0, -math.inf, -1.0]),
    "probabilities below 1e-45": ([0.0, -200.0, -3.0, -110.0, -0.5], [-200.0, 0.0, -120.0, -110.0, -0.5]),
}
#: the step of finite differences, in log q or in a logit
_STEP = 1e-5
#: the errors that a mistake in a user's class raises
_MISTAKES = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError)


def imported_class(path: str) -> Any:
    """Import the object `package.module:Class`. Raises ValueError if it does not exist."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{path}: {first_line(error)}; expected package.module:Class") from error


def divergence_class(name: str, kind: Any) -> type[Divergence]:
    """Return the class of a divergence that is not one of this package's.

    name: its name in expressions. kind: a registered class of parameters, or a user's class.

    Raises ValueError unless it is a frozen dataclass that derives from `Divergence` and has its methods.
    """
    expected = "expected a class that derives from stillhouse.objective.Divergence"
    if not isinstance(kind, type) or not issubclass(kind, Parameters):
        raise ValueError(f"{name} is {kind!r:.80}: {expected}")
    divergence = kind.divergence()
    if not isinstance(divergence, type) or not issubclass(divergence, Divergence):
        raise ValueError(f"divergence() of {name} gives {divergence!r:.80}: {expected}")
    if inspect.isabstract(divergence):
        missing = " and ".join(sorted(divergence.__abstractmethods__))
        raise ValueError(f"{name} is a class without {missing}: {expected}, with balanced and balanced_slope")
    if "__dataclass_params__" not in vars(divergence):
        raise ValueError(f"{name} is no dataclass: expected @dataclass(frozen=True) before its class")
    return divergence


def check_divergence(divergence: Divergence) -> None:
    """Raise ValueError if a divergence is wrong on one of a few fixed distributions. The message has the numbers."""
    with _disable_current_modes(), torch.no_grad():  # a dry run has tensors without values
        _Check(divergence, _LOGITS).check_slopes()
        _Check(divergence, _LOGITS | _ZEROS).check_numbers()


class _Check:
    """The checks of a divergence. logits: those of the teachers and students, by the descriptions of the rows."""

    def __init__(self, divergence: Divergence, logits: Mapping[str, tuple[list[float], list[float]]]):
        self._divergence, self._rows = divergence, list(logits)
        self._log_p_RV, self._log_q_RV = (
            torch.tensor(rows, dtype=torch.float64, device="cpu").log_softmax(-1)
            for rows in zip(*logits.values(), strict=True)
        )

    def check_slopes(self) -> None:
        """Compare both slopes with finite differences of their values, and both values with each other."""
        log_p_RV, log_q_RV, steps = self._log_p_RV, self._log_q_RV, (_STEP, -_STEP)
        value_RV, q_RV = self._call("value", log_p_RV, log_q_RV), log_q_RV.exp()
        around = [self._call("value", log_p_RV, log_q_RV + step) for step in steps]
        slope_RV = self._call("weighted_slope", log_p_RV, log_q_RV)
        self._compare(around, value_RV, value_RV.abs(), slope_RV, "weighted_slope", "q·∂f/∂q")
        balanced_RV = self._call("balanced", self._sides())
        unit_V1V = torch.eye(q_RV.shape[1], dtype=q_RV.dtype, device=q_RV.device)[:, None]
        moved = [(log_q_RV + step * unit_V1V).log_softmax(-1) for step in steps]
        around = [self._call("balanced", sides(log_p_RV.expand_as(log_q), log_q)).sum(-1).T for log_q in moved]
        total_R1, size_R1 = balanced_RV.sum(-1, keepdim=True), balanced_RV.abs().sum(-1, keepdim=True)
        for pair in (self._sides(), self._sides(with_pivot=True)):
            slope_RV = self._call("balanced_slope", pair)
            slope_RV = slope_RV - q_RV * slope_RV.sum(-1, keepdim=True)
            what = "the gradient by a logit from balanced_slope"
            self._compare(around, total_R1, size_R1, slope_RV, what, "q·(∂f/∂q + c) with one c per row")
        self._check_sums(balanced_RV, value_RV)

    def _check_sums(self, balanced_RV: Tensor, value_RV: Tensor) -> None:
        total_R, textbook_R = balanced_RV.sum(-1), value_RV.sum(-1)
        bound_R = 1e-9 * (balanced_RV.abs() + value_RV.abs()).sum(-1) + 1e-12
        is_equal_R = (self._log_p_RV == self._log_q_RV).all(-1)
        for row, (total, textbook) in enumerate(zip(total_R.tolist(), textbook_R.tolist(), strict=True)):
            if not abs(total - textbook) <= bound_R[row]:
                problem = f"the sum of balanced is {total:.6g}, and that of value {textbook:.6g}"
                self._fail(row, problem, "the same sum over all outcomes")
            if total < -bound_R[row] or (is_equal_R[row] and total > bound_R[row]):
                self._fail(row, f"it is {total:.6g}", "a divergence, which is never negative, and 0 where p = q")

    def check_numbers(self) -> None:
        """Require finite numbers (except with `definition.infinite`), which are nearly the same in float32."""
        exact_RV = self._call("value", self._log_p_RV, self._log_q_RV)
        for dtype in (torch.float64, torch.float32):
            log_p_RV, log_q_RV = self._log_p_RV.to(dtype), self._log_q_RV.to(dtype)
            value_RV = self._call("value", log_p_RV, log_q_RV)
            self._require_finite("value", value_RV)
            self._require_finite("weighted_slope", self._call("weighted_slope", log_p_RV, log_q_RV))
            self._require_finite("balanced", self._call("balanced", self._sides(dtype)))
            for with_pivot in (False, True):
                slope_RV = self._call("balanced_slope", self._sides(dtype, with_pivot=with_pivot))
                self._require_finite("balanced_slope", slope_RV)
            error_RV = (value_RV.double() - exact_RV).abs()
            is_far_RV = error_RV.isfinite() & (error_RV > 1e-3 * exact_RV.abs() + 1e-5)
            for row, at in is_far_RV.nonzero().tolist()[:1]:
                numbers = f"{value_RV[row, at].item():.6g} in {dtype}, but {exact_RV[row, at].item():.6g} in float64"
                self._fail(row, f"value is {numbers} at {self._place(row, at)}", "nearly equal numbers")

    def _call(self, name: str, *arguments: Tensor | Sides) -> Tensor:
        """Call a method. Raises ValueError unless it is elementwise and leaves its arguments unchanged."""
        tensors = [tensor for one in arguments for tensor in ([one] if isinstance(one, Tensor) else one[:5])]
        before, shape, dtype = [tensor.clone() for tensor in tensors], tensors[0].shape, tensors[0].dtype
        result = self._run(name, *arguments)
        if not isinstance(result, Tensor) or result.shape != shape or result.dtype != dtype:
            got = f"{tuple(result.shape)}, {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
            expected = f"a tensor of shape {tuple(shape)} and {dtype}, because it is elementwise"
            raise ValueError(f"{self._divergence}: {name} gives {got}; expected {expected}")
        if not all(map(_is_same, before, tensors)):
            raise ValueError(f"{self._divergence}: {name} changes its arguments in place; expected new tensors")
        shorter = self._run(name, *map(_first_two, arguments))
        if not _is_same(result[None, ..., :2], shorter):
            raise ValueError(
                f"{self._divergence}: {name} gives an outcome another number if other outcomes are left out; "
                "expected an elementwise function, because a tensor can have only a part of the outcomes"
            )
        return result.detach()

    def _run(self, name: str, *arguments: Tensor | Sides) -> Any:
        try:
            return getattr(self._divergence, name)(*arguments)
        except _MISTAKES as error:
            kind, reason = type(error).__name__, first_line(error)
            raise ValueError(f"{self._divergence}: {name} raises {kind}: {reason}") from error

    def _compare(
        self, around: Sequence[Tensor], value: Tensor, size: Tensor, slope_RV: Tensor, name: str, formula: str
    ) -> None:
        """Compare a slope with the difference of the values one step above and below.

        around: these two values. size: the size of the summands of `value`, which determines the rounding error.
        """
        difference_RV = (around[0] - around[1]) / (2 * _STEP)
        kink_RV = (around[0] + around[1] - 2 * value).abs() / (2 * _STEP)  # such as that of |p − q| where p = q
        largest_RV = torch.maximum(difference_RV.abs(), slope_RV.abs())
        bound_RV = 1e-5 * largest_RV + kink_RV + 1e-9 * (size + slope_RV.abs().amax(-1, keepdim=True)) + 1e-9
        for row, at in (~((difference_RV - slope_RV).abs() <= bound_RV)).nonzero().tolist()[:1]:
            slope, difference = slope_RV[row, at].item(), difference_RV[row, at].item()
            problem = f"{name} is {slope:.6g}, but the finite difference of the value is {difference:.6g}"
            self._fail(row, f"{problem} at {self._place(row, at)}", formula)

    def _require_finite(self, name: str, result_RV: Tensor) -> None:
        is_allowed = bool(self._divergence.definition.infinite)
        is_bad_RV = result_RV.isnan() if is_allowed else ~result_RV.isfinite()
        for row, at in is_bad_RV.nonzero().tolist()[:1]:
            where = f"in {result_RV.dtype} at {self._place(row, at)}"
            expected = "a number" if is_allowed else "a finite number, or Definition(…, infinite=…) for the class"
            self._fail(row, f"{name} is {result_RV[row, at].item()} {where}", expected)

    def _sides(self, dtype: torch.dtype = torch.float64, *, with_pivot: bool = False) -> Sides:
        log_p_RV, log_q_RV = self._log_p_RV.to(dtype), self._log_q_RV.to(dtype)
        if not with_pivot:
            return sides(log_p_RV, log_q_RV)
        peak_p_R1, peak_q_R1 = (log_RV.amax(-1, keepdim=True) for log_RV in (log_p_RV, log_q_RV))
        return sides(log_p_RV, log_q_RV, pivot=Pivot(peak_q_R1, peak_q_R1 - peak_p_R1))  # as in `tile/pointwise.py`

    def _place(self, row: int, at: int) -> str:
        return f"p = {self._log_p_RV[row, at].exp().item():.3g}, q = {self._log_q_RV[row, at].exp().item():.3g}"

    def _fail(self, row: int, problem: str, expected: str) -> NoReturn:
        raise ValueError(f"{self._divergence}: {problem} ({self._rows[row]}); expected {expected}")


def _first_two(argument: Tensor | Sides) -> Tensor | Sides:
    """The same argument for the first two outcomes alone, with one more dim in front, as sums over pieces have it."""
    if isinstance(argument, Tensor):
        return argument[None, ..., :2]
    return argument._replace(**{name: getattr(argument, name)[None, ..., :2] for name in Sides._fields[:5]})


def _is_same(one: Tensor, other: Any) -> bool:
    """Whether two tensors are equal, up to the rounding of vectorized instructions; NaN is equal to NaN."""
    if not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    return torch.allclose(one, other, rtol=1e-5, atol=1e-30, equal_nan=True)
