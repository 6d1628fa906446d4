"""Seven defects of an engine that drove its ranks as threads before this one: here each is looked for by name."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from peg.config import EngineConfig
from peg.deadlines import Deadlines
from peg.errors import EngineUnavailable
from peg.failure import CauseKind, EngineState, Fault, FaultKind, FaultPoint
from peg.plan import FinishReason
from peg.ranks.blueprint import draw_blueprint
from peg.ranks.device import CpuDevice
from peg.ranks.group import RankGroup
from peg.ranks.thread_comm import ThreadComm
from tests.faults.faulty_engine import HEALTHY_S, MAX_TOKENS, FaultyEngine, until, write_model

PROMPT, LONG = [5, 6, 7], list(range(3, 22))
QUICK = Deadlines(step_cap_s=0.4, step_floor_s=0.4, abort_s=0.5, join_s=0.5, linger_s=0.05, exit_s=1.5)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path)


async def test_d1_every_communicator_is_aborted_whoever_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1. Rank 0 fails while its peers are inside a collective: all are aborted, each once, and before any join."""
    calls: list[str] = []
    abort, join = ThreadComm.abort, RankGroup.join

    def aborted(comm: ThreadComm, reason: str) -> None:
        calls.append(f"abort {comm.rank} by {threading.current_thread().name}")
        abort(comm, reason)

    def joined(group: RankGroup, deadline_s: float) -> bool:
        calls.append("join")
        return join(group, deadline_s)

    monkeypatch.setattr(ThreadComm, "abort", aborted)
    monkeypatch.setattr(RankGroup, "join", joined)
    faulty = FaultyEngine(model, QUICK, tensor_parallel_size=3)
    await faulty.engine.start()
    faulty.inject(Fault(FaultKind.RAISE, 0, 1, FaultPoint.BEFORE))
    faulty.submit(PROMPT)
    await faulty.all_answered(HEALTHY_S)
    assert await asyncio.wait_for(faulty.engine.ended(), HEALTHY_S) == 70
    assert sorted(calls[:3]) == [f"abort {rank} by peg-abort-{rank}" for rank in range(3)]
    assert calls[3] == "join"
    await faulty.close()


async def test_d2_a_rank_that_never_comes_blocks_no_loop(model: Path) -> None:
    """D2. Rank 1 stands still before its collective: the loop goes on all the time, and a deadline names the rank."""
    faulty = FaultyEngine(model, QUICK, tensor_parallel_size=3)
    await faulty.engine.start()
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.005)

    ticking = asyncio.create_task(tick())
    faulty.inject(Fault(FaultKind.STALL, 1, 1, FaultPoint.BEFORE))
    faulty.submit(PROMPT)
    await faulty.all_answered(HEALTHY_S)
    ticking.cancel()
    assert max(later - sooner for sooner, later in pairwise(ticks)) < QUICK.step_cap_s / 2
    cause = faulty.engine.cause
    assert cause is not None
    assert (cause.kind, cause.rank) == (CauseKind.STEP_DEADLINE, 1)
    await faulty.close()


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_d3_no_rank_fails_beside_an_engine_that_goes_on(model: Path, rank: int) -> None:
    """D3. Whichever rank fails the engine is broken: every later request has the same first reason, no step is run."""
    faulty = FaultyEngine(model, QUICK, tensor_parallel_size=3)
    await faulty.engine.start()
    faulty.inject(Fault(FaultKind.RAISE, rank, 1))
    faulty.submit(LONG)
    await faulty.all_answered(HEALTHY_S)
    assert faulty.engine.state is EngineState.BROKEN
    issued = len(faulty.plans)
    for _ in range(3):
        with pytest.raises(EngineUnavailable, match=f"injected on rank {rank}"):
            faulty.submit(PROMPT)
    await asyncio.sleep(0.05)
    assert len(faulty.plans) == issued
    await faulty.close()


@pytest.mark.parametrize(("prompt", "scored"), [(PROMPT, None), (PROMPT, 1), (LONG, None), (LONG, 1)])
async def test_d4_a_failed_prefill_without_peers_costs_one_request(
    model: Path, prompt: list[int], scored: int | None
) -> None:
    """D4. At world size 1, plain or scored, whole or in chunks: the next request is served by the same engine."""
    faulty = FaultyEngine(model, QUICK)
    await faulty.engine.start()
    faulty.inject(Fault(FaultKind.RAISE, 0, 1, FaultPoint.INSIDE))
    lost = faulty.submit(prompt, prompt_logprobs=scored)
    served = faulty.submit(prompt, prompt_logprobs=scored)
    await faulty.all_answered(HEALTHY_S)
    assert lost.terminal is not None
    assert served.terminal is not None
    assert (lost.terminal.reason, served.terminal.reason) == (FinishReason.FAILED, FinishReason.LENGTH)
    assert len(faulty.tokens[1]) == MAX_TOKENS
    assert (faulty.engine.state, faulty.engine.epoch) == (EngineState.READY, 0)
    await faulty.close()


@pytest.mark.parametrize("world_size", [1, 3])
async def test_d5_a_failed_readback_costs_one_request(model: Path, world_size: int) -> None:
    """D5. Scores that cannot be read, when all ranks have done the step, fail their own request at any world size."""
    faulty = FaultyEngine(model, QUICK, tensor_parallel_size=world_size)
    await faulty.engine.start()
    faulty.inject(Fault(FaultKind.UNREADABLE, 0, 1))
    lost = faulty.submit(PROMPT, prompt_logprobs=1)
    served = faulty.submit(PROMPT, prompt_logprobs=1)
    await faulty.all_answered(HEALTHY_S)
    assert lost.terminal is not None
    assert served.terminal is not None
    assert (lost.terminal.reason, served.terminal.reason) == (FinishReason.FAILED, FinishReason.LENGTH)
    assert len(served.prompt_logprobs) == len(PROMPT) - 1
    assert faulty.engine.state is EngineState.READY
    await faulty.close()


@pytest.mark.parametrize("block_size", [16, 64])
def test_d6_what_is_told_of_blocks_is_counted_with_the_blocks_in_use(model: Path, block_size: int) -> None:
    """D6. Blocks, bytes and capacity that people are shown follow the block size; no text of ours has its own."""
    budget = 200_000
    config = EngineConfig(model="tiny", model_dir=model, load_format="dummy", block_size=block_size)
    blueprint = draw_blueprint(config)
    capacities = blueprint.capacities(budget)
    info = blueprint.describe(capacities, ("cpu",), "solo", ())
    layers, heads, width = 2, 6, 8
    per_token = 2 * layers * heads * width * 4
    assert info.block_size == block_size
    assert capacities[0].num_blocks == budget // (per_token * block_size)
    assert info.kv_capacity_tokens == (capacities[0].num_blocks - 1) * block_size
    assert EngineConfig.__dataclass_fields__["block_size"].default == 16


async def test_d7_no_step_waits_for_a_whole_device(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D7. Once it is READY no rank synchronises its device: neither in a prefill, nor in a decode, nor between."""
    waits: list[str] = []
    monkeypatch.setattr(CpuDevice, "synchronize", lambda _: waits.append(threading.current_thread().name))
    faulty = FaultyEngine(model, QUICK, tensor_parallel_size=3)
    await faulty.engine.start()
    assert waits, "the warm-up does"
    waits.clear()
    faulty.submit(LONG, prompt_logprobs=1)
    faulty.submit(PROMPT)
    await faulty.all_answered(HEALTHY_S)
    assert waits == []
    await until(lambda: faulty.engine.stats().open_streams == 0, HEALTHY_S)
    await faulty.close()
