"""The life of the server process: listen, load, serve, drain, end. The port is bound before this is imported."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator

import structlog
import uvloop
from aiohttp import web

from peg.config import EngineConfig, ServerConfig
from peg.engine import Engine
from peg.errors import EngineUnavailable
from peg.server.app import build_app
from peg.server.garbage import collect_at_rest, frozen
from peg.server.service import Service
from peg.server.status import tell_status

log = structlog.get_logger("peg.server")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CLOSING_S = 1.0  # for answers that are still being written when the listener closes
_BACKLOG = 1024


def serve(sock: socket.socket, engine_config: EngineConfig, config: ServerConfig) -> int:
    """Serve on a bound socket until a signal or a failure; the exit code: 0 drained, 70 failed.

    Raises UsageError where the checkpoint or the configuration is at fault. Main thread only.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(sock, engine_config, config))


async def _serve(sock: socket.socket, engine_config: EngineConfig, config: ServerConfig) -> int:
    service = Service(Engine(engine_config), engine_config, config, sock.getsockname()[:2])
    _stop_on_signal(service.stop)
    async with listening(service, sock):
        return await live(service)


@contextlib.asynccontextmanager
async def listening(service: Service, sock: socket.socket) -> AsyncIterator[None]:
    """Answer on `sock` while the body runs; afterwards the engine is closed.

    A handler is cancelled when its client leaves: aiohttp does that only where it is asked to.
    """
    app = build_app(service)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSING_S)
    await runner.setup()
    try:
        await web.SockSite(runner, sock, backlog=_BACKLOG).start()
        yield
    finally:
        await runner.cleanup()


async def live(service: Service) -> int:
    """Load, serve until a stop or a failure, drain; the exit code. Until it is loaded the listener answers 503."""
    starting = asyncio.create_task(service.start())
    stopping = asyncio.create_task(service.stop.wait())
    ended = asyncio.create_task(service.engine.ended())
    tasks = [starting, stopping, ended]
    try:
        await _first(starting, stopping)
        if not starting.done():
            return 0
        try:
            await starting
        except EngineUnavailable:  # a rank failed while it loaded; the supervisor says when it is over
            return await ended
        with frozen():
            _tell_ready(service)
            tasks.append(asyncio.create_task(tell_status(service, service.config.status_interval_s)))
            if any(device != "cpu" for device in service.engine.info.devices):
                tasks.append(asyncio.create_task(collect_at_rest(service.engine)))
            await _first(ended, stopping)
            if not ended.done():
                await _drain(service)
            return 0 if service.engine.cause is None else await ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first(*tasks: asyncio.Task[object]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


async def _drain(service: Service) -> None:
    """Let what runs finish and be read; at the deadline the rest is told and cut."""
    limit_s = service.config.shutdown_timeout_s
    until_s = time.monotonic() + limit_s
    log.info("draining", live=len(service.live), limit_s=limit_s)
    await service.engine.drain(limit_s)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(service.live.none_left.wait(), until_s - time.monotonic())


def _tell_ready(service: Service) -> None:
    info = service.engine.info
    log.info("sampling defaults", **service.sampling_defaults())
    log.info(
        "ready",
        url=service.url,
        model=", ".join(service.names),
        ranks=info.world_size,
        devices=",".join(info.devices),
        communicator=info.communicator,
        dtype=info.dtype,
        context_tokens=info.max_model_len,
        kv_capacity_tokens=info.kv_capacity_tokens,
        load_s={name: round(took_s, 2) for name, took_s in info.load_times_s},
    )


def _stop_on_signal(stop: asyncio.Event) -> None:
    """The first SIGTERM or SIGINT sets `stop`. A second one ends the process with 128 + its number."""
    told = False

    def on_signal(number: int) -> None:
        nonlocal told
        if told:
            log.warning("second signal: ending at once", signal=signal.Signals(number).name)
            logging.shutdown()
            sys.stderr.flush()
            os._exit(128 + number)
        told = True
        log.info("signal", signal=signal.Signals(number).name)
        stop.set()

    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
