"""Text is shown unchanged; invisible characters (newlines, tabs, control characters) get a mark."""

_MARKS = {"\n": "↵", "\t": "⇥", "\r": "␍", "\x7f": "␡"}


def label(text: str) -> str:
    """Return a token's text on one line, with visible spaces."""
    marked = "".join("␣" if character == " " else _mark(character) or character for character in text)
    return marked or "∅"


def pieces(text: str) -> list[tuple[str, str]]:
    """Split the text at characters that need a mark. Newlines and tabs also stay in the text beside their mark."""
    if not text:
        return [("", "∅")]
    parts = [("", "")]
    for character in text:
        mark = _mark(character)
        if mark:
            parts.append((character if character in "\n\t" else "", mark))
        elif parts[-1][1]:
            parts.append((character, ""))
        else:
            parts[-1] = (parts[-1][0] + character, "")
    return [part for part in parts if part != ("", "")]


def _mark(character: str) -> str:
    if character in _MARKS:
        return _MARKS[character]
    return chr(0x2400 + ord(character)) if ord(character) < 0x20 else ""  # the control pictures, in the same order
