"""Server-sent events: one answer written event by event."""

from __future__ import annotations

import time
from collections.abc import Mapping

from aiohttp import web

_HEADERS: Mapping[str, str] = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_DONE = b"data: [DONE]\n\n"


def event(document: bytes) -> bytes:
    """One event out of one line of JSON."""
    return b"data: " + document + b"\n\n"


class EventStream:
    """One streamed answer. Status and headers leave with the first event, so an earlier error keeps its status.

    Owned by the loop; written by the tasks of one request. `blocked_since_s` (time.monotonic) is set while a write
    waits for the client to read.
    """

    def __init__(self, request: web.Request) -> None:
        self.begun = False
        self.blocked_since_s: float | None = None
        self._request = request
        self._response = web.StreamResponse(headers=_HEADERS)
        request[STREAM] = self

    async def send(self, events: bytes) -> None:
        """Write one or more whole events. Raises ConnectionError once the client has left."""
        if not self.begun:
            self.begun = True
            await self._response.prepare(self._request)
        self.blocked_since_s = time.monotonic()
        await self._response.write(events)
        self.blocked_since_s = None

    async def end(self, last: bytes = b"") -> web.StreamResponse:
        """Write `last`, say that it is done, and close the answer."""
        await self.send(last + _DONE)
        await self._response.write_eof()
        return self._response

    async def fail(self, error: bytes) -> web.StreamResponse:
        """Tell a client that already has events what went wrong. A stream that only closed would look complete."""
        return await self.end(event(error))


STREAM = web.RequestKey("stream", EventStream)
