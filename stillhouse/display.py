"""Makes external text safe to print: shortens it and escapes characters that control the cursor or text direction.

Also names a phase that takes long.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

#: control characters (except tab and newline), line separators, text-direction controls, and surrogates
_CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_CONTROLS_AND_LINES = re.compile(_CONTROLS.pattern[:-1] + "\n\t]")
#: the maximum number of lines of an error message, and of characters per line
LINES, WIDTH = 20, 600
#: the maximum number of names in a list, and of characters per name
NAMES, NAME_WIDTH = 12, 60
#: the seconds after which a phase is named
SLOW_SECONDS = 1.0


def escaped(text: str, *, lines: bool = False) -> str:
    r"""Return the text with control characters escaped as in Python (`\x1b`).

    lines: whether newlines and tabs are kept.
    """
    pattern = _CONTROLS if lines else _CONTROLS_AND_LINES
    return pattern.sub(lambda match: ascii(match[0])[1:-1], text)


def print_escaped(text: object, *, err: bool = False) -> None:
    """Print a text that may quote files or servers, with control characters escaped.

    err: whether to print on stderr instead of stdout.
    """
    print(escaped(str(text), lines=True), file=sys.stderr if err else sys.stdout, flush=True)


def print_progress(line: str) -> None:
    """Print on stderr, because stdout can be a table or an answer that another program reads."""
    print_escaped(line, err=True)


@contextmanager
def named_if_slow(phase: str, show: Callable[[str], None] = print_progress) -> Iterator[None]:
    """If the block takes longer than `SLOW_SECONDS`, print the phase's name on rank 0. show: prints the line."""
    timer = Timer(SLOW_SECONDS, show, [f"{phase} …"])
    timer.daemon = True
    if os.environ.get("RANK", "0") == "0":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def message(text: str) -> str:
    """Return an error message, escaped and cut to `LINES` lines; a cut message ends with the number of cut lines."""
    lines = [_cut(line, WIDTH) for line in escaped(text, lines=True).splitlines()]
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], f"... and {len(lines) - LINES + 1:,} more lines"]
    return "\n".join(lines)


def name_list(names: Iterable[object]) -> str:
    """Return at most `NAMES` names, sorted and escaped, then the number of omitted names; "none" without names."""
    ordered = sorted(map(str, names))
    shown = [_cut(escaped(name), NAME_WIDTH) for name in ordered[:NAMES]]
    more = [f"and {len(ordered) - NAMES:,} more"] if len(ordered) > NAMES else []
    return ", ".join(shown + more) or "none"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the right form: "1 step", "2 steps", "2 batches"."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def enumerated(names: Sequence[str], word: str) -> str:
    """Return the names separated by commas, with `word` (such as "or") instead of the last comma."""
    return f" {word} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, and also the second line if the first one ends with a colon.

    The later lines, in which libraries give advice, are omitted. The error's type precedes the text, except for
    ValueError, OSError and jinja2's errors, whose messages are sentences.
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


def model_folder_name(path: str) -> str:
    """The name of a model's folder. For the final model or adapter of a run, such as runs/a/model, this is the name
    of the run's folder.
    """
    *_, parent, name = "", *Path(path).parts
    return parent if parent and name in ("model", "adapter") else name


def duration(seconds: float) -> str:
    """A time in words, such as "3 min 05 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"
