"""A whole engine over a tiny model that a fault strikes, and everything that it tells about it."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peg.config import EngineConfig
from peg.deadlines import Deadlines
from peg.engine import Engine
from peg.failure import Fault
from peg.plan import SamplingParams, SequenceRequest, StepPlan
from peg.process_end import ProcessEnd
from peg.token_stream import TokenStream
from tests.unit.tiny_group import CONFIG

BLOCK = 4
CHUNK_TOKENS = 8
MAX_TOKENS = 12
VOCABULARY: int = CONFIG["vocab_size"]
HEALTHY_S = 20.0  # a bound no healthy wait comes near


class RecordedEnd(ProcessEnd):
    """The process goes on, and what would have ended it is noted down."""

    def __init__(self) -> None:
        self.armed = 0
        self.codes: list[int] = []
        self.ended_s: float | None = None

    def arm(self, after_s: float) -> None:
        self.armed += 1

    def disarm(self) -> None:
        pass

    def exit(self, code: int) -> None:
        self.codes.append(code)
        self.ended_s = self.ended_s or time.monotonic()


class AllAllowed:
    """A grammar that allows everything: its sequence is planned only once its last token is on the host."""

    first_mask = b"\xff" * (VOCABULARY // 8 + 1)

    def advance(self, token_id: int) -> bytes | None:
        return self.first_mask


def write_model(folder: Path) -> Path:
    """A model whose heads divide by 1, 2 and 3."""
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_key_value_heads": 6}), "utf-8")
    return folder


class FaultyEngine:
    """One engine, its streams, and the plans that it issued. Owned by the loop of the test."""

    def __init__(self, folder: Path, deadlines: Deadlines, **options: Any) -> None:
        settings = {"load_format": "dummy", "block_size": BLOCK, "kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 1}
        settings |= {"max_num_batched_tokens": CHUNK_TOKENS, "enable_fault_injection": True}
        config = EngineConfig(model="tiny", model_dir=folder, **{**settings, **options})
        self.end = RecordedEnd()
        self.engine = Engine(config, deadlines, self.end)
        self.plans: list[StepPlan] = []
        self.issued_s: list[float] = []
        self.streams: list[TokenStream] = []
        self.tokens: list[list[int]] = []
        self.answered_s: list[float] = []
        self._readers: list[asyncio.Task[None]] = []
        run = self.engine._group.run

        def recorded(plan: StepPlan) -> None:
            self.plans.append(plan)
            self.issued_s.append(time.monotonic())
            run(plan)

        self.engine._group.run = recorded  # type: ignore[method-assign]

    @property
    def next_step(self) -> int:
        epochs = [plan.step for plan in self.plans if plan.epoch == self.engine.epoch]
        return max(epochs, default=-1) + 1

    def submit(self, prompt: list[int], *, host_paced: bool = False, **request: Any) -> TokenStream:
        """Ask for tokens; they and the end are read by a task."""
        settings = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "sampling": SamplingParams(temperature=0)}
        wanted = SequenceRequest(
            request_id=f"request {len(self.streams)}", prompt_ids=tuple(prompt), **{**settings, **request}
        )
        stream = self.engine.submit(wanted, grammar=AllAllowed() if host_paced else None)
        self.streams.append(stream)
        self.tokens.append([])
        self._readers.append(asyncio.create_task(self._read(stream, self.tokens[-1])))
        return stream

    async def _read(self, stream: TokenStream, tokens: list[int]) -> None:
        async for output in stream:
            tokens += output.token_ids
        self.answered_s.append(time.monotonic())

    async def all_answered(self, within_s: float) -> None:
        await asyncio.wait_for(asyncio.gather(*self._readers), within_s)

    async def until(self, stream: TokenStream, tokens: int) -> None:
        """Wait until a stream has published so many tokens."""
        await until(lambda: stream.published_tokens >= tokens, HEALTHY_S)

    def inject(self, *faults: Fault) -> None:
        for fault in faults:
            self.engine.inject(fault)

    def let_go(self) -> None:
        """The process has ended, so what went on for ever does no longer."""
        for faults in self.engine._group._rank_faults:
            assert faults is not None
            faults.let_go()

    def threads(self) -> list[threading.Thread]:
        """This engine's own."""
        group = self.engine._group
        helpers = () if group._aborts is None else group._aborts.threads
        return [self.engine._supervisor._thread, *helpers, *(rank.thread for rank in group._ranks)]

    async def close(self) -> None:
        self.let_go()
        await asyncio.wait_for(self.engine.close(), HEALTHY_S)


async def until(reached: Callable[[], bool], within_s: float) -> None:
    """Look again and again until it is so; TimeoutError where it is not in time."""
    async with asyncio.timeout(within_s):
        while not reached():  # noqa: ASYNC110  what is looked at belongs to other threads
            await asyncio.sleep(0.002)


def threads() -> list[str]:
    """The engine's threads that are still there."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("peg-", "mask"))]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def temporary_files() -> list[Path]:
    return sorted(Path(tempfile.gettempdir()).glob("peg*"))
