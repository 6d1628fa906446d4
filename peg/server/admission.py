"""What happens to requests that come while the engine is rebuilt."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from peg.server.service import SERVICE

GENERATING = frozenset({"/v1/completions", "/v1/chat/completions"})


@web.middleware
async def admission_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """With --rebuild-admission wait, let them wait until the engine is READY again, or will never be."""
    service = request.app[SERVICE]
    if service.waits_for_rebuild and request.path in GENERATING:
        await service.engine.admission()
    return await handler(request)
