"""Makes external text safe to print: shortens it and escapes characters that control the cursor or text direction."""

import re
import sys
from collections.abc import Iterable, Sequence

#: control characters (except tab and newline), line separators, text-direction controls, halves of surrogate pairs
_CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_CONTROLS_AND_LINES = re.compile(_CONTROLS.pattern[:-1] + "\n\t]")
#: limits of a message: lines, and characters per line
LINES, WIDTH = 20, 600
#: limits of a list of names: names, and characters per name
NAMES, NAME_WIDTH = 12, 60


def escaped(text: str, *, lines: bool = False) -> str:
    r"""The text with control characters escaped as in Python (`\x1b`). lines: whether to keep newlines and tabs."""
    pattern = _CONTROLS if lines else _CONTROLS_AND_LINES
    return pattern.sub(lambda match: ascii(match[0])[1:-1], text)


def print_escaped(text: object, *, err: bool = False) -> None:
    """Print a text that may quote files or servers. err: whether to print on stderr."""
    print(escaped(str(text), lines=True), file=sys.stderr if err else sys.stdout, flush=True)


def message(text: str) -> str:
    """Escape an error message and cut it to `LINES` lines. A cut message ends with the number of missing lines."""
    lines = [_cut(line, WIDTH) for line in escaped(text, lines=True).splitlines()]
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], f"... and {len(lines) - LINES + 1:,} more lines"]
    return "\n".join(lines)


def name_list(names: Iterable[object]) -> str:
    """At most `NAMES` of the names, sorted and escaped, and the number of the others; "none" if there is no name."""
    ordered = sorted(map(str, names))
    shown = [_cut(escaped(name), NAME_WIDTH) for name in ordered[:NAMES]]
    more = [f"and {len(ordered) - NAMES:,} more"] if len(ordered) > NAMES else []
    return ", ".join(shown + more) or "none"


def enumerated(names: Sequence[str], word: str) -> str:
    """The names, separated by commas, with `word` before the last one."""
    return f" {word} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without the advice that libraries add after it.

    The type of the error is added, except for ValueError, OSError and jinja2's errors: their messages are sentences.
    """
    first, _, rest = str(error).strip().partition("\n")
    if first.endswith(":"):
        first += " " + rest.strip().partition("\n")[0]
    text = _cut(escaped(first), WIDTH)
    if text and (isinstance(error, ValueError | OSError) or type(error).__module__.startswith("jinja2")):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
