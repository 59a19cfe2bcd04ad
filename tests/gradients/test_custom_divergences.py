"""Users' own divergences: the check at load, their names in expressions, and the compiled pass.

The lists of `kit/objective_cases.py` have one, so that all tests of gradients and of vocabulary shards run it.
"""

import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from kit.config_cases import refused_calls
from kit.divergence_formulas import TRIANGULAR, Triangular
from kit.objective_cases import ALL_DIVERGENCES, make_full, make_leaves, run
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stillhouse import parse_divergence, parse_objective
from stillhouse.objective import Distill, Divergence, forward_kl, linear_objective
from stillhouse.objective.custom_divergences import check_divergence
from stillhouse.objective.divergence import Sides, weighted_parts
from stillhouse.objective.divergence_parameters import Definition
from stillhouse.objective.reference import dense_objective
from stillhouse.objective.tile import compiled

Method = Callable[[Sides], Tensor]


def own(balanced: Method, slope: Method, infinite: str = "") -> Divergence:
    """A divergence with these methods."""

    @dataclass(frozen=True)
    class Own(Divergence):
        definition = Definition("own", "", "", infinite=infinite)

        def balanced(self, pair: Sides) -> Tensor:
            return balanced(pair)

        def balanced_slope(self, pair: Sides) -> Tensor:
            return slope(pair)

    return Own()


#: ½ Σ (p − q)², which is right, for the cases with one mistake
def half_square(pair: Sides) -> Tensor:
    return 0.5 * (pair.p - pair.q).square()


def square_slope(pair: Sides) -> Tensor:
    return pair.q * (pair.q - pair.p)


def neyman(pair: Sides) -> Tensor:
    return (pair.p - pair.q).square() / pair.q


def neyman_slope(pair: Sides) -> Tensor:
    return pair.q - pair.p.square() / pair.q


def in_place(pair: Sides) -> Tensor:
    value = half_square(pair)
    pair.p.mul_(2)
    return value


@pytest.mark.parametrize("expression", ALL_DIVERGENCES)
def test_right_divergences_pass(expression: str) -> None:
    for _, part in weighted_parts(parse_divergence(expression)):
        check_divergence(part)


def test_a_plain_right_one_passes_and_infinity_must_be_declared() -> None:
    check_divergence(own(half_square, square_slope))
    zero = own(
        lambda pair: torch.where(pair.p == pair.q, 0.0, neyman(pair)),
        lambda pair: torch.where(pair.p == pair.q, 0.0, neyman_slope(pair)),
        infinite="q = 0 < p",
    )
    check_divergence(zero)
    with pytest.raises(ValueError, match=r"own: value is inf in torch\.float64 at .*, q = 0 \(prob"):
        check_divergence(own(zero.balanced, zero.balanced_slope))


@pytest.mark.parametrize(("call", "message"), refused_calls("wrong divergences"))
def test_a_wrong_divergence_is_refused_with_the_numbers(call: str, message: str) -> None:
    with pytest.raises(ValueError, match="^own: " + message):
        check_divergence(eval(call))


def test_a_path_stands_wherever_a_name_of_a_divergence_stands() -> None:
    divergence = parse_divergence(f"0.5*{TRIANGULAR}(0.3) + 0.5*forward_kl")
    assert divergence == 0.5 * Triangular(0.3) + 0.5 * forward_kl()
    assert str(divergence) == f"0.5*{TRIANGULAR}(alpha=0.3) + 0.5*forward_kl"
    assert parse_divergence(str(divergence)) == divergence
    assert parse_divergence(TRIANGULAR) == Triangular()
    spec = parse_objective(f"0.3*cross_entropy + 0.7*{TRIANGULAR}(alpha=0.25)", 2.0)
    assert (spec.divergence, spec.divergence_scale, spec.cross_entropy) == (Triangular(0.25), 0.7, 0.3)
    assert f"0.7 × {TRIANGULAR}(alpha=0.25)" in spec.in_words()


@pytest.mark.parametrize(("call", "message"), refused_calls("paths of divergences"))
def test_a_wrong_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, message: str) -> None:
    start = "from dataclasses import dataclass\nfrom stillhouse.objective import Divergence\n"
    methods = "    def balanced(self, pair): ...\n    def balanced_slope(self, pair): ...\n"
    (tmp_path / "my_losses.py").write_text(
        f"{start}class Plain(Divergence):\n{methods}\n"
        "@dataclass(frozen=True)\nclass Half(Divergence):\n    def balanced(self, pair): return 0 * pair.p\n"
        "def function(pair): ...\n"
    )
    (tmp_path / "no_import.py").write_text("import a_module_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_divergence(call)


def test_a_registered_divergence_passes_the_same_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stillhouse.objective.spec import read_objective

    @dataclass(frozen=True)
    class Wrong(Divergence):
        definition = Definition("wrong", "", "")

        def balanced(self, pair: Sides) -> Tensor:
            return half_square(pair)

        def balanced_slope(self, pair: Sides) -> Tensor:
            return 2 * square_slope(pair)

    assert importlib.metadata.entry_points(group="stillhouse.divergences")
    with pytest.raises(ValueError, match=r"wrong: weighted_slope is .*, but the finite difference"):
        read_objective("0.5*wrong", {"wrong": Wrong})


def test_a_dry_run_makes_the_check_with_real_numbers() -> None:
    """`stillhouse plan` has tensors without values."""
    with FakeTensorMode():
        check_divergence(Triangular())
        with pytest.raises(ValueError, match="own: weighted_slope is"):
            check_divergence(own(half_square, lambda pair: 2 * square_slope(pair)))


@pytest.mark.slow
def test_the_compiled_pass_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same gradient as in float64, in a vocabulary that is large enough to be compiled."""
    names: list[str] = []
    original = compiled._compiled

    def recorded(function: Callable[..., object], *rest: object) -> Callable[..., object]:
        names.append(function.__name__)
        return original(function, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(compiled, "_compiled", recorded)
    teacher, exact_teacher = (make_full(9, 2053, dtype=dtype) for dtype in (torch.float32, torch.float64))
    leaves, term = make_leaves(9, 2053, dtype=torch.float32), Distill(teacher, Triangular(0.3))
    fast = run(linear_objective, leaves, [term])
    assert "normalized_sums" in names
    exact = run(dense_objective, make_leaves(9, 2053), [Distill(exact_teacher, Triangular(0.3))])
    for name, gradient in exact.gradients.items():
        torch.testing.assert_close(fast.gradients[name].double(), gradient, rtol=1e-3, atol=1e-7)
