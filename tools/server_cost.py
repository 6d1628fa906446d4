#!/usr/bin/env python3
"""What the server costs beside its model: streamed tokens/s over ranks whose steps cost what they are told to.

    .venv/bin/python tools/server_cost.py

Everything but the ranks is the product: they say one token for ever, each after `--step-ms`. With steps that cost
nothing the yardsticks are bare aiohttp handlers on the same kind of loop, in processes of their own: one that writes
the very same events, made beforehand, a write each, and one that encodes each as it writes it. Rounds alternate; the
figures are medians, the ratio that of each round's own, for a machine is not as fast in every round. The client must
have had time to spare. With slower steps the yardstick is the step itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import click
import uvloop
from aiohttp import web

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import peg.engine  # noqa: E402  the tests' ranks are in this checkout only
from peg.config import ServerConfig  # noqa: E402
from peg.engine import Engine  # noqa: E402
from peg.plan import StepPlan, StepResult  # noqa: E402
from peg.server.run import listening, live  # noqa: E402
from peg.server.service import Service  # noqa: E402
from tests.http.echo_group import EchoGroup  # noqa: E402
from tests.http.serving import echo_config  # noqa: E402

PROMPT = "the cat tool call the cat END "
SAID = 258  # " the"


class FixedGroup(EchoGroup):
    """Ranks with the same logits for ever, and so the same token."""

    def _result(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, plan.epoch, (SAID,) * sum(piece.samples for piece in plan.slices))


# --- what is measured, each in a process of its own ---------------------------------------------------------------


async def product(sock: socket.socket, step_s: float, folder: Path) -> None:
    def fixed_group(*arguments: Any, **named: Any) -> FixedGroup:
        group = FixedGroup(*arguments, **named)
        group.step_s = step_s
        return group

    vars(peg.engine)["RankGroup"] = fixed_group
    config = echo_config(folder, max_model_len=4096, max_num_seqs=64)
    engine = Engine(config)
    service = Service(engine, config, ServerConfig(), sock.getsockname()[:2])
    async with listening(service, sock):
        await live(service)


async def bare(sock: socket.socket, events: list[str], *, encodes: bool) -> None:
    """Writes the events as they are, or makes each of them out of its document first."""
    ready = [event.encode() for event in events]
    documents = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]

    async def write_all(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in documents if encodes else ready:
            await response.write(
                b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n" if encodes else event
            )
            await asyncio.sleep(0)  # tokens come one by one, to every stream
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", write_all)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.SockSite(runner, sock, backlog=1024).start()
    await asyncio.Event().wait()


def serve(fd: int, what: str, argument: str) -> None:
    sock = socket.socket(fileno=fd)
    sys.setswitchinterval(1e-4)
    if what != "product":
        uvloop.run(bare(sock, json.loads(Path(argument).read_text()), encodes=what == "bare, encoding"))
        return
    with tempfile.TemporaryDirectory() as folder:
        uvloop.run(product(sock, float(argument) / 1000, Path(folder)))


@contextlib.contextmanager
def serving(what: str, argument: str) -> Iterator[tuple[str, int]]:
    """A child process that serves; where it listens."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as sock:
        command = [sys.executable, str(Path(__file__)), "--serve", str(sock.fileno()), what, argument]
        child = subprocess.Popen(command, pass_fds=[sock.fileno()], stdout=subprocess.DEVNULL)
        try:
            yield sock.getsockname()
        finally:
            child.terminate()
            child.wait(20)


# --- the client: as little as a client can do ---------------------------------------------------------------------


class Reader(asyncio.Protocol):
    """Sends one request and keeps what comes until the end of the stream."""

    def __init__(self, body: bytes) -> None:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: peg\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        self._request = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
        self.parts: list[bytes] = []
        self.first_s = self.last_s = 0.0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self.last_s = time.monotonic()
        self.first_s = self.first_s or self.last_s
        self.parts.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def events(self) -> list[str]:
        """The events that came, out of their chunks."""
        body = b"".join(self.parts).partition(b"\r\n\r\n")[2]
        text = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            text += body[: int(size, 16)]
            body = body[int(size, 16) + 2 :]
        return [event + "\n\n" for event in text.decode().split("\n\n")[:-1]]


async def read_streams(address: tuple[str, int], streams: int, tokens: int) -> tuple[float, list[Reader]]:
    """Seconds from the first token to the last one of `streams` streams together, and what was read."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    body["stream_options"] = {"include_usage": True}
    loop = asyncio.get_running_loop()
    readers = [Reader(json.dumps(body).encode()) for _ in range(streams)]
    for reader in readers:
        await loop.create_connection(lambda reader=reader: reader, *address)  # type: ignore[misc]
    await asyncio.gather(*(reader.done for reader in readers))
    for reader in readers:
        if f'"completion_tokens":{tokens}'.encode() not in b"".join(reader.parts[-3:]):
            raise click.ClickException(f"a stream did not bring its {tokens} tokens")
    return max(reader.last_s for reader in readers) - min(reader.first_s for reader in readers), readers


async def until_it_answers(address: tuple[str, int]) -> list[str]:
    """The events of one stream, once there is one."""
    for _ in range(200):
        with contextlib.suppress(click.ClickException, OSError):
            return (await read_streams(address, 1, TOKENS))[1][0].events()
        await asyncio.sleep(0.05)
    raise click.ClickException("the server does not answer")


TOKENS = 1000


async def zero_cost(streams: int, rounds: int) -> None:
    """Tokens/s of the product, and over those of the bare handlers."""
    with contextlib.ExitStack() as servers:
        folder = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        subjects = {"product": servers.enter_context(serving("product", "0"))}
        events = folder / "events.json"
        events.write_text(json.dumps(await until_it_answers(subjects["product"])))
        for name in ("bare", "bare, encoding"):
            subjects[name] = servers.enter_context(serving(name, str(events)))
            await until_it_answers(subjects[name])
        rates: dict[str, list[float]] = {name: [] for name in subjects}
        busy: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(rounds):
            for name, address in subjects.items():
                began_s, worked_s = time.monotonic(), time.process_time()
                took_s, _ = await read_streams(address, streams, TOKENS)
                rates[name].append(streams * TOKENS / took_s)
                busy[name].append((time.process_time() - worked_s) / (time.monotonic() - began_s))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    print(f"{streams} streams, steps that cost nothing, tokens/s:")
    for name, rate in medians.items():
        client = f"the client works {statistics.median(busy[name]):.0%} of the time"
        ratios = sorted(product / other for product, other in zip(rates["product"], rates[name], strict=True))
        spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        print(f"  {name:<15}{rate:9.0f}   product / {name}: {spread}   {client}")


async def slow_step(streams: int, step_ms: float) -> float:
    """Milliseconds that a token takes."""
    with serving("product", str(step_ms)) as address:
        await until_it_answers(address)
        took_s, _ = await read_streams(address, streams, TOKENS)
    per_token_ms = 1000 * took_s / (TOKENS - 1)
    print(f"{streams} streams, steps of {step_ms:g} ms: {per_token_ms:.2f} ms a token")
    return per_token_ms


@click.command(help=__doc__)
@click.option("--streams", default=64, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--step-ms", default=20.0, show_default=True, help="Of the slower steps.")
def main(streams: int, rounds: int, step_ms: float) -> None:
    print(f"python {sys.version.split()[0]}, {len(os.sched_getaffinity(0))} cores")
    uvloop.run(zero_cost(streams, rounds))
    uvloop.run(slow_step(streams, step_ms))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        main()
