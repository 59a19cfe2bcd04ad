"""Hostile requests to a server of ours, made from valid ones and from its OpenAPI document."""

import random
from collections import Counter
from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.mutations import damaged_bytes, damaged_json, damaged_safetensors
from kit.serving import Server
from schemathesis.checks import not_a_server_error

from stillhouse.serving.wire import SAFETENSORS

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
