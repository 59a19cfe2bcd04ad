"""Errors that a client gets, in the form of the OpenAI interface as vLLM gives it."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse

from stillhouse.display import message as brief


class RequestError(Exception):
    """A request that is answered with an error. param: the field that is wrong, if it is one."""

    def __init__(
        self, status: HTTPStatus, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers

    def response(self) -> JSONResponse:
        return error_response(self.status, self.message, param=self.param, headers=self.headers)


def error_response(
    status: int, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return JSONResponse(
        error_content(status, message, param), status, headers=None if headers is None else dict(headers)
    )


def error_content(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error. message: it may quote the request, so it is shortened and escaped."""
    words = HTTPStatus(status).phrase.replace("-", " ").removesuffix(" Error").split()
    kind = "".join(word.capitalize() for word in words) + "Error"
    return {"error": {"message": brief(message), "type": kind, "param": param, "code": int(status)}}
