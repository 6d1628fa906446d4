"""Request bodies: bytes in, a checked struct out, or an error that names the field."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from peg.server.errors import ApiError, invalid

T = TypeVar("T", bound=msgspec.Struct)

_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_INDEX = re.compile(r"\[(\d+|\.\.\.)\]")
_NAMED_FIELD = re.compile(r"(unknown|missing required) field `(?P<field>[^`]*)`")
_MAX_SHOWN = 80


async def read_body(request: web.Request, decoder: msgspec.json.Decoder[T]) -> T:
    """The body as a `T`. 415 unless it is application/json in UTF-8, 413 over the limit, 400 for everything else."""
    if request.content_type != "application/json" or (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        given = request.headers.get("Content-Type", "none")
        raise ApiError(415, "unsupported_media_type", f"Content-Type {given}: must be application/json in UTF-8")
    body = await request.read()
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _not_valid(error, body) from None
    except msgspec.DecodeError as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None


def _not_valid(error: msgspec.ValidationError, body: bytes) -> ApiError:
    """Say which field has which value, and what it must be."""
    match = _AT.match(str(error))
    assert match is not None
    what = match["what"]
    path = _INDEX.sub(r".\1", (match["path"] or "").removeprefix("$")).removeprefix(".")
    named = _NAMED_FIELD.search(what)
    if named is not None:
        param = f"{path}.{named['field']}" if path else named["field"]
        return invalid(f"{param}: {named[1]} field", param, f"{named[1].split()[0]}_field")
    if not path:
        return invalid(f"the body: {what}")
    return invalid(f"{path}: {what}{_shown(body, path)}", path)


def _shown(body: bytes, path: str) -> str:
    """The value at `path`, as far as it can be shown in a message."""
    try:
        value: Any = msgspec.json.decode(body)
        for step in path.split("."):
            value = value[int(step)] if isinstance(value, list) else value[step]
        text = msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, RecursionError):
        return ""
    return f", got {text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + '…'}"
