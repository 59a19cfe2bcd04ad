"""The grammar of objectives: a sum of named parts with coefficients and arguments.

    0.3*cross_entropy + 0.7*jsd(0.5)
    0.9*forward_kl + 0.1*skew_reverse_kl(alpha=0.1)
    policy_gradient(clip_low=0.2, surrogate=cispo) + 0.1*sampled_kl(k3)
    0.5*my_package.my_module:Chi2(2) + 0.5*forward_kl

A name is a divergence (`divergence_parameters.py`), `cross_entropy(label_smoothing=…)`, `z_loss` or `entropy` (an
entropy bonus has a negative coefficient). All divergences of a sum become one term, whose name in metrics is the
expression of these divergences. A name with a colon is the path of a user's class of a divergence; this file only
reads the path.

Two more terms train on the tokens of a batch of rollouts that the student has sampled: `sampled_kl(k2)` or
`sampled_kl(k3)`, and `policy_gradient(clip_low=…, teacher_kl=…, …)`, whose arguments are in `policy_parameters.py`.
In a batch of rollouts, cross-entropy and z-loss count only at tokens that the student has not sampled. Divergences
and the entropy do not depend on which token was sampled, so they count at all tokens.

Python's own parser reads the text. Only sums and differences, products with a number, names, and calls with literal
arguments are accepted; nothing is evaluated. Most arguments are numbers, and some are words, such as k3.

This file does not import torch, so that a command refuses a misspelt loss before it imports torch.
"""

import ast
import difflib
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

from stillhouse.objective.divergence_parameters import PARAMETERS, DivergenceKinds, require_weight
from stillhouse.objective.policy_parameters import policy_fields

Made = TypeVar("Made")
Words = Mapping[str, Collection[str]]
#: the path of a user's class, package.module:Class
_PATH = re.compile(r"(?<![\w.])[^\W\d][\w.]*:[^\W\d]\w*")
#: the names of the grammar that are not divergences, each with other words that users could write for it
OTHERS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("ce", "nll", "sft", "xent", "hard_loss"),
    "z_loss": (),
    "entropy": (),
    "sampled_kl": ("k1", "k2", "k3"),
    "policy_gradient": (),
}
#: why a loss, or a key or value of the configuration, was removed, for error messages
NO_GAIN = "removed in November 2026, because it gave no gain (docs/claims.md)"
#: the names of divergences and terms that were removed
REMOVED = ("acceptance", "uld")


@dataclass(frozen=True)
class Summand:
    """One summand: `coefficient * name(*arguments, **keywords)`.

    place: the summand's position in the expression in words, for error messages; "" if there is no other summand.
    """

    coefficient: float
    name: str
    arguments: tuple[float | bool | str, ...] = ()
    keywords: tuple[tuple[str, float | bool | str], ...] = ()
    place: str = field(default="", compare=False)

    @property
    def is_path(self) -> bool:
        """Whether the name is the path of a user's class."""
        return ":" in self.name

    def call(self, make: Callable[..., Made], example: str = "") -> Made:
        """Return make(*arguments, **keywords).

        example: valid arguments, which the message about a missing argument shows.

        Raises ValueError for a wrong number or name of arguments, and if `make` raises ValueError. The message ends
        with the summand's place.
        """
        signature = inspect.signature(make)
        try:
            for bind in (signature.bind_partial, signature.bind):  # report surplus arguments before missing ones
                bind(*self.arguments, **dict(self.keywords))
        except TypeError as error:
            missing = re.fullmatch(r"missing a required .*?argument: (.*)", str(error))
            problem = f"its {missing[1]} is missing" if missing else str(error)
            expected = ", ".join(str(one.replace(annotation=one.empty)) for one in signature.parameters.values())
            form = f"{self.name}({expected})" if expected else f"{self.name}, without arguments"
            form += f", such as {self.name}({example})" if missing and example else ""
            raise ValueError(f"{self.name}: {problem}; expected {form}{self.place}") from error
        try:
            return make(*self.arguments, **dict(self.keywords))
        except ValueError as error:
            raise ValueError(f"{error}{self.place}") from error


def parse_sum(text: str, take_words: Words = MappingProxyType({})) -> list[Summand]:
    """Return the summands of an expression, in order.

    take_words: for each name that takes words as arguments, the keywords of these arguments; "*" means all positional
        arguments. All other arguments are numbers.

    Raises ValueError, whose message quotes the invalid part of the text.
    """
    text = text.strip()
    try:  # Python has no such paths, so a name of the same length replaces each of them
        tree = ast.parse(_PATH.sub(lambda path: re.sub("[.:]", "_", path[0]), text), mode="eval")
    except SyntaxError as error:
        raise ValueError(
            f"cannot read {text!r}: expected a sum such as '0.3*cross_entropy + 0.7*jsd(0.5)'"
        ) from error
    nodes = _summands(tree.body, 1.0)
    return [
        replace(_summand(node, sign, text, take_words), place=_place(node, text) if len(nodes) > 1 else "")
        for node, sign in nodes
    ]


