"""Gemma 3 270M's real weights in bf16: two ranks pass `peg parity`, and each fault of the ranks fails it."""

from __future__ import annotations

import asyncio
import faulthandler
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from unittest.mock import Mock

import pytest

from peg.config import EngineConfig
from peg.models import gemma3
from peg.parity.arm import ArmReading, read_arm
from peg.parity.prompts import make_prompts
from peg.parity.session import Session, Wanted
from peg.plan import EngineInfo
from tests.parity.real_models import real_model
from tests.parity.sabotage import reduce_late, shift_heads, skip_reduction, spoil, swap_blocks

CONTEXT, PROMPTS, NEW_TOKENS = 64, 2, 4
ACROSS, ACROSS_CONTINUED = "2 ranks or one", "2 ranks or one, continued"


def config(ranks: int) -> EngineConfig:
    return EngineConfig(
        model="gemma3-270m",
        model_dir=real_model("gemma3-270m"),
        tensor_parallel_size=ranks,
        dtype="bfloat16",
        max_model_len=CONTEXT,
        kv_cache_memory_bytes=16 << 20,
    )


@dataclass(frozen=True)
class OneRank:
    """What one rank says: the same in every session, and so read once."""

    info: EngineInfo
    passes: list[ArmReading]


@pytest.fixture(scope="module")
def one_rank() -> OneRank:
    prompts = make_prompts(real_model("gemma3-270m"), PROMPTS, NEW_TOKENS, CONTEXT)
    return OneRank(*asyncio.run(read_arm(config(1), prompts, NEW_TOKENS, passes=2)))


async def failed(one_rank: OneRank, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, tuple[str, ...]]:
    """The gates that fail, and what they tell."""
    session = Session(config(2), Wanted(prompts=PROMPTS, new_tokens=NEW_TOKENS))
    arm = session._arm

    async def read_once(size: int, passes: int) -> list[ArmReading]:
        if size > 1:
            return await arm(size, passes)
        session.info = one_rank.info
        return one_rank.passes

    monkeypatch.setattr(session, "_arm", read_once)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", Mock())  # a failed engine wants its process to end
    return {verdict.gate: verdict.faults async for verdict in session.verdicts() if not verdict.passed}


async def test_two_ranks_pass(one_rank: OneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the lines for bf16, at every gate."""
    assert not await failed(one_rank, monkeypatch)


@pytest.mark.parametrize(
    "sabotage",
    [
        pytest.param(skip_reduction, id="a reduction is skipped"),
        pytest.param(lambda patch: reduce_late(patch, gemma3), id="a reduction comes behind its norm"),
        pytest.param(lambda patch: shift_heads(patch, gemma3), id="a shard is shifted by one head"),
        pytest.param(swap_blocks, id="two entries of a block table are swapped"),
    ],
)
async def test_a_fault_is_found(
    one_rank: OneRank, monkeypatch: pytest.MonkeyPatch, sabotage: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Mean, p99 and regret are all over the lines for bf16, over the prompts and over what is generated."""
    sabotage(monkeypatch)
    found = await failed(one_rank, monkeypatch)
    for gate in (ACROSS, ACROSS_CONTINUED):
        assert [fault.split()[0] for fault in found[gate][:3]] == ["mean", "p99", "regret"]


async def test_a_nan_is_found(one_rank: OneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks themselves refuse it, and the session says so."""
    spoil(monkeypatch)
    assert "not finite" in (await failed(one_rank, monkeypatch))["every run ends"][0]
