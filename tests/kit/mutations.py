"""Seeded damage of bytes, text, the structure of JSON, and safetensors files, and of requests to a server of ours."""

import json
import random
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.serving import Server
from schemathesis.checks import not_a_server_error

from stillhouse.serving import SAFETENSORS

schemathesis.openapi.media_type(SAFETENSORS, st.binary())


def assert_survives(server: Server, bodies: list[tuple[str, str, bytes]], per_body: int, seed: int) -> None:
    """bodies: path, content type and body of requests that are answered. Send many changed ones."""
    statuses, draw = Counter[int](), random.Random(seed)
    for path, kind, body in bodies:
        damage = damaged_safetensors if kind == SAFETENSORS else damaged_json
        valid = server.client.post(path, content=body, headers={"content-type": kind})
        assert valid.status_code == 200, valid.text
        for changed in (draw.choice([damaged_bytes, damage])(draw, body) for _ in range(per_body)):
            answer = server.client.post(path, content=changed, headers={"content-type": kind})
            statuses[answer.status_code] += 1
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, (path, kind, changed, answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"]["code"] == answer.status_code
    assert statuses[400] > per_body


def from_the_openapi_document(server: Server, examples: int) -> None:
    schema = schemathesis.openapi.from_dict(server.client.get("/openapi.json").json())
    schema.config.update(base_url=server.url)
    for operation in schema.get_all_operations():

        @given(case=operation.ok().as_strategy())
        @settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        def one(case: Any) -> None:
            case.call_and_validate(checks=[not_a_server_error])

        one()


#: values that have a wrong type or size for most keys
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 255, 2**31, 2**63, 2**64, 10**18, 10**30),
    *(0.5, -0.0, 1e308, 1e-320, 1e400, float("nan")),
    *("", " ", "a", "\0", "\x1b[31mred\x1b[0m", "\u202eevil", "\ud800", "é" * 50, "x" * 5000, "a\nb"),
    *("null", "true", "1", "1e5", "auto", "float32", "float99", "%s%n", "${HOME}"),
    *("../../etc/passwd", "/dev/null", "{{ 10**(10**8) }}", "{% for"),
    *([], [[]], [None], [1, "a"], ["a"] * 200, [{"id": 5}], [[0, 1]]),
    *({}, {"a": 1}, {"": {}}, {"type": "BPE"}, {"type": None}),
]
#: text that has a meaning for a parser
PIECES = [
    *("!!bool maybe", "!!int 'x'", "!!float .", "!!binary x", "!!set {a}", "!!omap []", "!!timestamp x"),
    *("!!python/object:a {}", "&a ", "*a", "<<: ", "? ", "- ", ": ", "|", ">", "%YAML 1.1\n", "---\n", "...\n"),
    *("\t", "#", "[" * 50, "{" * 50, "'", '"', ",", "]", "}", "{}", "[]", "\r", "\n", "\n\n"),
    *("9" * 4299, "9" * 5000, "0x" + "f" * 5000, "1e999999", ".inf", ".nan", "~", "null", "-", "e"),
    *("\x1b[2J", "\u202e", "\0", "\ufeff", "\\u", "\\ud800", "\\x", "NaN", "Infinity"),
    *("{{", "}}", "{%", "%}"),
]


