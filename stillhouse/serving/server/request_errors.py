"""Errors that the server sends to clients, in the format of the OpenAI API as vLLM implements it."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse

from stillhouse.display import message as brief

ENDING = "the server is about to end"


class RequestError(Exception):
    """An error that is sent as the answer to a request. param: the invalid field, if the error concerns one field."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers

    def response(self) -> JSONResponse:
        """The HTTP response. The message is shortened and escaped, because it may quote the request."""
        error = {
            "message": brief(self.message),
            "type": error_type(self.status),
            "param": self.param,
            "code": int(self.status),
        }
        return JSONResponse({"error": error}, self.status, headers=self.headers)


def error_type(status: int) -> str:
    words = HTTPStatus(status).phrase.replace("-", " ").removesuffix(" Error").split()
    return "".join(word.capitalize() for word in words) + "Error"


def refused(message: str, param: str | None = None) -> RequestError:
    """The error for an invalid request. param: the invalid field."""
    return RequestError(HTTPStatus.BAD_REQUEST, message, param=param)


def busy(message: str, seconds: int = 1, headers: Mapping[str, str] | None = None) -> RequestError:
    """The error of a server that is at one of its limits. seconds: when the client may try again."""
    return RequestError(
        HTTPStatus.TOO_MANY_REQUESTS, message, headers={"Retry-After": str(seconds), **(headers or {})}
    )


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI descriptions of the errors with these statuses."""
    content = {"application/json": {"schema": {"type": "object", "required": ["error"]}}}
    return {status: {"description": error_type(status), "content": content} for status in statuses}
