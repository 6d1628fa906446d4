"""The server that the product ships, on a thread of the test's process, over ranks that echo."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import uvloop

import peg.engine
from peg.config import EngineConfig, ServerConfig
from peg.deadlines import Deadlines
from peg.engine import Engine
from peg.failure import EngineState
from peg.process_end import ProcessEnd
from peg.server.run import listening, live
from peg.server.service import Service
from tests.http.echo_group import EchoGroup
from tests.unit.small_tokenizers import byte_level

T = TypeVar("T")

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if loop.first %}{{ raise_exception('the user speaks first') }}{% endif %}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


def model_dir(folder: Path) -> Path:
    """A model directory with everything but weights."""
    byte_level().save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "eos_token_id": 292}))
    return folder


class RecordedEnd(ProcessEnd):
    """A process that would have ended notes it down and goes on."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def arm(self, after_s: float) -> None:
        pass

    def disarm(self) -> None:
        pass

    def exit(self, code: int) -> None:
        self.codes.append(code)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        return error

    @property
    def events(self) -> list[Any]:
        """The documents of an event stream, which must end with [DONE]."""
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        *events, done, rest = self.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


@dataclass
class Server:
    """A running server. `call` runs a function on its loop."""

    service: Service
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    thread: threading.Thread
    exit_codes: list[int] = field(default_factory=list)

    @property
    def group(self) -> EchoGroup:
        group: Any = self.service.engine._group
        assert isinstance(group, EchoGroup)
        return group

    @property
    def address(self) -> tuple[str, int]:
        return self.service.address

    def call(self, function: Callable[[], T]) -> T:
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                outcome.set_result(function())
            except Exception as error:
                outcome.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return outcome.result(10)

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout_s: float = 20
    ) -> Answer:
        """One request on a connection of its own. `body` is bytes as they are, or anything that JSON can hold."""
        connection = http.client.HTTPConnection(*self.address, timeout=timeout_s)
        headers = dict(headers or {})
        if body is not None:
            headers.setdefault("Content-Type", "application/json")
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        with contextlib.closing(connection):
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.request("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def complete(self, prompt: Any = "the cat", **fields: Any) -> Answer:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def chat(self, content: Any = "the cat", **fields: Any) -> Answer:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def open(self, path: str, body: Any) -> socket.socket:
        """A connection on which a request was sent and nothing was read."""
        sock = socket.create_connection(self.address, timeout=20)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: peg\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        sock.sendall(head.encode() + b"\r\n\r\n" + data)
        return sock

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in self.get("/metrics").body.decode().splitlines():
            sample, _, value = line.rpartition(" ")
            found, _, pairs = sample.partition("{")
            if found == name and wanted <= set(pairs.rstrip("}").split(",")):
                return float(value)
        raise AssertionError(f"no metric {name} {labels}")

    def wait_for(self, condition: Callable[[], bool], what: str, limit_s: float = 5.0) -> None:
        """Look again and again until it is so."""
        until_s = time.monotonic() + limit_s
        while not self.call(condition):
            assert time.monotonic() < until_s, f"not within {limit_s} s: {what}"
            time.sleep(0.005)

    def wait_idle(self) -> None:
        """Nothing runs, nothing waits, no block is taken."""

        def idle() -> bool:
            stats = self.service.engine.stats()
            scheduler = stats.scheduler
            used = sum(group.used for group in scheduler.groups)
            return not (stats.open_streams or scheduler.running or scheduler.waiting or used or len(self.service.live))

        self.wait_for(idle, "idle")


@contextlib.contextmanager
def serving(
    engine_config: EngineConfig,
    config: ServerConfig | None = None,
    *,
    host: str = "127.0.0.1",
    deadlines: Deadlines | None = None,
    wait_ready: bool = True,
    prepare: Callable[[EchoGroup], None] | None = None,
) -> Iterator[Server]:
    """A server while the body runs; afterwards it is stopped, and its thread must have ended."""
    with socket.create_server((host, 0)) as sock:
        started: list[Server] = []
        codes: list[int] = []
        ready = threading.Event()

        async def main() -> int:
            engine = Engine(engine_config, deadlines, RecordedEnd())
            service = Service(engine, engine_config, config or ServerConfig(), sock.getsockname()[:2])
            server = Server(service, asyncio.get_running_loop(), service.stop, threading.current_thread(), codes)
            if prepare is not None:
                prepare(server.group)
            started.append(server)
            async with listening(service, sock):
                ready.set()
                return await live(service)

        def run() -> None:
            try:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    codes.append(runner.run(main()))
            finally:
                ready.set()

        thread = threading.Thread(target=run, name="server")
        thread.start()
        assert ready.wait(10)
        server = started[0]
        try:
            if wait_ready:
                server.wait_for(lambda: server.service.state is EngineState.READY, "ready")
            yield server
        finally:
            with contextlib.suppress(RuntimeError):
                server.loop.call_soon_threadsafe(server.stop.set)
            server.group.go.set()
            thread.join(15)
            assert not thread.is_alive(), "the server did not end"


def echo_config(folder: Path, **fields: Any) -> EngineConfig:
    """An engine over the echo. The module that uses it must have put EchoGroup in RankGroup's place."""
    base = EngineConfig(model="echo", model_dir=model_dir(folder), enable_fault_injection=True)
    return replace(base, **fields)


def echo_in_place_of_ranks(monkeypatch: Any) -> None:
    """Engines made from now on have ranks that echo."""
    monkeypatch.setattr(peg.engine, "RankGroup", EchoGroup)


def joined(events: list[Any], index: int = 0) -> str:
    """A choice's text out of a stream of either kind."""
    found = [each for event in events for each in event["choices"] if each["index"] == index]
    return "".join(each["text"] if "text" in each else each["delta"].get("content", "") for each in found)
