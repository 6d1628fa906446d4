"""Random load, and a fault that can be rebuilt every moment: nobody is forgotten, and nothing grows."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from peg.config import EngineConfig
from peg.deadlines import Deadlines
from peg.engine import Engine
from peg.errors import EngineUnavailable, QueueFull
from peg.failure import EngineState, Fault, FaultKind, FaultPoint
from peg.plan import SamplingParams, SequenceRequest, Terminal
from peg.token_stream import TokenStream
from tests.faults.faulty_engine import RecordedEnd, open_files, until

KINDS = (
    FaultKind.RAISE,
    FaultKind.MEMORY_ERROR,
    FaultKind.STALL,
    FaultKind.SKIP,
    FaultKind.EXTRA,
    FaultKind.WRONG_SHAPE,
    FaultKind.WRONG_TOKEN,
    FaultKind.WRONG_DIGEST,
    FaultKind.UNREADABLE,
    FaultKind.COMM_ERROR,
    FaultKind.LOOP_RAISES,
)
STEP_S = 0.3
REBUILD_S = 2.0
HANG_S = STEP_S + REBUILD_S + 5.0  # a request is short: whoever waits longer waits for ever
LIMITS = Deadlines(step_cap_s=STEP_S, step_floor_s=STEP_S, rebuild_s=REBUILD_S, rebuild_limit=1_000_000)
STRUCK_S = 1.0  # a fault has struck by then, or costs nobody but its requests
SETTLED = 20  # rebuilds after which nothing may grow any more
CLIENTS = 8
RANKS = 3


@dataclass(frozen=True)
class Footprint:
    """What the process holds, right after a rebuild."""

    threads: int
    files: int
    resident_bytes: int


@dataclass
class Soaked:
    """What came of it."""

    sent: int = 0
    refused: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    hung: int = 0
    twice: int = 0
    rebuilds: int = 0
    slowest_s: float = 0.0
    footprints: list[Footprint] = field(default_factory=list)

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {reason}" for reason, count in sorted(self.ends.items()))
        line = f"{self.sent} sent, {sum(self.ends.values())} terminals ({ends}), {self.refused} refused"
        line += f", {self.twice} twice, {self.hung} hung, slowest {self.slowest_s:.2f} s; {self.rebuilds} rebuilds"
        if len(self.footprints) > SETTLED:
            first, last = self.footprints[SETTLED], self.footprints[-1]
            line += f"; from the {SETTLED}th on: threads {first.threads} -> {last.threads}, files {first.files} -> "
            line += f"{last.files}, resident {first.resident_bytes >> 20} -> {last.resident_bytes >> 20} MiB"
        return line


class Soak:
    """One engine for all of it. Owned by the loop that runs it."""

    def __init__(self, model: Path, seed: int) -> None:
        config = EngineConfig(
            model="tiny",
            model_dir=model,
            load_format="dummy",
            tensor_parallel_size=RANKS,
            block_size=4,
            kv_cache_memory_bytes=1 << 20,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_num_queued_reqs=6,
            on_failure="rebuild",
            enable_fault_injection=True,
        )
        self.soaked = Soaked()
        self._engine = Engine(config, LIMITS, RecordedEnd())
        self._random = Random(seed)
        self._ended: deque[tuple[TokenStream, Terminal]] = deque(maxlen=500)
        self._over = False

    async def run(self, seconds: float) -> Soaked:
        """Load and faults for so long; then everything must come to rest. Whatever is found, the threads end."""
        try:
            await self._engine.start()
            await self._break_for(seconds)
        finally:
            await self._engine.close()
        return self.soaked

    async def _break_for(self, seconds: float) -> None:
        async with asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(self._client(number))
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                await self._break_and_wait()
                await asyncio.sleep(self._random.uniform(0.05, 0.4))
            self._over = True
        self.soaked.twice += sum(stream.terminal is not terminal for stream, terminal in self._ended)
        self.soaked.rebuilds = len(self._engine.vitals().rebuilt)
        counters = self._engine.stats().scheduler.counters
        booked = sum(count for reason, count in counters.finished.items() if reason != "rejected")
        assert counters.admitted == booked == sum(self.soaked.ends.values())
        assert self._engine.stats().open_streams == 0

    async def _break_and_wait(self) -> None:
        """One fault, and READY again. A fault that costs only its requests rebuilds nothing."""
        fault = Fault(
            self._random.choice(KINDS),
            self._random.randrange(RANKS),
            self._random.randint(1, 4),
            self._random.choice(list(FaultPoint)),
        )
        before = self._engine.epoch
        self._engine.inject(fault)
        with contextlib.suppress(TimeoutError):
            await until(lambda: self._engine.epoch != before, STRUCK_S)
        await until(lambda: self._engine.state is EngineState.READY, HANG_S)
        if self._engine.epoch != before:
            self.soaked.footprints.append(footprint())

    async def _client(self, number: int) -> None:
        random = Random(number)
        while not self._over:
            await asyncio.sleep(random.uniform(0.0, 0.02))
            try:
                stream = self._engine.submit(self._request(random, f"{number} {self.soaked.sent}"))
            except (EngineUnavailable, QueueFull):
                self.soaked.refused += 1
                continue
            self.soaked.sent += 1
            began_s = time.monotonic()
            leaves_after = random.choice((None, None, 0, 3))
            try:
                await asyncio.wait_for(self._read(stream, leaves_after), HANG_S)
            except TimeoutError:
                self.soaked.hung += 1
                continue
            assert stream.terminal is not None
            self.soaked.slowest_s = max(self.soaked.slowest_s, time.monotonic() - began_s)
            self.soaked.ends[stream.terminal.reason] += 1
            self._ended.append((stream, stream.terminal))

    def _request(self, random: Random, name: str) -> SequenceRequest:
        return SequenceRequest(
            request_id=name,
            prompt_ids=tuple(random.randrange(3, 50) for _ in range(random.randint(1, 30))),
            sampling=SamplingParams(temperature=random.choice((0.0, 1.0)), seed=random.getrandbits(30)),
            max_tokens=random.randint(1, 20),
            prompt_logprobs=random.choice((None, None, 1)),
        )

    async def _read(self, stream: TokenStream, leaves_after: int | None) -> None:
        if leaves_after == 0:
            stream.cancel()
        async for _ in stream:
            if leaves_after is not None and stream.published_tokens >= leaves_after:
                stream.cancel()


async def soak(model: Path, seed: int, seconds: float) -> Soaked:
    """Random load and faults on an engine of three ranks."""
    return await Soak(model, seed).run(seconds)


def footprint() -> Footprint:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    helpers = [thread for thread in threading.enumerate() if thread.name.startswith("peg-abort")]
    return Footprint(threading.active_count() - len(helpers), open_files(), pages * 4096)
