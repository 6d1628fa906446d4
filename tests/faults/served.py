"""`peg serve` as a process over a small model with random weights, and clients of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.http.serving import model_dir
from tests.unit.tiny_group import CONFIG

CONTEXT = 4096
CHANGES = {"num_key_value_heads": 6, "vocab_size": 304, "max_position_embeddings": CONTEXT, "eos_token_id": 292}
START_S = 60.0


def write_served_model(folder: Path) -> Path:
    """A directory with config and tokenizer; the weights are random."""
    (folder / "config.json").write_text(json.dumps(CONFIG | CHANGES), "utf-8")
    return model_dir(folder)


@dataclass
class Told:
    """What one client was told, and when."""

    status: int = 0
    body: bytes = b""
    began: threading.Event = field(default_factory=threading.Event)
    ended_s: float = 0.0
    cut: bool = False

    @property
    def error(self) -> dict[str, Any]:
        """Of the answer, or of the last event of a stream."""
        if not self.body.startswith(b"data:"):
            found: dict[str, Any] = json.loads(self.body)["error"]
            return found
        events = self.body.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""], events[-3:]
        told: dict[str, Any] = json.loads(events[-3].removeprefix("data: "))["error"]
        return told

    @property
    def tokens(self) -> int:
        return self.body.count(b"data: {")


class Client:
    """One request on a thread of its own."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self.told = Told()
        self._port = port
        self._body = json.dumps({"model": "tiny", "prompt": "the cat", "ignore_eos": True, "temperature": 0, **body})
        self.thread = threading.Thread(target=self._ask)
        self.thread.start()

    def _ask(self) -> None:
        told = self.told
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", self._body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            told.status = response.status
            while part := response.read1(65536):
                told.body += part
                told.began.set()
        except (OSError, http.client.HTTPException):
            told.cut = True
        finally:
            connection.close()
            told.ended_s = time.monotonic()
            told.began.set()

    def wait(self, within_s: float = 30.0) -> Told:
        self.thread.join(within_s)
        assert not self.thread.is_alive(), "the client was never answered"
        return self.told


@dataclass
class Served:
    """A running server. Its log is read all the time, for a full pipe would stop it."""

    process: subprocess.Popen[str]
    port: int
    log: list[str]

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {} if body is None else {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def fault(self, kind: str, **fields: Any) -> float:
        """Arm a fault; when."""
        status, answer = self.request("POST", "/admin/fault", {"kind": kind, "rank": 1, **fields})
        assert status == 200, answer
        return time.monotonic()

    def ask(self, **body: Any) -> Client:
        return Client(self.port, body)

    def streams(self, count: int) -> list[Client]:
        """Streams that run."""
        clients = [self.ask(stream=True, max_tokens=CONTEXT - 100) for _ in range(count)]
        for client in clients:
            assert client.told.began.wait(20)
        return clients

    def wait_for_log(self, event: str, within_s: float) -> dict[str, Any]:
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s:
            for line in list(self.log):
                if line.startswith("{") and json.loads(line).get("event") == event:
                    found: dict[str, Any] = json.loads(line)
                    return found
            time.sleep(0.01)
        raise AssertionError(f"no {event!r} within {within_s} s in:\n" + "".join(self.log[-30:]))


@contextlib.contextmanager
def served(model: Path, *flags: str, port: int = 0) -> Iterator[Served]:
    """A server over a small model with random weights, with fault injection."""
    settings = ("--load-format", "dummy", "--kv-cache-memory", "16MiB", "--enable-fault-injection")
    with serve_model(str(model), *settings, *flags, port=port) as server:
        yield server


@contextlib.contextmanager
def serve_model(model: str, *flags: str, port: int = 0) -> Iterator[Served]:
    """A server that is READY while the body runs; afterwards it must have ended, or is killed."""
    command = [sys.executable, "-m", "peg", "serve", model, "--port", str(port), "--served-model-name", "tiny", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        log: list[str] = []
        assert process.stderr is not None
        reading = threading.Thread(target=log.extend, args=(process.stderr,))
        reading.start()
        try:
            server = Served(process, port, log)
            ready = server.wait_for_log("ready", START_S)
            server.port = int(ready["url"].rpartition(":")[2])
            yield server
        finally:
            process.kill()
            reading.join()
