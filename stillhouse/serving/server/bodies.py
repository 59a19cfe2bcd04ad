"""Parses JSON requests and encodes JSON answers, for both roles."""

from typing import Any, TypeVar

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

from stillhouse.serving.server.request_errors import refused
from stillhouse.serving.strict_body import require_few_lists

Body = TypeVar("Body", bound=BaseModel)


def parse_json(content: bytes, kind: type[Body], named: int = 2) -> Body:
    """Raises RequestError for an invalid body. named: how many levels of the invalid field's path the error names."""
    try:
        require_few_lists(content)
    except ValueError as error:
        raise refused(str(error)) from error
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = ".".join(str(level) for level in first["loc"][:named]) or None
        problem = "is not supported by this server" if first["type"] == "extra_forbidden" else first["msg"]
        raise refused(f"{param or 'the body'}: {problem}", param) from error


def encode_json(content: Any) -> bytes:
    return bytes(JSONResponse(content).body)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int | None]:
    """The field `usage` of an answer in the OpenAI API."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
