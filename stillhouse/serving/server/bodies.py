"""JSON requests, and errors in the format of the OpenAI API as in vLLM."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError

from stillhouse.display import message as brief
from stillhouse.serving.strict_body import require_few_lists

Body = TypeVar("Body", bound=BaseModel)


def parse_json(content: bytes, kind: type[Body], named: int = 2) -> Body:
    """Raises RequestError for an invalid body. named: how many levels of the invalid field's path the error names."""
    try:
        require_few_lists(content)
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = ".".join(str(level) for level in first["loc"][:named]) or None
        problem = "is not supported by this server" if first["type"] == "extra_forbidden" else first["msg"]
        raise refused(f"{param or 'the body'}: {problem}", param) from error
    except ValueError as error:
        raise refused(str(error)) from error


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int | None]:
    """The field `usage` of an answer in the OpenAI API."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


ENDING = "the server is about to end"


class RequestError(Exception):
    """An error that is the answer to a request. param: the invalid field, if the error concerns one field."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers

    def response(self) -> JSONResponse:
        """The HTTP response. The message is shortened and escaped, because it may quote the request."""
        kind, code = error_type(self.status), int(self.status)
        error = {"message": brief(self.message), "type": kind, "param": self.param, "code": code}
        return JSONResponse({"error": error}, self.status, headers=self.headers)


def error_type(status: int) -> str:
    words = HTTPStatus(status).phrase.replace("-", " ").removesuffix(" Error").split()
    return "".join(word.capitalize() for word in words) + "Error"


def refused(message: str, param: str | None = None) -> RequestError:
    """The error for an invalid request. param: the invalid field."""
    return RequestError(HTTPStatus.BAD_REQUEST, message, param=param)


def busy(message: str, seconds: int = 1, headers: Mapping[str, str] | None = None) -> RequestError:
    """The error of a server that is at one of its limits. seconds: when the client may try again."""
    headers = {"Retry-After": str(seconds), **(headers or {})}
    return RequestError(HTTPStatus.TOO_MANY_REQUESTS, message, headers=headers)


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI descriptions of the errors with these statuses."""
    content = {"application/json": {"schema": {"type": "object", "required": ["error"]}}}
    return {status: {"description": error_type(status), "content": content} for status in statuses}
