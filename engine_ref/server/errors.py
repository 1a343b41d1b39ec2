"""Errors in OpenAI's form, as vLLM answers them."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from kvhash import KvHashError

__all__ = ["ApiError", "bad_request", "error_body", "handlers", "not_running"]


class ApiError(Exception):
    """What a client is told: a status, an error type and a message; ``param``: the field that is wrong."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.param = message, status, kind, param


def bad_request(message: str, *, param: str | None = None) -> ApiError:
    """Return the error of a request that cannot be served."""
    return ApiError(message, param=param)


def not_running(why: str | None = None) -> ApiError:
    """Return the error of a server that takes no requests."""
    return ApiError(why or "the engine is not running", status=503, kind="ServiceUnavailableError")


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the answer's body."""
    described = {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}
    return {"error": described}


async def _api_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error_body(error), status_code=error.status)


async def _kvhash_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, KvHashError)
    return JSONResponse(error_body(bad_request(str(error), param=_field(error.at))), status_code=400)


async def _http_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = {404: "NotFoundError", 405: "MethodNotAllowedError"}.get(error.status_code, "HTTPError")
    answer = ApiError(str(error.detail), status=error.status_code, kind=kind)
    return JSONResponse(error_body(answer), status_code=error.status_code, headers=dict(error.headers or {}))


async def _gone(_: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _unexpected(_: HttpRequest, error: Exception) -> Response:
    answer = ApiError(f"{type(error).__name__} in the server", status=500, kind="InternalServerError")
    return JSONResponse(error_body(answer), status_code=500)


def _field(at: str | None) -> str | None:
    """Return the field of a path such as ``$.prompt[3]``."""
    return at.removeprefix("$.").partition("[")[0].partition(".")[0] if at and at.startswith("$.") else None


handlers: dict[Any, Any] = {
    ApiError: _api_error,
    KvHashError: _kvhash_error,
    HTTPException: _http_error,
    ClientDisconnect: _gone,
    Exception: _unexpected,
}
