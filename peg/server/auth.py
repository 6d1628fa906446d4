"""Who may ask: API keys for the interface, loopback or the admin key for the admin routes."""

from __future__ import annotations

import hmac
import ipaddress

from aiohttp import web
from aiohttp.typedefs import Handler

from peg.server.errors import ApiError
from peg.server.service import SERVICE

OPEN_PATHS = frozenset({"/health", "/version", "/metrics", "/openapi.json"})
_FORWARDED = ("Forwarded", "X-Forwarded-For")


@web.middleware
async def auth_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """401 or 403 unless the request may pass. OPTIONS and `OPEN_PATHS` need no key."""
    config = request.app[SERVICE].config
    if request.path.startswith("/admin/"):
        _check_admin(request, config.admin_key)
    elif config.api_keys and request.method != "OPTIONS" and request.path not in OPEN_PATHS:
        _check_key(request, config.api_keys)
    return await handler(request)


def _check_key(request: web.Request, keys: tuple[str, ...]) -> None:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    # Every key is compared, whichever fits, so that the time says nothing.
    fits = [hmac.compare_digest(_bytes(given.strip()), _bytes(key)) for key in keys]
    if scheme.lower() != "bearer" or not any(fits):
        raise ApiError(
            401, "invalid_api_key", "no valid key in 'Authorization: Bearer …'", headers={"WWW-Authenticate": "Bearer"}
        )


def _check_admin(request: web.Request, admin_key: str | None) -> None:
    if admin_key is not None:
        _check_key(request, (admin_key,))
        return
    for name in _FORWARDED:
        if name in request.headers:
            raise ApiError(403, "forbidden", f"admin routes take no request with {name} without --admin-key")
    if not _is_loopback(request):
        raise ApiError(403, "forbidden", "the server is not bound to a loopback address: admin routes need --admin-key")


def _is_loopback(request: web.Request) -> bool:
    """Whether the listening socket itself, not only this connection, is bound to a loopback address."""
    return ipaddress.ip_address(request.app[SERVICE].address[0]).is_loopback


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
