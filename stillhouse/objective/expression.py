"""The grammar of objectives: a sum of named parts with coefficients and arguments.

    0.3*cross_entropy + 0.7*jsd(0.5)
    0.9*forward_kl + 0.1*skew_reverse_kl(alpha=0.1)
    policy_gradient(clip_low=0.2, surrogate=cispo) + 0.1*sampled_kl(k3)

Python's own parser reads the text. Only sums, products with a number, names, and calls with literal arguments are
accepted; nothing is evaluated. An argument is a number, or a word for the arguments that take one, such as k3. Needs
no torch.
"""

import ast
import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from stillhouse.objective.parameters import PARAMETERS

Made = TypeVar("Made")
Words = Mapping[str, Collection[str]]


@dataclass(frozen=True)
class Summand:
    """One summand: `coefficient * name(*arguments, **keywords)`.

    place: where it is in the expression, in words; "" if the expression is this summand alone.
    """

    coefficient: float
    name: str
    arguments: tuple[float | bool | str, ...] = ()
    keywords: tuple[tuple[str, float | bool | str], ...] = ()
    place: str = field(default="", compare=False)

    def call(self, make: Callable[..., Made], example: str = "") -> Made:
        """Call `make` with the arguments. Raises its ValueError, or one for a wrong number or name of arguments, with
        the summand's place.

        example: valid arguments, which the message shows if an argument is missing.
        """
        try:
            return self._call(make, example)
        except ValueError as error:
            raise ValueError(f"{error}{self.place}") from error

    def _call(self, make: Callable[..., Made], example: str) -> Made:
        signature = inspect.signature(make)
        try:
            for bind in (signature.bind_partial, signature.bind):  # report surplus arguments first
                bind(*self.arguments, **dict(self.keywords))
        except TypeError as error:
            missing = re.fullmatch(r"missing a required .*?argument: (.*)", str(error))
            problem = f"its {missing[1]} is missing" if missing else str(error)
            expected = ", ".join(str(one.replace(annotation=one.empty)) for one in signature.parameters.values())
            form = f"{self.name}({expected})" if expected else f"{self.name}, without arguments"
            form += f", such as {self.name}({example})" if missing and example else ""
            raise ValueError(f"{self.name}: {problem}; expected {form}") from error
        return make(*self.arguments, **dict(self.keywords))


def parse_sum(text: str, take_words: Words = MappingProxyType({})) -> list[Summand]:
    """Return the summands of an expression, in order. Raises ValueError that quotes the invalid part of the text.

    take_words: for each name with such arguments, the keywords of arguments that are words; "*": all positional ones.
    """
    text = text.strip()
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ValueError(
            f"cannot read {text!r}: expected a sum such as '0.3*cross_entropy + 0.7*jsd(0.5)'"
        ) from error
    nodes = _summands(tree.body, 1.0)
    places = [_place(node, text) if len(nodes) > 1 else "" for node, _ in nodes]
    return [
        replace(_summand(node, sign, text, take_words), place=place)
        for (node, sign), place in zip(nodes, places, strict=True)
    ]


def unknown_name(name: str, others: Mapping[str, Iterable[str]] | None = None, place: str = "") -> ValueError:
    """Return a ValueError for an unknown name; its message suggests the nearest known name.

    others: known names that are not divergences, each with the synonyms that other projects use.
    """
    synonyms = {divergence: kind.definition.synonyms for divergence, kind in PARAMETERS.items()} | dict(others or {})
    names = sorted(synonyms)
    near = [other for other in names if name.lower() in synonyms[other]]
    near = near or difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return ValueError(f"unknown name {name!r}{hint} (known: {', '.join(names)}){place}")


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
        number, node = (node.left, node.right) if _is_number(node.left) else (node.right, node.left)
        coefficient = _literal(number, text)
        if isinstance(coefficient, bool):
            raise ValueError(f"coefficient {coefficient} in {text!r}: expected a number")
    if isinstance(node, ast.Name):
        return Summand(sign * coefficient, node.id)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        words = take_words.get(node.func.id, ())

        def read(key: str, value: ast.expr) -> float | bool | str:
            return _word(value, text) if key in words else _literal(value, text)

        arguments = tuple(read("*", argument) for argument in node.args)
        keywords = tuple((str(keyword.arg), read(str(keyword.arg), keyword.value)) for keyword in node.keywords)
        return Summand(sign * coefficient, node.func.id, arguments, keywords)
    raise ValueError(f"cannot read {ast.unparse(node)!r} in {text!r}: expected number*name or number*name(arguments)")


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant | ast.UnaryOp)


def _word(node: ast.expr, text: str) -> str:
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError(f"cannot read {ast.unparse(node)!r} in {text!r}: expected a word, without quotation marks")


def _literal(node: ast.expr, text: str) -> float | bool:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        value = None
    if not isinstance(value, int | float):
        raise ValueError(f"cannot read {ast.unparse(node)!r} in {text!r}: expected a number")
    return value
