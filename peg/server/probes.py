"""The small routes: who is served, in which version, and whether all is well. All answer in constant time."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from aiohttp import web

from peg.failure import EngineState
from peg.server.errors import ApiError
from peg.server.form import encode
from peg.server.health import short_health
from peg.server.service import SERVICE, Service


async def health(request: web.Request) -> web.Response:
    """200 while requests are taken, idle or busy; 503 otherwise, with the state and the first cause."""
    document = short_health(request.app[SERVICE])
    return _json(document, 200 if document["status"] == EngineState.READY else 503)


async def show_version(_request: web.Request) -> web.Response:
    """The version of peg, in every state."""
    return _json({"version": version("peg")})


async def list_models(request: web.Request) -> web.Response:
    """Every name that the model is served under."""
    service = request.app[SERVICE]
    return _json({"object": "list", "data": [_model(service, name) for name in service.model().names]})


async def show_model(request: web.Request) -> web.Response:
    """One of them; 404 for any other name."""
    service = request.app[SERVICE]
    return _json(_model(service, service.model().check_name(request.match_info["id"])))


async def show_metrics(request: web.Request) -> web.Response:
    """The page for Prometheus, in every state."""
    page = request.app[SERVICE].metrics.exposition()
    return web.Response(body=page, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def cancel_request(request: web.Request) -> web.Response:
    """End a live request as its client wishes; its own answer has what there is, and says `abort`."""
    request_id = request.match_info["id"]
    if not request.app[SERVICE].live.cancel(request_id):
        raise ApiError(404, "request_not_found", f"there is no live request {request_id!r}", "id")
    return _json({"id": request_id, "cancelled": True})


def _model(service: Service, name: str) -> dict[str, object]:
    model = service.model()
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "peg",
        "root": model.names[0],
        "parent": None,
        "max_model_len": model.info.max_model_len,
        "permission": [],
    }


def _json(document: Mapping[str, object], status: int = 200) -> web.Response:
    return web.Response(body=encode(document), status=status, content_type="application/json")
