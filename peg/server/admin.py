"""Routes for whoever runs the server. `auth` guards them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from peg.failure import EngineState, Fault, FaultKind, FaultPoint
from peg.server.body import read_body
from peg.server.errors import ApiError, invalid
from peg.server.form import encode
from peg.server.service import SERVICE


class FaultRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /admin/fault`: strikes `after_steps` steps from now."""

    kind: FaultKind
    rank: Annotated[int, Meta(ge=0)]
    after_steps: Annotated[int, Meta(ge=1)] = 1
    point: FaultPoint = FaultPoint.BEFORE


fault_decoder = msgspec.json.Decoder(FaultRequest)


async def inject_fault(request: web.Request) -> web.Response:
    """Arm a fault on one rank. 403 unless the server was started with --enable-fault-injection."""
    service = request.app[SERVICE]
    if not service.fault_injection:
        raise ApiError(403, "forbidden", "the server was started without --enable-fault-injection")
    body = await read_body(request, fault_decoder)
    ranks = service.model().info.world_size
    if body.rank >= ranks:
        raise invalid(f"rank {body.rank}: there are ranks 0 to {ranks - 1}", "rank")
    service.engine.inject(Fault(body.kind, body.rank, body.after_steps, body.point))
    return web.Response(body=encode({"armed": msgspec.to_builtins(body)}), content_type="application/json")


async def admin_health(request: web.Request) -> web.Response:
    """Everything that the engine can say about itself."""
    service = request.app[SERVICE]
    engine = service.engine
    state, stats = service.read_engine()
    cause = engine.cause
    document = {
        "state": state,
        "epoch": engine.epoch,
        "cause": None if cause is None else msgspec.to_builtins(cause),
        "stats": None if stats is None else msgspec.to_builtins(stats),
    }
    return web.Response(
        body=encode(document), status=200 if state is EngineState.READY else 503, content_type="application/json"
    )
