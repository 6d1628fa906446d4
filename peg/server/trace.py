"""A name for every request, and a line in the log for its answer."""

from __future__ import annotations

import time

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler

from peg.server.live import checked_request_id, new_request_id
from peg.server.service import SERVICE

log = structlog.get_logger("peg.server")

REQUEST_ID = web.RequestKey("request_id", str)
_HEADER = "X-Request-Id"
_QUIET = frozenset({"/health", "/metrics"})


@web.middleware
async def id_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Take the client's X-Request-Id, or make one. 400 for one that is malformed."""
    given = request.headers.get(_HEADER)
    request[REQUEST_ID] = new_request_id() if given is None else checked_request_id(given, _HEADER)
    return await handler(request)


async def tell_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: the id goes out with the headers of every answer."""
    if REQUEST_ID in request:
        response.headers[_HEADER] = request[REQUEST_ID]


@web.middleware
async def log_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Log and count one line per answer; `client left` is an answer that nobody got."""
    started_s = time.monotonic()
    status = 499  # the client left before there was one
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        resource = request.match_info.route.resource
        route = "none" if resource is None else resource.canonical
        request.app[SERVICE].metrics.answered(request.method, route, status)
        if request.path not in _QUIET:
            took_ms = round(1000 * (time.monotonic() - started_s), 1)
            log.info(
                "request",
                id=request.get(REQUEST_ID),
                method=request.method,
                path=request.path,
                status=status,
                ms=took_ms,
            )