def damaged_bytes(draw: random.Random, content: bytes) -> bytes:
    """Change one to four single bytes or ranges of bytes."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed) + 1)
        stretch = draw.choice([1, 1, 2, 4, 8, 64, 1000])
        match draw.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << draw.randrange(8)
            case 1:
                changed[at : at + stretch] = draw.randbytes(stretch)
            case 2:
                del changed[at : at + stretch]
            case 3:
                del changed[at:]
            case 4:
                changed[at:at] = changed[draw.randrange(len(changed) + 1) :][:stretch]
            case _:
                changed[at : at + stretch] = bytes([draw.choice([0, 255, 127])]) * stretch
    return bytes(changed)


def damaged_text(draw: random.Random, content: bytes) -> bytes:
    """Insert one to four texts, or move, repeat or cut lines."""
    text = content.decode("utf-8", "surrogateescape")
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(text) + 1)
        match draw.randrange(5):
            case 0 | 1:
                text = text[:at] + draw.choice(PIECES) + text[at + draw.choice([0, 0, 1, 5]) :]
            case 2:
                lines = text.split("\n")
                lines.insert(draw.randrange(len(lines)), draw.choice(lines))
                text = "\n".join(lines)
            case 3:
                lines = text.split("\n")
                draw.shuffle(lines)
                text = "\n".join(lines)
            case _:
                text = text[:at]
    return text.encode("utf-8", "surrogatepass" if "\ud800" in text else "surrogateescape")


def damaged_value(draw: random.Random, value: Any) -> Any:
    """Return a copy with one to three of its parts replaced, removed, repeated or moved to another key."""
    copy = json.loads(json.dumps(value))
    for _ in range(draw.randint(1, 3)):
        copy = _changed(draw, copy)
    return copy


def _changed(draw: random.Random, value: Any) -> Any:
    places = list(_places(value))
    if not places:
        return deepcopy(draw.choice(ODD))
    # prefer keys near the top, which matter most
    holder, key = draw.choice(places if draw.random() < 0.5 else places[:40])
    match draw.randrange(6):
        case 0 | 1 | 2:
            # a copy, because a later change would otherwise change ODD
            holder[key] = deepcopy(draw.choice(ODD))
        case 3 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = holder[key] * draw.choice([-1, 0, 2, 3, 0.5, 10**6])
        case 4 if isinstance(holder, dict):
            holder[draw.choice(["", "a", "\x1b[1m", "type", "auto_map", "text", key + "s"])] = holder.pop(key)
        case _:
            other, from_key = draw.choice(places)
            holder[key] = json.loads(json.dumps(other[from_key]))
    return value


def _places(value: Any) -> Any:
    """Yield every (container, key) of a nested value, the outer ones first."""
    level = [value]
    while level:
        holders, level = [holder for holder in level if isinstance(holder, dict | list)], []
        for holder in holders:
            keys = list(holder) if isinstance(holder, dict) else range(min(len(holder), 20))
            for key in keys:
                yield holder, key
                level.append(holder[key])


def damaged_json(draw: random.Random, content: bytes) -> bytes:
    """Damage a JSON document, in its structure or as text."""
    if draw.random() < 0.3:
        return draw.choice([damaged_bytes, damaged_text])(draw, content)
    return json.dumps(damaged_value(draw, json.loads(content))).encode()


def damaged_lines(draw: random.Random, content: bytes) -> bytes:
    """Damage JSON Lines: the structure of one or two records, or the file as bytes or text."""
    if draw.random() < 0.4:
        return draw.choice([damaged_bytes, damaged_text])(draw, content)
    lines = content.splitlines()
    for at in draw.sample(range(len(lines)), k=min(len(lines), draw.randint(1, 2))):
        lines[at] = damaged_json(draw, lines[at]).replace(b"\n", b" ")
    if draw.random() < 0.1:
        lines[0] = b"[" * 3000 + b"]" * draw.choice([0, 3000])
    return b"\n".join(lines) + b"\n"


def damaged_safetensors(draw: random.Random, content: bytes) -> bytes:
    """Damage the header as JSON, its length, or the body as bytes."""
    size = int.from_bytes(content[:8], "little")
    header, body = content[8 : 8 + size], content[8 + size :]
    match draw.randrange(4):
        case 0 | 1:
            header = damaged_json(draw, header)
            return len(header).to_bytes(8, "little") + header + body
        case 2:
            return draw.choice([0, size - 1, 2**62, 2**64 - 1]).to_bytes(8, "little") + header + body
        case _:
            return content[: 8 + size] + damaged_bytes(draw, body)


DAMAGE: dict[str, Callable[[random.Random, bytes], bytes]] = {
    ".json": damaged_json,
    ".jsonl": damaged_lines,
    ".safetensors": damaged_safetensors,
    ".yaml": damaged_text,
    ".jinja": damaged_text,
}


def damage_files(draw: random.Random, files: list[Path], foreign: list[Path]) -> list[Path]:
    """Damage one or two of these files and return them. foreign: files that may replace them."""
    chosen = draw.sample(files, k=min(len(files), draw.choice([1, 1, 1, 2])))
    for path in chosen:
        match draw.randrange(12):
            case 0:
                path.unlink()
            case 1:
                path.write_bytes(draw.choice(foreign).read_bytes())
            case 2:
                path.write_bytes(b"")
            case 3 | 4:
                path.write_bytes(damaged_bytes(draw, path.read_bytes()))
            case _:
                path.write_bytes(DAMAGE.get(path.suffix, damaged_bytes)(draw, path.read_bytes()))
    return chosen


def readable(error: pytest.ExceptionInfo[ValueError]) -> str:
    """Return the text of an error about a hostile input; assert that it is short and has no escape sequences."""
    text = str(error.value)
    assert text.count("\n") < 12
    assert len(text) < 1500
    assert "\x1b" not in text
    return text
