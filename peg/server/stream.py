"""Server-sent events: one answer written event by event."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping

from aiohttp import web

_HEADERS: Mapping[str, str] = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients skip


def event(document: bytes) -> bytes:
    """One event out of one line of JSON."""
    return b"data: " + document + b"\n\n"


class EventStream:
    """One streamed answer. Status and headers leave with the first event, so an earlier error keeps its status.

    Owned by the loop; written by the tasks of one request. `blocked_since_s` (time.monotonic) is set while a write
    waits for the client to read, `sent_s` is when something was sent last.
    """

    def __init__(self, request: web.Request) -> None:
        self.begun = False
        self.blocked_since_s: float | None = None
        self.sent_s = time.monotonic()
        self._request = request
        self._response = web.StreamResponse(headers=_HEADERS)
        self._opening = asyncio.Lock()
        request[STREAM] = self

    async def send(self, events: bytes) -> None:
        """Write one or more whole events. Raises ConnectionError once the client has left."""
        if not self._response.prepared:
            await self._open()
        self.blocked_since_s = self.sent_s = time.monotonic()
        await self._response.write(events)
        self.blocked_since_s = None

    async def _open(self) -> None:
        async with self._opening:
            if not self.begun:
                self.begun = True
                await self._response.prepare(self._request)

    @contextlib.asynccontextmanager
    async def kept_alive(self, every_s: float) -> AsyncIterator[None]:
        """While the body runs, a client that has been told nothing for so long is told that the server lives."""
        keeping = asyncio.create_task(self._keep_alive(every_s))
        try:
            yield
        finally:
            keeping.cancel()

    async def _keep_alive(self, every_s: float) -> None:
        with contextlib.suppress(ConnectionError):  # whoever writes the answer notices too
            while True:
                quiet_s = time.monotonic() - self.sent_s
                if quiet_s >= every_s and self.blocked_since_s is None:
                    await self.send(_KEEP_ALIVE)
                else:
                    await asyncio.sleep(max(every_s - quiet_s, every_s / 10))

    async def end(self, last: bytes = b"") -> web.StreamResponse:
        """Write `last`, say that it is done, and close the answer."""
        await self.send(last + _DONE)
        await self._response.write_eof()
        return self._response

    async def fail(self, error: bytes) -> web.StreamResponse:
        """Tell a client that already has events what went wrong. A stream that only closed would look complete."""
        return await self.end(event(error))


STREAM = web.RequestKey("stream", EventStream)
