"""Every error answer: one class, one shape, one middleware that makes it out of whatever was raised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from peg.errors import EngineUnavailable, InvalidRequest, QueueFull
from peg.server.stream import STREAM, EventStream

log = structlog.get_logger("peg.server")

_RETRY_AFTER: Mapping[str, str] = {"Retry-After": "1"}


ErrorType: TypeAlias = Literal["invalid_request_error", "not_found_error", "rate_limit_error", "server_error"]


class ErrorFields(msgspec.Struct, frozen=True):
    """What an error answer says: `code` is one snake_case word, `param` the path of the field at fault."""

    message: str
    type: ErrorType
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """The document of an error answer."""

    error: ErrorFields


class ApiError(Exception):
    """An answer that is an error. `code` is one snake_case word, `param` the path of the field at fault."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = headers

    @property
    def type(self) -> ErrorType:
        """One of the four words that clients know."""
        if self.status >= 500:
            return "server_error"
        if self.status == 404:
            return "not_found_error"
        return "rate_limit_error" if self.status == 429 else "invalid_request_error"

    def body(self) -> bytes:
        """The JSON document, `{"error": {…}}`."""
        return msgspec.json.encode(ErrorBody(ErrorFields(self.message, self.type, self.param, self.code)))

    def response(self) -> web.Response:
        """The whole answer."""
        return web.Response(status=self.status, body=self.body(), content_type="application/json", headers=self.headers)


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """The request itself is at fault: 400."""
    return ApiError(400, code, message, param)


def as_api_error(error: Exception, request: web.Request) -> ApiError:
    """What a client is told about `error`. Anything unforeseen is a 500 that gives nothing away."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return invalid(str(error), error.param)
        case QueueFull():
            return ApiError(429, "queue_full", str(error), headers=_RETRY_AFTER)
        case EngineUnavailable():
            return ApiError(503, "engine_unavailable", str(error), headers=_RETRY_AFTER)
        case web.HTTPNotFound():
            return ApiError(404, "route_not_found", f"there is no route {request.path}")
        case web.HTTPMethodNotAllowed():
            allow = ", ".join(sorted(error.allowed_methods))
            message = f"{request.path} takes {allow}, not {request.method}"
            return ApiError(405, "method_not_allowed", message, headers={"Allow": allow})
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, "body_too_large", error.text or error.reason)
        case web.HTTPException():
            return ApiError(error.status, "http_error", error.reason)
        case _:
            log.error("unforeseen error in a handler", path=request.path, exc_info=error)
            return ApiError(500, "internal_error", "the server made a mistake; its log has the details")


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn whatever a handler raises into the answer: JSON, or the last event of a stream that has begun."""
    try:
        return await handler(request)
    except ConnectionError:  # the client has left: nobody is there to be told, and it is no fault of anybody's
        return web.Response(status=499)
    except Exception as error:  # the one broad except of the server: every error has the same shape
        answer = as_api_error(error, request)
        stream: EventStream | None = request.get(STREAM)
        if stream is not None and stream.begun:
            return await stream.fail(answer.body())
        return answer.response()
