"""Faults under captured steps: found, aborted, drained and rebuilt on the card, with the same answers afterwards."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from peg.checkpoint.synth_config import SynthOptions
from peg.commands.synth import synth
from peg.config import EngineConfig
from peg.deadlines import Deadlines
from peg.engine import Engine
from peg.errors import EngineUnavailable
from peg.failure import EngineState, Fault, FaultKind, FaultPlace, FaultPoint
from peg.plan import FinishReason, SamplingParams, SequenceRequest
from peg.ranks.faults import RankFaults
from tests.gpu.cards import needs_card, on_card
from tests.gpu.test_graphs import tokens

pytestmark = [pytest.mark.gpu, needs_card, pytest.mark.timeout(240)]
FLOOR_S = 1.0
PLAIN = [SamplingParams(temperature=0)] * 7
FAULTS = {
    "raise before a collective": Fault(FaultKind.RAISE, 1, 5),
    "raise in a captured step": Fault(FaultKind.RAISE, 1, 20, FaultPoint.AFTER),
    "stall in a captured step": Fault(FaultKind.STALL, 1, 20),
    "a replay without a peer's": Fault(FaultKind.SKIP, 1, 20),
    "stall of rank 0": Fault(FaultKind.STALL, 0, 25),
    "another token": Fault(FaultKind.WRONG_TOKEN, 1, 20),
    "another digest": Fault(FaultKind.WRONG_DIGEST, 1, 20),
    "an error of NCCL": Fault(FaultKind.COMM_ERROR, 1, 20),
}


@dataclass(frozen=True)
class Recovered:
    """How long after the fault struck clients were answered, and the engine was ready again."""

    answered_s: float
    ready_s: float
    cause: str


def engine_on(folder: Path, world_size: int) -> Engine:
    config = EngineConfig(
        model="small",
        model_dir=folder,
        dtype="bfloat16",
        max_model_len=256,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=16 << 20,
        on_failure="rebuild",
        enable_fault_injection=True,
        **on_card(world_size),
    )
    return Engine(config, Deadlines(step_floor_s=FLOOR_S, step_cap_s=5.0, rebuild_limit=1000))


async def fail_once(engine: Engine, fault: Fault) -> Recovered:
    """A load, a fault in it, everyone answered, ready again."""
    epoch = engine.epoch
    streams = [
        engine.submit(
            SequenceRequest(
                request_id=f"{epoch}/{number}",
                prompt_ids=tuple(range(10, 30 + number)),
                sampling=SamplingParams(temperature=0),
                max_tokens=200,
                ignore_eos=True,
            )
        )
        for number in range(6)
    ]
    engine.inject(fault)
    began_s = time.monotonic()
    while engine.state is EngineState.READY and engine.epoch == epoch:  # noqa: ASYNC110 (states have no event)
        await asyncio.sleep(0.001)
    found_s, cause = time.monotonic(), str(engine.cause)
    for stream in streams:
        async for _ in stream:
            pass
        assert stream.terminal is not None
        assert stream.terminal.reason is FinishReason.FAILED
    answered_s = time.monotonic()
    while engine.state is not EngineState.READY:
        assert time.monotonic() - found_s < 15, engine.state
        await asyncio.sleep(0.005)
    assert engine.epoch == epoch + 1
    assert answered_s - began_s < FLOOR_S + 3
    return Recovered(answered_s - found_s, time.monotonic() - found_s, cause)


@pytest.mark.parametrize("world_size", [2, 4])
async def test_every_fault_is_recovered_from(world_size: int, tmp_path: Path) -> None:
    """Cause known, clients answered, ready within ten seconds, the same ids; twenty times over, with flat memory."""
    synth(SynthOptions(family="gemma4-31b", window=32), tmp_path / "model")
    engine = engine_on(tmp_path / "model", world_size)
    await engine.start()
    try:
        before = await tokens(engine, PLAIN)
        held: list[int] = []
        for turn in range(20):
            name = list(FAULTS)[turn % len(FAULTS)]
            found = await fail_once(engine, FAULTS[name])
            after = await tokens(engine, PLAIN)
            held.append(torch.cuda.memory_reserved())
            print(f"{world_size} ranks, {name}: {found}, reserved {held[-1]}")
            assert after == before
            assert found.ready_s < 10
        assert held[-1] == held[2], held
    finally:
        await engine.close()


@pytest.mark.parametrize("place", [FaultPlace.LOAD, FaultPlace.CONNECT, FaultPlace.MAKE_CACHE])
async def test_a_rank_that_fails_in_the_start(
    place: FaultPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed load, connection or capture ends the start with its cause; no rank is left behind."""

    class Armed(RankFaults):
        def __init__(self, rank: int) -> None:
            super().__init__(rank)
            if rank == 1:
                self.arm(Fault(FaultKind.RAISE, 1, place=place), 0, -1)

    monkeypatch.setattr("peg.ranks.group.RankFaults", Armed)
    synth(SynthOptions(family="llama"), tmp_path / "model")
    engine = engine_on(tmp_path / "model", 2)
    try:
        with pytest.raises(EngineUnavailable, match="injected on rank 1"):
            await engine.start()
    finally:
        await engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("peg-rank")]
