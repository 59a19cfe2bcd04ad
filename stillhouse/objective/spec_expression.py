"""The grammar of an objective's expression: `0.3*cross_entropy + 0.7*jsd(0.5) + 1e-4*z_loss`.

The grammar is that of `parse_divergence` with more names: `cross_entropy(label_smoothing=…)`, `z_loss`, `entropy` (an
entropy bonus has a negative coefficient) and `uld` (`sorted_l1.py`). All divergences of the sum become one term, so
that they share one pass over the tile; the term's name in metrics is the divergences' expression.

Two more terms train on sampled tokens of a batch of rollouts: `sampled_kl(k2)` or `sampled_kl(k3)`, and
`policy_gradient(clip_low=…, teacher_kl=…, …)`, whose arguments are in `policy.py`. There, cross-entropy and z-loss
count at the other tokens. Divergences and the entropy count at all tokens and need no importance correction: they are
exact for any token.

This file needs no torch, so that a misspelt loss is refused before torch is imported.
"""

import math
from collections.abc import Callable
from typing import Any

from stillhouse.objective.expression import Summand, parse_sum, unknown_name
from stillhouse.objective.parameters import PARAMETERS, require_weight
from stillhouse.objective.policy import policy_fields

#: the names in the grammar that are not divergences, and other projects' names for them
OTHERS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("ce", "nll", "sft", "xent", "hard_loss"),
    "z_loss": (),
    "entropy": (),
    "uld": (),
    "sampled_kl": ("k1", "k2", "k3"),
    "policy_gradient": (),
}


def expression_fields(text: str) -> tuple[dict[str, Any], list[Summand]]:
    """Return the fields of `ObjectiveSpec` that an expression sets, without the divergence; and the divergences.

    Raises ValueError for an unknown or repeated name, and for a coefficient that is not finite or, except for
    `entropy`, not positive.
    """
    others: dict[str, Summand] = {}
    divergences: list[Summand] = []
    for summand in parse_sum(text, TAKE_WORDS):
        if summand.name in PARAMETERS:
            divergences.append(summand)
        elif summand.name not in OTHERS:
            raise unknown_name(summand.name, OTHERS, summand.place)
        elif summand.name in others:
            raise ValueError(f"{summand.name} comes twice in {text!r}; expected one coefficient for it")
        else:
            others[summand.name] = summand
    _check_coefficients(others, text)
    fields: dict[str, Any] = {name: summand.coefficient for name, summand in others.items()}
    for summand in divergences:
        kind = PARAMETERS[summand.name]
        require_weight(summand.coefficient, summand.call(kind, kind.definition.example))
    for name, arguments in ARGUMENTS.items():
        if name in others:
            fields |= others[name].call(arguments)
    return fields, divergences


def _check_coefficients(others: dict[str, Summand], text: str) -> None:
    for name, summand in others.items():
        if not math.isfinite(summand.coefficient):
            raise ValueError(f"{summand.coefficient:g}*{name} in {text!r}: expected a finite coefficient")
        if name != "entropy" and not summand.coefficient > 0:
            raise ValueError(f"{summand.coefficient:g}*{name} in {text!r}: expected a positive coefficient")
        if name not in ARGUMENTS and (summand.arguments or summand.keywords):
            raise ValueError(f"{name} takes no arguments (in {text!r}); write coefficient*{name}")
    if "z_loss" in others and "cross_entropy" not in others:
        raise ValueError(f"z_loss without cross_entropy in {text!r}: expected both, it steadies the cross-entropy")


def check_estimator(estimator: str) -> None:
    if estimator == "k1":
        raise ValueError(
            "estimator='k1' as a loss: the expected on-policy gradient of log q − log p at the sampled token is 0; "
            "expected 'k2' (descends reverse KL) or 'k3' (forward KL). k1 is an advantage: pass log p − log q to "
            "PolicyGradient"
        )
    if estimator not in ("k2", "k3"):
        raise ValueError(f"estimator={estimator!r}: expected 'k2' (descends reverse KL) or 'k3' (forward KL)")


def _cross_entropy(label_smoothing: float = 0.0) -> dict[str, Any]:
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"cross_entropy(label_smoothing={label_smoothing}): expected 0 ≤ label_smoothing < 1")
    return {"label_smoothing": label_smoothing}


def _sampled_kl(estimator: str = "k2") -> dict[str, Any]:
    check_estimator(estimator)
    return {"estimator": estimator}


#: the names that take arguments, each with a function that turns the arguments into fields of `ObjectiveSpec`
ARGUMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "cross_entropy": _cross_entropy,
    "sampled_kl": _sampled_kl,
    "policy_gradient": policy_fields,
}
#: the arguments that are words (see `parse_sum`)
TAKE_WORDS = {"sampled_kl": ("*", "estimator"), "policy_gradient": ("surrogate", "ratio")}
