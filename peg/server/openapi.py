"""`GET /openapi.json`: the interface as an OpenAPI document, made of the routes and of what decodes their bodies."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from peg.server.errors import ErrorBody
from peg.server.form import encode
from peg.server.routes import Route

_VARIABLE = re.compile(r"\{(\w+)[^}]*\}")
_REFERENCE = "#/components/schemas/{name}"


def serve_document(routes: Sequence[Route]) -> Handler:
    """The handler of a document that is made once."""
    document = encode(openapi_document(routes))

    async def show_openapi(_request: web.Request) -> web.Response:
        """The interface itself, as this document."""
        return web.Response(body=document, content_type="application/json")

    return show_openapi


def openapi_document(routes: Sequence[Route]) -> dict[str, Any]:
    """OpenAPI 3.1. Routes that disrupt the engine are marked `x-disrupts`, for those who try routes at random."""
    bodies = [route.body for route in routes if route.body is not None]
    _, schemas = msgspec.json.schema_components([*bodies, ErrorBody], ref_template=_REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(_VARIABLE.sub(r"{\1}", route.path), {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "peg", "version": version("peg"), "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],  # a key is needed only where the server was started with some
    }


def _operation(route: Route) -> dict[str, Any]:
    name = getattr(route.handler, "__name__", "")
    summary, _, more = (inspect.getdoc(route.handler) or "").partition("\n\n")
    parameters = [
        {"name": found, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for found in _VARIABLE.findall(route.path)
    ]
    operation: dict[str, Any] = {
        "operationId": f"{name}_{route.method.lower()}",
        "summary": " ".join(summary.split()),
        "parameters": parameters,
        "responses": {
            "200": {"description": "What was asked for.", "content": {kind: {} for kind in route.answers}},
            "default": {"description": "An error.", "content": {"application/json": {"schema": _schema(ErrorBody)}}},
        },
    }
    if more:
        operation["description"] = more
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _schema(route.body)}}}
    if route.disrupts:
        operation["x-disrupts"] = True
    return operation


def _schema(body: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=body.__name__)}
