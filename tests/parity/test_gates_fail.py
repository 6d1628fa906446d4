"""Every gate is seen to fail: groups of ranks are broken in ways that raise nothing, and `peg parity` finds each."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest.mock import Mock

import pytest

from peg.checkpoint.synth_config import SynthOptions
from peg.commands.synth import synth
from peg.config import EngineConfig
from peg.models import gemma3
from peg.parity.session import Session, Wanted
from peg.ranks.inputs import HostInputs
from tests.parity.sabotage import (
    When,
    far_out,
    in_batches,
    in_decode,
    reduce_late,
    shift_heads,
    skip_reduction,
    spoil,
    swap_blocks,
)
from tools.golden import make_golden

ACROSS, ACROSS_CONTINUED = "2 ranks or one", "2 ranks or one, continued"
REFERENCE, REFERENCE_CONTINUED = "2 ranks or the reference", "2 ranks or the reference, continued"
EVERYWHERE = {ACROSS, ACROSS_CONTINUED, REFERENCE, REFERENCE_CONTINUED}


@pytest.fixture(autouse=True)
def no_deadman(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that failed wants its process to end soon, and this one has more to do."""
    monkeypatch.setattr(faulthandler, "dump_traceback_later", Mock())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3, and what the reference says about it."""
    directory = tmp_path_factory.mktemp("synth") / "model"
    synth(SynthOptions(family="gemma3"), directory)
    make_golden(directory, directory / "golden.json", "float32", 4, 6)
    return directory


async def failed(checkpoint: Path) -> Mapping[str, str]:
    """The gates that fail over two ranks, and the first fault that each tells."""
    config = EngineConfig(
        model="small", model_dir=checkpoint, tensor_parallel_size=2, block_size=4, kv_cache_memory_bytes=16 << 20
    )
    session = Session(config, Wanted(reference=str(checkpoint / "golden.json")))
    return {verdict.gate: verdict.faults[0] async for verdict in session.verdicts() if not verdict.passed}


def repeated() -> When:
    """Steps of a single sequence that were there before."""
    seen: set[bytes] = set()

    def again(inputs: HostInputs) -> bool:
        step = inputs.token_ids.tobytes() + inputs.context_lens.tobytes()
        found = step in seen
        seen.add(step)
        return found and not in_batches(inputs)

    return again


async def test_nothing_fails_where_nothing_is_broken(checkpoint: Path) -> None:
    """Two ranks of a Gemma 3 pass every gate."""
    assert not await failed(checkpoint)


@pytest.mark.parametrize(
    ("sabotage", "gates"),
    [
        pytest.param(skip_reduction, EVERYWHERE, id="a reduction is skipped"),
        pytest.param(lambda patch: reduce_late(patch, gemma3), EVERYWHERE, id="a reduction comes behind its norm"),
        pytest.param(lambda patch: shift_heads(patch, gemma3), EVERYWHERE, id="a shard is shifted by one head"),
        pytest.param(swap_blocks, EVERYWHERE, id="two entries of a block table are swapped"),
        pytest.param(spoil, {"every run ends"}, id="a NaN"),
        pytest.param(
            lambda patch: skip_reduction(patch, when=in_decode),
            {ACROSS_CONTINUED, REFERENCE_CONTINUED},
            id="a reduction is skipped in decode",
        ),
        pytest.param(
            lambda patch: skip_reduction(patch, when=in_batches),
            {"2 ranks, alone or in a batch", "2 ranks, alone or in a batch, continued", ACROSS, REFERENCE},
            id="a reduction is skipped in batches",
        ),
        pytest.param(
            lambda patch: swap_blocks(patch, far_out),
            {"2 ranks, in front of more text", ACROSS},
            id="two entries are swapped far out",
        ),
        pytest.param(
            lambda patch: swap_blocks(patch, repeated(), alone=True), {"one rank, twice"}, id="one rank differs later"
        ),
        pytest.param(
            lambda patch: swap_blocks(patch, in_batches, alone=True),
            {"one rank, alone or in a batch", "one rank, alone or in a batch, continued", "one rank or the reference"},
            id="one rank is wrong in batches",
        ),
        pytest.param(
            lambda patch: swap_blocks(patch, in_decode, alone=True),
            {"one rank or the reference, continued", ACROSS_CONTINUED},
            id="one rank is wrong in decode",
        ),
        pytest.param(
            lambda patch: swap_blocks(patch, far_out, alone=True),
            {"one rank, in front of more text", ACROSS},
            id="one rank is wrong far out",
        ),
    ],
)
async def test_a_fault_is_found(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, sabotage: Callable[[pytest.MonkeyPatch], None], gates: set[str]
) -> None:
    """Each fault fails the gates that are there for it, at the fp32 lines."""
    sabotage(monkeypatch)
    found = await failed(checkpoint)
    for gate, fault in found.items():
        print(f"{gate}: {fault}")
    assert gates <= set(found)
