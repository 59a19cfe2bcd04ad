"""Hostile requests to a server of ours, made from valid ones and from its OpenAPI document."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, settings
from kit.serving import Server
from schemathesis.checks import not_a_server_error


def mutations(body: bytes, count: int, seed: int) -> Iterator[bytes]:
    """The body with bits flipped, bytes replaced, parts cut out, doubled or moved, or numbers made extreme."""
    draw = random.Random(seed)
    extreme = [
        b"-1",
        b"99999999999999999999",
        b"1e999",
        b"NaN",
        b"null",
        b'"x"',
        b"[]",
        b"{}",
        b"true",
        b"0.5",
        b"\xff",
    ]
    for _ in range(count):
        changed = bytearray(body)
        for _ in range(draw.choice([1, 1, 1, 2, 5])):
            start = draw.randrange(len(changed) + 1) if changed else 0
            stop = min(len(changed), start + draw.choice([1, 1, 2, 8, 64]))
            kind = draw.randrange(6)
            if kind == 0 and start < len(changed):
                changed[start] ^= 1 << draw.randrange(8)
            elif kind == 1:
                changed[start:stop] = draw.randbytes(stop - start)
            elif kind == 2:
                del changed[start:stop]
            elif kind == 3:
                changed[start:start] = changed[start:stop]
            elif kind == 4:
                changed[start:stop] = draw.choice(extreme)
            elif digits := [at for at, each in enumerate(changed) if chr(each).isdigit()]:
                at = draw.choice(digits)
                changed[at : at + 1] = draw.choice(extreme)
        yield bytes(changed)


def assert_survives(server: Server, bodies: list[tuple[str, str, bytes]], per_body: int, seed: int) -> None:
    """bodies: path, content type and body of requests that are answered. Send many changed ones."""
    statuses: Counter[int] = Counter()
    for path, kind, body in bodies:
        valid = server.client.post(path, content=body, headers={"content-type": kind})
        assert valid.status_code == 200, valid.text
        for changed in mutations(body, per_body, seed):
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
