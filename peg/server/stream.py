"""Server-sent events: one answer written event by event."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping

from aiohttp import HttpVersion11, web

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
        self._flows = False  # head and first event are out, in chunks
        request[STREAM] = self

    async def send(self, events: bytes) -> None:
        """Write one or more whole events, or nothing. Raises ConnectionError once the client has left."""
        if not events:
            return  # an empty chunk would end the body
        self.sent_s = time.monotonic()
        if self._flows and self._write_at_once(events):
            return
        if not self._response.prepared:
            await self._open()
        self.blocked_since_s = self.sent_s
        await self._response.write(events)
        self.blocked_since_s = None
        self._flows = self._response.chunked

    def _write_at_once(self, events: bytes) -> bool:
        """Write a chunk to a client that keeps up, in half the time that the response takes; false for another."""
        transport = self._request.transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(events), events))
        return True

    async def _open(self) -> None:
        async with self._opening:
            if not self.begun:
                self.begun = True
                if self._request.version >= HttpVersion11:
                    self._response.enable_chunked_encoding()
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
