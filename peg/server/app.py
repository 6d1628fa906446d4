"""The aiohttp application: every route, every middleware, and the engine's life in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from peg.server.admission import admission_middleware
from peg.server.auth import auth_middleware
from peg.server.errors import error_middleware
from peg.server.openapi import serve_document
from peg.server.routes import ROUTES
from peg.server.service import SERVICE, Service
from peg.server.timeout import timeout_middleware
from peg.server.trace import id_middleware, log_middleware, tell_request_id

_STALL_CHECK_S = 1.0


def build_app(service: Service) -> web.Application:
    """The application over one service. It closes the engine when it is cleaned up; starting it is the runner's."""
    app = web.Application(
        middlewares=[
            log_middleware,
            error_middleware,
            id_middleware,
            auth_middleware,
            timeout_middleware,
            admission_middleware,
        ],
        client_max_size=service.config.max_body_bytes,
    )
    app[SERVICE] = service
    app.router.add_get("/openapi.json", serve_document(ROUTES))
    for route in ROUTES:
        app.router.add_route(route.method, route.path, route.handler)
        if route.method == "GET":
            app.router.add_route("HEAD", route.path, route.handler)
    app.on_response_prepare.append(tell_request_id)
    app.cleanup_ctx.append(_engine_life)
    app.cleanup_ctx.append(_stalled_readers)
    return app


async def _engine_life(app: web.Application) -> AsyncIterator[None]:
    """The engine is closed after the last connection, whatever ended the server."""
    yield
    await app[SERVICE].engine.close()


async def _stalled_readers(app: web.Application) -> AsyncIterator[None]:
    """Readers that take nothing are cut off, so that what waits for them stays bounded."""
    service = app[SERVICE]

    async def watch() -> None:
        while True:
            await asyncio.sleep(_STALL_CHECK_S)
            service.live.drop_stalled(service.config.reader_stall_s)

    watching = asyncio.create_task(watch())
    yield
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
