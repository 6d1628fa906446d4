"""The requests that are being answered right now, by the ids their clients know."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from aiohttp import web

from peg.server.errors import ApiError, invalid
from peg.server.metrics import Metrics
from peg.server.stream import STREAM
from peg.token_stream import TokenStream

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def new_request_id() -> str:
    """128 random bits: nobody guesses another client's."""
    return secrets.token_hex(16)


def checked_request_id(given: str, param: str) -> str:
    """A client's own id, or a 400."""
    if _ID.fullmatch(given) is None:
        raise invalid(f"{param}: must be 1 to 128 characters out of A-Z a-z 0-9 . _ -", param)
    return given


@dataclass(eq=False, slots=True)
class LiveRequest:
    """One request and its sequences. Owned by the loop."""

    http: web.Request
    arrived_s: float = field(default_factory=time.monotonic)
    streams: list[TokenStream] = field(default_factory=list)

    def cancel(self) -> None:
        """End every sequence. Those that have ended stay as they are."""
        for stream in self.streams:
            stream.cancel()


class LiveRequests:
    """All of them. A request is found under its bare id and under the id of its answer. Owned by the loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._by_id: dict[str, LiveRequest] = {}
        self.none_left = asyncio.Event()
        self.none_left.set()

    def __len__(self) -> int:
        return len(set(self._by_id.values()))

    @contextlib.contextmanager
    def register(self, http: web.Request, *ids: str) -> Iterator[LiveRequest]:
        """Keep a request while the body runs; whatever ends it, its sequences end too. 409 for an id that is live."""
        for request_id in ids:
            if request_id in self._by_id:
                raise ApiError(409, "request_id_in_use", f"request {request_id} is running", "request_id")
        live = LiveRequest(http)
        self._by_id.update(dict.fromkeys(ids, live))
        self.none_left.clear()
        try:
            yield live
        finally:
            live.cancel()
            self._metrics.ended(live.streams, live.arrived_s)
            for request_id in ids:
                del self._by_id[request_id]
            if not self._by_id:
                self.none_left.set()

    def cancel(self, request_id: str) -> bool:
        """End a live request as its client wishes; false where there is none of that id."""
        live = self._by_id.get(request_id)
        if live is None:
            return False
        live.cancel()
        return True

    def cancel_all(self) -> int:
        """End every live request; how many there were."""
        every = set(self._by_id.values())
        for live in every:
            live.cancel()
        return len(every)

    def drop_stalled(self, limit_s: float) -> int:
        """Cut the connection of every stream whose reader has taken nothing for `limit_s`; how many there were."""
        now = time.monotonic()
        stalled = [live for live in set(self._by_id.values()) if _blocked_s(live.http, now) > limit_s]
        for live in stalled:
            if live.http.transport is not None:
                live.http.transport.abort()
        return len(stalled)


def _blocked_s(http: web.Request, now: float) -> float:
    stream = http.get(STREAM)
    return 0.0 if stream is None or stream.blocked_since_s is None else now - stream.blocked_since_s
