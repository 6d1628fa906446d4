"""Routes for whoever runs the server. `auth` guards them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from peg.failure import FAULT_EFFECTS, CauseKind, EngineState, Fault, FaultKind, FaultPlace, FaultPoint
from peg.server.body import read_body
from peg.server.errors import ApiError, invalid
from peg.server.form import encode
from peg.server.health import full_health
from peg.server.service import SERVICE, Service

T = TypeVar("T", bound=Struct)


class AbortRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /admin/abort`: one request, or all."""

    request_id: str | None = None
    all: bool = False


class ReasonRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /admin/fail` and `/admin/rebuild`: what clients and logs are told."""

    reason: Annotated[str, Meta(min_length=1, max_length=1000)] = "asked for by the operator"


class NothingRequest(Struct, forbid_unknown_fields=True):
    """The body of `POST /admin/drain`: an empty object."""


class FaultRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of `POST /admin/fault`: `after_steps` steps from now, or the next time that the rank is there."""

    kind: FaultKind
    rank: Annotated[int, Meta(ge=0)] = 0
    after_steps: Annotated[int, Meta(ge=1)] = 1
    point: FaultPoint = FaultPoint.BEFORE
    place: FaultPlace = FaultPlace.STEP


abort_decoder = msgspec.json.Decoder(AbortRequest)
reason_decoder = msgspec.json.Decoder(ReasonRequest)
nothing_decoder = msgspec.json.Decoder(NothingRequest)
fault_decoder = msgspec.json.Decoder(FaultRequest)


async def admin_health(request: web.Request) -> web.Response:
    """Everything that the engine can say about itself; 200 and 503 as `/health`."""
    document = full_health(request.app[SERVICE])
    return _json(document, 200 if document["status"] == EngineState.READY else 503)


async def abort(request: web.Request) -> web.Response:
    """End one live request, or all, with what they have. 404 for an id that is not live."""
    body = await read_body(request, abort_decoder)
    live = request.app[SERVICE].live
    if body.all:
        if body.request_id is not None:
            raise invalid("request_id: not together with all", "request_id")
        return _json({"aborted": live.cancel_all()})
    if not body.request_id:
        raise invalid("request_id: the id of a request, or all: true", "request_id")
    if not live.cancel(body.request_id):
        raise ApiError(404, "request_not_found", f"there is no live request {body.request_id!r}", "request_id")
    return _json({"aborted": 1})


async def drain(request: web.Request) -> web.Response:
    """Finish what is open and end with 0, as after SIGTERM."""
    await read_body(request, nothing_decoder)
    service = request.app[SERVICE]
    service.stop.set()
    return _json({"draining": len(service.live)}, 202)


async def fail(request: web.Request) -> web.Response:
    """Break the engine: everyone is answered, and the process ends with 70, whatever --on-failure says."""
    return await _break(request, CauseKind.OPERATOR_STOP)


async def rebuild(request: web.Request) -> web.Response:
    """Break the engine and rebuild it, whatever --on-failure says. 409 unless it is READY."""
    service = request.app[SERVICE]
    if service.state is not EngineState.READY:
        raise ApiError(409, "not_ready", f"the engine is {service.state}: only one that is ready can be rebuilt")
    return await _break(request, CauseKind.OPERATOR_REBUILD)


async def _break(request: web.Request, kind: CauseKind) -> web.Response:
    body = await read_body(request, reason_decoder)
    service = request.app[SERVICE]
    if not service.engine.fail(kind, body.reason):
        raise ApiError(409, "not_ready", f"the engine is {service.state} already")
    return _json({"state": service.state}, 202)


async def list_faults(request: web.Request) -> web.Response:
    """The faults that can be injected, in words."""
    _check_injection(request.app[SERVICE])
    return _json({"kinds": FAULT_EFFECTS, "points": list(FaultPoint), "places": list(FaultPlace)})


async def inject_fault(request: web.Request) -> web.Response:
    """Arm a fault. 403 unless the server was started with --enable-fault-injection."""
    service = request.app[SERVICE]
    _check_injection(service)
    body = await read_body(request, fault_decoder)
    ranks = service.model().info.world_size
    if body.rank >= ranks:
        raise invalid(f"rank {body.rank}: there are ranks 0 to {ranks - 1}", "rank")
    service.engine.inject(Fault(body.kind, body.rank, body.after_steps, body.point, body.place))
    return _json({"armed": msgspec.to_builtins(body)})


def _check_injection(service: Service) -> None:
    if not service.fault_injection:
        raise ApiError(403, "forbidden", "the server was started without --enable-fault-injection")


def _json(document: Mapping[str, object], status: int = 200) -> web.Response:
    return web.Response(body=encode(document), status=status, content_type="application/json")
