"""How long a request may take."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.typedefs import Handler

from peg.server.errors import ApiError
from peg.server.service import SERVICE


@web.middleware
async def timeout_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """End a request that takes longer than it may, from its head to the last byte of its answer: 504."""
    limit_s = request.app[SERVICE].config.request_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await handler(request)
    except TimeoutError:
        message = f"the request took longer than {limit_s:g} s (--request-timeout)"
        raise ApiError(504, "request_timeout", message) from None