def expression_fields(text: str, kinds: DivergenceKinds = PARAMETERS) -> tuple[dict[str, Any], list[Summand]]:
    """Return the fields of `ObjectiveSpec` that an expression sets, except `divergence`, and the divergences in it.

    kinds: the divergences that the text can name.

    Raises ValueError for an unknown or repeated name, and for a coefficient that is not finite or, except for
    `entropy`, not positive.
    """
    others: dict[str, Summand] = {}
    divergences: list[Summand] = []
    for summand in parse_sum(text, TAKE_WORDS):
        if summand.name in kinds or summand.is_path:
            divergences.append(summand)
        elif summand.name not in OTHERS:
            raise unknown_name(summand, kinds, OTHERS)
        elif summand.name in others:
            raise ValueError(f"{summand.name} comes twice in {text!r}; expected one coefficient for it")
        else:
            others[summand.name] = summand
    for name, summand in others.items():
        if not math.isfinite(summand.coefficient):
            raise ValueError(f"{summand.coefficient:g}*{name} in {text!r}: expected a finite coefficient")
        if name != "entropy" and not summand.coefficient > 0:
            raise ValueError(f"{summand.coefficient:g}*{name} in {text!r}: expected a positive coefficient")
        if name not in ARGUMENTS and (summand.arguments or summand.keywords):
            raise ValueError(f"{name} takes no arguments (in {text!r}); write coefficient*{name}")
    if "z_loss" in others and "cross_entropy" not in others:
        raise ValueError(
            f"z_loss without cross_entropy in {text!r}: expected both, because z_loss stabilises cross_entropy"
        )
    fields: dict[str, Any] = {name: summand.coefficient for name, summand in others.items()}
    for summand in divergences:
        kind = None if summand.is_path else kinds[summand.name]
        part = summand.name if kind is None else summand.call(kind, kind.definition.example)
        require_weight(summand.coefficient, part)
    for name, arguments in ARGUMENTS.items():
        if name in others:
            fields |= others[name].call(arguments)
    return fields, divergences


def class_paths(text: str) -> list[str]:
    """Return the paths of users' classes in an expression. Raises ValueError if it cannot be read."""
    return [summand.name for summand in parse_sum(text, TAKE_WORDS) if summand.is_path]


def unknown_name(
    summand: Summand, kinds: DivergenceKinds, others: Mapping[str, Iterable[str]] = MappingProxyType({})
) -> ValueError:
    """Return a ValueError for a summand with an unknown name; its message suggests the nearest known name.

    others: known names that are not divergences, each with the synonyms that other projects use.
    """
    if summand.name.lower() in REMOVED:
        other = "teacher.cross_tokenizer: gold, or another loss" if summand.name.lower() == "uld" else "another loss"
        return ValueError(
            f"{summand.name} does not exist any more: {NO_GAIN}; expected {other}, such as forward_kl{summand.place}"
        )
    synonyms = {name: kind.definition.synonyms for name, kind in kinds.items()} | dict(others)
    names = sorted(synonyms)
    near = [other for other in names if summand.name.lower() in synonyms[other]]
    near = near or difflib.get_close_matches(summand.name, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    known = f"known: {', '.join(names)}; a class of your own is package.module:Class"
    return ValueError(f"unknown name {summand.name!r}{hint} ({known}){summand.place}")


def check_estimator(estimator: str) -> None:
    if estimator == "k1":
        raise ValueError(
            "estimator='k1' as a loss: the expected on-policy gradient of log q − log p at the sampled token is 0; "
            "expected 'k2' (descends reverse KL) or 'k3' (descends forward KL). Use k1 as an advantage: "
            "policy_gradient(teacher_kl=1), or log p − log q as advantages_T of PolicyGradient"
        )
    if estimator not in ("k2", "k3"):
        raise ValueError(
            f"estimator={estimator!r}: expected 'k2' (descends reverse KL) or 'k3' (descends forward KL)"
        )


def _place(node: ast.expr, text: str) -> str:
    source = ast.get_source_segment(text, node)
    before = text.encode().splitlines(keepends=True)
    start = len((b"".join(before[: node.lineno - 1]) + before[node.lineno - 1][: node.col_offset]).decode())
    return f"; see {source!r} at character {start + 1} of {text!r}"


def _summands(node: ast.expr, sign: float) -> list[tuple[ast.expr, float]]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        right_sign = sign if isinstance(node.op, ast.Add) else -sign
        return _summands(node.left, sign) + _summands(node.right, right_sign)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        return _summands(node.operand, -sign)
    return [(node, sign)]


def _summand(node: ast.expr, sign: float, text: str, take_words: Words) -> Summand:
    coefficient = 1.0
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        is_number_first = isinstance(node.left, ast.Constant | ast.UnaryOp)
        number, node = (node.left, node.right) if is_number_first else (node.right, node.left)
        coefficient = _literal(number, text)
        if isinstance(coefficient, bool):
            raise ValueError(f"coefficient {coefficient} in {text!r}: expected a number")
    if isinstance(node, ast.Name):
        return Summand(sign * coefficient, _name(node, text))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        words = take_words.get(node.func.id, ())
        pairs = [(str(keyword.arg), keyword.value) for keyword in node.keywords]
        keywords = tuple(
            (name, _word(value, text) if name in words else _literal(value, text)) for name, value in pairs
        )
        arguments = tuple(_word(value, text) if "*" in words else _literal(value, text) for value in node.args)
        return Summand(sign * coefficient, _name(node.func, text), arguments, keywords)
    raise ValueError(
        f"cannot read {_source(node, text)!r} in {text!r}: expected number*name or number*name(arguments)"
    )


def _name(node: ast.Name, text: str) -> str:
    return source if ":" in (source := _source(node, text)) else node.id


def _source(node: ast.expr, text: str) -> str:
    """The text of a node; only it has the paths of users' classes."""
    return ast.get_source_segment(text, node) or ast.unparse(node)


def _word(node: ast.expr, text: str) -> str:
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError(f"cannot read {_source(node, text)!r} in {text!r}: expected a word, without quotation marks")


def _literal(node: ast.expr, text: str) -> float | bool:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        value = None
    if isinstance(value, int | float):
        return value
    raise ValueError(f"cannot read {_source(node, text)!r} in {text!r}: expected a number")


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
#: the arguments that are words, not numbers (`take_words` of `parse_sum`)
TAKE_WORDS = {"sampled_kl": ("*", "estimator"), "policy_gradient": ("surrogate", "ratio")}
